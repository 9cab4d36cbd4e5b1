"""A lane: one communicator of a group, on which collectives are posted one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..api.comm import Communicator
from ..calls.dispatch import Runner
from ..calls.failure import not_started
from ..calls.prepare import KINDS
from ..calls.request import SLICE, Request, finished
from ..engine.lowering import Program
from ..native.libraries import ffi, lib

__all__ = ["GroupCommunicator", "Lane"]

_NULL = ffi.NULL
_cast = ffi.cast
_run = lib.ucch_program_run

#: Seconds that stand for "no limit" where one is needed.
_LONG = 1e7


class GroupCommunicator(Communicator):
    """One of a torch group: whoever waits for a message lets a stream wait."""

    _arenas = True


class Lane:
    """One communicator with the locks that order what is posted on it.

    ``check_aborted`` raises when the group has been aborted; blocking calls ask it now and then.
    """

    def __init__(self, comm: Communicator, check_aborted: Callable[[], None]) -> None:
        self.comm, self.run = comm, comm._run
        self.messages = comm._messages
        self._check_aborted = check_aborted
        self._lock = threading.RLock()
        #: Messages have one of their own: a peer may come to a collective only after a message of ours.
        self._message_lock = threading.RLock()
        #: Programs of plain calls, by all that tells such calls apart but their addresses.
        self._kept: dict[tuple[Any, ...], Program] = {}
        #: Those of this epoch of the runner's.
        self._epoch = 0

    def call(self, name: str, send: Any, recv: Any, op: Any, root: int, counts: Any, seconds: float) -> None:
        """Run a collective on host memory to its end in this thread."""
        key = None
        if counts is None and type(send) is not list and type(recv) is not list:
            like = recv if recv is not None else send
            if like is not None:
                key = (name, like.dtype, like.numel(), send is None, recv is None, op, root)
        with self._refusing(name), self._lock:
            run = self._limited(seconds)
            if run.epoch != self._epoch:
                self._kept.clear()
                self._epoch = run.epoch
            program = self._kept.get(key) if key is not None else None
            if program is not None and not run.broken:
                outof = _NULL if send is None else _cast("void *", send.data_ptr())
                into = _NULL if recv is None else _cast("void *", recv.data_ptr())
                state = _run(program.handle, outof, into, seconds, SLICE)
                if state == 1:
                    return
                if state >= 0:
                    self._wait(program, state, (send, recv), name)
                    return
            self._first(key, name, send, recv, op, root, counts)

    @contextmanager
    def _refusing(self, name: str) -> Iterator[None]:
        """Tell the other ranks of a collective that this one cannot make."""
        try:
            yield
        except Exception as error:
            self.run.refuse_call(name, error)
            raise

    def _limited(self, seconds: float) -> Runner:
        """The runner, with the time limit of the call to come; making teams for it is limited likewise."""
        run = self.run
        if run.timeout != seconds:
            run.timeout = seconds
            run.members.teams.timeout = seconds or _LONG
        return run

    def _first(self, key: Any, name: str, send: Any, recv: Any, op: Any, root: int, counts: Any) -> None:
        """A call of a kind that is not kept: bound, planned and lowered by the runner."""
        run = self.run
        run._ready()
        # Counts that only some ranks know are not exchanged: a rank may make the same call asynchronously, and its
        # peers would wait for its part of the exchange.
        prepared = run._prepared.prepare(name, send, recv, op, root, counts, exchange=False)
        if prepared is None:
            return
        state = _run(prepared.program.handle, prepared.send, prepared.recv, run.timeout, SLICE)
        if state < 0:
            raise not_started(run.rank, prepared.label, state)
        self._wait(prepared.program, state, prepared, prepared.label)
        prepared.finish()
        if key is None or not prepared.repeatable or not _filled(send, recv):
            prepared.give_back()
            return
        if len(self._kept) >= KINDS:
            self._kept.clear()
        self._kept[key] = prepared.program

    def _wait(self, program: Program, state: int, keep: object, label: str) -> None:
        while not state:
            try:
                state = lib.ucch_wait(program.op, SLICE)
                if not state:
                    self._check_aborted()
            except BaseException:
                if not self.run.broken:
                    self.run._break(f"{label} was interrupted")
                abandoned.append((program, keep))
                raise
        self.run._judge(program, state, keep, label)

    def start(self, name: str, send: Any, recv: Any, op: Any, root: int, counts: Any, seconds: float) -> Request:
        """Start a collective; the progress thread is to be woken if it does not end at once."""
        with self._refusing(name), self._lock:
            run = self._limited(seconds)
            run._ready()
            prepared = run._prepared.prepare(name, send, recv, op, root, counts, exchange=False)
            return finished() if prepared is None else run._begin(prepared, watched=False)

    def start_on(
        self, name: str, send: Any, recv: Any, op: Any, root: int, counts: Any, seconds: float, stream: int
    ) -> tuple[Request, bool]:
        """Start a collective when ``stream`` gets there; also whether the stream waits for its end.

        Where streams must not wait for a call (docs/gpu.md), the host has to; it can do so later. They are not held for
        one: torch allocates whenever it likes.
        """
        with self._lock:
            run = self._limited(seconds)
            return run.start_on(stream, name, send, recv, op, root, counts, later=True, hold=False)

    def send(self, tensor: Any, dest: int, tag: int, seconds: float, stream: int | None = None) -> Request:
        """Start a send; of what is there when ``stream`` gets there."""
        with self._message_lock:
            messages = self.messages
            messages.timeout = seconds
            return messages.start(messages.outgoing(tensor, dest, tag, stream=stream))

    def check_message(self, outgoing: bool, peer: int, tag: int) -> None:
        """Refuse a peer or a tag that cannot be."""
        messages = self.messages
        wild = not outgoing and peer < 0
        messages.check("dest" if outgoing else "source", messages.any_source if wild else peer, tag)

    def receive(
        self, tensor: Any, source: int, tag: int, seconds: float, stream: int | None = None, *, taken: bool = False
    ) -> Request:
        """Start a receive, which may write once ``stream`` gets there; ``source`` -1 is any, ``taken`` as that of
        :meth:`.p2p.Messages.incoming`."""
        with self._message_lock:
            messages = self.messages
            messages.timeout = seconds
            origin = messages.any_source if source < 0 else source
            return messages.start(messages.incoming(tensor, origin, tag, stream=stream, taken=taken))


def _filled(send: Any, recv: Any) -> bool:
    return (send is None or send.numel() > 0) and (recv is None or recv.numel() > 0)


#: Programs and tensors of calls that were interrupted while the libraries still used them; never freed.
abandoned: list[object] = []
