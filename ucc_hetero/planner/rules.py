"""Rules that say which algorithm runs: UCC's TUNE grammar, and the table of measured choices as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ucc_hetero.env import parse_size
from ucc_hetero.machine.vendors import VENDORS
from ucc_hetero.planner import algorithms
from ucc_hetero.planner.collectives import ROWS
from ucc_hetero.planner.topology import Topology, numbered

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
        """True if the rule is for this call."""
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
            raise ValueError(f"UCCH_TUNE: section {section!r}: {error}") from None
        if key in found:
            raise ValueError(f"UCCH_TUNE: section {section!r}: {token.strip()!r} gives the {key} a second time")
        found[key] = value
    collectives = found.pop("collectives", ())
    if not collectives:
        raise ValueError(f"UCCH_TUNE: section {section!r}: no collective; one of {', '.join(ROWS)} must be named")
    if "algorithm" not in found:
        raise ValueError(f"UCCH_TUNE: section {section!r}: no algorithm, such as @flat")
    low, high = found.pop("range", (0, math.inf))
    for collective in collectives:
        if found["algorithm"] not in algorithms.names(collective):
            known = ", ".join("@" + name for name in algorithms.names(collective))
            raise ValueError(
                f"UCCH_TUNE: section {section!r}: {collective} has no @{found['algorithm']}; it has {known}"
            )
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


@dataclass(frozen=True, slots=True)
class Measured:
    """Entry of a table for one topology: rules, relative bandwidth of each rank's link (empty: all alike)."""

    rules: tuple[Rule, ...] = ()
    weights: tuple[int, ...] = ()


def save_table(path: str | Path, topology: Topology, found: Measured) -> None:
    """Put what was measured for a topology into a JSON table, beside other topologies already there.

    ``ValueError`` if the file is there and not such a table.
    """
    rows = [
        {
            "collective": rule.collective,
            "from": rule.low,
            "to": None if rule.high == math.inf else rule.high,
            "algorithm": rule.algorithm,
            "fragments": rule.fragments,
        }
        for rule in found.rules
    ]
    entry: dict[str, Any] = {"islands": topology.describe(), "weights": list(found.weights), "rules": rows}
    _put(Path(path), "topologies", topology.fingerprint(), entry)


def _put(file: Path, section: str, key: str, entry: dict[str, Any] | None) -> None:
    """Put an entry into a section of a table, which is made where there is none; None takes it out."""
    table: dict[str, Any] = {"format": 1, "topologies": {}}
    if file.exists():
        table = _parse(file.read_text())
    entries = table.setdefault(section, {})
    if entry is None:
        entries.pop(key, None)
    else:
        entries[key] = entry
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(table, indent=1) + "\n")
    temporary.replace(file)  # a reader sees the old table or the new one


def load_table(text: str, topology: Topology) -> Measured:
    """Entry of a JSON table (its text: rank 0 reads the file, all get the same) for a topology; nothing if unknown.

    Tables go by topologies without weights: those are part of what was measured. ``ValueError`` if the text is not such
    a table.
    """
    table = _parse(text)
    with _reading():
        entry = table["topologies"].get(topology.fingerprint())
        if not entry:
            return Measured()
        weights = tuple(int(weight) for weight in entry.get("weights", ()))
        if weights and (len(weights) != topology.size or min(weights) < 1):
            raise ValueError(f"weights {list(weights)} for {topology.size} ranks")
        return Measured(tuple(_row(row) for row in entry["rules"]), weights)


class Table(NamedTuple):
    """Table of measured choices as rank 0 has read it, for all ranks; no text where none is wanted."""

    path: str = ""
    text: str = ""


#: Of jobs without UCCH_TUNE_FILE.
NO_TABLE = Table()


