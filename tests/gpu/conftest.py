"""HIP over CUDA, for ranks of another vendor; adds the test folders to the import path."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def hip_over_cuda(tmp_path_factory, compiled):
    source = ROOT / "tests" / "hipcuda" / "hipcuda.c"
    return compiled(tmp_path_factory.mktemp("hipcuda") / "libamdhip64-over-cuda.so", "-shared", "-fPIC", source, "-ldl")
