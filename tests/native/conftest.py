"""Runtimes over the fake GPU libraries, and ranks that use them; helper modules beside the tests can be imported."""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from crews import of_case_and_job

from ucc_hetero.device import DeviceRuntime, registry, runtime_of

sys.path.insert(0, str(Path(__file__).parent))

#: vendor -> the variable that names its library
LIBRARIES = {"nvidia": "UCCH_CUDA_LIB", "amd": "UCCH_HIP_LIB"}


@pytest.fixture
def load(fakegpu: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DeviceRuntime]]:
    """Start the runtime of one vendor over its fake library, in this environment; the other vendor has none."""

    def start(vendor: str = "amd", **environ: str) -> DeviceRuntime:
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
def runtime(request: pytest.FixtureRequest, load: Callable[..., DeviceRuntime]) -> DeviceRuntime:
    """The runtime of one vendor, with device 1 in use."""
    vendor, _, version = request.param.partition(" ")
    found = load("amd", FAKEGPU_HIP=version) if version else load(vendor)
    found.use(1)
    return found


def ranks_of(layout: str) -> int:
    return sum(int(part.partition(":")[2]) for part in layout.split(","))


@pytest.fixture
def fakes(mpirun: Callable[..., Any], fake_environment: Callable[[str], dict[str, str]]) -> Callable[..., Any]:
    """Run a script with a fake GPU for every rank: ``fakes(script, layout, **more environment)``.

    ``mpi``: more arguments of ``mpirun``.
    """

    def run(script: str, layout: str, timeout: float = 120, mpi: Mapping[str, Any] | None = None, **env: str) -> Any:
        return mpirun(script, ranks_of(layout), env=fake_environment(layout) | env, timeout=timeout, **(mpi or {}))

    return run


@pytest.fixture
def fake_crew(crew: Callable[..., Any], fake_environment: Callable[[str], dict[str, str]]) -> Callable[..., Any]:
    """As `fakes`, for scripts that end well, on ranks that stay for the next one."""

    def run(script: str, layout: str, timeout: float = 120, **env: str) -> Any:
        case, job = of_case_and_job(env)
        return crew(script, ranks_of(layout), env=case, job=fake_environment(layout) | job, timeout=timeout)

    return run
