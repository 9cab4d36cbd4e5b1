"""Benchmarks under a real mpirun: what they print can be parsed, what they measure is right, and nothing hangs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MAIN = "from ucc_hetero.bench.__main__ import main; raise SystemExit(main())\n"
Run = Callable[..., Any]
COLLECTIVES = (
    *("allgather", "allgatherv", "allreduce", "alltoall", "alltoallv", "bcast", "gather", "gatherv", "reduce"),
    *("reduce_scatter", "reduce_scatter_block", "scatter", "scatterv"),
)


def split(words: str) -> list[str]:
    return words.split()


def rows(text: str) -> list[list[str]]:
    """The table as a parser of OSU's output sees it."""
    return [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]


@pytest.fixture
def bench(crew: Run) -> Run:
    """Call as ``bench(*command lines, n=2, case="right")``."""
    return lambda *commands, n=2, case="right": crew(f"bench_cases:{case}", n, args=commands, timeout=150)


def test_every_column_at_once(bench: Run, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("backend", ["mpi4py", "ucc"])
def test_blocking_collectives_are_checked(bench: Run, backend: str) -> None:
    commands = [f"osu_{name} --backend {backend} -m 4:16 -i 3 -x 1 -c -u 1 -T mpi_int" for name in COLLECTIVES]
    result = bench(*commands, f"osu_barrier --backend {backend} -i 3 -x 1", n=3)
    table = rows(result.stdout)
    assert [row[-1] for row in table[:-1]] == ["Pass"] * (3 * len(COLLECTIVES))
    assert len(table[-1]) == 1


def test_in_place_and_rotating_roots(bench: Run) -> None:
    commands = [
        f"osu_{name} --backend mpi4py -m 16:16 -i 6 -x 1 -c -u 0 -T mpi_float -l"
        for name in COLLECTIVES
        if name != "bcast"
    ]
    commands += [f"osu_{name} --backend mpi4py -m 16:16 -i 6 -x 1 -c -u 0 -k rotate" for name in ("reduce", "gatherv")]
    result = bench(*commands, n=3)
    assert [row[-1] for row in rows(result.stdout)] == ["Pass"] * len(commands)


def test_nonblocking_and_persistent(bench: Run) -> None:
    rest = "--backend mpi4py -m 8:8 -i 3 -x 1"
    commands = [f"osu_i{name} {rest} -c -u 1 -t 2 -f" for name in COLLECTIVES]
    commands += [f"osu_{name}_persistent {rest} -c -u 1" for name in COLLECTIVES]
    commands += ["osu_ibarrier --backend mpi4py -i 3 -x 1", "osu_barrier_persistent --backend mpi4py -i 3 -x 1"]
    result = bench(*commands)
    table = rows(result.stdout)
    count = len(COLLECTIVES)
    assert {(len(row), row[-1]) for row in table[:count]} == {(11, "Pass")}
    assert {(len(row), row[-1]) for row in table[count : 2 * count]} == {(3, "Pass")}
    assert [len(row) for row in table[2 * count :]] == [4, 1]
    for row in table[:count]:
        assert 0 <= float(row[9]) <= 100


@pytest.mark.parametrize("backend", ["ours", "mpi4py"])
def test_point_to_point(bench: Run, backend: str) -> None:
    rest = f"--backend {backend} -m 1:8 -i 3 -x 1 -c -u 1"
    names = ("osu_latency", "osu_bw", "osu_bibw", "osu_mbw_mr", "osu_multi_lat")
    commands = [f"{name} {rest} {'-W 4' if 'bw' in name else ''}" for name in names]
    result = bench(*commands)
    table = rows(result.stdout)
    assert [row[-1] for row in table] == ["Pass"] * (4 * len(names))
    assert {len(row) for row in table[12:16]} == {4}  # osu_mbw_mr also has the message rate


def test_pairs_of_an_odd_job(bench: Run) -> None:
    result = bench("osu_mbw_mr --backend mpi4py -m 1:2 -i 2 -x 1", n=3)
    assert "# [ pairs: 1 ] [ window size: 64 ]" in result.stdout
    assert [(row[0], len(row)) for row in rows(result.stdout)] == [("1", 3), ("2", 3)]


def test_peers_are_interleaved_and_compared(bench: Run) -> None:
    result = bench("osu_allreduce --backend mpi4py --peer ucc --rounds 3 -m 8:8 -i 9 -x 1 -c -u 0 -T mpi_int")
    ((size, _, validation, theirs, ratio, interval),) = rows(result.stdout)
    assert (size, validation) == ("8", "Pass")
    assert float(theirs) > 0
    assert float(ratio) > 0
    assert re.fullmatch(r"\[[\d.]+,[\d.]+\]", interval)


def test_limits_and_peers_of_every_family(bench: Run, tmp_path: Path) -> None:
    rest = "-m 1K:4K -i 4 -x 1 --limit --peer mpi4py --rounds 2"
    families = ("osu_allreduce -c", "osu_bcast_persistent", "osu_ialltoall", "osu_latency -c -z50", "osu_bibw")
    commands = [f"{name} {rest} -T mpi_int --json {tmp_path}/{i}.json" for i, name in enumerate(families)]
    commands += [f"osu_{name} {rest} --json {tmp_path}/{name}.json" for name in ("put_latency", "get_bw")]
    result = bench(*commands)
    assert "Fail" not in result.stdout
    for header in ("Of limit(%)", "mpi4py(us)", "mpi4py(MB/s)", "ours/mpi4py", "mpi4py/ours", "Limit(MB/s)"):
        assert header in result.stdout
    for path in tmp_path.glob("*.json"):
        data = json.loads(path.read_text())
        assert data["links"]
        for row in data["rows"]:
            better = row["value"] / row["limit"] if data["unit"] == "MB/s" else row["limit"] / row["value"]
            if "overlap" in row:
                better = row["limit"] / row["overlap"]["pure"]
            assert row["limit"] > 0
            assert row["of_limit"] == pytest.approx(better)
            assert set(row["peers"]) == {"mpi4py"}
            assert row["peers"]["mpi4py"]["verdict"] in ("faster", "slower", "same", "too noisy")
            assert bool(row["plan"]) == (data["family"] in ("blocking", "persistent", "nonblocking"))


def test_one_sided(bench: Run) -> None:
    commands = [
        f"osu_{name} --backend {backend} -m 256:1K -i 4 -x 1"
        for name in ("put_latency", "get_latency", "put_bw", "get_bw", "put_bibw")
        for backend in ("ours", "mpi4py")
    ]
    result = bench(*commands)
    table = rows(result.stdout)
    assert [row[0] for row in table] == ["256", "512", "1024"] * len(commands), result.stdout
    assert all(float(row[1]) > 0 for row in table)


def test_what_one_sided_benchmarks_do(crew: Run) -> None:
    """Once, with the other rank's memory as MPI says that it is then."""
    for what in ("put", "get"):
        crew("window_cases:once", args=[what])


def test_kv_transfer(bench: Run, tmp_path: Path) -> None:
    """A row for each case, whose values were compared on the way."""
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


def test_compare(mpirun: Run, tmp_path: Path) -> None:
    words = ["compare", "-m", "8:64", "--step", "8", "-r", "3", "--json", str(tmp_path / "c.json")]
    result = mpirun(MAIN, n=2, args=words, timeout=120)
    assert "ours(us)     ours*(us)    mpi4py(us)      ucc*(us)" in result.stdout
    assert [row[0] for row in rows(result.stdout)] == ["8", "64"]
    for line in ("# import ucc_hetero, beyond numpy and mpi4py: ", "# communicator of ours: ", "# machine: "):
        assert line in result.stdout
    data = json.loads((tmp_path / "c.json").read_text())
    assert [(r["of"], r["to"]) for r in data["rows"][0]["ratios"]] == [("mpi4py", "ours"), ("ucc*", "ours*")]
    assert all(len(series["rounds"]) == 3 for series in data["rows"][0]["series"])


def test_the_quickest_put(bench: Run) -> None:
    bench(n=3, case="quickest_put")


def test_wrong_data_on_one_rank_fails_the_job(bench: Run) -> None:
    words = "osu_allreduce --backend mpi4py -m 4:64 -i 2 -x 0 -u 0 -T mpi_int -c"
    result = bench("wrong", words, case="broken")
    assert [row[-1] for row in rows(result.stdout)[:3]] == ["Pass", "Pass", "Fail"]
    assert "DATA VALIDATION ERROR: osu_allreduce exited with status 1 on message size 16.\n" in result.stdout


def test_wrong_data_is_not_compared(bench: Run) -> None:
    result = bench("wrong", "compare --no-start-up --peers mpi4py,ucc -m 16:16 -T int32 -r 2", case="broken")
    assert "error: mpi4py: 1 wrong elements in allreduce of 4 int32" in result.stderr


def test_an_error_on_one_rank_ends_the_job(mpirun: Run) -> None:
    words = split("osu_allreduce --backend mpi4py")
    result = mpirun("tests/mpi/bench_cases.py", n=2, args=words, check=False, timeout=30)
    assert result.returncode != 0
    assert "OSError: this rank fails" in result.stderr


MISTAKES = {
    2: {
        "osu_gather -k fixed:2": "the job has ranks 0 to 1",
        "osu_mbw_mr -p 2": "2 ranks make at most 1 pairs",
        "osu_get_bw --backend ucc": "peer 'ucc' has no one-sided communication",
        "kv_transfer --way back": "--way back: known are buffer, plain",
        "kv_transfer --block-size 16,x": "kv_transfer: argument --block-size: '16,x': a number from 1",
        "osu_nothing": "benchmark 'osu_nothing' is not known",
        "compare --rounds 1": "from 2",
    },
    3: {
        "osu_latency": "osu_latency requires exactly two ranks; the job has 3",
        "kv_transfer": "kv_transfer needs two ranks",
    },
}


@pytest.mark.parametrize("ranks", MISTAKES)
def test_mistakes_are_said_once(bench: Run, ranks: int) -> None:
    result = bench(*MISTAKES[ranks], n=ranks, case="wrong")
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == len(MISTAKES[ranks])
    for line, says in zip(lines, MISTAKES[ranks].values(), strict=True):
        assert says in line


def test_help(bench: Run) -> None:
    result = bench("--help", "osu_allreduce --help", "osu_allreduce -v")
    assert result.stdout.count("osu_scatterv_persistent") == 1
    assert result.stdout.count("--tail-lat") == 1
    assert "# OSU MPI Allreduce Latency Test v7.4" in result.stdout
