"""Runtimes over the fake GPU libraries, and ranks that use them; makes helper modules importable."""

import sys
from pathlib import Path

import pytest
from crews import of_case_and_job, vendors

from ucc_hetero.device import registry, runtime_of

sys.path.insert(0, str(Path(__file__).parent))

LIBRARIES = {"nvidia": "UCCH_CUDA_LIB", "amd": "UCCH_HIP_LIB"}


@pytest.fixture
def load(fakegpu, monkeypatch):
    """Start the runtime of one vendor over its fake library, in this environment, without the other vendor."""

    def start(vendor="amd", **environ):
        for name, variable in LIBRARIES.items():
            monkeypatch.setenv(variable, str(fakegpu[name]) if name == vendor else "none")
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        registry.forget()
        found = runtime_of(vendor)
        assert found is not None, registry.report(vendor)
        return found

    yield start
    registry.forget()


@pytest.fixture(params=["nvidia", "amd", "HIP 5", "HIP 7"])
def runtime(request, load):
    """The runtime of one vendor, with device 1 in use."""
    vendor, _, version = request.param.partition(" ")
    found = load("amd", FAKEGPU_HIP=version) if version else load(vendor)
    found.use(1)
    return found


#: Ranks of the crew for cases of all layouts; crews with other variables have only the ranks of their layout.
POOL = "nvidia:3,amd:3,host:3"


@pytest.fixture
def fakes(mpirun, fake_environment):
    """Run a script with a fake GPU for every rank: ``fakes(script, layout, args=(), **more environment)``.

    ``mpi``: more arguments of ``mpirun``.
    """

    def run(script, layout, args=(), timeout=120, mpi=None, **env):
        env = fake_environment(layout) | env
        return mpirun(script, len(vendors(layout)), args=args, env=env, timeout=timeout, **(mpi or {}))

    return run


@pytest.fixture
def fake_crew(crew, fake_environment):
    """As `fakes`, for scripts that succeed, on ranks that are reused."""

    def run(script, layout, args=(), timeout=120, **env):
        pool = layout if of_case_and_job(env)[1] else POOL
        case, job = of_case_and_job(fake_environment(layout) | env)
        return crew(script, args=args, layout=layout, env=case, job=job, pool=pool, timeout=timeout)

    return run
