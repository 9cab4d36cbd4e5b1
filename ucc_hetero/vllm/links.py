"""Links between workers of engines: an agent, its page table, and peers whose contracts fit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from ..errors import CollectiveTimeout, DeviceError, PeerError
from ..log import log
from ..rma import Agent, AgentPeer, ChannelError, PageTable, PageTarget
from .contract import Contract, ContractError, describe, element_type
from .settings import Settings
from .stats import Stats

#: Seconds between the reader's checks for shutdown and for expired state.
_MOMENT = 0.25
#: Timeout of a connection in seconds: a host that is off does not answer, and requests wait for it.
_CALL = 5.0
#: Number of simultaneous connection attempts, so that hosts that do not answer do not delay the others.
_CALLERS = 64


class Link(NamedTuple):
    """A worker of another engine: its caches by the numbers of a cache here and there, where layers are the same, and
    the seconds for which it keeps blocks."""

    peer: AgentPeer
    targets: dict[tuple[int, int], PageTarget]
    lease: float


def _usable(peer: AgentPeer) -> bool:
    """True if the peer can be used.

    libucp may give up the data connection while the message connection still works. The peer is then dropped, so that
    both sides connect again and later requests succeed.
    """
    if peer.alive and not peer.endpoint.alive:
        log("net").info("agent %r: the connection for data has ended", peer.name)
        peer.leave()
    return peer.alive


class Links:
    """All links of a worker. ``on(name, handler)`` sets the handler of a message: ``handler(link, message)``."""

    def __init__(self, settings: Settings, caches: dict[str, Any]) -> None:
        self.settings, self.stats = settings, Stats()
        self.contract, described = describe(settings, caches)
        name = f"{settings.engine}/{settings.rank}"
        self.agent = Agent(settings.listens, settings.secret, tls=settings.tls, name=name)
        self.tables: list[PageTable] = []
        try:
            for cache, (arrays, axes) in zip(self.contract.caches, described, strict=True):
                heads = settings.own_heads(arrays[0].shape[axes.index("H")]) if "H" in axes else None
                dtype = element_type(cache)
                self.tables.append(PageTable(self.agent.worker, arrays, axes, dtype=dtype, heads=heads))
        except (ValueError, BufferError) as error:
            self._withdraw()
            raise ContractError(f"the caches have no pages: {error}; set VLLM_KV_CACHE_LAYOUT=NHD") from error
        self._handlers: dict[str, Callable[[Link, dict[str, Any]], None]] = {}
        self._timers: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._links: dict[AgentPeer, Link | str] = {}  # or the reason why there is none
        self._calls: dict[str, Future[Link]] = {}
        self._callers = ThreadPoolExecutor(_CALLERS, "ucch-kv-call")
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="ucch-kv", daemon=True)
        if alone := settings.alone:
            log("net").warning("%s is %s: engines on other hosts do not reach it", settings.host, alone)
        log("net").info("%r at %s, contract %s", self.tables, self.agent.address, self.contract.digest)

    def on(self, name: str, handler: Callable[[Link, dict[str, Any]], None]) -> None:
        """Call ``handler`` for messages of this name. To be called before :meth:`start`."""
        self._handlers[name] = handler

    def each_moment(self, what: Callable[[], None]) -> None:
        """Call ``what`` regularly from the reader's thread."""
        self._timers.append(what)

    def start(self) -> None:
        """Start the reader, and compare contracts with the configured engines. Those that do not answer may be started
        later."""
        self._thread.start()
        for place, call in [(place, self.to(place)) for place in self.settings.prefill]:
            try:
                call.result()
            except ChannelError as error:
                log("net").warning("prefill engine %s cannot be asked yet: %s", place, error)

    def to(self, place: str) -> Future[Link]:
        """The link to the worker at an address, as a future. :class:`PeerError` if the worker refuses,
        :class:`ChannelError` if none listens there."""
        with self._changed:
            call = self._calls.get(place)
            if call is None or (call.done() and (call.exception() or not _usable(call.result().peer))):
                call = self._calls[place] = self._callers.submit(self._call, place)
        return call

    def pages(self, cache: int, blocks: list[int]) -> list[int]:
        """Numbers of the pages in a cache that are a request's blocks: vLLM's backends may divide blocks."""
        each = self.settings.groups[self.contract.caches[cache].group].block // self.tables[cache].form.size
        return [block * each + i for block in blocks for i in range(each)] if each > 1 else blocks

    def reach(self, places: Sequence[str], then: Callable[[list[Future[Link]]], None]) -> None:
        """Connect to several places, then call ``then`` in another thread. At most one attempt per place at a time; no
        thread waits."""
        self._await([self.to(place) for place in places], then)

    def _await(self, calls: list[Future[Link]], then: Callable[[list[Future[Link]]], None]) -> None:
        left = next((call for call in calls if not call.done()), None)
        if left is not None:
            left.add_done_callback(lambda _: self._await(calls, then))
            return
        with suppress(RuntimeError):  # RuntimeError: closed, so no worker is called any more
            self._callers.submit(then, calls)

    def _call(self, place: str) -> Link:
        peer = self.agent.connect(place, min(_CALL, self.settings.timeout))
        self._greet(peer, answer=False)
        with self._changed:
            self._changed.wait_for(lambda: peer in self._links or not peer.alive, self.settings.timeout)
            found = self._links.get(peer, "its worker does not answer" if peer.alive else "its worker has ended")
        if isinstance(found, str):
            peer.leave()
            raise PeerError(f"{place}: {found}")
        return found

    def _greet(self, peer: AgentPeer, answer: bool) -> None:
        tables = [table.descriptor.hex() for table in self.tables]
        told = {"contract": self.contract.told(), "tables": tables, "lease": self.settings.lease}
        with suppress(PeerError):
            peer.send({"op": "hello", "answer": answer, **told})

    def _read(self) -> None:
        due = time.monotonic()
        while not self._closed:
            with suppress(CollectiveTimeout):
                self._handle(*self.agent.receive(_MOMENT))
            if time.monotonic() >= due:
                due = time.monotonic() + _MOMENT
                for timer in self._timers:
                    timer()
                with self._changed:
                    self._links = {peer: link for peer, link in self._links.items() if _usable(peer)}
                    self._changed.notify_all()  # a peer may have ended before it has answered

    def _handle(self, peer: AgentPeer, said: Any) -> None:
        try:
            name = said["op"]
            if name == "hello":
                self._meet(peer, said)
            elif name == "refused":
                self._settle(peer, f"it refuses: {said['why']!s:.2000}")
            elif isinstance(link := self._links.get(peer), Link):
                self._handlers[name](link, said)
        except Exception as error:  # an error in one peer's message must not stop the reader
            log("net").warning("agent %r: %s: %s", peer.name, type(error).__name__, error)
            peer.leave()

    def _meet(self, peer: AgentPeer, said: dict[str, Any]) -> None:
        called = said["answer"] is not True  # the side that connected receives pages, the other side sends
        try:
            theirs = Contract.heard(said["contract"])
            sender, receiver = (self.contract, theirs) if called else (theirs, self.contract)
            why = "; ".join(receiver.differences(sender))
            if why:
                raise ContractError(why)
            targets = self._targets(peer, theirs, [bytes.fromhex(each) for each in said["tables"]])
            link = Link(peer, targets, float(said["lease"]))
            for target in targets.values() if called else ():
                if target.plan.heads > 0:
                    _ = target.targets  # open the target and compile its kernels before the first request
        except (ValueError, DeviceError) as error:
            self._settle(peer, str(error))
            peer.send({"op": "refused", "why": str(error)})
            log("net").error("caches of agent %r and of this worker cannot be exchanged: %s", peer.name, error)
            return
        if theirs.vllm != self.contract.vllm:
            log("net").warning("agent %r has vLLM %s, this is %s", peer.name, theirs.vllm, self.contract.vllm)
        log("net").info("agent %r: %r", peer.name, list(targets.values()))
        self._settle(peer, link)
        if called:
            self._greet(peer, answer=True)

    def _targets(self, peer: AgentPeer, theirs: Contract, tables: list[bytes]) -> dict[tuple[int, int], PageTarget]:
        each = self.contract.common(theirs).items()
        return {(i, j): self.tables[i].open(peer.endpoint, tables[j], layers=layers) for (i, j), layers in each}

    def _settle(self, peer: AgentPeer, link: Link | str) -> None:
        with self._changed:
            self._links[peer] = link
            self._changed.notify_all()

    def close(self) -> None:
        self._callers.shutdown(wait=False, cancel_futures=True)
        self._closed = True
        self._thread.join()
        for peer in self.agent.peers:
            peer.leave()
        self._withdraw()

    def _withdraw(self) -> None:
        for table in self.tables:
            with suppress(CollectiveTimeout):
                table.close()
        self.agent.close()
