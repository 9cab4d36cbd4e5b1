"""OSU's command line, every refusal and its advice, and tables that are byte for byte those of OSU 7.4."""

from dataclasses import asdict

import pytest

from ucc_hetero.bench import output
from ucc_hetero.bench.options import BadUsage, HelpWanted, parse
from ucc_hetero.bench.output import Row
from ucc_hetero.bench.stats import Interval, Overlap
from ucc_hetero.bench.table import BENCHES


def options(name, *words):
    return parse(BENCHES[name], words)


def changed(name, *words):
    got, default = (asdict(options(name, *each)) for each in (words, ()))
    return {name: value for name, value in got.items() if value != default[name]}


OPTIONS = {
    "osu_allreduce": [
        ("-fcli 7 -x 0 -m2:128 -z50,99 -T MPI_FLOAT -M 1K -d cuda", {
            "full": True, "validate": True, "in_place": True, "iterations": 7, "warmup": 0, "min_size": 2,
            "max_size": 128, "percentiles": (50, 99), "types": ("mpi_float",), "mem_limit": 1 << 20,
            "accelerator": "cuda",
        }),
        ("--full --iter 5 --message-size=4:64M --tail-lat=5 --peer mpi4py,ucc --rounds 5 -d HOST", {
            "full": True, "iterations": 5, "min_size": 4, "max_size": 64 << 20, "percentiles": (5,),
            "peers": ("mpi4py", "ucc"), "rounds": 5,
        }),
        ("-cfu 2 -z", {"validate": True, "full": True, "validation_warmup": 2, "percentiles": (50, 90, 99)}),
        ("-m 128", {"max_size": 128}), ("-m 2:", {"min_size": 2}), ("-m :64", {"max_size": 64}),
        ("-m 1K:1M", {"min_size": 1 << 10}), ("-T all", {"types": ("mpi_char", "mpi_int", "mpi_float")}),
    ],
    "osu_gather": [("-k fixed:3", {"root": 3}), ("-k rotate", {"root": None})],
    "osu_bw": [("-W 8 -z H H", {"window": 8, "percentiles": (50, 90, 99), "places": ("H", "H")})],
    "osu_mbw_mr": [("-p 1", {"pairs": 1})], "osu_iallreduce": [("-t 100", {"test_calls": 100})],
    "osu_put_bw": [("-W 16 -d cuda", {"window": 16, "accelerator": "cuda"})],
    "osu_latency": [("-d cuda D H", {"accelerator": "cuda", "places": ("D", "H")})],
}  # fmt: skip


@pytest.mark.parametrize("name, words, expected", [(name, *row) for name, rows in OPTIONS.items() for row in rows])
def test_options(name, words, expected):
    assert changed(name, *words.split()) == expected


REFUSALS = {
    "osu_allreduce": [
        ("-m x", "-m.*'x'.*number"), ("-m 64:8", "minimum 64 is above the maximum 8"), ("-m 1:2:3", "MIN:MAX"),
        ("-i 0", "from 1"), ("-u 11", "0 to 10"), ("-z1,2,3,4,5,6", "at most 5"), ("-z0", "1 to 100"),
        ("-k rotate", "unrecognized arguments: -k"), ("--full=1", "--full: ignored explicit argument"),
        ("--va", "--validation, --validation-warmup"), ("-d tpu", "host.*cuda.*rocm.*auto"),
        ("--peer other", "ours, mpi4py, ucc, gloo, nccl"),
    ],
    "osu_latency": [("-D cont", "unrecognized arguments: -D"), ("D H", "-d cuda"), ("D", "H or D, twice")],
    "osu_gather": [("-k 3", "fixed:RANK or rotate")], "osu_barrier": [("-c", "unrecognized arguments: -c")],
    "osu_bcast": [("-l", "unrecognized arguments: -l")],
}  # fmt: skip


@pytest.mark.parametrize("name, words, says", [(name, *row) for name, rows in REFUSALS.items() for row in rows])
def test_refusals_say_what_would_be_right(name, words, says):
    with pytest.raises(BadUsage, match=says):
        options(name, *words.split())


