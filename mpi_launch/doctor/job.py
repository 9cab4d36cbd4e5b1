"""Comparison of a job's ranks: what must be equal, what should be, and what they must not share."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...bootstrap.agreement import differences, judged, steering
from ...errors import ranks_text
from ...machine.fabric import NO_FABRIC, RESULTS, Fabric
from ...machine.vendors import VENDORS, seen
from ...planner.rules import Layout, measured_fabric
from ...transport.wires import USUAL
from .checks import over_tcp
from .facts import Facts
from .findings import Finding, finding, ok

#: Seconds by which clocks may differ before traces and logs of several hosts mislead.
CLOCK = 0.1
#: The version of UCC from which its settings by model of processor no longer differ within a team.
UCC_FORGETS_PROCESSORS = (1, 9)


def _hosts(everyone: Sequence[Facts]) -> str:
    count = len({facts.host for facts in everyone})
    return f"{count} host{'s' * (count > 1)}"


def _table(title: str, groups: Sequence[tuple[object, Sequence[int]]]) -> str:
    return "\n".join(
        [f"{title} differs between ranks:", *(f"{value or 'none'}: {ranks_text(ranks)}" for value, ranks in groups)]
    )


def _unlike(code: str, title: str, values: Iterable[object], after: str = "", about: str = "") -> Iterator[Finding]:
    """The finding, if ranks have unlike values; None stands for a rank that does not count."""
    groups: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            groups.setdefault(value, []).append(rank)
    if len(groups) > 1:
        yield finding(code, _table(title, list(groups.items())) + after, about)


def _before(version: str, limit: tuple[int, int]) -> bool:
    return bool(version) and tuple(map(int, re.findall(r"\d+", version)[:2])) < limit


def agreement(everyone: Sequence[Facts], size: int) -> Iterator[Finding]:
    """Differences that make a job impossible."""
    told = {dict(f.env).get("WORLD_SIZE", str(size)) for f in everyone}
    if told != {str(size)}:
        yield finding("job-size", f"{', '.join(sorted(told))} ranks were started, but MPI sees {size} in this one")
    found = [judged(f.package, f.libraries.ucc, f.libraries.ucx, steering(dict(f.env))) for f in everyone]
    unlike = differences(found)
    for each in unlike:
        yield finding("job-disagrees", _table(each.what, each.groups), cure=each.cure)
    if not unlike:
        yield ok("job", f"{len(everyone)} ranks on {_hosts(everyone)} agree on versions and settings")


def placement(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Ranks of one machine can share memory, and no two share a device."""
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
    """The devices that a rank sees, as far as they are known; else the words that choose them."""
    there = [each for vendor in VENDORS for each in seen(vendor, list(facts.usable), dict(facts.env))]
    return [device.pci if device else word for word, device in there]


