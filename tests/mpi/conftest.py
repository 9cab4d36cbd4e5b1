"""Marks of all tests here, which start ranks, and torchrun: those of the PyTorch backend need torch."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from crews import program

TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: pip install '.[torch]'")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.mpi)
            if item.path.name.startswith("test_torch_"):
                item.add_marker(TORCH)


@pytest.fixture
def torchrun(tmp_path, pythons, request):
    """Call as ``torchrun(script, args, *options, **env)``: what two ranks print that torchrun has started. The
    script is given as for `mpirun`."""

    def run(script, args, *options, **env):
        python = pythons.of(request.path, env)
        launcher = [*pythons.of(request.path, {}), str(Path(sys.executable).with_name("torchrun"))]
        command = [*launcher, "--standalone", "--nproc-per-node", "2"]
        path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
        job = subprocess.run(
            [*command, *options, "--no-python", *python, *program(tmp_path, script, args, request.path)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
            cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert job.returncode == 0, job.stderr
        return job.stdout

    return run
