"""The fake GPU libraries, built once, and the runtimes over them; helper modules beside the tests can be imported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ucc_hetero.device import DeviceRuntime, runtime_of, vendors

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).resolve().parents[1] / "fakegpu" / "fakegpu.c"
#: vendor -> (what the source is built as, the variable that names the library)
BUILDS = {"nvidia": ("CUDA", "UCCH_CUDA_LIB"), "amd": ("HIP", "UCCH_HIP_LIB")}


@pytest.fixture(scope="session")
def fakegpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """vendor -> its fake library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("fakegpu")
    out = {}
    for vendor, (kind, _) in BUILDS.items():
        out[vendor] = folder / f"libfake{kind.lower()}.so"
        command = [compiler, "-std=gnu11", "-O1", "-shared", "-fPIC", f"-DFAKE_{kind}", str(SOURCE), "-lpthread"]
        subprocess.run([*command, "-o", str(out[vendor])], check=True, timeout=120)
    return out


@pytest.fixture(params=["nvidia", "amd"])
def runtime(
    request: pytest.FixtureRequest, fakegpu: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[DeviceRuntime]:
    """The runtime of one vendor over its fake library, with device 1 in use; the other vendor has none."""
    for vendor, (_, variable) in BUILDS.items():
        monkeypatch.setenv(variable, str(fakegpu[vendor]) if vendor == request.param else "none")
    vendors.forget()
    found = runtime_of(request.param)
    assert found is not None, vendors.report(request.param)
    found.use(1)
    yield found
    vendors.forget()


@pytest.fixture
def fakes(mpirun: Callable[..., Any], fakegpu: Mapping[str, Path]) -> Callable[..., Any]:
    """Run a script with a fake GPU for every rank: ``fakes(script, layout, **more environment)``.

    ``mpi``: more arguments of ``mpirun``.
    """

    def run(script: str, layout: str, timeout: float = 120, mpi: Mapping[str, Any] | None = None, **env: str) -> Any:
        ranks = sum(int(part.partition(":")[2]) for part in layout.split(","))
        libraries = {f"FAKEGPU_{vendor.upper()}": str(path) for vendor, path in fakegpu.items()}
        more = {"FAKEGPU_LAYOUT": layout, "FAKEGPU_DELAY_US": "200", "PYTHONPATH": f"{ROOT}:{SOURCE.parent}"}
        return mpirun(script, ranks, env=libraries | more | env, timeout=timeout, **(mpi or {}))

    return run
