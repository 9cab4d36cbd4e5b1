"""Benchmarks under a real mpirun: output can be parsed, results are correct, and nothing hangs."""

import json
import re

import pytest

COLLECTIVES = (
    *("allgather", "allgatherv", "allreduce", "alltoall", "alltoallv", "bcast", "gather", "gatherv", "reduce"),
    *("reduce_scatter", "reduce_scatter_block", "scatter", "scatterv"),
)


def rows(text):
    return [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]


@pytest.fixture
def bench(crew):
    """Call as ``bench(*command lines, n=2, case="right")``."""
    return lambda *commands, n=2, case="right": crew(f"bench_cases:{case}", n, args=commands, timeout=150)


def test_every_column_at_once(bench, tmp_path):
    result = bench(f"osu_allreduce -m 4:8 -i 3 -x 1 -f -c -u 1 -z50,99 -T all --json {tmp_path}/new/r.json")
    assert result.stdout.startswith("\n# OSU MPI Allreduce Latency Test v7.4\n# Datatype: MPI_CHAR.\n# Size ")
    assert re.findall(r"# Datatype: (\w+)\.", result.stdout) == ["MPI_CHAR", "MPI_INT", "MPI_FLOAT"]
    table = rows(result.stdout)
    assert [row[0] for row in table] == ["4", "8"] * 3
    for _, average, least, most, iterations, validation, *tails in table:
        assert 0 < float(least) <= float(average) <= float(most)
        assert (iterations, validation, len(tails)) == ("3", "Pass", 2)
    data = json.loads((tmp_path / "new" / "r.json").read_text())
    assert data["format"] == "ucc_hetero.bench/1"
    assert (data["benchmark"], data["backend"], data["job"]["ranks"]) == ("osu_allreduce", "ours", 2)
    assert [row["size"] for row in data["rows"]] == [4, 8] * 3
    assert {"machine", "versions", "date", "command", "settings", "plans"} <= set(data)
    assert data["topology"] == "host[0-1]@0"


def of_each(words, names=COLLECTIVES):
    return [words.format(name) for name in names]


