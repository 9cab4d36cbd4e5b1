"""A worker's receiving half: tracks loads until their blocks have arrived, or certainly will not be written any
more."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..errors import PeerError, UCCHError
from ..log import log
from ..rma import AgentPeer, PageTarget, Receipt
from .links import Link, Links
from .messages import Load, Remote

#: Number of renewals in the time of a lease, and maximum number of requests in a message.
_RENEWALS, _NAMES = 6, 1000


@dataclass
class _Loading:
    """A load under way. ``receipts``: of the caches that have some of its blocks, all of them once ``is_known``;
    ``writers``: peers that send its blocks and, after it was given up, may still write to them; ``why``: why it was
    given up, empty if it was not."""

    load: Load
    until: float
    receipts: list[Receipt] = field(default_factory=list)
    is_known: bool = False
    writers: dict[AgentPeer, Link] = field(default_factory=dict)
    why: str = ""


class Receiver:
    def __init__(self, links: Links) -> None:
        self._links, self._settings = links, links.settings
        self._lock = threading.RLock()
        self._loading: dict[str, _Loading] = {}
        self._failed: list[Load] = []
        #: Addresses of an engine -> remote requests by the local ones that wait; and when their leases are due.
        self._waiting: dict[tuple[str, ...], dict[str, Remote]] = {}
        self._due: dict[tuple[str, ...], float] = {}
        self._places: dict[str, tuple[str, ...]] = {}
        links.on("failed", self._refused)
        links.on("ended", self._ended)
        links.each_moment(self._renew)

    def load(self, load: Load) -> None:
        """Start to load blocks, or tell the other engine that they are not needed."""
        state = _Loading(load, time.monotonic() + self._settings.timeout)
        if not load.is_empty:
            with self._lock:
                self._loading[load.request] = state
        self._links.reach(load.remote.addresses, lambda calls: self._ask(state, calls))

    def _ask(self, state: _Loading, calls: list[Future[Link]]) -> None:
        load = state.load
        try:
            links = [call.result() for call in calls]
            tickets = {} if load.is_empty else self._receive(state, links)
            for link in links:
                named = {"request": load.remote.request, "engine": load.remote.engine, "to": load.request}
                said = {"op": "want", **named, "tickets": tickets.get(link.peer, []), "ranks": self._settings.world}
                with self._lock:  # a load that was cancelled meanwhile must not be requested
                    if state.why:
                        return
                    link.peer.send(said)
        except (UCCHError, ValueError, OSError) as error:
            with self._lock:
                self._give_up(state, str(error))

    def _receive(self, state: _Loading, links: list[Link]) -> dict[AgentPeer, list[Any]]:
        """For each worker that sends: for each of its caches that it sends from, its number, that of the cache here,
        the number of the first block, and a ticket."""
        out: dict[AgentPeer, list[Any]] = {}
        with self._lock:
            if state.why:
                raise PeerError(state.why)
            for i, table in enumerate(self._links.tables):
                first, blocks = state.load.parts[self._links.contract.caches[i].group]
                if not blocks:
                    continue
                sources = self._sources(i, links)
                targets = [target for _, _, target in sources]
                pages = self._links.pages(i, blocks)
                receipt = table.recv_pages(pages, targets, timeout=2 * self._settings.timeout)
                state.receipts.append(receipt)
                for (link, j, _), ticket in zip(sources, receipt.tickets, strict=True):
                    state.writers[link.peer] = link
                    out.setdefault(link.peer, []).append([j, i, first, ticket.hex()])
            state.is_known = True
        return out

    def _sources(self, cache: int, links: list[Link]) -> list[tuple[Link, int, PageTarget]]:
        """(worker, number of its cache, that cache) from which a cache here is received; each head of each layer comes
        once."""
        form, out = self._links.tables[cache].form, []
        missing = {(layer, head) for layer in range(form.layers) for head in range(form.first, form.first + form.heads)}
        for link in links:
            for (i, j), target in link.targets.items():
                there = range(target.form.first, target.form.first + target.form.heads)
                if i == cache and (has := missing & {(layer, head) for layer in target.layers for head in there}):
                    missing -= has
                    out.append((link, j, target))
        return out

    def _give_up(self, state: _Loading, why: str) -> None:
        """Refuse late data. Keep the blocks until writers with direct access confirm that they have stopped."""
        if state.why:
            return
        load, state.why = state.load, why
        log("net").warning("request %s of %s: %s", load.remote.request, load.remote.engine, why)
        state.until = time.monotonic() + self._settings.timeout
        for receipt in state.receipts:
            receipt.close()
        for peer, link in list(state.writers.items()):
            if not any(target.direct for target in link.targets.values()):
                del state.writers[peer]
            try:
                link.peer.send({"op": "cancel", "request": load.remote.request, "to": load.request})
            except PeerError:
                state.writers.pop(peer, None)

    def _of(self, link: Link, said: dict[str, Any]) -> _Loading | None:
        """The load that a writer's message refers to; None if there is none."""
        state = self._loading.get(said["to"])
        return state if state is not None and link.peer in state.writers else None

    def _refused(self, link: Link, said: dict[str, Any]) -> None:
        with self._lock:
            if (state := self._of(link, said)) is not None:
                del state.writers[link.peer]
                self._give_up(state, f"agent {link.peer.name!r}: {said['why']!s:.500}")

    def _ended(self, link: Link, said: dict[str, Any]) -> None:
        with self._lock:
            if (state := self._of(link, said)) is not None and state.why:
                del state.writers[link.peer]

    def ended(self) -> set[str]:
        """Local requests whose loads have ended, with or without an error."""
        with self._lock:
            out = {request for request, state in self._loading.items() if self._over(state)}
            for request in out:
                self._count(self._loading.pop(request))
        return out

    def _count(self, state: _Loading) -> None:
        if state.why:
            self._links.stats.data["failed"] += 1
            return
        began, nbytes = state.until - self._settings.timeout, 0
        for i, table in enumerate(self._links.tables):
            pages = self._links.pages(i, state.load.parts[self._links.contract.caches[i].group].blocks)
            nbytes += len(pages) * (sum(region.nbytes for region in table.regions) // table.form.blocks)
        self._links.stats.loaded(time.monotonic() - began, nbytes)

    def _over(self, state: _Loading) -> bool:
        if not state.why:
            try:
                if state.is_known and all(receipt.Test() for receipt in state.receipts):
                    return True
                if time.monotonic() > state.until:
                    self._give_up(state, f"not there after {self._settings.timeout:g} s")
            except UCCHError as error:
                self._give_up(state, str(error))
        if not state.why:
            return False
        if time.monotonic() > state.until:
            for peer in state.writers:  # it neither stops writing nor confirms: disconnect
                peer.leave()
        if any(peer.alive for peer in state.writers):
            return False
        if not all(receipt.idle for receipt in state.receipts):
            return False  # a device is still copying arrived data
        self._failed.append(state.load)
        return True

    def failed(self) -> list[Load]:
        """Loads that have failed, and ended, since the last call."""
        with self._lock:
            out, self._failed = self._failed, []
        return out

    # --- leases -------------------------------------------------------------------------------------------------------

    def wait_for(self, waiting: dict[str, Remote], scheduled: list[str]) -> None:
        """Ask other engines to keep blocks for requests that wait; no longer for those that were scheduled."""
        with self._lock:
            for request, remote in waiting.items():
                places = self._places[request] = remote.addresses
                self._waiting.setdefault(places, {})[request] = remote
                self._due.setdefault(places, 0.0)
            for request in scheduled:
                if (known := self._places.pop(request, None)) is None:
                    continue  # from before the caches were registered again
                del self._waiting[known][request]
                if not self._waiting[known]:
                    del self._waiting[known], self._due[known]

    def _renew(self) -> None:
        """Renew leases in time; connect with engines before the first load."""
        now = time.monotonic()
        with self._lock:
            places = [place for place, due in self._due.items() if due <= now]
            self._due |= dict.fromkeys(places, math.inf)  # until the call below has ended
        for each in places:
            self._links.reach(each, lambda calls, each=each: self._renewed(each, calls))  # type: ignore[misc]

    def _renewed(self, places: tuple[str, ...], calls: list[Future[Link]]) -> None:
        links = [call.result() for call in calls if not call.exception()]
        with self._lock:
            told = [[remote.engine, remote.request] for remote in self._waiting.get(places, {}).values()]
            if places in self._due:
                again = [link.lease for link in links] if len(links) == len(calls) else [self._settings.lease]
                self._due[places] = time.monotonic() + min(again) / _RENEWALS
        for link in links:
            for i in range(0, len(told), _NAMES):
                with suppress(PeerError):
                    link.peer.send({"op": "renew", "requests": told[i : i + _NAMES]})
