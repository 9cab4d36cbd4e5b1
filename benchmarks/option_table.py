"""Options of all benchmarks, a row each: OSU's letter and long name, what it takes, its help, and what it sets."""

from __future__ import annotations

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
    validation_warmup: int = 5
    types: tuple[str, ...] = ("mpi_char",)
    in_place: bool = False
    percentiles: tuple[int, ...] = ()
    root: int | None = 0  # None: another root in each iteration
    test_calls: int = 0
    window: int = 64
    pairs: int | None = None
    accelerator: str = "host"
    places: tuple[str, ...] = ()  # "H" or "D" for the two sides of point-to-point
    backend: str = "ours"
    peers: tuple[str, ...] = ()
    rounds: int = 10
    limit: bool = False
    json: str | None = None

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


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``letter`` is empty for those that OSU does not have, which every benchmark takes."""

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
    _row("M:", "mem-limit", "most memory a buffer may take, in bytes (default 536870912)",
         _field("mem_limit", lambda text: max(number(text), _LEAST_MEMORY))),
    _row("d:", "accelerator", "memory: cuda, rocm, host, or auto for what each rank has (default host)",
         _choice("accelerator", "host", "cuda", "rocm", "auto")),
    _row("p:", "num-pairs", "pairs of ranks (default ranks / 2)", _int("pairs", 1)),
    _row("c", "validation", "check every element: Pass or Fail; a Fail ends the run with status 1",
         _flag(validate=True)),
    _row("u:", "validation-warmup", "warm-up calls before each checked iteration, at most 10 (default 5)",
         _int("validation_warmup", 0, _MOST_WARMUPS)),
    _row("T:", "type", _DTYPES, _types),
    _row("l", "in-place", "in place", _flag(in_place=True)),
    _row("z::", "tail-lat", "[P,P...] percentiles (default 50,90,99)", _percentiles),
    _row("k:", "root-rank", "fixed:RANK, or rotate: another root in each iteration (default fixed:0)", _root),
    _row(":", "backend", f"what is measured: {', '.join(PEERS)} (default ours)", _choice("backend", *PEERS)),
    _row(":", "peer", "also run these, interleaved, and print ratios: a list out of the same",
         _choices("peers", *PEERS)),
    _row(":", "rounds", "rounds of the interleaved runs (default 10)", _int("rounds", 2)),
    _row("", "limit", "measure the links first; per size, what they allow at best, and the share reached",
         _flag(limit=True)),
    _row(":", "json", "also write results, machine and versions to this file", _field("json", str)),
)  # fmt: skip
