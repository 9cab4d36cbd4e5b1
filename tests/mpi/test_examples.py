"""Commands of the documentation and examples/, on one vendor and on two."""

import os
import re
from pathlib import Path

import pytest

from ucc_hetero import StoreServer

ROOT = Path(__file__).resolve().parents[2]
MIXED = "nvidia:2,amd:2"


def test_training(crew):
    job = crew("examples/train_digits.py", 4, args=["--check", "--epochs", "2"], layout=MIXED, timeout=150)
    assert len(re.findall(r"^epoch +\d+ +loss [\d.]+ +test accuracy", job.stdout, re.M)) == 2
    assert "identical on all 4 ranks: yes" in job.stdout
    assert "difference from a single process" in job.stdout
    last = re.findall(r"test accuracy +([\d.]+)%", job.stdout)[-1]
    assert float(last) > 90


def test_training_grows_back(mpirun, ulfm, tmp_path):
    """A vendor's whole island dies, the others go on, and replacements are let in: four ranks end with equal weights,
    and with the losses of a single process without failures.
    """
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    server = StoreServer("tcp://127.0.0.1:0", secret.read_bytes())
    args = ["--kill", "2,3", "--check", "--epochs", "4", "--dtype", "float64", "--whole-by", "50"]
    env = {"UCCH_EMULATE": MIXED}
    args += ["--store", server.address, "--secret", str(secret)]
    options = {"args": args, "env": env, "mpi_args": ulfm}
    job = mpirun("examples/train_through.py", 4, timeout=150, **options)
    server.close()
    assert re.search(r"^2 ranks go on with step 4[01] after", job.stdout, re.M), job.output
    assert re.search(r"^4 ranks go on with step \d+, ", job.stdout, re.M), job.output
    assert "identical on all 4 ranks: yes" in job.stdout and "difference from a single process" in job.stdout


def test_own_algorithm(mpirun):
    job = mpirun("examples/own_algorithm.py", 3, env={"UCCH_EMULATE": "nvidia:2,amd:1"})
    assert "right" in job.stdout and "by_rank_0 (default)" in job.stdout


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/index.md", "docs/rma.md"])
def test_code_of_the_documentation(crew, page):
    codes = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    codes = [code for code in codes if " Communicator() " in code]  # torch's are in test_torch_examples.py
    assert codes
    for code in codes:
        job = crew(code, 4, layout=MIXED)
        assert job.stdout.strip()
