"""Rules that say which algorithm runs: UCC's TUNE grammar, and the table of measured choices as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ucc_hetero.env import TABLE, parse_size
from ucc_hetero.machine.vendors import VENDORS
from ucc_hetero.planner import algorithms
from ucc_hetero.planner.collectives import ROWS
from ucc_hetero.planner.topology import Topology
from ucc_hetero.types import Transport

_Choice = TypeVar("_Choice")


@dataclass(frozen=True, slots=True)
class Rule:
    """From ``low`` up to (not including) ``high`` bytes the collective runs ``algorithm``.

    ``vendors`` (empty: any) must hold every vendor of the communicator, ``ranks`` its size. ``fragments`` 0 leaves
    those to the defaults. Of several rules that fit the one with the highest score holds, then the last.
    """

    collective: str
    low: float
    high: float
    algorithm: str
    fragments: int = 0
    vendors: tuple[str, ...] = ()
    ranks: tuple[float, float] = (0, math.inf)
    score: float = math.inf

    def fits(self, topology: Topology, collective: str, nbytes: int) -> bool:
        """Whether the rule speaks of this call."""
        return (
            self.collective == collective
            and (self.low <= nbytes < self.high)
            and self.ranks[0] <= topology.size <= self.ranks[1]
            and (not self.vendors or all(island.vendor in self.vendors for island in topology.islands))
        )


def match(rules: tuple[Rule, ...], topology: Topology, collective: str, nbytes: int) -> Rule | None:
    """The rule that holds for a call, or None."""
    best: Rule | None = None
    for rule in rules:
        if rule.score > 0 and rule.fits(topology, collective, nbytes) and (best is None or rule.score >= best.score):
            best = rule
    return best


@dataclass(frozen=True, slots=True)
class PairRule:
    """From ``low`` up to (not including) ``high`` bytes, messages between ranks of two vendors take ``path``.

    ``vendors`` in alphabetical order, ``host`` for a rank without a device; ``near``: on one host, or on two.
    """

    vendors: tuple[str, str]
    near: bool
    low: float
    high: float
    path: Transport


def pair_path(rules: tuple[PairRule, ...], vendors: tuple[str, str], near: bool, nbytes: int) -> Transport | None:
    """``DIRECT`` or ``STAGED``, as measured for such a message; None where no rule says so."""
    fits = (r.path for r in rules if (r.vendors, r.near) == (vendors, near) and r.low <= nbytes < r.high)
    return next(fits, None)


# --- the TUNE grammar -------------------------------------------------------------------------------------------------


def parse_tune(text: str) -> tuple[Rule, ...]:
    """Rules from UCC's TUNE grammar: sections joined by ``#``, tokens of a section joined by ``:`` in any order.

    Tokens: collectives (``allreduce,bcast``), a byte range (``0-64k``, ``64k-inf``), vendors (``host,nvidia``), a range
    of communicator sizes (``[2-16]``), an algorithm (``@split_rail``), a score (``100`` or ``inf``), and of our own
    ``fragments=8``. ``ValueError`` names the section and the token at fault.
    """
    rules: list[Rule] = []
    for section in text.split("#"):
        if section.strip():
            rules += _section(section.strip())
    return tuple(rules)


def _section(section: str) -> list[Rule]:
    found: dict[str, Any] = {}
    for token in section.split(":"):
        try:
            key, value = _token(token.strip())
        except ValueError as error:
            raise ValueError(f"tune section {section!r}: {error}") from None
        if key in found:
            raise ValueError(f"tune section {section!r}: {token.strip()!r} gives the {key} a second time")
        found[key] = value
    collectives = found.pop("collectives", ())
    if not collectives:
        raise ValueError(f"tune section {section!r}: no collective; one of {', '.join(ROWS)} must be named")
    if "algorithm" not in found:
        raise ValueError(f"tune section {section!r}: no algorithm, such as @flat")
    low, high = found.pop("range", (0, math.inf))
    for collective in collectives:
        if found["algorithm"] not in algorithms.names(collective):
            known = ", ".join("@" + name for name in algorithms.names(collective))
            raise ValueError(f"tune section {section!r}: {collective} has no @{found['algorithm']}; it has {known}")
    return [Rule(collective, low, high, **found) for collective in collectives]


def _token(token: str) -> tuple[str, Any]:
    """(what a token gives, its value)."""
    words = tuple(word.strip().lower() for word in token.split(","))
    if token.startswith("@") and len(token) > 1:
        return "algorithm", token[1:]
    if token.startswith("fragments="):
        number = token.removeprefix("fragments=")
        if not number.isdigit() or not 1 <= int(number) <= 1024:
            raise ValueError(f"{token!r} should be a number from 1 to 1024")
        return "fragments", int(number)
    if token.startswith("path="):
        raise ValueError(f"{token!r} means nothing any more: collectives have one way each (docs/gpu.md)")
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
    raise ValueError(f"{token!r} is no collective, byte range, vendor, [ranks], @algorithm, score or fragments=")


def _range(text: str) -> tuple[float, float]:
    low, _, high = text.partition("-")
    bounds = parse_size(low), parse_size(high or low)
    if bounds[0] > bounds[1]:
        raise ValueError(f"range {text!r} ends before it begins")
    return bounds


# --- what measurements say --------------------------------------------------------------------------------------------

#: A candidate must beat the choice that would be made anyway by this much, or it is noise.
_GAIN = 0.95


def best_of(seconds: Mapping[_Choice, float], default: _Choice) -> _Choice:
    """The fastest of what was measured, or the default where nothing is clearly faster."""
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] < _GAIN * seconds[default] else default


def spans(sizes: Sequence[int], found: Sequence[_Choice | None]) -> Iterator[tuple[_Choice, float, float]]:
    """Findings at ascending sizes as (what, from, up to bytes), without ranges where it is None.

    Ranges end halfway (geometrically) between neighbours that differ, and at twice the last size.
    """
    low = 0.0
    for i, (size, what) in enumerate(zip(sizes, found, strict=True)):
        last = i + 1 == len(sizes)
        if last or found[i + 1] != what:
            high = float(2 * size if last else round(math.sqrt(max(size, 1) * sizes[i + 1])))
            if what is not None:
                yield what, low, high
            low = high


# --- the measured table -----------------------------------------------------------------------------------------------


class Wires(NamedTuple):
    """Number of network threads' pairs in a process and bytes of their slots; 0: not measured."""

    number: int = 0
    slot: int = 0


