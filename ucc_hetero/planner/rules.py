"""Rules for the choice of algorithms: UCC's TUNE grammar, and tables of measured choices as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..env import parse_size
from ..machine.vendors import VENDORS
from . import algorithms
from .collectives import ROWS
from .topology import Topology


@dataclass(frozen=True, slots=True)
class Rule:
    """The collective uses ``algorithm`` from ``low`` up to (not including) ``high`` bytes.

    ``vendors`` (empty: any) must contain every vendor of the communicator, ``ranks`` its size. ``fragments`` 0: the
    default number. If several rules match, the one with the highest score applies; among equals the last.
    """

    collective: str
    low: float
    high: float
    algorithm: str
    fragments: int = 0
    vendors: tuple[str, ...] = ()
    ranks: tuple[float, float] = (0, math.inf)
    score: float = math.inf

    def __str__(self) -> str:
        """The rule in the TUNE grammar; only parts that measured rules have."""
        high = "inf" if self.high == math.inf else f"{self.high:.0f}"
        cut = f":fragments={self.fragments}" if self.fragments else ""
        return f"{self.collective}:{self.low:.0f}-{high}:@{self.algorithm}{cut}"

    def fits(self, topology: Topology, collective: str, nbytes: int) -> bool:
        return (
            self.collective == collective
            and (self.low <= nbytes < self.high)
            and self.ranks[0] <= topology.size <= self.ranks[1]
            and (not self.vendors or all(island.vendor in self.vendors for island in topology.islands))
        )


def match(rules: tuple[Rule, ...], topology: Topology, collective: str, nbytes: int) -> Rule | None:
    best: Rule | None = None
    for rule in rules:
        if rule.score > 0 and rule.fits(topology, collective, nbytes) and (best is None or rule.score >= best.score):
            best = rule
    return best


def parse_tune(text: str, where: str = "UCCH_TUNE") -> tuple[Rule, ...]:
    """Parse rules in UCC's TUNE grammar: sections joined by ``#``, tokens of a section joined by ``:`` in any order.

    Tokens: collectives (``allreduce,bcast``), a byte range (``0-64k``, ``64k-inf``), vendors (``host,nvidia``), a range
    of communicator sizes (``[2-16]``), an algorithm (``@split_rail``), a score (``100`` or ``inf``), and as an
    extension ``fragments=8``. ``ValueError`` names the section and the wrong token, and ``where`` they are.
    """
    rules: list[Rule] = []
    for section in text.split("#"):
        if section.strip():
            rules += _section(section.strip(), f"{where}: section {section.strip()!r}")
    return tuple(rules)


def _section(section: str, where: str) -> list[Rule]:
    found: dict[str, Any] = {}
    for token in section.split(":"):
        try:
            key, value = _token(token.strip())
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if key in found:
            raise ValueError(f"{where}: {token.strip()!r} gives the {key} a second time")
        found[key] = value
    collectives = found.pop("collectives", ())
    if not collectives:
        raise ValueError(f"{where}: no collective; one of {', '.join(ROWS)} must be named")
    if "algorithm" not in found:
        raise ValueError(f"{where}: no algorithm, such as @flat")
    low, high = found.pop("range", (0, math.inf))
    for collective in collectives:
        if found["algorithm"] not in algorithms.names(collective):
            known = ", ".join("@" + name for name in algorithms.names(collective))
            raise ValueError(f"{where}: {collective} has no @{found['algorithm']}; it has {known}")
    return [Rule(collective, low, high, **found) for collective in collectives]


def _token(token: str) -> tuple[str, Any]:
    """(field that a token sets, its value)."""
    words = tuple(word.strip().lower() for word in token.split(","))
    if token.startswith("@") and len(token) > 1:
        return "algorithm", token[1:]
    if token.startswith("fragments="):
        number = token.removeprefix("fragments=")
        if not number.isdigit() or not 1 <= int(number) <= 1024:
            raise ValueError(f"{token!r} should be a number from 1 to 1024")
        return "fragments", int(number)
    if all(word in ROWS for word in words):
        return "collectives", words
    if all(word in VENDORS for word in words):
        return "vendors", words
    if token.startswith("[") and token.endswith("]"):
        return "ranks", _range(token[1:-1])
    if "-" in token.strip("-"):
        return "range", _range(token)
    if token.isdigit() or token == "inf":
        return "score", float(token)
    raise ValueError(f"{token!r} is not a collective, byte range, vendor, [ranks], @algorithm, score or fragments=")


def _range(text: str) -> tuple[float, float]:
    low, _, high = text.partition("-")
    bounds = parse_size(low), parse_size(high or low)
    if bounds[0] > bounds[1]:
        raise ValueError(f"range {text!r} ends before it begins")
    return bounds


#: Format of tables whose rules are in the TUNE grammar.
_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured choices for one topology: rules, and relative bandwidth of each rank's link (empty: all equal)."""

    rules: tuple[Rule, ...] = ()
    weights: tuple[int, ...] = ()


def save_table(path: str | Path, topology: Topology, found: Measured) -> None:
    """Add measured choices for a topology to a JSON table; ``ValueError`` if the file is not such a table."""
    rules = [str(rule) for rule in found.rules]
    entry: dict[str, Any] = {"islands": topology.describe(), "weights": list(found.weights), "rules": rules}
    file = Path(path)
    empty: dict[str, Any] = {"format": _FORMAT, "topologies": {}}
    table = _parse(file.read_text()) if file.exists() else empty
    table["topologies"][topology.fingerprint()] = entry
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(table, indent=1) + "\n")
    temporary.replace(file)  # atomic: a reader sees the old or the new table


def load_table(text: str, topology: Topology) -> Measured:
    """Measured choices for a topology without weights, from a table's text; empty if it has none. ``ValueError`` if it
    is not a table."""
    table = _parse(text)
    with _reading():
        entry = table["topologies"].get(topology.fingerprint())
        if not entry:
            return Measured()
        weights = tuple(int(weight) for weight in entry.get("weights", ()))
        if weights and (len(weights) != topology.size or min(weights) < 1):
            raise ValueError(f"weights {list(weights)} for {topology.size} ranks")
        return Measured(parse_tune("#".join(entry["rules"]), "rules"), weights)


class Table(NamedTuple):
    """The table of measured choices as read by rank 0, for all ranks; empty without one."""

    path: str = ""
    text: str = ""


#: The table of jobs without UCCH_TUNE_FILE.
NO_TABLE = Table()


def read_table(path: str) -> Table:
    """Read the file named by ``UCCH_TUNE_FILE``, if any; ``ValueError`` if it cannot be read or is not a table."""
    if not path:
        return NO_TABLE
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"UCCH_TUNE_FILE={path} cannot be read ({error.strerror}); "
            f"`mpirun -n N python -m ucc_hetero tune --file {path}` writes it"
        ) from None
    _parse(text)
    return Table(path, text)


@contextmanager
def _reading() -> Iterator[None]:
    """Turn any error that shows that a text is not a table into ``ValueError``."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a table of measured choices: {error!r}") from None
    except ValueError as error:
        raise ValueError(f"not a table of measured choices: {error}") from None


def _parse(text: str) -> dict[str, Any]:
    with _reading():
        table = json.loads(text)
        if table["format"] != _FORMAT:
            raise ValueError(f"format {table['format']!r}; this version reads format {_FORMAT}")
        return dict(table)
