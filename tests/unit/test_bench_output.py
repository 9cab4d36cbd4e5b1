"""Tables byte for byte as OSU 7.4 prints them."""

from typing import Any

import pytest

from ucc_hetero.bench import output
from ucc_hetero.bench.options import parse
from ucc_hetero.bench.output import Row
from ucc_hetero.bench.stats import Interval, Overlap
from ucc_hetero.bench.table import BENCHES


def table(name: str, words: str, row: Row, accelerator: str = "host", pairs: int = 1) -> str:
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

#: Arguments of `table` -> what is printed; the second is the example of the format's description, with its accelerator.
TABLES = [
    (("osu_allreduce", "", Row(1, 3.046)), """
# OSU MPI Allreduce Latency Test v7.4
# Datatype: MPI_CHAR.
# Size         Avg Latency(us)
1                         3.05
"""),
    (("osu_allreduce", "-f -c", Row(1, 3.05, 2.9, 3.21, 1000), "cuda"), """
# OSU MPI-CUDA Allreduce Latency Test v7.4
# Datatype: MPI_CHAR.
# Size         Avg Latency(us)     Min Latency(us)     Max Latency(us)  Iterations          Validation
1                         3.05                2.90                3.21        1000                Pass
"""),
    (("osu_reduce", "-c -z5,99", Row(1048576, 123456.789, wrong=3, percentiles=(1.0, 22.5)), "rocm"), """
# OSU MPI-ROCM Reduce Latency Test v7.4
# Datatype: MPI_CHAR.
# Size         Avg Latency(us)          Validation     P5 Tail Lat(us)    P99 Tail Lat(us)
1048576              123456.79                Fail                1.00               22.50
"""),
    (("osu_barrier", "-f", Row(0, 1.5, 1.25, 1.75, 1000)), """
# OSU MPI Barrier Latency Test v7.4
# Avg Latency(us)     Min Latency(us)     Max Latency(us)  Iterations
             1.50                1.25                1.75        1000
"""),
    (("osu_iallreduce", "", Row(4, 10.0, overlap=TIMES)), """
# OSU MPI Non-blocking Allreduce Latency Test v7.4
# Overall = Coll. Init + Compute + MPI_Test + MPI_Wait

# Datatype: MPI_CHAR.
# Size             Overall(us)         Compute(us)      Pure Comm.(us)          Overlap(%)
4                        10.00                4.00                5.00               12.35
"""),
    (("osu_latency", "-c", Row(4194304, 0.005)), """
# OSU MPI Latency Test v7.4
# Datatype: MPI_CHAR.
# Size         Avg Latency(us)          Validation
4194304                   0.01                Pass
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
def test_tables(arguments: tuple[Any, ...], text: str) -> None:
    assert table(*arguments) == text


@pytest.mark.parametrize(("arguments", "header", "row"), [
    (
        ("osu_iallreduce", "-f", Row(4, 10.0, overlap=TIMES)),
        "# Size             Overall(us)         Compute(us)      Coll. Init(us)        MPI_Test(us)        MPI_Wait(us)"
        "      Pure Comm.(us)       Min Comm.(us)       Max Comm.(us)          Overlap(%)",
        "4                        10.00                4.00                1.00                0.50                4.50"
        "                5.00                4.75                5.25               12.35",
    ), (
        ("osu_ibarrier", "", Row(0, 10.0, overlap=TIMES)),
        "# Overall(us)         Compute(us)      Pure Comm.(us)          Overlap(%)",
        "        10.00                4.00                5.00               12.35",
    ), (
        ("osu_allreduce", "--peer mpi4py,ucc", Row(8, 2.0, ratios=PEERS)),
        "# Size         Avg Latency(us)"
        "          mpi4py(us)           mpi4py/ours             ucc(us)              ucc/ours",
        "8                         2.00"
        "                2.60      1.30 [1.25,1.40]                   -                     -",
    ),
], ids=["full", "barrier", "peers come last"])  # fmt: skip
def test_last_lines(arguments: tuple[Any, ...], header: str, row: str) -> None:
    assert table(*arguments).splitlines()[-2:] == [header, row]
