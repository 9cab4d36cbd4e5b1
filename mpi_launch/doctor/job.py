"""Comparison of a job's ranks: what must be equal, what should be equal, and what they must not share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ...errors import ranks_text
from ...machine.vendors import VENDORS, seen
from ...planner.topology import ranks_by
from .facts import Facts
from .findings import Finding, finding

#: First version of UCC whose CPU-specific settings do not differ within a team.
UCC_FORGETS_PROCESSORS = (1, 9)


def _unlike(code: str, title: str, values: Iterable[object], after: str = "", about: str = "") -> Iterator[Finding]:
    """The finding if ranks have different values. None stands for a rank that does not count."""
    groups = ranks_by(values)
    groups.pop(None, None)
    if len(groups) > 1:
        table = "\n".join(f"{value or 'none'}: {ranks_text(ranks)}" for value, ranks in groups.items())
        yield finding(code, f"{title} differs between ranks:\n{table}{after}", about)


def placement(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Ranks of a machine can share memory, and have different devices."""
    by_boot: dict[str, set[tuple[str, ...]]] = {}
    users: dict[tuple[str, str], list[int]] = {}
    for rank, facts in enumerate(everyone):
        by_boot.setdefault(facts.boot_id, set()).add(facts.memory_domain)
        shown = _visible(facts)
        if len(shown) == 1:
            users.setdefault((facts.host, shown[0]), []).append(rank)
    if any(len(domains) > 1 for domains in by_boot.values()):
        yield finding(
            "job-namespaces",
            "ranks of one machine are in containers that cannot share memory, and UCX takes them for one node",
        )
    for (host, device), ranks in users.items():
        if len(ranks) > 1:
            yield finding("job-device-shared", f"{ranks_text(ranks)} on {host} use one device, {device}")


def _visible(facts: Facts) -> list[str]:
    """The devices that a rank sees, if known; else the words that select them."""
    there = [each for vendor in VENDORS for each in seen(vendor, list(facts.usable), dict(facts.env))]
    return [device.pci if device else word for word, device in there]


def likeness(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Differences that should not exist, and limits of mixed vendors."""
    versions = [tuple(map(int, re.findall(r"\d+", f.libraries.ucc)[:2])) for f in everyone if f.libraries.ucc]
    forgetful = any(version < UCC_FORGETS_PROCESSORS for version in versions)
    for vendor in VENDORS:
        drivers = [dict(f.drivers).get(vendor, "") if vendor in f.vendors else None for f in everyone]
        yield from _unlike("job-drivers", f"the {vendor} driver", drivers)
        processors = [f.processor if forgetful and vendor in f.vendors else None for f in everyone]
        after = "\nand this UCC may choose different algorithms on them"
        yield from _unlike("job-processors", f"the processor beside {vendor} GPUs", processors, after)
    packets = [{name: mtu for name, _, mtu in f.interfaces} for f in everyone]
    for name in sorted({name for each in packets for name in each} - {"lo"}):
        yield from _unlike("job-mtu", f"the MTU of {name}", [each.get(name) for each in packets], about=name)
    vendors = {vendor for f in everyone for vendor in f.vendors}
    if len(vendors) < 2:
        needed = {VENDORS[vendor].memory for vendor in vendors}
        known = [", ".join(sorted(needed & set(f.libraries.memory_types))) for f in everyone]
        yield from _unlike("job-memory", "GPU memory that UCX knows", known)
    kinds = [VENDORS[vendor].fp8 for vendor in sorted(vendors) if VENDORS[vendor].fp8]
    if len(set(kinds)) > 1:
        yield finding("job-fp8", f"float8_e4m3 means other numbers on {' than on '.join(kinds)}")


def compare(everyone: Sequence[Facts], size: int) -> list[Finding]:
    """Findings about a job's ranks that need no communicator, as that would refuse ranks that do not fit."""
    found = [*placement(everyone), *likeness(everyone)]
    told = {dict(f.env).get("WORLD_SIZE", str(size)) for f in everyone}
    if told != {str(size)}:
        text = f"{', '.join(sorted(told))} ranks were started, but MPI sees {size} in this one"
        found.append(finding("job-size", text))
    return found