_FEW, _PAIRS = "-m 8:8 -i 3 -x 1", ("osu_latency", "osu_bw", "osu_bibw", "osu_mbw_mr", "osu_multi_lat")
#: Number of ranks, and command lines with the number of columns of their rows; with -c received data is compared.
FAMILIES = {
    "blocking": (3, {
        3: [each for peer in ("mpi4py", "ucc") for each in of_each(f"osu_{{}} --backend {peer} {_FEW} -c -u 1")],
        1: [f"osu_barrier --backend {peer} -i 3 -x 1" for peer in ("mpi4py", "ucc")],
    }),
    "in place, and rotating roots": (3, {
        3: of_each(f"osu_{{}} {_FEW} -c -u 0 -T mpi_float -l", [name for name in COLLECTIVES if name != "bcast"])
        + of_each(f"osu_{{}} {_FEW} -c -u 0 -k rotate", ["reduce", "gatherv"]),
    }),
    "non-blocking": (2, {11: of_each(f"osu_i{{}} {_FEW} -c -u 1 -t 2 -f"), 4: ["osu_ibarrier -i 3 -x 1"]}),
    "persistent": (2, {3: of_each(f"osu_{{}}_persistent {_FEW} -c -u 1"), 1: ["osu_barrier_persistent -i 3 -x 1"]}),
    "messages": (2, {
        columns: [f"{name} --backend {peer} {_FEW} -c -u 1 {'-W 4' * ('bw' in name)}" for peer in ("ours", "mpi4py")
                  for name in _PAIRS if ("mr" in name) == (columns == 4)] for columns in (3, 4)
    }),
    "pairs of an odd job": (3, {3: [f"osu_mbw_mr {_FEW}"]}),
    "one-sided": (2, {
        2: [f"osu_{what} --backend {peer} {_FEW}" for peer in ("ours", "mpi4py")
            for what in ("put_latency", "get_latency", "put_bw", "get_bw", "put_bibw")],
    }),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_benchmark(bench, family):
    ranks, lines = FAMILIES[family]
    commands = [each for some in lines.values() for each in some]
    table = rows(
        bench(*(each if "backend" in each else f"{each} --backend mpi4py" for each in commands), n=ranks).stdout
    )
    assert [len(row) for row in table] == [columns for columns, some in lines.items() for _ in some]
    assert [row[-1] == "Pass" for row in table] == [" -c" in each for each in commands], table
    assert all(float(row[1]) >= 0 for row in table if len(row) > 1)  # of few bytes 0.00, if cores are busy


def test_peers_of_every_family(bench, tmp_path):
    rest = "-m 1K:4K -i 4 -x 1 --peer mpi4py --rounds 2"
    families = ("osu_allreduce -c", "osu_bcast_persistent", "osu_ialltoall", "osu_latency -c -z50", "osu_bibw")
    commands = [f"{name} {rest} -T mpi_int --json {tmp_path}/{i}.json" for i, name in enumerate(families)]
    commands += [f"osu_{name} {rest} --json {tmp_path}/{name}.json" for name in ("put_latency", "get_bw")]
    result = bench(*commands)
    assert "Fail" not in result.stdout
    for header in ("mpi4py(us)", "mpi4py(MB/s)", "ours/mpi4py", "mpi4py/ours"):
        assert header in result.stdout
    assert re.search(r" \[[\d.]+,[\d.]+\]\n", result.stdout), "the interval of the ratio"
    for path in tmp_path.glob("*.json"):
        data = json.loads(path.read_text())
        for row in data["rows"]:
            assert set(row["peers"]) == {"mpi4py"}
            assert row["peers"]["mpi4py"]["verdict"] in ("faster", "slower", "same", "too noisy")
            assert bool(row["plan"]) == (data["family"] in ("blocking", "persistent", "nonblocking"))


def test_what_one_sided_benchmarks_do(crew):
    """Each once; the other rank's memory is checked through an MPI window."""
    for what in ("put", "get"):
        crew("bench_cases:once", args=[what])


def test_kv_transfer(bench, tmp_path):
    """A row for each case, whose values are compared during the measurement."""
    ways = "buffer,plain,layout,half,float8"
    few = f"--way {ways} --pages 3,5 --block-size 4 --concurrency 1,2 --layers 2 --heads 2 --dim 8 -r 2"
    result = bench(f"kv_transfer {few} --json {tmp_path}/k.json")
    data = json.loads((tmp_path / "k.json").read_text())
    assert [[row[name] for name in ("way", "pages", "concurrency")] for row in data["rows"]] == [
        [way, pages, n] for way in ways.split(",") for pages in (3, 5) for n in (1, 2)
    ]
    for row, shown in zip(data["rows"], rows(result.stdout), strict=True):
        size = 1 if row["way"] == "float8" else 2
        assert row["bytes"] == 2 * 2 * 4 * 2 * 8 * size * row["pages"] * row["concurrency"]
        assert shown[:4] == [row["way"], "4", str(row["pages"]), str(row["concurrency"])]
        assert 0 < row["gbs"] <= row["best"] and row["ms"] > 0


def test_compare(bench, tmp_path):
    result = bench(f"compare -m 8:64 --step 8 -r 3 --json {tmp_path / 'c.json'}")
    assert "ours(us)     ours*(us)    mpi4py(us)      ucc*(us)" in result.stdout
    assert [row[0] for row in rows(result.stdout)] == ["8", "64"]
    assert "# machine: " in result.stdout
    data = json.loads((tmp_path / "c.json").read_text())
    assert [(r["of"], r["to"]) for r in data["rows"][0]["ratios"]] == [("mpi4py", "ours"), ("ucc*", "ours*")]
    assert all(len(series["rounds"]) == 3 for series in data["rows"][0]["series"])


def test_wrong_data_on_one_rank_fails_the_job(bench):
    words = "osu_allreduce --backend mpi4py -m 4:64 -i 2 -x 0 -u 0 -T mpi_int -c"
    result = bench("wrong", words, case="broken")
    assert [row[-1] for row in rows(result.stdout)[:3]] == ["Pass", "Pass", "Fail"]
    assert "DATA VALIDATION ERROR: osu_allreduce exited with status 1 on message size 16.\n" in result.stdout


def test_wrong_data_is_not_compared(bench):
    result = bench("wrong", "compare --peers mpi4py,ucc -m 16:16 -T int32 -r 2", case="broken")
    assert "error: mpi4py: 1 wrong elements in allreduce of 4 int32" in result.stderr


def test_an_error_on_one_rank_ends_the_job(mpirun):
    result = mpirun("bench_cases:broken", args=["raise", "osu_allreduce --backend mpi4py"], check=False, timeout=30)
    assert result.returncode != 0
    assert "OSError: this rank fails" in result.stderr


MISTAKES = {
    2: {
        "osu_gather -k fixed:2": "the job has ranks 0 to 1",
        "osu_mbw_mr -p 2": "2 ranks make at most 1 pairs",
        "osu_get_bw --backend ucc": "peer 'ucc' has no one-sided communication",
        "kv_transfer --way back": "--way back: known are buffer, plain",
        "kv_transfer --block-size 16,x": "kv_transfer: argument --block-size: '16,x': a number from 1",
        "osu_alreduce": "benchmark 'osu_alreduce' is not known; did you mean osu_allreduce?",
        "compare --rounds 1": "from 2",
        "compare -m 64:8": "the minimum 64 is above the maximum 8",
    },
    3: {
        "osu_latency": "osu_latency requires exactly two ranks; the job has 3",
        "kv_transfer": "kv_transfer needs two ranks",
    },
}


@pytest.mark.parametrize("ranks", MISTAKES)
def test_mistakes_are_said_once(bench, ranks):
    result = bench(*MISTAKES[ranks], n=ranks, case="wrong")
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == len(MISTAKES[ranks])
    for line, says in zip(lines, MISTAKES[ranks].values(), strict=True):
        assert says in line


def test_help(bench):
    result = bench("--help", "osu_allreduce --help", "osu_allreduce -v")
    assert result.stdout.count("osu_scatterv_persistent") == 1
    assert result.stdout.count("--tail-lat") == 1
    assert "# OSU MPI Allreduce Latency Test v7.4" in result.stdout
