"""The HIP runtime over CUDA, for ranks that are to be of another vendor; lets tests import what lies beside them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def hip_over_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("hipcuda") / "libamdhip64-over-cuda.so"
    source = ROOT / "tests" / "hipcuda" / "hipcuda.c"
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True, timeout=240)
    return library
