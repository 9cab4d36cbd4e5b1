"""Command lines: OSU's options, options of all benchmarks, and options of programs under mpirun."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from ..machine import launchers
from .table import LARGE, VERSION, Bench

#: Implementations whose calls can be measured.
PEERS = ("ours", "mpi4py", "ucc", "gloo", "nccl")
_SUFFIX = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
#: OSU's limits: warm-ups with validation, percentile columns, minimum of the memory limit.
_MOST_WARMUPS, _MOST_PERCENTILES, _LEAST_MEMORY = 10, 5, 1 << 20


class BadUsage(ValueError):
    """The command line is wrong. The message names the option, its value, and what is allowed."""


class HelpWanted(Exception):
    """Help was asked for with ``-h``, and was printed."""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a benchmark. Sizes in bytes. ``None`` for iterations or warm-ups: the row's default."""

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
    json: str | None = None

    def loops(self, bench: Bench, size: int) -> tuple[int, int]:
        """(iterations, warm-up calls) for messages of ``size`` bytes."""
        row = bench.loops
        # OSU runs osu_ibarrier with the counts for large messages.
        large = size > LARGE or (bench.family == "nonblocking" and not bench.sized)
        default, warmup = (row.large, row.warmup_large) if large else (row.small, row.warmup_small)
        return default if self.iterations is None else self.iterations, warmup if self.warmup is None else self.warmup


# --- values -----------------------------------------------------------------------------------------------------------


def number(text: str, least: int = 0, most: int | None = None) -> int:
    """An integer, with K, M or G for binary multiples; ValueError says what is allowed."""
    found = re.fullmatch(r"(\d+)([kmg]?)(?:i?b)?", text.strip().lower())
    value = int(found[1]) * _SUFFIX[found[2]] if found else -1
    if value < least or (most is not None and value > most):
        raise ValueError(f"a number from {least}{'' if most is None else f' to {most}'} is needed")
    return value


def sizes_of(text: str) -> tuple[int | None, int | None]:
    low, _, high = text.rpartition(":")
    if not (low or high) or ":" in low:
        raise ValueError("MAX, MIN:MAX or MIN: is needed")
    return number(low, 1) if low else None, number(high) if high else None


def _percentiles(text: str) -> tuple[int, ...]:
    values = tuple(number(part, 1, 100) for part in text.split(","))
    if len(values) > _MOST_PERCENTILES:
        raise ValueError(f"at most {_MOST_PERCENTILES} percentiles are printed")
    return values


def _root(text: str) -> int | None:
    if text.lower() == "rotate":
        return None
    word, _, rank = text.partition(":")
    if word.lower() != "fixed" or not rank:
        raise ValueError("fixed:RANK or rotate is needed")
    return number(rank)


def _types(text: str) -> tuple[str, ...]:
    return ("mpi_char", "mpi_int", "mpi_float") if text.lower() == "all" else tuple(text.lower().split(","))


def _peers(text: str) -> tuple[str, ...]:
    words = tuple(text.lower().split(","))
    if not set(words) <= set(PEERS):
        raise ValueError(f"a list out of {', '.join(PEERS)} is needed")
    return words


def value(convert: Callable[..., Any], *limits: int) -> dict[str, Any]:
    """An argparse option with a value; errors show the value."""

    def checked(text: str) -> Any:
        try:
            return convert(text, *limits)
        except ValueError as why:
            raise argparse.ArgumentTypeError(f"{text!r}: {why}") from None

    return {"type": checked}


_FLAG: dict[str, Any] = {"action": "store_true"}
_WORD: dict[str, Any] = {"type": str.lower}