def likeness(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Differences that should not be, and what mixed vendors cannot do."""
    forgetful = any(_before(f.libraries.ucc, UCC_FORGETS_PROCESSORS) for f in everyone)
    for vendor in VENDORS:
        drivers = [dict(f.drivers).get(vendor, "") if vendor in f.vendors else None for f in everyone]
        yield from _unlike("job-drivers", f"the {vendor} driver", drivers)
        processors = [f.processor if forgetful and vendor in f.vendors else None for f in everyone]
        after = "\nand this UCC may choose different algorithms on them"
        yield from _unlike("job-processors", f"the processor beside {vendor} GPUs", processors, after)
    packets = [{name: mtu for name, _, mtu in f.interfaces} for f in everyone]
    for name in sorted({name for each in packets for name in each} - {"lo"}):
        yield from _unlike("job-mtu", f"the MTU of {name}", [each.get(name) for each in packets], about=name)
    controls = [dict(f.sysctl).get("net.ipv4.tcp_congestion_control", "") if over_tcp(f) else None for f in everyone]
    yield from _unlike("job-congestion", "TCP's congestion control", controls)
    vendors = {vendor for f in everyone for vendor in f.vendors}
    if len(vendors) < 2:
        needed = {VENDORS[vendor].memory for vendor in vendors}
        known = [", ".join(sorted(needed & set(f.libraries.memory_types))) for f in everyone]
        yield from _unlike("job-memory", "GPU memory that UCX knows", known)
    kinds = [VENDORS[vendor].fp8 for vendor in sorted(vendors) if VENDORS[vendor].fp8]
    if len(set(kinds)) > 1:
        yield finding("job-fp8", f"float8_e4m3 means other numbers on {' than on '.join(kinds)}")


def _measured(everyone: Sequence[Facts]) -> tuple[str, str, str]:
    """Measured value of UCCH_FABRIC for these ranks, where it is from, and what is wrong with the table."""
    table, wrong = everyone[0].table, everyone[0].no_table
    names = [[name for name in f.vendors if seen(name, list(f.usable), dict(f.env))] or ["host"] for f in everyone]
    wanted = {found.wanted for facts in everyone for _, found in facts.fabrics}
    if wrong or wanted != {"auto"} or any(len(each) > 1 for each in names):  # which vendor's a rank is is not known
        return "", "", wrong
    ranks = [
        (name, f.host, dict(f.fabrics).get(name, NO_FABRIC).kind) for (name,), f in zip(names, everyone, strict=True)
    ]
    try:
        return *measured_fabric(table, Layout.of(*zip(*ranks, strict=True))), ""
    except ValueError as error:
        return "", "", str(error)


def fabric(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Hosts of a vendor that its library's own fabric joins, or does not."""
    word, why, wrong = _measured(everyone)
    if wrong:
        yield finding("env-bad", wrong, "UCCH_TUNE_FILE")
    for vendor in VENDORS:
        of: dict[str, Fabric] = {f.host: dict(f.fabrics)[vendor] for f in everyone if vendor in dict(f.fabrics)}
        kinds = {found.kind for found in of.values()}
        if len(of) < 2:
            continue
        if word:
            yield ok("job-fabric", f"{vendor} on {len(of)} hosts: {RESULTS[word]} ({why})")
        elif len(kinds) > 1:
            words = [dict(f.fabrics).get(vendor) for f in everyone]
            yield from _unlike("job-fabric", f"the fabric of {vendor}", [each and each.describe() for each in words])
        else:
            told = "; ".join(filter(None, [next(iter(of.values())).describe(), why]))
            yield ok("job-fabric", f"{vendor} on {len(of)} hosts: {told}")


def network_threads(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Cores for the network threads between devices of several hosts that no vendor's fabric joins."""
    ranks, word = Counter(facts.host for facts in everyone), _measured(everyone)[0]
    islands = {
        (vendor, {"all": "", "host": facts.host}.get(word, found.kind or facts.host))
        for facts in everyone
        for vendor, found in facts.fabrics
    }
    if len(ranks) < 2 or len(islands) < 2:
        return
    for facts in {facts.host: facts for facts in everyone if over_tcp(facts)}.values():
        usual = USUAL["limited" if facts.flow_limit[1] else "tcp"]
        asked = dict(facts.env).get("UCCH_WIRES", "auto")
        wanted, here = int(asked) if asked.isdigit() else usual, ranks[facts.host]
        if 2 * wanted * here > facts.host_cores:
            yield finding(
                "job-wires",
                f"{here} ranks on {facts.host} want {2 * wanted} network threads each, and it has {facts.host_cores} "
                + ("cores" if asked.isdigit() else f"cores: they get {max(2, facts.host_cores // here // 2 * 2)}"),
            )


def clocks(everyone: Sequence[Facts], offsets: Sequence[float]) -> Iterator[Finding]:
    """Clocks of different hosts."""
    worst = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    if abs(offsets[worst]) > CLOCK:
        yield finding(
            "job-clock",
            f"the clock of {everyone[worst].host} is {offsets[worst]:+.2f} s from that of {everyone[0].host}",
        )


def clock_offsets(comm: Any) -> list[float]:
    """Seconds by which each rank's clock is ahead of rank 0's, at the best of some meetings."""
    meetings = []
    for _ in range(5):
        comm.Barrier()
        meetings.append(comm.allgather(time.time()))
    return [min((times[rank] - times[0] for times in meetings), key=abs) for rank in range(comm.Get_size())]


def compare(everyone: Sequence[Facts], size: int, offsets: Sequence[float]) -> list[Finding]:
    """Everything there is to say about the ranks of a job together."""
    alone = (placement, likeness, fabric, network_threads)
    found = [each for check in alone for each in check(everyone)]
    return [*agreement(everyone, size), *found, *clocks(everyone, offsets)]
