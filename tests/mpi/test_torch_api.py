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


UNCHANGED = """
    import os
    import sys

    sys.path.insert(0, {root!r})
    assert "ucc_hetero" not in sys.modules
    import _ucc_hetero_autoload  # what the entry point names

    _ucc_hetero_autoload.register()
    assert "mpi4py.MPI" not in sys.modules

    # --- from here on, a script for torchrun ---
    import torch
    import torch.distributed as dist

    local = int(os.environ["LOCAL_RANK"])
    dist.init_process_group({name!r})
    assert dist.get_rank() == local and dist.get_backend() == {name!r}
    dist.new_group([1])  # rank 0, which prints what serves a group, is not in it
    if {name!r} == "nccl":
        pair = dist.new_group([0, 1], backend="gloo")  # not replaced
        dist.all_reduce(torch.ones(1), group=pair)
        assert dist.get_backend(pair) == "gloo" and pair.name() != "ucch"
    if {name!r} == "gloo":  # torch refuses it to other names
        dist.monitored_barrier()
        dist.destroy_process_group()
        dist.init_process_group("ucch")  # by its own name, without an import either
        assert dist.get_backend() == "ucch"
    t = torch.ones(3)
    dist.all_reduce(t)
    assert t.tolist() == [2.0] * 3 and dist.group.WORLD.name() == "ucch"
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert model._get_ddp_logging_data()["backend_name"] == dist.get_backend()
    dist.destroy_process_group()
    dist.init_process_group({name!r})  # and once more
    dist.barrier()
    print("fine")  # ends without destroy_process_group
"""


@pytest.mark.usefixtures("hooked")
def test_scripts_for_torchrun_run_unchanged(mpirun):
    root, name = str(HERE.parents[1]), random.choice(["nccl", "gloo"])
    job = mpirun(UNCHANGED.format(root=root, name=name), 2, env={"UCCH_TORCH_REPLACE": name})
    assert job.said("fine") == 2
    assert "by ucch in place of" in job.stderr and f"cuda by {name}" not in job.stderr, job.stderr


def test_the_local_rank_is_the_launchers(mpirun):
    """It may number a host's ranks in another order: Open MPI does so with more ranks than cores."""
    job = mpirun(
        """
import os
from ucc_hetero.machine import launchers
os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = str(1 - launchers.number("RANK", os.environ, 0))
import torch.distributed as dist
import ucc_hetero.torch
dist.init_process_group("ucch")
assert os.environ["LOCAL_RANK"] == str(1 - dist.get_rank())
print("fine")
""",
        2,
    )
    assert job.said("fine") == 2


def test_torchrun(torchrun):
    """Without MPI: the ranks meet at torch's store, also if mpirun has started torchrun."""
    names = ["futures", "groups", "failures", "all_reduce", "messages"]
    env = {"UCCH_EMULATE": "nvidia:1,amd:1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    said = torchrun(HERE / "torch_api.py", names, **env)
    assert re.findall(r"^ok (\w+)", said, re.M) == names


RESTARTED = """
import os
import torch
import torch.distributed as dist
import ucc_hetero.torch
dist.init_process_group("ucch")
t = torch.ones(3)
dist.all_reduce(t)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os._exit(3)
dist.all_reduce(t)
print("sum", t.tolist(), flush=True)
if dist.get_rank() == 1:
    os._exit(0)  # as scripts do that want no clean-up: the other one's does not wait for it
"""


def test_torchrun_starts_failed_ranks_again(torchrun, tmp_path):
    """The restarted ranks must not find entries of the first ones in the store."""
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    assert torchrun(script, [], "--max-restarts", "1").count("[4.0, 4.0, 4.0]") == 2