#: Of a topology for which nobody has measured any.
NO_WIRES = Wires()


@dataclass(frozen=True, slots=True)
class Measured:
    """Entry of a table for one topology: rules, relative bandwidth of each rank's link (empty: all alike)."""

    rules: tuple[Rule, ...] = ()
    weights: tuple[int, ...] = ()
    messages: tuple[PairRule, ...] = ()
    wires: Wires = NO_WIRES


def save_table(
    path: str | Path,
    topology: Topology,
    found: Measured,
) -> None:
    """Put what was measured for a topology into a JSON table, beside other topologies already there.

    ``ValueError`` if the file is there and not such a table.
    """
    file = Path(path)
    table: dict[str, Any] = {"format": 1, "topologies": {}}
    if file.exists():
        table = _parse(file.read_text())
    rows = [
        {"collective": rule.collective} | _range_row(rule) | {"algorithm": rule.algorithm, "fragments": rule.fragments}
        for rule in found.rules
    ]
    entry: dict[str, Any] = {"islands": topology.describe(), "weights": list(found.weights), "rules": rows}
    if found.messages:
        entry["messages"] = [
            {"between": list(rule.vendors), "near": rule.near} | _range_row(rule) | {"path": rule.path}
            for rule in found.messages
        ]
    entry |= {"wires": found.wires._asdict()} if found.wires.number else {}
    table["topologies"][topology.fingerprint()] = entry
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(table, indent=1) + "\n")
    temporary.replace(file)  # a reader sees the old table or the new one


def load_table(text: str, topology: Topology) -> Measured:
    """Entry of a JSON table (its text: rank 0 reads the file, all get the same) for a topology; nothing if unknown.

    Tables go by topologies without weights: those are part of what was measured. ``ValueError`` if the text is not such
    a table.
    """
    table = _parse(text)
    try:
        entry = table["topologies"].get(topology.fingerprint())
        if not entry:
            return Measured()
        weights = tuple(int(weight) for weight in entry.get("weights", ()))
        if weights and (len(weights) != topology.size or min(weights) < 1):
            raise ValueError(f"weights {list(weights)} for {topology.size} ranks")
        messages = tuple(_pair_row(row) for row in entry.get("messages", ()))
        wires = _wires(entry["wires"]) if "wires" in entry else Wires()
        return Measured(tuple(_row(row) for row in entry["rules"]), weights, messages, wires)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a table of measured choices: {error!r}") from None
    except ValueError as error:
        raise ValueError(f"not a table of measured choices: {error}") from None


def _wires(data: dict[str, Any]) -> Wires:
    found = Wires(int(data["number"]), int(data["slot"]))
    for name, value in zip(("WIRES", "WIRE_SLOT"), found, strict=True):
        TABLE[name].parse(str(value))
    return found


def check_table(text: str) -> None:
    """``ValueError`` if the text is not a table of measured choices."""
    _parse(text)


def _parse(text: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
        if table["format"] != 1:
            raise ValueError(f"format {table['format']!r}; this version reads format 1")
        return dict(table)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a table of measured choices: {error!r}") from None
    except ValueError as error:
        raise ValueError(f"not a table of measured choices: {error}") from None


def _range_row(rule: Rule | PairRule) -> dict[str, Any]:
    return {"from": rule.low, "to": None if rule.high == math.inf else rule.high}


def _range_of(row: dict[str, Any]) -> tuple[float, float]:
    return float(row["from"]), math.inf if row["to"] is None else float(row["to"])


def _pair_row(row: dict[str, Any]) -> PairRule:
    if row["path"] not in (Transport.DIRECT, Transport.STAGED):
        raise ValueError(f"path {row['path']!r} of messages is neither direct nor staged")
    one, other = sorted(map(str, row["between"]))
    return PairRule((one, other), bool(row["near"]), *_range_of(row), Transport(row["path"]))


def _row(row: dict[str, Any]) -> Rule:
    algorithms.find(row["collective"], row["algorithm"])
    return Rule(row["collective"], *_range_of(row), row["algorithm"], int(row["fragments"]))
