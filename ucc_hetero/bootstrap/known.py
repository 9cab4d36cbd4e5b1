"""What ranks know of each other before calls: facts, islands, and the rules by which they choose algorithms.

Communicators of the same ranks in the same order share it if one was made from the other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

from .. import env, log
from ..device import DeviceRuntime
from ..machine.facts import Facts
from ..planner.algorithms import added
from ..planner.rules import Table
from ..planner.select import Tuning, agreed
from ..planner.topology import Topology, levels_of, link_weights, numbered, share_hosts
from ..transport.paths import Device, staged
from ..transport.wires import warn_idle
from . import agreement
from .pages import Page
from .process import Job

#: Team numbers that libucc accepts.
MOST_NUMBERS = 1 << 15

#: Most subsets of ranks that are cached.
_MOST_PARTS = 64


class Contact(NamedTuple):
    """How other processes connect with a process: its addresses and their networks, and the port and secret of its
    listener."""

    addresses: tuple[tuple[str, str], ...]
    port: int
    secret: bytes


class Known:
    """What the ranks of communicators know of each other, by rank; ``places``: their ranks in the whole job."""

    def __init__(
        self, job: Job, facts: Sequence[Facts], places: Sequence[int], table: Table, runtime: DeviceRuntime | None
    ) -> None:
        self.job, self.facts, self.places, self.table, self.runtime = job, facts, places, table, runtime
        self.size = len(facts)
        #: Their ranks in the job, and this process's rank here.
        self.members = tuple([job.index[each.process] for each in facts])
        self.rank = self.members.index(job.rank)
        self.processes = [each.process for each in facts]
        #: The host of each rank as a number from 0 on, and the ranks that share this one's.
        self.hosts = list(numbered([job.hosts[member] for member in self.members]))
        self.near = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        #: True if ranks are on several hosts, so that no arrival board shows all of them.
        self.far = len(self.near) < self.size
        islands = tuple([job.topology.island_of[member] for member in self.members])
        said = dict(facts[self.rank].settings)  # equal on all ranks, even if variables have changed since
        wanted = env.get("STAGING", said)
        #: ``bare``: topology with islands only, the key of measured tables.
        self.bare, self.topology, self.tuning, self.staged = _chosen_by(
            tuple(facts), islands, wanted, env.get("TUNE", said), table.text
        )
        #: A communicator uses what another one has left only if this is equal: other plans need other teams.
        self.kind = self.members, self.topology, self.tuning.user, self.tuning.measured
        if wanted == "direct" and not (self.tuning.plain or self.bare.flat or self.rank):
            _say_of_messages()
        self.island = self.topology.islands[self.topology.island_of[self.rank]]
        #: True if usual calls need no other team than that of all ranks.
        self.one_team = self.topology.flat and not self.topology.deep and not added()
        #: Teams that most calls need: of this rank's island, and of all ranks.
        self.main = [(self.island.ranks, "native")] * (self.island.size > 1)
        if not self.topology.flat:
            self.main.append((tuple(range(self.size)), "bridge"))
        self.device = Device.of(self.rank, self.island.ranks, facts, runtime)
        warn_idle(self.rank, facts)
        self.pids = [facts[rank].pid for rank in self.near]
        #: True if calls between devices may be queued in streams: that takes more exchanges.
        self.may_queue = not self.bare.flat and all(each.device_memory for each in facts)
        #: How processes connect with each rank's; empty until some communicator of these ranks has links.
        self.contacts: Sequence[Contact] = ()
        #: The ranks of which these are a part, and the numbers of these there.
        self.origin: tuple[Known, tuple[int, ...]] | None = None
        #: Calls that a communicator leaves to the next one of these ranks, by signature.
        self.recipes: dict[Any, Any] = {}
        self._settled = False
        self._parts: dict[tuple[int, ...], Known] = {}

    def part(self, ranks: Sequence[int]) -> Known:
        """What a subset of the ranks know, in this order."""
        key = tuple(ranks)
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) >= _MOST_PARTS:
                self._parts.pop(next(iter(self._parts)))
            facts, places = [self.facts[rank] for rank in key], [self.places[rank] for rank in key]
            whole = key == tuple(range(self.size))
            found = self._parts[key] = self if whole else Known(self.job, facts, places, self.table, self.runtime)
            found.origin = None if whole else (self, key)
        return found

    def page(self, number: int) -> Page | None:
        """Memory that this host's ranks share in communicator ``number``; None if there are no others."""
        shared, first, ranks = self.job.pages, self.members[self.near[0]], len(self.near)
        return shared.page(number, first, ranks) if shared and ranks > 1 else None

    def in_context(self, ranks: Sequence[int], link: str) -> tuple[int, ...]:
        """The ranks' numbers in the context of a link."""
        places = [self.members[rank] for rank in ranks]
        return tuple(places if link != "native" else [self.job.island_index[place] for place in places])

    def makes_alone(self, ranks: tuple[int, ...], link: str) -> bool:
        """True if each of these ranks makes a team with a given number by itself; the same on all of them."""
        if (link, self.in_context(ranks, link)) not in self.job.tried:
            return False
        return link == "bridge" or agreement.native_makes_teams_alone(os.environ)

    def makes_teams_alone(self, claimed: int) -> bool:
        """True if that holds for all teams that usual calls of a new communicator need."""
        if not self._settled:
            self._settled = self.one_team and all(self.makes_alone(*each) for each in self.main)
        return self._settled and claimed < MOST_NUMBERS


@lru_cache(maxsize=64)
def _chosen_by(
    facts: tuple[Facts, ...], islands: tuple[int, ...], staging: str, rules: str, table: str
) -> tuple[Topology, Topology, Tuning, bool]:
    """(topology with islands only, topology, rules of choice, True if messages are staged); cached."""
    hosts = numbered(f.host.node for f in facts)
    plain = not any(f.device_memory for f in facts)
    levels = levels_of([f.group for f in facts])
    if plain or share_hosts(islands, hosts):  # no vendor's library knows hosts, or spans one
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
