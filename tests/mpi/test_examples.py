"""Commands that the documentation and examples/ give a newcomer, on one vendor and on two."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("n", "emulate", "dtype"), [
    (1, "", "float32"), (3, "", "float64"), (2, "nvidia:1,amd:1", "float64"), (3, "nvidia:2,amd:1", "float32"),
    (4, "nvidia:2,amd:2", "float32"),
])  # fmt: skip
def test_training(mpirun, n: int, emulate: str, dtype: str) -> None:
    env = {"UCCH_EMULATE": emulate} if emulate else {}
    job = mpirun(
        "examples/train_digits.py", n, args=["--check", "--epochs", "8", "--dtype", dtype], env=env, timeout=150
    )
    assert len(re.findall(r"^epoch +\d+ +loss [\d.]+ +test accuracy", job.stdout, re.M)) == 8
    assert f"identical on all {n} ranks: yes" in job.stdout
    assert "difference from a single process" in job.stdout
    last = re.findall(r"test accuracy +([\d.]+)%", job.stdout)[-1]
    assert float(last) > 95


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
def test_code_of_the_documentation(mpirun, page: str) -> None:
    for code in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S):
        job = mpirun(code, 4, env={"UCCH_EMULATE": "nvidia:2,amd:2"})
        assert job.stdout.strip()
