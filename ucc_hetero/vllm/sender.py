"""A worker's sending half: sends blocks of finished requests to the workers that ask for them, then releases the
blocks."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from ..errors import PeerError, UCCHError
from ..log import log
from ..rma import Request
from ..rma.wire_format import Ticket
from .links import Link, Links

#: Number of finished requests that are remembered, to answer late messages about them.
_PAST = 10_000
#: Timeout in seconds: a transfer that failed by its timeout might go on while the other side believes that it ended.
_FOREVER = 86_400.0


@dataclass
class _Want:
    """A request for blocks from a worker of the other engine, for its request ``to``: numbers of the caches here and
    there, number of the first block, and the ticket; none if it wants nothing."""

    link: Link
    to: str
    tickets: list[tuple[int, int, int, bytes]]
    ranks: int
    since: float
    transfers: list[Request] = field(default_factory=list)
    cancelled: bool = False
    why: str = ""

    def poll(self) -> bool:
        """True once no transfer for it is under way."""
        left = []
        for transfer in self.transfers:
            try:
                if not transfer.Test():
                    left.append(transfer)
            except UCCHError as error:
                self.why = self.why or str(error)
        self.transfers = left
        return not left


@dataclass
class _Offer:
    """Blocks of a finished request: seconds for which they are kept, and until when; which workers have asked for and
    received them; ``is_kept``: for a next turn, which may not come."""

    blocks: list[list[int]]
    seconds: float
    is_kept: bool
    until: float = 0.0
    wants: list[_Want] = field(default_factory=list)
    ended: list[_Want] = field(default_factory=list)


class Sender:
    def __init__(self, links: Links) -> None:
        self._links, self._settings = links, links.settings
        self._lock = threading.RLock()
        self._offers: dict[str, _Offer] = {}
        #: Requests for blocks of which the scheduler has not told this worker yet.
        self._early: dict[str, list[_Want]] = {}
        self._past: dict[str, None] = {}
        links.on("want", self._want)
        links.on("cancel", self._cancel)
        links.on("renew", self._renew)
        links.each_moment(self._expire)

    def offer(self, request: str, blocks: list[list[int]], is_kept: bool) -> None:
        with self._lock:
            offer = _Offer(blocks, self._settings.keep if is_kept else self._settings.lease, is_kept)
            offer.until = time.monotonic() + offer.seconds
            self._offers[request] = offer
            for want in self._early.pop(request, []):
                self._begin(request, offer, want)

    def _want(self, link: Link, said: dict[str, Any]) -> None:
        request, engine = str(said["request"]), said["engine"]
        tickets = [(int(i), int(j), int(first), bytes.fromhex(ticket)) for i, j, first, ticket in said["tickets"]]
        want = _Want(link, str(said["to"]), tickets, int(said["ranks"]), time.monotonic())
        with self._lock:
            if (offer := self._offers.get(request)) is not None:
                self._begin(request, offer, want)
            elif engine != self._settings.engine:
                self._refuse(want, "its engine has been started anew since")
            elif request in self._past:
                self._refuse(want, "its blocks are no longer kept")
            else:
                self._early.setdefault(request, []).append(want)

    def _begin(self, request: str, offer: _Offer, want: _Want) -> None:
        offer.wants.append(want)
        try:
            for i, j, first, ticket in want.tickets:
                target, blocks = want.link.targets[i, j], offer.blocks[self._links.contract.caches[i].group]
                each = len(self._links.pages(i, [0]))
                count = len(Ticket.unpack(ticket).pages) // 4 // each
                mine = blocks[first : first + count]
                if first < 0 or len(mine) != count:
                    raise ValueError(f"{count} blocks from number {first} on, of {len(blocks)}")
                sending = target.send_pages(self._links.pages(i, mine), ticket, timeout=_FOREVER)
                want.transfers += sending.each
        except (UCCHError, ValueError, LookupError) as error:
            want.why = str(error)

    def _renew(self, link: Link, said: dict[str, Any]) -> None:
        with self._lock:
            for engine, request in said["requests"]:
                if engine == self._settings.engine and (offer := self._offers.get(request)) is not None:
                    offer.until = max(offer.until, time.monotonic() + self._settings.lease)

    def _refuse(self, want: _Want, why: str) -> None:
        self._tell(want, op="failed", to=want.to, why=why)

    @staticmethod
    def _tell(want: _Want, **said: Any) -> None:
        try:
            want.link.peer.send(said)
        except PeerError as error:
            log("net").debug("%s is not told: %s", want.link.peer.name, error)

    def _cancel(self, link: Link, said: dict[str, Any]) -> None:
        """Cancel a transfer. Confirm once nothing is written any more, which may be at once."""
        request, whose = str(said["request"]), (link, str(said["to"]))
        with self._lock:
            if request in self._early:
                self._early[request] = [want for want in self._early[request] if (want.link, want.to) != whose]
            offer = self._offers.get(request)
            under_way = [want for want in offer.wants if (want.link, want.to) == whose] if offer else []
            for want in under_way:
                want.cancelled = True
        if not under_way:
            link.peer.send({"op": "ended", "to": whose[1]})

    def ended(self) -> set[str]:
        """Requests whose blocks can be released: all workers have them, or they were given up."""
        out = set()
        with self._lock:
            for request, offer in self._offers.items():
                self._settle(request, offer)
                if self._over(request, offer):
                    out.add(request)
            for request in out:
                del self._offers[request]
                self._past[request] = None
            while len(self._past) > _PAST:
                del self._past[next(iter(self._past))]
        return out

    def _settle(self, request: str, offer: _Offer) -> None:
        for want in [want for want in offer.wants if want.poll()]:
            offer.wants.remove(want)
            offer.ended.append(want)
            if want.why:
                log("net").warning("request %s is not sent to %s: %s", request, want.link.peer.name, want.why)
                self._refuse(want, want.why)
            if want.cancelled:
                self._tell(want, op="ended", to=want.to)

    def _over(self, request: str, offer: _Offer) -> bool:
        now = time.monotonic()
        for want in offer.wants:
            if now > want.since + self._settings.lease:
                want.link.peer.leave()  # the worker is alive, but does not accept the data
        if offer.wants:
            return False
        if now > offer.until and offer.is_kept and not offer.ended:
            return True
        if now > offer.until:
            log("net").warning("request %s: not all decode workers asked for its blocks in time", request)
            self._links.stats.data["expired"] += 1
            return True
        gone = any(not want.link.peer.alive for want in offer.ended)  # so are its engine's other workers
        return gone or (bool(offer.ended) and len(offer.ended) >= offer.ended[0].ranks)

    def _expire(self) -> None:
        """Report failures, and refuse requests for blocks that were never offered. The engine may be in a long step
        meanwhile."""
        late = time.monotonic() - self._settings.timeout
        with self._lock:
            for request, offer in self._offers.items():
                self._settle(request, offer)
            for request, wants in list(self._early.items()):
                for want in [want for want in wants if want.since < late]:
                    wants.remove(want)
                    self._refuse(want, "there is no such request")
                if not wants:
                    del self._early[request]