def read_table(path: str) -> Table:
    """Read the file of measured choices that ``UCCH_TUNE_FILE`` names; nothing if that is empty.

    Raises:
        ValueError: it cannot be read, or is no such table.
    """
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
    """``ValueError`` in the place of any error by which a text shows that it is no table."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a table of measured choices: {error!r}") from None
    except ValueError as error:
        raise ValueError(f"not a table of measured choices: {error}") from None


def _parse(text: str) -> dict[str, Any]:
    with _reading():
        table = json.loads(text)
        if table["format"] != 1:
            raise ValueError(f"format {table['format']!r}; this version reads format 1")
        return dict(table)


def _row(row: dict[str, Any]) -> Rule:
    algorithms.find(row["collective"], row["algorithm"])
    high = math.inf if row["to"] is None else float(row["to"])
    return Rule(row["collective"], float(row["from"]), high, row["algorithm"], int(row["fragments"]))


# --- islands by fabric ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of a job by vendor and host, and RDMA between the hosts: what a measured choice of islands goes by."""

    #: Ranks of a vendor on one host are an island.
    topology: Topology
    #: Vendor on several hosts -> kinds of RDMA there that its library uses; an empty one for hosts without.
    rdma: Mapping[str, list[str]]

    @classmethod
    def of(cls, vendors: Sequence[str], nodes: Sequence[Hashable], kinds: Sequence[str]) -> Layout:
        """Make a layout.

        Args:
            vendors: of each rank's memory.
            nodes: of each rank, equal for those of one host.
            kinds: RDMA of each rank's host that its vendor's library uses; empty where there is none.
        """
        hosts = numbered(nodes)
        wide = [name for name in dict.fromkeys(vendors) if name != "host" and len(_of(name, vendors, hosts)) > 1]
        rdma = {name: sorted(_of(name, vendors, kinds)) for name in wide}
        return cls(Topology.group(vendors, hosts, fabrics=hosts), rdma)

    def entry(self, word: str) -> dict[str, Any]:
        """Entry of a table."""
        return {"ranks": self.topology.describe(), "rdma": dict(self.rdma), "fabric": word}


def _of(vendor: str, vendors: Sequence[str], values: Sequence[_Choice]) -> set[_Choice]:
    """Values of a vendor's ranks."""
    return {value for name, value in zip(vendors, values, strict=True) if name == vendor}


def save_fabric(path: str | Path, layout: Layout, word: str) -> None:
    """Put the measured value of UCCH_FABRIC for the ranks of a job into a JSON table, beside what is there already.

    Args:
        path: file of the table, made where there is none.
        layout: the ranks.
        word: ``host`` or ``all``; empty takes an older entry out, where neither was clearly faster.

    Raises:
        ValueError: the file is there and no such table.
    """
    _put(Path(path), "fabrics", layout.topology.fingerprint(), layout.entry(word) if word else None)


def measured_fabric(table: Table, layout: Layout) -> tuple[str, str]:
    """Find the value of UCCH_FABRIC that was measured for the ranks of a job.

    Args:
        table: as rank 0 has read it.
        layout: the ranks.

    Returns:
        ``host`` or ``all``, and where it is from. Without a value: two empty texts, or why an entry for such ranks is
        not followed, as their hosts had other RDMA.

    Raises:
        ValueError: the entry is none.
    """
    if not table.text or not layout.rdma:
        return "", ""
    where = f"the tuned table {table.path}"
    try:
        entries, key = _fabrics(table.text), layout.topology.fingerprint()
        if key not in entries:
            return "", ""
        entry = entries[key]
        word, rdma = entry["fabric"], {str(name): sorted(map(str, kinds)) for name, kinds in entry["rdma"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} has no proper fabric for {layout.topology.describe()}: {error!r}") from None
    if word not in ("host", "all"):
        raise ValueError(f"{where} has the fabric {word!r} for {layout.topology.describe()}; it must be host or all")
    if rdma != layout.rdma:
        return "", f"not by {where}, of hosts with {_rdma_text(rdma)}"
    return word, f"by {where}"


def _rdma_text(rdma: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{' and '.join(kind or 'no RDMA' for kind in kinds)} for {name}" for name, kinds in rdma.items())


def fabrics_of(table: Table) -> dict[str, str]:
    """Measured values of UCCH_FABRIC in a table, by the ranks that they are for. ``ValueError`` for a bad table."""
    try:
        return {str(entry["ranks"]): str(entry["fabric"]) for entry in _fabrics(table.text).values()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the tuned table {table.path} has no proper fabrics: {error!r}") from None


def _fabrics(text: str) -> dict[str, Any]:
    return dict(_parse(text).get("fabrics", {})) if text else {}
