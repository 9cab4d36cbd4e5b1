"""Bridges whose ranks have different kinds of memory: wrong with libucc's own choices, right with those of a bridge.

CUDA and host memory on one GPU take the branches that CUDA and ROCm memory take: what counts is that ranks differ. The
hazards are those of docs/bridge.md; each is shown where the libucc at hand has it, and where it has not, that nothing
there depends on the memory.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bridge_memory import CALLS
from gpu_machine import gpus

JOB = Path(__file__).parent / "bridge_memory.py"
ROOT = JOB.parents[2]
MIB = 1 << 20
IN_PLACE = ("allreduce", "reduce", "allgather", "gather", "reduce_scatter")
LONG = ("allreduce", "reduce", "bcast", "allgather", "alltoall", "reduce_scatter")

pytestmark = [pytest.mark.gpu, pytest.mark.mpi, pytest.mark.skipif(gpus() < 1, reason="needs an NVIDIA GPU and torch")]

Run = Callable[..., Any]


@pytest.fixture
def bridge(mpirun: Run) -> Run:
    """``bridge(settings, calls, ranks=4, *options)`` -> what the job left, whatever its end."""

    def run(settings: str, calls: list[str], ranks: int = 4, *options: str, timeout: float = 120) -> Any:
        # What the environment says about UCC would be said to both kinds of settings.
        args = [settings, *calls, *options]
        return mpirun(JOB, ranks, args=args, env={"PYTHONPATH": str(ROOT)}, timeout=timeout, check=False)

    return run


def right(job: Any, ranks: int) -> bool:
    return bool(job.returncode == 0 and job.stdout.split().count("right") == ranks)


def broke(job: Any) -> bool:
    """It was the call that failed, not the job before it: wrong data, an error, a crash, or a time limit."""
    crash = re.search(r"exited on\s+signal|Segmentation fault|Caught signal", job.output)
    late = "Timeout (" in job.stderr
    return job.returncode != 0 and bool(crash or late or re.search(r"^(wrong|failed): rank", job.stdout, re.M))


def calls(*sizes: int, names: tuple[str, ...] = tuple(CALLS)) -> list[str]:
    """Every collective at these sizes, in place too where UCC has that."""
    out = []
    for size in sizes:
        for name in names:
            out.append(f"{name}:out:{size}")
            if name in IN_PLACE:
                out.append(f"{name}:in:{size}")
    return out


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_collective_on_our_bridge(bridge: Run, ranks: int) -> None:
    job = bridge("ours", calls(4, 400, 3000, 65536, 4 * MIB), ranks)
    assert right(job, ranks), job.output


def test_ranks_that_see_no_gpu(bridge: Run) -> None:
    """libucp that does not know a peer's memory cannot receive long messages from it, whatever the settings.

    Between such ranks data has to go through the host: the path ``staged``.
    """
    long = [f"{name}:out:{4 * MIB}" for name in ("allreduce", "allgather", "bcast")]
    assert broke(job := bridge("ours", long, 2, "--blind", "--limit", "6")), job.output


@pytest.mark.parametrize("size", [16 * MIB, 256 * MIB])
def test_long_messages_on_our_bridge(bridge: Run, size: int) -> None:
    job = bridge("ours", calls(size, names=LONG), 4, timeout=200)
    assert right(job, 4), job.output


def knows(setting: str) -> bool:
    """Whether libucc's UCP component has a setting: what it cannot be told it does not do."""
    from ucc_hetero.native.libraries import load

    component = next(Path(load().ucc_path).resolve().parent.glob("ucc/libucc_tl_ucp.so*"))
    return setting.encode() in component.read_bytes()


@pytest.fixture
def maps(bridge: Run) -> Callable[[str], dict[str, dict[str, str]]]:
    """``maps(settings)`` -> collective -> memory -> ranges of sizes that are treated alike, as libucc reports them."""

    def read(settings: str) -> dict[str, dict[str, str]]:
        job = bridge(settings, [], 4, "--maps")
        assert right(job, 4), job.output
        out: dict[str, dict[str, str]] = {}
        name = ""
        for line in re.findall(r"ucc_coll_score_map\.c:\d+ +UCC\s+INFO\s+(.*)", job.output):
            if found := re.fullmatch(r"(\w+):\s*", line):
                name = found[1].lower()
            elif found := re.match(r"(\w+): (.*\S)", line):
                out.setdefault(name, {})[found[1].lower()] = found[2]
        assert out.get("allreduce", {}).keys() >= {"host", "cuda"}, job.output
        return out

    return read


@pytest.mark.parametrize("ranks", [2, 4])
def test_H1_long_allreduce_in_place(bridge: Run, ranks: int) -> None:
    """Ranks of CUDA memory alone cut it into pieces."""
    call = [f"allreduce:in:{8 * MIB}"]
    assert broke(job := bridge("default", call, ranks, "--limit", "6")), job.output
    assert right(job := bridge("ours", call, ranks), ranks), job.output


def test_H1b_long_reduce(bridge: Run) -> None:
    """The same for reduce, in the releases that have the algorithm."""
    call = [f"reduce:in:{8 * MIB}", f"reduce:out:{8 * MIB}"]
    job = bridge("default", call, 4, "--limit", "6")
    if knows("REDUCE_SRG_KN_PIPELINE"):
        assert broke(job), job.output
    else:  # such as 1.4.0: one algorithm for every size and memory
        assert right(job, 4), job.output
    assert right(job := bridge("ours", call), 4), job.output


def test_H2_allgather(bridge: Run, maps: Callable[[str], dict[str, dict[str, str]]]) -> None:
    """Ranks of CUDA memory choose another algorithm where each is alone on its host, from 1.4.4 on."""
    call = [f"allgather:{place}:{size}" for place in ("in", "out") for size in (3000, 65536, 4 * MIB)]
    ours = maps("ours")["allgather"]
    assert ours["host"] == ours["cuda"]
    assert right(job := bridge("ours", call), 4), job.output
    if not knows("REDUCE_SRG_KN_PIPELINE"):  # older than 1.4.4
        default = maps("default")["allgather"]
        assert default["host"] == default["cuda"]
        assert right(job := bridge("default", call), 4), job.output


def test_H6_alltoall_of_four_ranks(bridge: Run, maps: Callable[[str], dict[str, dict[str, str]]]) -> None:
    """Ranks of host memory have an algorithm of their own for short messages."""
    default = maps("default")["alltoall"]
    assert default["host"] != default["cuda"]
    call = ["alltoall:out:256", "alltoall:out:400"]
    assert broke(job := bridge("default", call, 4, "--limit", "6")), job.output
    assert right(job := bridge("ours", call), 4), job.output
