"""Command lines: OSU's options scanned as getopt_long does it, and options of programs under mpirun.

argparse cannot express clusters with optional arguments (``-z50,99``). Which letters a benchmark takes
is its row's getopt string; what they mean is in ``option_table.py``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from ..machine import launchers
from .option_table import OPTIONS, Option, Options
from .table import VERSION, Bench


class BadUsage(ValueError):
    """A mistake on the command line; the message names the option, its value and what would be right."""


class HelpWanted(Exception):
    """``-h`` was given."""


class VersionWanted(Exception):
    """``-v`` was given."""


def probable_rank() -> int:
    """This process's rank as the launcher tells, before MPI is initialised; 0 without a launcher."""
    return launchers.number("RANK", os.environ, 0, torchrun=False)


class ProgramParser(argparse.ArgumentParser):
    """Options of a program under mpirun: mistakes and wishes for help are raised, so that all ranks leave together."""

    def __init__(self, name: str, **more: Any) -> None:
        super().__init__(prog=f"python -m ucc_hetero.bench {name}", add_help=False, **more)
        self.name = name
        self.add_argument("-h", "--help", action="store_true", help="print this help")

    def error(self, message: str) -> NoReturn:
        raise BadUsage(f"{self.name}: {message}; --help lists the options")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The options that were given. Raises BadUsage, and HelpWanted after help was printed on one rank."""
        found = self.parse_args(list(words))
        if found.help:
            if probable_rank() == 0:
                self.print_help()
            raise HelpWanted
        return found


def _offered(bench: Bench) -> tuple[Option, ...]:
    return tuple(option for option in OPTIONS if not option.letter or option.letter in bench.letters)


def _long(bench: Bench, name: str) -> Option:
    """The option of a long name or of an unambiguous beginning of one."""
    offered = _offered(bench)
    found = [option for option in offered if option.name == name]
    found = found or [option for option in offered if option.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    what = "may mean " + ", ".join(f"--{option.name}" for option in found) if found else f"is not one of {bench.name}'s"
    raise BadUsage(f"option --{name} {what}; --help lists them")


def _short(bench: Bench, letter: str) -> Option:
    for option in _offered(bench):
        if option.letter == letter:
            return option
    raise BadUsage(f"option -{letter} is not one of {bench.name}'s; --help lists them")


def _scan(bench: Bench, arguments: Sequence[str]) -> Iterator[tuple[Option | None, str, str]]:
    """Yield (option, its name as given, its argument); positional arguments come with None."""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--" or not word.startswith("-") or word == "-":
            # As getopt with "+": the first positional argument ends the options.
            yield from ((None, "", text) for text in (rest if word == "--" else [word, *rest]))
            return
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            option = _long(bench, name)
            if option.takes == "nothing" and equals:
                raise BadUsage(f"option --{option.name} takes no argument, but {value!r} was given")
            if option.takes == "value" and not equals:
                value = _next(rest, f"--{option.name}")
            yield option, f"--{option.name}", value
            continue
        cluster = word[1:]
        while cluster:
            option, cluster = _short(bench, cluster[0]), cluster[1:]
            value = ""
            if option.takes != "nothing":
                value, cluster = cluster, ""
                if option.takes == "value" and not value:
                    value = _next(rest, f"-{option.letter}")
            yield option, f"-{option.letter}", value


def _next(rest: list[str], name: str) -> str:
    if not rest:
        raise BadUsage(f"option {name} needs an argument; --help says which")
    return rest.pop(0)


def parse(bench: Bench, arguments: Sequence[str]) -> Options:
    """Read a benchmark's command line.

    Raises BadUsage for a mistake, HelpWanted and VersionWanted where those were asked for.
    """
    options = Options(max_size=bench.max_size, min_size=bench.min_size)
    positional: list[str] = []
    for option, name, value in _scan(bench, arguments):
        if option is None:
            positional.append(value)
            continue
        if option.letter == "h":
            raise HelpWanted
        if option.letter == "v":
            raise VersionWanted
        try:
            options = option.apply(options, value)
        except ValueError as why:
            raise BadUsage(f"option {name} {value!r}: {why}") from None
    return _whole(bench, options, positional)


def _places(bench: Bench, options: Options, words: list[str]) -> tuple[str, ...]:
    """OSU's words behind the options: memory of the first and of the second rank of each pair."""
    if bench.family != "pt2pt" or len(words) != 2 or not set(words) <= {"H", "D"}:
        takes = "H or D, twice," if bench.family == "pt2pt" else "options only"
        raise BadUsage(f"argument {' '.join(words)!r}: {bench.name} takes {takes}; see --help")
    if "D" in words and options.accelerator == "host":
        raise BadUsage(f"argument {' '.join(words)!r}: D is device memory; say which with -d cuda or -d rocm")
    return tuple(words)


def _whole(bench: Bench, options: Options, positional: list[str]) -> Options:
    """Check what only the options together can tell."""
    if positional:
        options = replace(options, places=_places(bench, options, positional))
    if bench.sized and options.min_size > options.max_size:
        raise BadUsage(f"option -m: the minimum {options.min_size} is above the maximum {options.max_size}")
    return options


def help_text(bench: Bench) -> str:
    """The benchmark's help, one line per option."""
    places = " [H|D H|D]" if bench.family == "pt2pt" else ""
    lines = [
        f"Usage: python -m ucc_hetero.bench {bench.name} [options]{places}",
        f"({bench.plain_title} v{VERSION})",
        "Options:",
    ]
    for option in _offered(bench):
        letter = f"-{option.letter}, " if option.letter else "    "
        lines.append(f"  {letter}--{option.name:<18} {option.help}")
    return "\n".join(lines) + "\n"