#: All options: OSU's letter (none for options that OSU lacks and every benchmark takes), name, field of Options,
#: argparse arguments, help.
_OPTIONS: tuple[tuple[str, str, str, dict[str, Any], str], ...] = (
    ("f", "full", "full", _FLAG, "also print minimum, maximum and iterations"),
    ("m", "message-size", "sizes", value(sizes_of),
     "[MIN:]MAX message sizes in bytes; K, M, G may follow; '-m 4:' sets only the minimum"),
    ("W", "window-size", "window", value(number, 1), "messages in flight before both sides meet (default 64)"),
    ("t", "num-test-calls", "test_calls", value(number), "calls of Test during the computation (default 0)"),
    ("i", "iterations", "iterations", value(number, 1), "iterations (default depends on the benchmark and the size)"),
    ("x", "warmup", "warmup", value(number), "warm-up iterations (likewise)"),
    ("M", "mem-limit", "mem_limit", value(lambda text: max(number(text), _LEAST_MEMORY)),
     "most memory a buffer may take, in bytes (default 536870912)"),
    ("d", "accelerator", "accelerator", _WORD | {"choices": ("host", "cuda", "rocm", "auto")},
     "memory: cuda, rocm, host, or auto for each rank's device (default host)"),
    ("p", "num-pairs", "pairs", value(number, 1), "pairs of ranks (default ranks / 2)"),
    ("c", "validation", "validate", _FLAG, "check every element: Pass or Fail; a Fail ends the run with status 1"),
    ("u", "validation-warmup", "validation_warmup", value(number, 0, _MOST_WARMUPS),
     "warm-up calls before each checked iteration, at most 10 (default 5)"),
    ("T", "type", "types", value(_types),
     "all, mpi_char, mpi_int, mpi_float, or dtype names such as float64 (default mpi_char)"),
    ("l", "in-place", "in_place", _FLAG, "in place"),
    ("z", "tail-lat", "percentiles", value(_percentiles) | {"nargs": "?", "const": (50, 90, 99)},
     "[P,P...] percentiles (default 50,90,99)"),
    ("k", "root-rank", "root", value(_root),
     "fixed:RANK, or rotate: another root in each iteration (default fixed:0)"),
    ("", "backend", "backend", _WORD | {"choices": PEERS}, f"what is measured: {', '.join(PEERS)} (default ours)"),
    ("", "peer", "peers", value(_peers),
     "also run these, alternating, and print ratios: a list of the same names"),
    ("", "rounds", "rounds", value(number, 2), "rounds of the interleaved runs (default 10)"),
    ("", "json", "json", {}, "also write results, machine and versions to this file"),
)  # fmt: skip


# --- parsers ----------------------------------------------------------------------------------------------------------


def probable_rank() -> int:
    """This process's rank from the launcher's variables, before MPI is initialised; 0 without a launcher."""
    return launchers.number("RANK", os.environ, 0, torchrun=False)


class ProgramParser(argparse.ArgumentParser):
    """Parser of a program under mpirun. It raises errors and requests for help, so that all ranks leave together."""

    def __init__(self, name: str, **more: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"python -m ucc_hetero.bench {name}", add_help=False, formatter_class=raw, **more)
        self.name = name
        self.add_argument("-h", "--help", action="store_true", help="print this help")

    def error(self, message: str) -> NoReturn:
        raise BadUsage(f"{self.name}: {message}; --help lists the options")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse. Raises ``BadUsage``; raises ``HelpWanted`` after help was printed on one rank."""
        found = self.parse_args(list(words))
        if found.help:
            if probable_rank() == 0:
                self.print_help()
            raise HelpWanted
        return found


class _Version(argparse.Action):
    """``-v``: print the benchmark's version on one rank."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        if probable_rank() == 0:
            print(f"# {parser.description} v{VERSION}", flush=True)
        raise HelpWanted


def _parser(bench: Bench) -> ProgramParser:
    """Parser with the benchmark's options."""
    found = ProgramParser(bench.name, description=bench.plain_title, argument_default=argparse.SUPPRESS)
    found.set_defaults(help=False, places=[])
    found.add_argument("-v", "--version", action=_Version, nargs=0, help="print the version")
    for letter, name, field, how, help in _OPTIONS:
        if not letter or letter in bench.letters:
            names = [f"-{letter}", f"--{name}"] if letter else [f"--{name}"]
            more = how if how is _FLAG else {"metavar": name.rpartition("-")[2].upper(), **how}
            found.add_argument(*names, dest=field, help=help.replace("%", "%%"), **more)
    if bench.family == "pt2pt":
        found.add_argument("places", nargs="*", metavar="H|D", help="memory of the ranks of each pair (default H H)")
    return found


def parse(bench: Bench, arguments: Sequence[str]) -> Options:
    """Parse a benchmark's command line.

    ``BadUsage`` for a mistake. ``HelpWanted`` after help or the version was printed on one rank.
    """
    # OSU's -z takes a value only if attached; argparse would take the next word.
    words = ["--tail-lat=50,90,99" if word in ("-z", "--tail-lat") else word for word in arguments]
    given = vars(_parser(bench).read(words))
    low, high = given.pop("sizes", (None, None))
    given["min_size"] = bench.min_size if low is None else low
    given["max_size"] = bench.max_size if high is None else high
    given["places"] = tuple(given["places"])
    options = Options(**{name: given[name] for name in given.keys() & {field.name for field in fields(Options)}})
    _check(bench, options)
    return options


def _check(bench: Bench, options: Options) -> None:
    """Raise ``BadUsage`` for combinations of options that are wrong."""
    words = " ".join(options.places)
    if options.places and (len(options.places) != 2 or not set(options.places) <= {"H", "D"}):
        raise BadUsage(f"argument {words!r}: {bench.name} takes H or D, twice; see --help")
    if "D" in options.places and options.accelerator == "host":
        raise BadUsage(f"argument {words!r}: D is device memory; say which with -d cuda or -d rocm")
    if bench.sized and options.min_size > options.max_size:
        raise BadUsage(f"option -m: the minimum {options.min_size} is above the maximum {options.max_size}")