@pytest.mark.parametrize(("name", "size", "expected"), [
    ("osu_allreduce", 8192, (1000, 100)), ("osu_allreduce", 16384, (100, 10)), ("osu_latency", 1, (10000, 100)),
    ("osu_latency", 1 << 20, (1000, 10)), ("osu_bw", 1, (100, 10)), ("osu_bw", 16384, (20, 2)),
    ("osu_mbw_mr", 1 << 20, (100, 10)), ("osu_barrier", 0, (1000, 100)), ("osu_ibarrier", 0, (100, 10)),
])  # fmt: skip
def test_default_loop_counts(name, size, expected):
    assert options(name).loops(BENCHES[name], size) == expected


def table(name, words, row, accelerator="host", pairs=1):
    bench = BENCHES[name]
    options = parse(bench, words.split())
    kind = output.datatype("MPI_CHAR") if bench.sized else ""
    return (
        output.osu_preamble(bench, options, accelerator, pairs)
        + kind
        + output.osu_header(bench, options)
        + output.osu_row(bench, options, row)
    )


TIMES = Overlap(
    overall=10.0, compute=4.0, init=1.0, test=0.5, wait=4.5, pure=5.0, least=4.75, most=5.25, percent=12.345
)
PEERS = {"mpi4py": (2.6, Interval(1.3, 1.25, 1.4))}

#: Arguments of `table` -> its output; the first is the example in the format's description, with its accelerator.
TABLES = [
    (("osu_allreduce", "-f -c", Row(1, 3.05, 2.9, 3.21, 1000), "cuda"), """
# OSU MPI-CUDA Allreduce Latency Test v7.4
# Datatype: MPI_CHAR.
# Size         Avg Latency(us)     Min Latency(us)     Max Latency(us)  Iterations          Validation
1                         3.05                2.90                3.21        1000                Pass
"""),
    (("osu_reduce", "-c -z5,99 --peer mpi4py,ucc",
      Row(1048576, 123456.789, wrong=3, percentiles=(1.0, 22.5), ratios=PEERS), "rocm"), """
# OSU MPI-ROCM Reduce Latency Test v7.4
# Datatype: MPI_CHAR.
# Size         Avg Latency(us)          Validation     P5 Tail Lat(us)    P99 Tail Lat(us)\
          mpi4py(us)           mpi4py/ours             ucc(us)              ucc/ours
1048576              123456.79                Fail                1.00               22.50\
                2.60      1.30 [1.25,1.40]                   -                     -
"""),
    (("osu_barrier", "-f", Row(0, 1.5, 1.25, 1.75, 1000)), """
# OSU MPI Barrier Latency Test v7.4
# Avg Latency(us)     Min Latency(us)     Max Latency(us)  Iterations
             1.50                1.25                1.75        1000
"""),
    (("osu_iallreduce", "-f", Row(4, 10.0, overlap=TIMES)), """
# OSU MPI Non-blocking Allreduce Latency Test v7.4
# Overall = Coll. Init + Compute + MPI_Test + MPI_Wait

# Datatype: MPI_CHAR.
# Size             Overall(us)         Compute(us)      Coll. Init(us)        MPI_Test(us)        MPI_Wait(us)\
      Pure Comm.(us)       Min Comm.(us)       Max Comm.(us)          Overlap(%)
4                        10.00                4.00                1.00                0.50                4.50\
                5.00                4.75                5.25               12.35
"""),
    (("osu_bibw", "-z50", Row(1, 4.2, percentiles=(4.0,))), """
# OSU MPI Bi-Directional Bandwidth Test v7.4
# Datatype: MPI_CHAR.
# Size        Bandwidth (MB/s)   P50 Tail BW(MB/s)
1                         4.20                4.00
"""),
    (("osu_mbw_mr", "-W 32", Row(1, 4.2, rate=4200000.0), "cuda", 2), """\
# OSU MPI Multiple Bandwidth / Message Rate Test v7.4
# [ pairs: 2 ] [ window size: 32 ]
# Datatype: MPI_CHAR.
# Size                    MB/s          Messages/s
1                         4.20          4200000.00
"""),
    (("osu_put_latency", "", Row(1, 2.0)), """\
# OSU MPI_Put Latency Test v7.4
# Window creation: MPI_Win_allocate
# Synchronization: MPI_Win_flush
# Datatype: MPI_CHAR.
# Size            Latency (us)
1                         2.00
"""),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "text"), TABLES, ids=[f"{a[0]} {a[1]}" for a, _ in TABLES])
def test_tables(arguments, text):
    assert table(*arguments) == text


def test_help_and_version():
    for words in ("-h", "--help", "-v", "-fv"):
        with pytest.raises(HelpWanted):
            options("osu_allreduce", *words.split())
