"""Which messages on device memory go by way of the host: where they must, or where that was measured to be faster.

Either end decides for its own part: data that one end sends from pinned memory may arrive on the other's device.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import env
from ..machine.facts import Facts
from ..planner.rules import pair_path
from ..planner.select import Tuning
from ..planner.topology import Topology
from ..types import Transport
from .paths import crowded_hosts, knows
from .rings import streams_wait

__all__ = ["Detours"]


class Detours:
    """Ways that one rank's messages take; ``forced`` is a path for all that could take either.

    ``near``: by rank, whose arenas it has opened. What comes from these to the host's memory is little more than words.
    """

    def __init__(
        self,
        rank: int,
        everyone: Sequence[Facts],
        topology: Topology,
        tuning: Tuning,
        near: Sequence[frozenset[int]] = (),
    ) -> None:
        self._rank, self._everyone, self._rules, self._near = rank, everyone, tuning.messages, near
        #: How messages go that could go either way, where nothing was measured.
        self.usual = tuning.path
        #: Device memory always goes by way of the host: so wanted, or this libucp cannot move it.
        self._always = self.usual is Transport.STAGED or not knows(everyone[rank])
        self._crowded = crowded_hosts(topology, everyone)
        self._free = env.get("STAGING") == "auto"
        self._spread = len({facts.host.memory for facts in everyone}) > 1
        self.forced: Transport | None = None
        self._late = everyone[rank].late

    def wanted(self, peer: int, nbytes: int, *, in_stream: bool = False) -> bool:
        """Whether a message of so many bytes with ``peer`` (negative: whoever it is) goes by way of the host.

        ``in_stream``: it is part of a stream's work. Between hosts the stream then does all copies itself: libucp would
        do them in a thread which must not wait for whoever launches kernels. So would it on one host, where that
        thread could not get past a kernel that is loaded while streams wait.
        """
        if self.arenas(peer) or (self._late and streams_wait()):
            return True
        if peer >= 0 and (self._rules or self.forced) and self.either(self._rank, peer):
            path = self.forced or pair_path(self._rules, *self.kind(self._rank, peer), nbytes)
            if path:
                return path is Transport.STAGED
        here = self._host(self._rank)
        if in_stream and self._free and (self._spread if peer < 0 else self._host(peer) != here):
            return True
        return self._always or (here in self._crowded and (peer < 0 or self._host(peer) == here))

    def arenas(self, peer: int) -> bool:
        """Whether the data of messages with ``peer`` (negative: whoever it is) may lie in arenas."""
        near = self._near[self._rank] if self._near else ()
        return peer in near or (peer < 0 and len(near) > 0)

    def kind(self, one: int, other: int) -> tuple[tuple[str, str], bool]:
        """Key of measured rules: the vendors of two ranks' devices, and whether these are on one host."""
        a, b = sorted(self._vendor(rank) for rank in (one, other))
        return (a, b), self._host(one) == self._host(other)

    def either(self, one: int, other: int) -> bool:
        """Whether messages between two ranks could go either way; some of them lie on a device."""
        a, b = self._everyone[one], self._everyone[other]
        if self._near and other in self._near[one]:
            return False
        near = self._host(one) == self._host(other)
        if not self._free or not (a.device_memory or b.device_memory) or (near and self._host(one) in self._crowded):
            return False
        if near:  # libucp opens the other's memory
            return knows(a, b) and knows(b, a)
        return knows(a) and knows(b)

    def _vendor(self, rank: int) -> str:
        facts = self._everyone[rank]
        return facts.vendor if facts.device_memory else "host"

    def _host(self, rank: int) -> object:
        return self._everyone[rank].host.memory
