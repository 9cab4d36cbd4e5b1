"""Options of all benchmarks, a row each: OSU's letter and long name, what it takes, its help, and what it sets."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from .table import LARGE, Bench

#: Implementations whose calls can be measured.
PEERS = ("ours", "mpi4py", "ucc", "gloo", "nccl")


@dataclass(frozen=True, slots=True)
class Options:
    """One benchmark's settings. Sizes are bytes; ``None`` iterations and warm-ups mean the row's defaults."""

    max_size: int
    min_size: int = 1
    iterations: int | None = None
    warmup: int | None = None
    full: bool = False
    mem_limit: int = 512 << 20
    validate: bool = False
    validation_log: str | None = None
    validation_warmup: int = 5
    types: tuple[str, ...] = ("mpi_char",)
    in_place: bool = False
    percentiles: tuple[int, ...] = ()
    root: int | None = 0  # None: another root in each iteration
    test_calls: int = 0
    window: int = 64
    vary_window: bool = False
    print_rate: bool = True
    pairs: int | None = None
    many_buffers: bool = False
    accelerator: str = "host"
    win: str = "allocate"
    sync: str = "flush"
    graph: tuple[str, ...] = ()
    session: bool = False
    places: tuple[str, ...] = ()  # "H" or "D" for the two sides of point-to-point
    backend: str = "ours"
    peers: tuple[str, ...] = ()
    rounds: int = 10
    limit: bool = False
    format: str = "osu"
    json: str | None = None
    csv: str | None = None
    buffer: str = "numpy"
    progress: bool = True

    def loops(self, bench: Bench, size: int) -> tuple[int, int]:
        """(iterations, warm-up calls) for messages of ``size`` bytes."""
        row = bench.loops
        # OSU's osu_ibarrier runs with the counts for large messages.
        large = size > LARGE or (bench.family == "nonblocking" and not bench.sized)
        default, warmup = (row.large, row.warmup_large) if large else (row.small, row.warmup_small)
        return (
            default if self.iterations is None else self.iterations,
            warmup if self.warmup is None else self.warmup,
        )


Apply = Callable[[Options, str], Options]

_SUFFIX = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
#: Limits of OSU's: validation warm-ups, percentile columns, and the least memory limit.
_MOST_WARMUPS, _MOST_PERCENTILES, _LEAST_MEMORY = 10, 5, 1 << 20


def number(text: str, least: int = 0, most: int | None = None) -> int:
    """An integer, with K, M or G for binary multiples; ValueError says what is allowed."""
    found = re.fullmatch(r"(\d+)([kmg]?)(?:i?b)?", text.strip().lower())
    value = int(found[1]) * _SUFFIX[found[2]] if found else -1
    if value < least or (most is not None and value > most):
        raise ValueError(f"a number from {least}{'' if most is None else f' to {most}'} is needed")
    return value


def _sizes(old: Options, text: str) -> Options:
    low, colon, high = text.partition(":")
    if not colon:
        low, high = "", text
    if not (low or high) or ":" in high:
        raise ValueError("MAX, MIN:MAX or MIN: is needed")
    return replace(
        old,
        min_size=number(low, 1) if low else old.min_size,
        max_size=number(high) if high else old.max_size,
    )


def _validation(old: Options, text: str) -> Options:
    if not text:
        return replace(old, validate=True)
    word, _, folder = text.partition(":")
    if word != "log":
        raise ValueError("'-c' takes nothing or log[:DIR]")
    folder = folder or "validation_output"
    if os.path.exists(folder):
        raise ValueError(f"the directory {folder!r} exists already; name a new one with -clog:DIR")
    return replace(old, validate=True, validation_log=folder)


def _percentiles(old: Options, text: str) -> Options:
    values = tuple(number(part, 1, 100) for part in text.split(",")) if text else (50, 90, 99)
    if len(values) > _MOST_PERCENTILES:
        raise ValueError(f"at most {_MOST_PERCENTILES} percentiles are printed")
    return replace(old, percentiles=values)


def _root(old: Options, text: str) -> Options:
    if text.lower() == "rotate":
        return replace(old, root=None)
    word, _, rank = text.partition(":")
    if word.lower() != "fixed" or not rank:
        raise ValueError("fixed:RANK or rotate is needed")
    return replace(old, root=number(rank))


def _types(old: Options, text: str) -> Options:
    names = ("mpi_char", "mpi_int", "mpi_float") if text.lower() == "all" else tuple(text.lower().split(","))
    return replace(old, types=names)


def _choice(field: str, *allowed: str) -> Apply:
    def convert(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"one of {', '.join(allowed)} is needed")
        return text.lower()

    return _field(field, convert)


def _choices(field: str, *allowed: str) -> Apply:
    def convert(text: str) -> tuple[str, ...]:
        words = tuple(text.lower().split(","))
        if not set(words) <= set(allowed):
            raise ValueError(f"a list out of {', '.join(allowed)} is needed")
        return words

    return _field(field, convert)


def _field(field: str, convert: Callable[[str], Any]) -> Apply:
    return lambda old, text: replace(old, **{field: convert(text)})


def _int(field: str, least: int = 0, most: int | None = None) -> Apply:
    return _field(field, lambda text: number(text, least, most))


def _flag(**change: Any) -> Apply:
    return lambda old, _: replace(old, **change)


def _refuse(why: str) -> Apply:
    def apply(old: Options, text: str) -> Options:
        raise ValueError(why)

    return apply


def _array_size(old: Options, text: str) -> Options:
    number(text, 1)
    return old


def _only_cpu(old: Options, text: str) -> Options:
    if text.lower() != "cpu":
        raise ValueError("the dummy computation runs on the CPU here; give cpu or leave the option out")
    return old


def _buffer_number(old: Options, text: str) -> Options:
    if text.lower() not in ("single", "multiple"):
        raise ValueError("single or multiple is needed")
    return replace(old, many_buffers=text.lower() == "multiple")


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``letter`` is empty for our own and OMB-Py's, which every benchmark takes."""

    letter: str
    name: str
    takes: Literal["nothing", "value", "maybe"]
    help: str
    apply: Apply


