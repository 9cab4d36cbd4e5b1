"""The PyTorch backend: every method through torch.distributed, on one vendor and on two."""

import random
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def cases(*scripts):
    return [name for each in scripts for name in re.findall(r"^@case\ndef (\w+)", (HERE / each).read_text(), re.M)]


#: These make torch load its compiler, which takes seconds on every rank.
COMPILED = ["functional", "results_of_functional_collectives", "compiled", "compiled_ddp"]


@pytest.mark.parametrize(("n", "emulate"), [(2, ""), (4, "nvidia:2,amd:2")])
def test_every_method(crew, n, emulate):
    """All on two vendors; on one vendor, whose calls are one step each, only repeated calls, which are made in C."""
    names = COMPILED + cases("torch_short.py")
    if emulate:
        names = cases("torch_calls.py", "torch_collectives.py", "torch_profile.py", "torch_short.py")
        names = [name for name in names if name not in COMPILED]
    job = crew(HERE / "torch_api.py", n, args=names, layout=emulate, timeout=160)
    assert re.findall(r"^ok (\w+)", job.stdout, re.M) == names


@pytest.mark.parametrize(("n", "emulate"), [(2, ""), (4, "nvidia:2,amd:2")])
def test_experts(crew, n, emulate):
    job = crew(HERE / "torch_experts.py", n, layout=emulate, timeout=100)
    assert re.findall(r"^ok (\w+)", job.stdout, re.M) == cases("torch_experts.py")


def test_torchcomms(crew):
    n, emulate = random.choice([(1, ""), (2, ""), (3, "nvidia:2,amd:1")])
    crew("torchcomms_cases:calls", n, layout=emulate)


def test_gloo_is_a_peer_in_benchmarks(crew):
    words = ["compare --no-start-up --peers ours,gloo -m 8:8 -r 2"]
    words += [
        f"osu_{name} --peer gloo -m 8:8 -i 4 -x 1 -T mpi_float -c" for name in ("allreduce", "reduce_scatter", "bcast")
    ]
    words += [f"osu_{name} --peer gloo -m 8:8 -i 4 -x 1 -c" for name in ("latency", "bibw")]
    job = crew("bench_cases:right", args=words, timeout=150)
    lines = [line.split() for line in job.stdout.splitlines() if line.strip() and not line.startswith("#")]
    compared, *tables = lines
    assert len(tables) == len(words) - 1
    for table in tables:
        assert (compared[0], table[0], table[2]) == ("8", "8", "Pass")
        assert all(float(us) > 0 for us in (*compared[1:4], table[1], table[3]))


@pytest.mark.usefixtures("hooked")
def test_scripts_for_torchrun_run_unchanged(mpirun):
    name = random.choice(["nccl", "gloo"])
    job = mpirun("script_cases:for_torchrun", 2, args=[name], env={"UCCH_TORCH_REPLACE": name})
    assert job.said("fine") == 2
    assert "by ucch in place of" in job.stderr and f"cuda by {name}" not in job.stderr, job.stderr


def test_the_local_rank_is_the_launchers(mpirun):
    mpirun("script_cases:local_rank_of_the_launcher", 2)


def test_torchrun(torchrun):
    """Without MPI: the ranks meet at torch's store, also if mpirun has started torchrun."""
    names = ["futures", "groups", "failures", "all_reduce", "messages"]
    env = {"UCCH_EMULATE": "nvidia:1,amd:1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    said = torchrun(HERE / "torch_api.py", names, **env)
    assert re.findall(r"^ok (\w+)", said, re.M) == names


def test_torchrun_starts_failed_ranks_again(torchrun):
    assert torchrun("script_cases:started_again", [], "--max-restarts", "1").count("[4.0, 4.0, 4.0]") == 2
