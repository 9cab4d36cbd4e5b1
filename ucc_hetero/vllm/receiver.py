"""A worker's receiving half: tracks loads until their blocks have arrived, or certainly will not be written any
more."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..errors import PeerError, UCCHError
from ..log import log
from ..rma import AgentPeer, Receipt
from .links import Link, Links
from .messages import Load


@dataclass
class _Loading:
    """A load under way. ``writers``: peers that send its blocks and, after it was given up, may still write to them;
    ``why``: why it was given up, empty if it was not."""

    load: Load
    until: float
    receipt: Receipt | None = None
    writers: dict[AgentPeer, Link] = field(default_factory=dict)
    why: str = ""


class Receiver:
    def __init__(self, links: Links) -> None:
        self._links, self._settings = links, links.settings
        self._lock = threading.RLock()
        self._loading: dict[str, _Loading] = {}
        self._failed: set[int] = set()
        links.on("failed", self._refused)
        links.on("ended", self._ended)

    def load(self, load: Load) -> None:
        """Start to load blocks, or tell the other engine that they are not needed."""
        state = _Loading(load, time.monotonic() + self._settings.timeout)
        if load.blocks:
            with self._lock:
                self._loading[load.request] = state
        self._links.reach(load.remote.addresses, lambda calls: self._ask(state, calls))

    def _ask(self, state: _Loading, calls: list[Future[Link]]) -> None:
        load = state.load
        try:
            links = [call.result() for call in calls]
            tickets = self._receive(state, links) if load.blocks else {}
            for link in links:
                said = {"op": "want", "request": load.remote.request, "engine": load.remote.engine, "first": load.first}
                said |= {"to": load.request, "ticket": tickets.get(link.peer, b"").hex(), "ranks": self._settings.ranks}
                with self._lock:  # a load that was cancelled meanwhile must not be requested
                    if state.why:
                        return
                    link.peer.send(said)
        except (UCCHError, ValueError, OSError) as error:
            with self._lock:
                self._give_up(state, str(error))

    def _receive(self, state: _Loading, links: list[Link]) -> dict[AgentPeer, bytes]:
        """Tickets for the workers that have heads of this one; each head comes once."""
        mine = self._links.table.form
        missing, sources = set(range(mine.first, mine.first + mine.heads)), []
        for link in links:
            form = link.target.form
            if has := missing & set(range(form.first, form.first + form.heads)):
                missing -= has
                sources.append(link)
        table, targets = self._links.table, [link.target for link in sources]
        with self._lock:
            if state.why:
                raise PeerError(state.why)
            state.receipt = table.recv_pages(state.load.blocks, targets, timeout=2 * self._settings.timeout)
            state.writers = {link.peer: link for link in sources}
            return {link.peer: ticket for link, ticket in zip(sources, state.receipt.tickets, strict=True)}

    def _give_up(self, state: _Loading, why: str) -> None:
        """Refuse late data. Keep the blocks until writers with direct access confirm that they have stopped."""
        if state.why:
            return
        load, state.why = state.load, why
        log("net").warning("request %s of %s: %s", load.remote.request, load.remote.engine, why)
        state.until = time.monotonic() + self._settings.timeout
        if state.receipt is not None:
            state.receipt.close()
        for peer, link in list(state.writers.items()):
            if not link.target.direct:
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
        table, began = self._links.table, state.until - self._settings.timeout
        block = sum(region.nbytes for region in table.regions) // table.form.blocks
        self._links.stats.loaded(time.monotonic() - began, block * len(state.load.blocks))

    def _over(self, state: _Loading) -> bool:
        if not state.why:
            try:
                if state.receipt is not None and state.receipt.Test():
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
        if state.receipt is not None and not state.receipt.idle:
            return False  # a device is still copying arrived data
        self._failed.update(state.load.blocks)
        return True

    def failed(self) -> set[int]:
        """Blocks whose loads have failed since the last call."""
        with self._lock:
            out, self._failed = self._failed, set()
        return out
