"""Every collective, datatype, operation, calling form and layout of ranks, against numpy on gathered inputs.

Each job draws random cases (``collective_cases.py``); the seed is printed, and ``UCCH_TEST_SEED`` repeats it. With
``UCCH_TEST_FULL=1`` (``make exhaustive``) every layout runs every kind of call under every algorithm. That takes hours:
``UCCH_TEST_SHARD=3/8`` (``make exhaustive SHARD=3/8``) runs the third of eight parts, each of which has all layouts.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FULL = bool(os.environ.get("UCCH_TEST_FULL"))
SHARD = os.environ.get("UCCH_TEST_SHARD", "1/1")

#: Ranks and their vendors: alone, native teams, even, uneven, interleaved, single-rank islands, three vendors.
LAYOUTS = [
    *((ranks, "") for ranks in (1, 2, 3)), (2, "nvidia:1,amd:1"), (4, "nvidia:2,amd:2"),
    (4, "nvidia:1,amd:1,nvidia:1,amd:1"), (4, "nvidia:3,amd:1"), (5, "nvidia:2,amd:2,host:1"),
    (6, "nvidia:2,amd:2,host:2"),
]  # fmt: skip
MORE_LAYOUTS = [
    (8, "nvidia:3,amd:3,host:2"), *((ranks, "") for ranks in (4, 5, 6, 7, 8)), (3, "nvidia:1,amd:1,host:1"),
    (3, "nvidia:2,amd:1"), (5, "amd:1,nvidia:4"), (6, "nvidia:2,amd:1,nvidia:1,amd:2"), (6, "nvidia:3,amd:3"),
    (7, "nvidia:5,amd:1,host:1"), (7, "host:1,amd:2,nvidia:1,host:2,nvidia:1"), (8, "nvidia:4,amd:4"),
    (8, "nvidia:1,amd:1,host:1,nvidia:1,amd:1,host:1,nvidia:1,amd:1"), (8, "nvidia:6,amd:2"),
]  # fmt: skip


def seed() -> int:
    return int(os.environ.get("UCCH_TEST_SEED") or secrets.randbelow(1 << 30))


@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize(("ranks", "vendors"), LAYOUTS + (MORE_LAYOUTS if FULL else []))
def test_cases(mpirun, ranks: int, vendors: str) -> None:
    number = seed()
    args = [str(number), *(["--table", SHARD] if FULL else ["50"])]
    env = {"UCCH_TIMEOUT": "100", "UCCH_EMULATE": vendors}
    job = mpirun("tests/mpi/collective_cases.py", ranks, args=args, env=env, timeout=1700 if FULL else 170)
    print(job.stdout)
    assert f"calls right on {ranks} ranks (seed {number})" in job.stdout


@pytest.mark.parametrize(
    ("ranks", "vendors"),
    [(3, ""), (6, "nvidia:1,amd:1,host:1,nvidia:1,amd:2")]
    + ([(n, "") for n in (2, 4, 5, 6, 7, 8)] + MORE_LAYOUTS[6:] if FULL else []),
)
def test_replicas(mpirun, ranks: int, vendors: str) -> None:
    """All ranks hold the same bits after an allreduce, by every algorithm and at every size."""
    sizes = [] if FULL else ["2", "5", "250", "4097", "70001"]
    env = {"UCCH_EMULATE": vendors}
    job = mpirun("tests/mpi/replica_cases.py", ranks, args=sizes, env=env, timeout=250 if FULL else 170)
    assert job.stdout.endswith(f"0 cases differ on {ranks} ranks\n"), job.stdout


@pytest.mark.parametrize(("ranks", "vendors"), [(1, ""), (2, ""), (4, "nvidia:2,amd:2")])
def test_special(mpirun, ranks: int, vendors: str) -> None:
    """Pairs, the user's operations, datatypes with gaps or one per rank, what is refused, many starts."""
    env = {"UCCH_TIMEOUT": "200", "UCCH_EMULATE": vendors}
    job = mpirun("tests/mpi/special_cases.py", ranks, env=env, timeout=120)
    assert f"all held on {ranks} ranks" in job.stdout


@pytest.mark.parametrize("ranks", [2, 3])
def test_as_mpi_does(mpirun, ranks: int) -> None:
    """Buffers in the ways of programs on mpi4py: the same calls by MPI and by this package."""
    # Open MPI's tuned algorithms stand still where ranks describe the same elements by different datatypes.
    env = {"UCCH_TIMEOUT": "100", "OMPI_MCA_coll": "basic,libnbc,self,inter"}
    job = mpirun("tests/mpi/as_mpi_cases.py", ranks, env=env, timeout=60)
    assert job.said("all good") == ranks


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="moves gigabytes: UCCH_TEST_FULL=1 runs it")
def test_more_than_31_bits(mpirun) -> None:
    """Counts and displacements beyond 2**31, in three gigabytes per rank."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 12 << 30:
        pytest.skip(f"{free >> 30} GiB are free, 12 are needed")
    job = mpirun("tests/mpi/huge_cases.py", 2, env={"UCCH_EMULATE": "nvidia:1,amd:1"}, timeout=450)
    assert "2147487747 elements moved" in job.stdout


#: Each rank stands where its place in a list says, then runs random cases.
PLACED = f"""
import os, runpy, sys
rank = next(int(os.environ[n]) for n in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK") if n in os.environ)
os.environ["UCCH_GROUP"] = sys.argv.pop(1).split(",")[rank]
sys.path.insert(0, {str(Path(__file__).parent)!r})
runpy.run_path({str(Path(__file__).with_name("collective_cases.py"))!r}, run_name="__main__")
"""
LONG = "allreduce,bcast,reduce,allgather,allgatherv,reduce_scatter,reduce_scatter_block:@{}:fragments=3"


@pytest.mark.parametrize(("vendors", "places", "tune"), [
    ("nvidia:4,host:2", "x,x,y,y,y,z/1", ""),
    ("nvidia:1,amd:1,host:1,nvidia:1,amd:1,host:1", "a/1,a/2,a/1,b,a/2,b", LONG.format("split_rail")),
])  # fmt: skip
def test_cases_on_levels(mpirun: Callable[..., Any], vendors: str, places: str, tune: str) -> None:
    number = seed()
    env = {"UCCH_EMULATE": vendors, "UCCH_TIMEOUT": "100", "UCCH_TUNE": tune}
    job = mpirun(PLACED, 6, args=[places, str(number), "25"], env=env, timeout=170)
    assert f"calls right on 6 ranks (seed {number})" in job.stdout
