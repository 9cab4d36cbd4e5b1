"""Every collective, datatype, operation, calling form and layout of ranks, against numpy on gathered inputs.

Each job draws random cases (``collective_cases.py``). It prints the seed, and ``UCCH_TEST_SEED`` repeats it. With
``UCCH_TEST_FULL=1`` (``make exhaustive``) every layout runs every kind of call under every algorithm, which takes
hours: ``UCCH_TEST_SHARD=3/8`` (``make exhaustive SHARD=3/8``) runs the third of eight parts, each of which has all
layouts.
"""

import os
import random

import pytest

FULL = bool(os.environ.get("UCCH_TEST_FULL"))
SHARD = os.environ.get("UCCH_TEST_SHARD", "1/1")

#: Ranks and their vendors: one rank, native teams, even, uneven, interleaved, single-rank islands, three vendors.
LAYOUTS = [
    *((ranks, "") for ranks in (1, 2, 3)), (4, "nvidia:2,amd:2"), (4, "nvidia:3,amd:1"),
    (5, "nvidia:1,amd:1,nvidia:1,amd:1,host:1"),
]  # fmt: skip
MORE_LAYOUTS = [
    (2, "nvidia:1,amd:1"), (4, "nvidia:1,amd:1,nvidia:1,amd:1"), (5, "nvidia:2,amd:2,host:1"),
    (6, "nvidia:2,amd:2,host:2"), (8, "nvidia:3,amd:3,host:2"), *((ranks, "") for ranks in (4, 5, 6, 7, 8)),
    (3, "nvidia:1,amd:1,host:1"), (3, "nvidia:2,amd:1"), (5, "amd:1,nvidia:4"), (6, "nvidia:2,amd:1,nvidia:1,amd:2"),
    (6, "nvidia:3,amd:3"), (7, "nvidia:5,amd:1,host:1"), (7, "host:1,amd:2,nvidia:1,host:2,nvidia:1"),
    (8, "nvidia:4,amd:4"), (8, "nvidia:1,amd:1,host:1,nvidia:1,amd:1,host:1,nvidia:1,amd:1"), (8, "nvidia:6,amd:2"),
]  # fmt: skip
#: Three vendors in turn.
TURNS = "nvidia:1,amd:1,host:1,nvidia:1,amd:1,host:1"


def seed():
    return int(os.environ.get("UCCH_TEST_SEED") or random.randrange(1 << 30))


@pytest.mark.parametrize(("ranks", "vendors"), LAYOUTS + (MORE_LAYOUTS if FULL else []))
def test_cases(crew, ranks, vendors):
    number = seed()
    args = [number, *(["--table", SHARD] if FULL else ["10"])]
    env = {"UCCH_TIMEOUT": "100"}
    job = crew("collective_cases:main", ranks, args=args, env=env, layout=vendors, timeout=1700 if FULL else 170)
    print(job.stdout)


@pytest.mark.parametrize(
    ("ranks", "vendors"),
    [(3, ""), (6, TURNS)] + ([(n, "") for n in (2, 4, 5, 6, 7, 8)] + MORE_LAYOUTS[10:] if FULL else []),
)
def test_replicas(crew, ranks, vendors):
    """All ranks have the same bits after an allreduce, by every algorithm, on data that shows the order of
    additions."""
    args = [seed(), "40" if FULL else "2", "--all-algorithms", "allreduce", "float16", "float32", "complex64"]
    print(crew("collective_cases:main", ranks, args=args, layout=vendors, timeout=250 if FULL else 170).stdout)


@pytest.mark.parametrize(("ranks", "vendors"), [(1, ""), (3, ""), (4, "nvidia:2,amd:2")])
def test_as_mpi_does(crew, ranks, vendors):
    """Calls as in programs on mpi4py (pair types, user-defined operations, datatypes with gaps or one per rank) give
    the same results by MPI and by this package."""
    # Open MPI's tuned algorithms hang if ranks describe the same elements by different datatypes.
    job, env = {"OMPI_MCA_coll": "basic,libnbc,self,inter"} if ranks > 1 else {}, {"UCCH_TIMEOUT": "100"}
    crew("cases:run_module", ranks, args=["as_mpi_cases"], env=env, job=job, layout=vendors, of=4 * (ranks > 1))


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="moves gigabytes: UCCH_TEST_FULL=1 runs it")
def test_more_than_31_bits(mpirun):
    """Counts and displacements beyond 2**31, in three gigabytes per rank."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 12 << 30:
        pytest.skip(f"{free >> 30} GiB are free, 12 are needed")
    mpirun("huge_cases:main", 2, env={"UCCH_EMULATE": "nvidia:1,amd:1"}, timeout=450)


LONG = "allreduce,bcast,reduce,allgather,allgatherv,reduce_scatter,reduce_scatter_block:@{}:fragments=6"


@pytest.mark.parametrize(("vendors", "places", "tune"), [
    ("nvidia:4,host:2", "x,x,y,y,y,z/1", ""),
    (TURNS, "a/1,a/2,a/1,b,a/2,b", LONG.format("split_rail")),
])  # fmt: skip
def test_cases_on_levels(crew, vendors, places, tune):
    number, env = seed(), {"UCCH_TIMEOUT": "100", "UCCH_TUNE": tune}
    args = [places.split(","), number, "10"]
    job = crew("collective_cases:placed", 6, args=args, env=env, layout=vendors, timeout=170)
    print(job.stdout)
