"""Torch jobs in which one rank ends early: the job ends at once, with its status, under mpirun and torchrun."""

import os
import random
import subprocess

import pytest
from processes import python


@pytest.mark.parametrize("wait", ["in a future", "at the end"])
def test_mpirun(mpirun, wait):
    job = mpirun("torch_ends_cases:exits_early", 2, args=[wait], check=False)
    assert job.returncode == 3 and "rank 1 has failed (status 3) and ends the job" in job.stderr, job.output


@pytest.mark.parametrize("where", ["hook", "future"])
def test_an_exception_in_a_hook_comes_out_of_backward(mpirun, where):
    """On the hook's rank; the other ranks, which may have finished, do not wait for it."""
    job = mpirun("torch_ends_cases:fails_in_a_hook", 2, args=[where], check=False)
    assert job.returncode == 1 and "KeyError: 'mine alone'" in job.stderr and "went on" not in job.stdout, job.output


@pytest.mark.parametrize("asked, emulated, said", [
    ("nccl", "", ["unknown variable UCCH_TORCH_REPLAC: did you mean UCCH_TORCH_REPLACE?",
                  "(rank 1; the backend of ucc_hetero is 'ucch': UCCH_TORCH_REPLACE=nccl,gloo gives it"]),
    ("nccl", "nvidia:1,amd:1",
     ["but this job has nvidia on rank 0 and amd on rank 1: set UCCH_TORCH_REPLACE=nccl"]),
    ("uchh", "", ["Unknown backend type uchh (rank 1; the backend of ucc_hetero is 'ucch'"]),
])  # fmt: skip
def test_a_script_that_asks_for_another_backend(mpirun, asked, emulated, said):
    """Without UCCH_TORCH_REPLACE; torch has no NCCL where these tests run."""
    script = f"import torch.distributed as dist\ndist.init_process_group({asked!r})\n"
    job = mpirun(script, 2, env={"UCCH_EMULATE": emulated, "UCCH_TORCH_REPLAC": "nccl"}, check=False)
    assert job.returncode != 0 and all(words in job.stderr for words in said), job.output


def test_replaced_on_some_ranks_only(mpirun):
    job = mpirun("script_cases:replaced_on_some_ranks", 2, env={"UCCH_TIMEOUT": "4"}, check=False)
    assert job.returncode != 0, job.output
    assert "rank(s) [1] did not come to the backend ucch within 4 s: UCCH_TORCH_REPLACE=gloo" in job.stderr


def test_groups_leave_nothing(crew):
    others = ("collectives", "communicators", "transfers", "refusals", "failures")
    job = crew("tools/soak.py", 2, args=[*(f"--{kind}=0" for kind in others), "--groups=20"])
    assert "groups: 18 more rounds" in job.stdout and "grown" not in job.stdout, job.output


def test_a_misspelt_replacement(pythons, request, tmp_path):
    """An error, not a warning: otherwise the script would silently train with the backend that it requests."""
    script, env = tmp_path / "script.py", {**os.environ, "UCCH_TORCH_REPLACE": "ncll"}
    script.write_text("import _ucc_hetero_autoload as a; a.register(); print('went on')")
    command = [*pythons.of(request.path, {}), str(script)]
    job = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert job.returncode != 0 and "UCCH_TORCH_REPLACE: 'ncll' is not one of nccl" in job.stderr, job.stderr
    assert "went on" not in job.stdout


@pytest.mark.parametrize(("case", "ranks", "layouts"), [
    ("refusals", 2, [""]), ("a_failed_gradient_and_barriers", 2, [""]), ("a_host_without_an_address", 1, [""]),
    ("messages_without_their_others", 2, ["", "nvidia:1,amd:1"]),
    ("destroyed_in_different_orders", 3, ["", "nvidia:2,amd:1"]),
])  # fmt: skip
def test_calls(crew, case, ranks, layouts):
    layout, env = random.choice(layouts), {"UCCH_TIMEOUT": "60"}
    crew(f"torch_ends_cases:{case}", ranks, layout=layout, env=env, timeout=100)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_rank_that_is_bound_to_one_core_is_told_once(mpirun):
    job = mpirun("torch_ends_cases:bound_to_one_core", 1)
    before, _, after = job.stderr.partition("no longer")
    assert "bound to one core" not in before and after.count("bound to one core") == 1, job.output


def test_a_forked_child_ends_no_group(torchrun):
    assert torchrun("torch_ends_cases:forked_children_end_no_group", []).count("went on 4.0") == 2


def test_processes_that_ranks_start_make_a_group(mpirun, tmp_path):
    job = mpirun("torch_ends_cases:children_make_a_group", 2, args=[str(tmp_path)])
    assert job.stdout.count("2 children") == 2, job.output


@pytest.mark.parametrize("how", ["destroys", "exits"])
def test_a_rank_that_is_done_leaves_all_groups_at_once(mpirun, how):
    job = mpirun("torch_ends_cases:leaves_all_groups", 2, args=[how], check=False)
    assert job.stdout.split() == ["right"], job.output


def test_groups_end_in_torchs_order(mpirun):
    """Destroying an NCCL group waits for the other ranks."""
    mpirun("torch_ends_cases:groups_end_in_torchs_order", 2)


def test_torch_finds_the_backend_by_itself():
    """Scripts that name it need no import of the package."""
    python("import torch.distributed as dist\nassert 'ucch' in dist.Backend.backend_list")
