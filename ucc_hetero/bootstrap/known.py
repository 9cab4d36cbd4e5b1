"""What ranks know of each other before they call: facts, islands, and what they choose algorithms by.

Communicators of the same ranks in the same order have it in common where one was made from the other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from .. import env, log
from ..device import DeviceRuntime
from ..machine.facts import Facts
from ..planner.rules import Table
from ..planner.select import Tuning, agreed
from ..planner.topology import Topology, levels_of, link_weights, numbered, share_hosts
from ..transport.paths import Device, staged
from ..transport.wires import warn_idle
from . import agreement
from .process import Job

#: Numbers of teams that can be given to libucc.
MOST_NUMBERS = 1 << 15

#: Parts that are remembered.
_MOST_PARTS = 64


class Known:
    """What the ranks of communicators know of each other, rank by rank; ``places``: their numbers in the whole job."""

    def __init__(
        self, job: Job, facts: Sequence[Facts], places: Sequence[int], table: Table, runtime: DeviceRuntime | None
    ) -> None:
        self.job, self.facts, self.places, self.table, self.runtime = job, facts, places, table, runtime
        self.size = len(facts)
        #: Their ranks in the job, and this one's rank here.
        self.members = tuple([job.index[each.process] for each in facts])
        self.rank = self.members.index(job.rank)
        self.processes = [each.process for each in facts]
        #: The memory of each rank's host, and the ranks that share this one's.
        self.hosts = [each.host.memory for each in facts]
        self.near = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        self.host_numbers = list(numbered(self.hosts))
        #: True if ranks are on hosts of their own, so that no arrival board shows all of them.
        self.far = len(self.near) < self.size
        islands = tuple([job.topology.island_of[member] for member in self.members])
        said = dict(facts[self.rank].settings)  # alike on all ranks, whatever has been changed since
        wanted = env.get("STAGING", said)
        #: ``bare`` has the islands alone: what tables of measured choices go by.
        self.bare, self.topology, self.tuning, self.staged = _chosen_by(
            tuple(facts), islands, wanted, env.get("TUNE", said), table.text
        )
        if wanted == "direct" and not (self.tuning.plain or self.bare.flat or self.rank):
            _say_of_messages()
        self.island = self.topology.islands[self.topology.island_of[self.rank]]
        #: Teams that most calls need: of this rank's island, and of all ranks.
        self.main = [(self.island.ranks, "native")] * (self.island.size > 1)
        if not self.topology.flat:
            self.main.append((tuple(range(self.size)), "bridge"))
        self.device = Device.of(self.rank, self.island.ranks, facts, runtime)
        warn_idle(self.rank, facts)
        self.pids = [facts[rank].pid for rank in self.near]
        #: Calls that a communicator leaves to the next one of these ranks, by their signatures.
        self.recipes: dict[Any, Any] = {}
        self._settled = False
        self._parts: dict[tuple[int, ...], Known] = {}

    def part(self, ranks: Sequence[int]) -> Known:
        """What some of the ranks know, in this order."""
        key = tuple(ranks)
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) >= _MOST_PARTS:
                self._parts.pop(next(iter(self._parts)))
            facts, places = [self.facts[rank] for rank in key], [self.places[rank] for rank in key]
            whole = key == tuple(range(self.size))
            found = self._parts[key] = self if whole else Known(self.job, facts, places, self.table, self.runtime)
        return found

    def in_context(self, ranks: Sequence[int], link: str) -> tuple[int, ...]:
        """The numbers that these ranks have in the context of a link."""
        places = [self.members[rank] for rank in ranks]
        return tuple(places if link != "native" else [self.job.island_index[place] for place in places])

    def makes_alone(self, ranks: tuple[int, ...], link: str) -> bool:
        """True if each of these ranks makes a team of them with a number of ours by itself; the same on all of them."""
        if (link, self.in_context(ranks, link)) not in self.job.tried:
            return False
        return link == "bridge" or agreement.native_makes_teams_alone(os.environ)

    def makes_teams_alone(self, claimed: int) -> bool:
        """True if that is so of all teams that most calls of a new communicator on one host need."""
        if not self._settled:
            self._settled = self.bare.flat and not self.far and all(self.makes_alone(*each) for each in self.main)
        return self._settled and claimed < MOST_NUMBERS


@lru_cache(maxsize=64)
def _chosen_by(
    facts: tuple[Facts, ...], islands: tuple[int, ...], staging: str, rules: str, table: str
) -> tuple[Topology, Topology, Tuning, bool]:
    """(islands alone, topology, rules by which ranks choose algorithms, True if messages are staged), kept for the
    next."""
    hosts = numbered(f.host.node for f in facts)
    plain = not any(f.device_memory for f in facts)
    levels = levels_of([f.group for f in facts])
    if plain or share_hosts(islands, hosts):  # no vendor's library knows of hosts, or joins what is on one
        levels.append(hosts)
    bare = Topology.group([f.vendor for f in facts], hosts, (), levels, islands)
    weighted = replace(bare, weights=link_weights(hosts, [f.link_speed for f in facts]))
    return bare, *agreed(bare, weighted, rules, table, plain=plain), staged(facts, staging)


@cache
def _say_of_messages() -> None:
    log.log("mem").warning(
        "UCCH_STAGING=direct is about messages alone: collectives of several vendors' devices are queued in streams, "
        "or go by way of the host (docs/gpu.md)"
    )
