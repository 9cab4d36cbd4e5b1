"""OSU's command line: clusters, optional arguments, long names, and every refusal with its way out."""

from dataclasses import fields

import pytest

from ucc_hetero.bench.options import BadUsage, Options, parse
from ucc_hetero.bench.table import BENCHES


def options(name: str, *words: str) -> Options:
    return parse(BENCHES[name], words)


def changed(name: str, *words: str) -> dict[str, object]:
    """Options that the words change from the defaults."""
    got, default = options(name, *words), options(name)
    return {
        field.name: getattr(got, field.name)
        for field in fields(Options)
        if getattr(got, field.name) != getattr(default, field.name)
    }


@pytest.mark.parametrize(("words", "expected"), [
    ("-f", {"full": True}), ("--full", {"full": True}), ("-m 128", {"max_size": 128}), ("-m 2:", {"min_size": 2}),
    ("-m2:128", {"min_size": 2, "max_size": 128}), ("-m :64", {"max_size": 64}),
    ("-m 4:64M", {"min_size": 4, "max_size": 64 << 20}), ("--message-size=1K:1M", {"min_size": 1 << 10}),
    ("-i 10 -x 0", {"iterations": 10, "warmup": 0}), ("-fli7", {"full": True, "in_place": True, "iterations": 7}),
    ("--iter 5", {"iterations": 5}), ("-c", {"validate": True}),
    ("-cfu 2", {"validate": True, "full": True, "validation_warmup": 2}),
    ("-z", {"percentiles": (50, 90, 99)}), ("-z50,99", {"percentiles": (50, 99)}),
    ("--tail-lat=5", {"percentiles": (5,)}),
    ("-T all", {"types": ("mpi_char", "mpi_int", "mpi_float")}), ("-T MPI_FLOAT", {"types": ("mpi_float",)}),
    ("-M 1K", {"mem_limit": 1 << 20}), ("-d HOST", {}), ("-d cuda", {"accelerator": "cuda"}),
])  # fmt: skip
def test_allreduce(words: str, expected: dict[str, object]) -> None:
    assert changed("osu_allreduce", *words.split()) == expected


@pytest.mark.parametrize(("name", "words", "expected"), [
    ("osu_gather", "-k fixed:3", {"root": 3}),
    ("osu_gather", "-k rotate", {"root": None}),
    ("osu_bw", "-W 8", {"window": 8}),
    ("osu_mbw_mr", "-p 1", {"pairs": 1}),
    ("osu_iallreduce", "-t 100", {"test_calls": 100}),
    ("osu_put_bw", "-W 16 -d cuda", {"window": 16, "accelerator": "cuda"}),
    ("osu_latency", "-d cuda D H", {"accelerator": "cuda", "places": ("D", "H")}),
    ("osu_bw", "H H", {"places": ("H", "H")}),
    ("osu_bw", "-z H H", {"percentiles": (50, 90, 99), "places": ("H", "H")}),
    ("osu_allreduce", "--peer mpi4py,ucc --rounds 5", {"peers": ("mpi4py", "ucc"), "rounds": 5}),
])  # fmt: skip
def test_others(name: str, words: str, expected: dict[str, object]) -> None:
    assert changed(name, *words.split()) == expected


#: Benchmark -> words, and what is said of them.
REFUSALS = {
    "osu_allreduce": [
        ("-m x", "-m.*'x'.*number"), ("-m 64:8", "minimum 64 is above the maximum 8"), ("-m 1:2:3", "MIN:MAX"),
        ("-i", "-i.*expected one argument"), ("-i 0", "from 1"), ("-u 11", "0 to 10"), ("-z1,2,3,4,5,6", "at most 5"),
        ("-z0", "1 to 100"), ("-k rotate", "unrecognized arguments: -k"), ("-W 4", "unrecognized arguments: -W"),
        ("--full=1", "--full: ignored explicit argument"), ("--va", "--validation, --validation-warmup"),
        ("--nonsense", "unrecognized arguments: --nonsense"), ("-P x:y", "unrecognized arguments: -P"),
        ("-d tpu", "host.*cuda.*rocm.*auto"), ("64", "unrecognized arguments: 64"),
        ("--peer other", "ours, mpi4py, ucc, gloo, nccl"),
    ],
    "osu_latency": [("-D cont", "unrecognized arguments: -D"), ("D H", "-d cuda"), ("D", "H or D, twice")],
    "osu_gather": [("-k 3", "fixed:RANK or rotate")],
    "osu_barrier": [("-c", "unrecognized arguments: -c")],
    "osu_bcast": [("-l", "unrecognized arguments: -l")],
}  # fmt: skip


@pytest.mark.parametrize("name, words, says", [(name, *row) for name, rows in REFUSALS.items() for row in rows])
def test_refusals_say_what_would_be_right(name: str, words: str, says: str) -> None:
    with pytest.raises(BadUsage, match=says):
        options(name, *words.split())


@pytest.mark.parametrize(("name", "size", "expected"), [
    ("osu_allreduce", 8192, (1000, 100)), ("osu_allreduce", 16384, (100, 10)), ("osu_latency", 1, (10000, 100)),
    ("osu_latency", 1 << 20, (1000, 10)), ("osu_bw", 1, (100, 10)), ("osu_bw", 16384, (20, 2)),
    ("osu_mbw_mr", 1 << 20, (100, 10)), ("osu_barrier", 0, (1000, 100)), ("osu_ibarrier", 0, (100, 10)),
])  # fmt: skip
def test_default_loop_counts(name: str, size: int, expected: tuple[int, int]) -> None:
    assert options(name).loops(BENCHES[name], size) == expected