def _row(letter: str, name: str, help: str, apply: Apply) -> Option:
    """An option; ``letter`` as getopt has it, with a colon for a value and two for one that may be left out."""
    takes: tuple[Literal["nothing", "value", "maybe"], ...] = "nothing", "value", "maybe"
    return Option(letter.rstrip(":"), name, takes[letter.count(":")], help, apply)


_DTYPES = "all, mpi_char, mpi_int, mpi_float, or dtype names such as float64 (default mpi_char)"
_SYNCS = "lock", "flush", "flush_local", "lock_all", "pscw", "fence"

#: Every option. ``h`` and ``v`` are answered by the parser itself.
OPTIONS: tuple[Option, ...] = (
    _row("h", "help", "print this help", _flag()),
    _row("v", "version", "print the version", _flag()),
    _row("f", "full", "also print minimum, maximum and iterations", _flag(full=True)),
    _row("m:", "message-size", "[MIN:]MAX message sizes in bytes; K, M, G may follow; '-m 4:' sets only the minimum",
         _sizes),
    _row("W:", "window-size", "messages in flight before both sides meet (default 64)", _int("window", 1)),
    _row("t:", "num-test-calls", "calls of Test during the computation (default 0)", _int("test_calls")),
    _row("i:", "iterations", "iterations (default depends on the benchmark and the size)", _int("iterations", 1)),
    _row("x:", "warmup", "warm-up iterations (likewise)", _int("warmup")),
    _row("a:", "array-size", "size of OSU's dummy computation on a GPU; accepted, without effect", _array_size),
    _row("s:", "sync-option", f"{', '.join(_SYNCS[:-1])} or {_SYNCS[-1]} (default flush)", _choice("sync", *_SYNCS)),
    _row("w:", "win-options", "create, allocate or dynamic windows (default allocate)",
         _choice("win", "create", "allocate", "dynamic")),
    _row("M:", "mem-limit", "most memory a buffer may take, in bytes (default 536870912)",
         _field("mem_limit", lambda text: max(number(text), _LEAST_MEMORY))),
    _row("d:", "accelerator", "memory: cuda, rocm, host, or auto for what each rank has (default host)",
         _choice("accelerator", "host", "cuda", "rocm", "auto")),
    _row("r:", "cuda-target", "where OSU's dummy computation runs; only cpu", _only_cpu),
    _row("R:", "print-rate", "0|1: print the message rate (default 1)",
         _field("print_rate", lambda text: bool(number(text, 0, 1)))),
    _row("p:", "num-pairs", "pairs of ranks (default ranks / 2)", _int("pairs", 1)),
    _row("V", "vary-window", "a table over window sizes 1 to 128", _flag(vary_window=True)),
    _row("c::", "validation", "[log:DIR] check every element: Pass or Fail; a Fail ends the run with status 1",
         _validation),
    _row("b:", "buffer-num", "single or multiple buffers per window (default single)", _buffer_number),
    _row("u:", "validation-warmup", "warm-up calls before each checked iteration, at most 10 (default 5)",
         _int("validation_warmup", 0, _MOST_WARMUPS)),
    _row("G:", "graph", "png,pdf,tty: plot every iteration (png and pdf need matplotlib)",
         _choices("graph", "png", "pdf", "tty")),
    _row("P:", "papi", "PAPI counters; not offered", _refuse("PAPI counters are not offered; use perf stat")),
    _row("D:", "ddt", "derived datatypes; not offered",
         _refuse("derived datatypes are not offered: UCC moves contiguous data")),
    _row("T:", "type", _DTYPES, _types),
    _row("I", "session", "initialise MPI by a session", _flag(session=True)),
    _row("l", "in-place", "in place", _flag(in_place=True)),
    _row("z::", "tail-lat", "[P,P...] percentiles (default 50,90,99)", _percentiles),
    _row("k:", "root-rank", "fixed:RANK, or rotate: another root in each iteration (default fixed:0)", _root),
    _row(":", "backend", f"what is measured: {', '.join(PEERS)} (default ours)", _choice("backend", *PEERS)),
    _row(":", "peer", "also run these, interleaved, and print ratios: a list out of the same",
         _choices("peers", *PEERS)),
    _row(":", "rounds", "rounds of the interleaved runs (default 10)", _int("rounds", 2)),
    _row("", "limit", "measure the links first; per size, what they allow at best, and the share reached",
         _flag(limit=True)),
    _row(":", "format", "osu or nccl (nccl-tests' columns)", _choice("format", "osu", "nccl")),
    _row(":", "json", "also write results, machine and versions to this file", _field("json", str)),
    _row(":", "csv", "also write the rows to this file", _field("csv", str)),
    _row(":", "buffer", "numpy, bytearray, array or torch (default numpy; torch with -d cuda or rocm)",
         _choice("buffer", "numpy", "bytearray", "array", "torch")),
    _row("", "no-progress", "no progress line on stderr", _flag(progress=False)),
    _row(":", "min", "smallest message (OMB-Py)", _int("min_size", 1)),
    _row(":", "max", "largest message (OMB-Py)", _int("max_size")),
    _row(":", "skip", "same as --warmup (OMB-Py)", _int("warmup")),
)  # fmt: skip
