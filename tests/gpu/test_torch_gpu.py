"""The PyTorch backend on CUDA tensors. Skipped without a GPU.

The jobs of tests/mpi run with ``CASES_DEVICE=cuda``, on one vendor, and with the second half of the ranks on HIP over
CUDA; two GPUs then serve four ranks, as one NVIDIA and one AMD device each.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from array_kinds import gpus

ROOT = Path(__file__).resolve().parents[2]
#: What runs, by modules of cases.
JOBS = {
    "api": ["torch_calls", "torch_collectives", "torch_profile", "torch_short"],
    **{name: [f"torch_{name}"] for name in ("strategies", "experts", "streams")},
}

#: Time limit of a job in seconds.
LIMIT = float(os.environ.get("CASES_LIMIT", "280"))

#: Cases that abandon calls which a peer never makes; a stream waits for these until the device is reset.
_UNSUITED = ["case_waiting_has_a_limit", "case_failures", "case_mismatches", "case_abort"]

pytestmark = [
    pytest.mark.gpu, pytest.mark.mpi, pytest.mark.timeout(1300),
    pytest.mark.skipif(gpus() < 1, reason="needs an NVIDIA GPU and torch"),
]  # fmt: skip
TWO = pytest.mark.skipif(gpus() < 2, reason="needs two NVIDIA GPUs: NCCL wants one for each rank")


@pytest.fixture(params=[pytest.param("one vendor", marks=TWO), "two vendors"])
def sides(request, hip_over_cuda):
    """Environments of the ranks; in the second one the second half of the ranks uses the HIP runtime."""
    env = {"CASES_DEVICE": "cuda", "CASES_LIMIT": str(LIMIT), "CUDA_MODULE_LOADING": "EAGER"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "gpu")])
    env["UCCH_TORCH_VENDOR"] = "n"  # groups must be this backend's
    if request.param == "one vendor":
        return {**env, "CASES_ALONE": "1"}
    return {**env, "CASES_HIP": str(hip_over_cuda)}


@pytest.mark.parametrize("name", JOBS)
def test_cases(mpirun, sides, name):
    room = gpus() if "CASES_ALONE" in sides else 2 * gpus()  # NCCL needs a GPU for each rank of a vendor
    ranks = 4 if name == "strategies" and room >= 4 else 2
    mpirun("torch_cases:run", ranks, args=[JOBS[name], [], _UNSUITED], env=sides, timeout=LIMIT + 20)


#: Arguments and environment of a one-vendor job, and the backend of its default group.
GROUPS = {
    "plain": (["capture"], {}, "ProcessGroupNCCL"),
    "bound": (["bound"], {}, "ProcessGroupNCCL"),
    "replaced": (["nccl"], {"UCCH_TORCH_REPLACE": "nccl"}, "ProcessGroupNCCL"),
    "detail": ([], {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "_ProcessGroupWrapper"),
    "off": ([], {"UCCH_TORCH_VENDOR": "n"}, "ProcessGroupUCCH"),
}


@TWO
@pytest.mark.parametrize(("words", "env", "backend"), GROUPS.values(), ids=GROUPS)
def test_groups_of_one_vendor_are_nccls(mpirun, words, env, backend):
    """Features that scripts use with NCCL: bound device, backend name, torch's checks, high-priority streams,
    graphs."""
    script = ROOT / "tests" / "gpu" / "torch_nccl.py"
    # torch reads some variables when it is imported, so ranks are not forked.
    job = mpirun(script, 2, args=words, env={"PYTHONPATH": str(ROOT), **env}, timeout=150, cold=True)
    assert re.findall(r"^group (\w+)", job.stdout, re.M) == [backend] * 2


@TWO
@pytest.mark.parametrize("way", ["ddp", "fsdp2", "pp"])
def test_language_model(mpirun, tmp_path, way):
    """examples/train_llm.py gets the same losses as with NCCL."""
    losses = {}
    for backend in ("ucch", "nccl"):
        path = tmp_path / backend
        args = ["--backend", backend, "--parallel", way, "--steps", "5", "--losses", str(path)]
        env = {"PYTHONPATH": os.pathsep.join([str(ROOT)])}
        mpirun(ROOT / "examples" / "train_llm.py", 2, args=args, env=env, timeout=min(150, LIMIT))
        losses[backend] = [float(line) for line in path.read_text().split()]
    assert losses["ucch"] == pytest.approx(losses["nccl"], rel=1e-4)


@TWO
@pytest.mark.parametrize("choose", [["chosen"], []], ids=["chosen", "default"])
@pytest.mark.parametrize("launcher", ["ucch-run", "mpirun", "torchrun"])
def test_a_script_for_nccl_stays_as_it_is(mpirun, tmp_path, launcher, choose):
    """Each rank uses the GPU of its LOCAL_RANK, whether the script selects it or torch does."""
    path = ROOT / "tests" / "gpu" / "plain_job.py"
    replace = {"UCCH_TORCH_REPLACE": "nccl", "PYTHONPATH": str(ROOT)}
    if launcher == "mpirun":
        job = mpirun(path, 2, args=choose, env=replace, timeout=LIMIT)
    else:
        words = {
            "ucch-run": "ucc_hetero.launch -np 2",
            "torchrun": "torch.distributed.run --standalone --nproc-per-node 2",
        }
        command = [sys.executable, "-m", *words[launcher].split(), *[sys.executable] * (launcher == "ucch-run")]
        command += [str(path), *choose]
        env = {**os.environ, **replace}
        job = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert job.returncode == 0 and job.stdout.count("fine") == 2, job.stdout + job.stderr
    assert "torch's process group: cuda by nccl" in job.stderr  # torch's own backend, as both devices are one vendor's
