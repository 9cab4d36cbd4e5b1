"""Commands that the documentation and examples/ give a newcomer, on one vendor and on two."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from ucc_hetero import StoreServer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("n", "emulate", "dtype"), [
    (1, "", "float32"), (3, "", "float64"), (4, "nvidia:2,amd:2", "float32"),
])  # fmt: skip
def test_training(crew, n: int, emulate: str, dtype: str) -> None:
    args = ["--check", "--epochs", "8", "--dtype", dtype]
    job = crew("examples/train_digits.py", n, args=args, layout=emulate, timeout=150)
    assert len(re.findall(r"^epoch +\d+ +loss [\d.]+ +test accuracy", job.stdout, re.M)) == 8
    assert f"identical on all {n} ranks: yes" in job.stdout
    assert "difference from a single process" in job.stdout
    last = re.findall(r"test accuracy +([\d.]+)%", job.stdout)[-1]
    assert float(last) > 95


def test_training_goes_through_deaths(mpirun, ulfm: list[str]) -> None:
    """A vendor's whole island dies; weights and losses are those of a single process's run, in which nobody does."""
    args = ["--kill", "2,3", "--check", "--epochs", "4", "--dtype", "float64"]
    env = {"UCCH_EMULATE": "nvidia:2,amd:2"}
    job = mpirun("examples/train_through.py", 4, args=args, env=env, mpi_args=ulfm, timeout=150)
    assert re.search(r"^2 ranks go on with step 4[01] after", job.stdout, re.M), job.output
    assert "identical on all 2 ranks: yes" in job.stdout and "difference from a single process" in job.stdout


def test_training_grows_back(mpirun, ulfm: list[str], tmp_path: Path) -> None:
    """Those that are started in the place of the dead are let in, in the middle of it: four ranks end alike."""
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    server = StoreServer("tcp://127.0.0.1:0", secret.read_bytes())
    args = ["--kill", "2,3", "--check", "--epochs", "6", "--dtype", "float64", "--whole-by", "50"]
    env = {"UCCH_EMULATE": "nvidia:2,amd:2"}
    args += ["--store", server.address, "--secret", str(secret)]
    options = {"args": args, "env": env, "mpi_args": ulfm}
    job = mpirun("examples/train_through.py", 4, timeout=150, **options)
    server.close()
    assert re.search(r"^2 ranks go on with step 4[01] after", job.stdout, re.M), job.output
    assert re.search(r"^4 ranks go on with step \d+, ", job.stdout, re.M), job.output
    assert "identical on all 4 ranks: yes" in job.stdout and "difference from a single process" in job.stdout


def test_training_notices_a_wrong_result(mpirun) -> None:
    """The example's own check has teeth: a rank that scales its gradients makes it fail."""
    script = f"""
        import runpy
        import sys

        from ucc_hetero import Communicator

        allreduce = Communicator.Allreduce

        def wrong(self, sendbuf, recvbuf, *args, **kwargs):
            recvbuf *= 1 + 1e-3 * self.rank
            return allreduce(self, sendbuf, recvbuf, *args, **kwargs)

        Communicator.Allreduce = wrong
        sys.argv = ["train_digits.py", "--check", "--epochs", "2"]
        runpy.run_path({str(ROOT / "examples" / "train_digits.py")!r}, run_name="__main__")
        """
    job = mpirun(script, check=False)
    assert job.returncode != 0
    assert "difference from a single process" in job.stdout


def test_own_algorithm(mpirun) -> None:
    job = mpirun("examples/own_algorithm.py", 3, env={"UCCH_EMULATE": "nvidia:2,amd:1"})
    assert "right" in job.stdout and "by_rank_0 (default)" in job.stdout


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_code_of_the_documentation(crew, page: str) -> None:
    codes = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    if find_spec("torch") is None:
        codes = [code for code in codes if "import torch" not in code]
    assert codes
    for code in codes:
        job = crew(code, 4, layout="nvidia:2,amd:2")
        assert job.stdout.strip()
