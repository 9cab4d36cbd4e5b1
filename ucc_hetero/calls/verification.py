"""Verification of a sample of calls (``UCCH_CHECK=data``), by checksums of the data they have read and written.

All ranks sample the same calls and keep copies of their data. Checksums are exchanged over MPI or torch's store, one
call after the other, in the order of their starts. If other ranks have not finished a call when it ends on this rank,
it is judged in a later call or in ``Free``.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np

from .. import env, log
from ..bindings import quarantine
from ..bootstrap.faults import EXCHANGE_ERRORS
from ..buffers import Buffer, pack
from ..buffers import copy as copy_elements
from ..device import stream_handle
from ..engine.lowering import Execution
from ..errors import DataError
from ..native.libraries import ffi, lib
from ..native.waiting import progress_until
from ..planner.collectives import ROWS, Shape
from ..planner.select import Choice, make_plan
from ..trace import flight
from ..transport.bounce import Bounce
from .arguments import Bound, CallSpec, Completion, bind, label_of, reduction_of
from .checksums import PIECES, Fault, MovedData, ReducedData, Span, length
from .request import Request, poll_hooks
from .state import State, with_record_path

#: Seconds: how long the end of a call waits for other ranks' checksums; how long ranks may search for the wrong
#: element; how long ``Free`` waits once a rank is known to be gone.
_MOMENT, _SEARCH_S, _GRACE_S = 0.5, 10.0, 1.0
#: Words before a row: the call's number, and whether it can be compared.
_HEAD = 2


class _Sample:
    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.label, self.call = name, 0
        self.bound: Bound | None = None
        self.sums: MovedData | ReducedData | None = None
        self.over = False
        self.read: Callable[[Buffer], Any] = _no_memory

    def take(self, rank: int) -> None:
        assert self.bound is not None and self.sums is not None
        self._refresh()
        bound = self.bound
        call, row = bound.call, ROWS[bound.call.collective]
        buffer = bound.send
        if buffer is None and (bound.in_place or (row.name == "bcast" and rank == call.root)):
            buffer = bound.recv
        if buffer is None:
            return
        self.sums.before = self.read(buffer)
        if bound.in_place and row.send is ROWS["allgather"].send:
            own, displs, size = Shape(call).own(rank), bound.recv_displs, buffer.dtype.itemsize
            start = displs[rank] if displs else own.offset
            self.sums.before = self.sums.before[start * size : (start + own.count) * size]

    def finish(self, failed: bool, call: int) -> None:
        """Copy what the call has written. A failed call is not compared."""
        self.call = call
        if failed:
            self.sums = None
        elif self.sums is not None and self.bound is not None and self.bound.recv is not None:
            self._refresh()
            self.sums.after = self.read(self.bound.recv)
        self.bound, self.read = None, _no_memory
        self.over = True

    def _refresh(self) -> None:
        """Copy blocks that are not contiguous to the packed copies that the call used."""
        assert self.bound is not None
        for each in self.bound.copies:
            copy_elements(each.original, each.copy)

    def row(self, ranks: int) -> Any:
        words = np.zeros(_HEAD + length(self.name, ranks), np.int64)
        words[0] = self.number
        if self.sums is not None:
            words[1:_HEAD] = 1
            words[_HEAD:] = self.sums.first()
        return words


def _no_memory(buffer: Buffer) -> Any:
    raise AssertionError("the call is over")


class Verification:
    """Samples of one communicator's calls: one in ``every``. Collective to create."""

    def __init__(self, state: State, every: int, used: Mapping[str, tuple[Choice, str, Execution]]) -> None:
        self._state, self._every, self._used = state, every, used
        self._mpi = state.mpi.Dup()
        self._number = 0
        #: Samples not judged yet, in call order; and the exchange for the first of them, with its words.
        self._queue: deque[_Sample] = deque()
        self._exchange: tuple[Any, Any, Any] | None = None
        self._lock = threading.RLock()
        self._failure: DataError | None = None
        #: The failure, until it has been raised.
        self._not_raised: DataError | None = None
        poll_hooks.append(self.attend)
        #: Numbers of samples that were compared, and that were not.
        self._judged = [0, 0]

    # --- calls --------------------------------------------------------------------------------------------------------

    def blocking(
        self, run: Callable[..., None], name: str, send: Any, recv: Any, op: Any = None, root: Any = -1,
        counts: Any = None, stream: Any = None,
    ) -> None:  # fmt: skip
        arguments = name, send, recv, op, root, counts
        sample = self.take(CallSpec(*arguments)) if stream is None else None
        if sample is None:
            run(*arguments, stream)
        else:
            self.within(sample, run, *arguments)
            self.end(sample)

    def begin(self, begin: Callable[..., Request], call: CallSpec, stream: Any, completion: Completion) -> Request:
        """As ``begin``. The host waits for the end of a sampled call in a stream."""
        try:
            stream = None if stream is None else stream_handle(stream)
        except TypeError:
            return begin(call, stream, completion)  # raises the error
        if stream is not None and lib.ucch_stream_captures(stream):
            return begin(call, stream, completion)
        sample = self.take(call, stream)
        if sample is None:
            return begin(call, stream, completion)
        request: Request = self.within(sample, begin, call, stream, completion)
        if stream is None and not request.finished:
            request.at_end(lambda failed: self.end(sample, failed))
        else:
            self.within(sample, request.Wait)
            self.end(sample)
        return request

    def around(
        self, call: CallSpec, start: Callable[[], int], finish: Callable[[int, Any], None]
    ) -> tuple[Callable[[], int], Callable[[int, Any], None]]:
        """(``start``, ``finish``) of a persistent call, each start of which may be sampled."""
        sample: _Sample | None = None

        def started() -> int:
            nonlocal sample
            sample = self.take(call)
            return start() if sample is None else int(self.within(sample, start))

        def finished(state: int, status: Any) -> None:
            if sample is None:
                finish(state, status)
            else:
                self.within(sample, finish, state, status)
                self.end(sample)

        return started, finished

    def within(self, sample: _Sample, make: Callable[..., Any], *arguments: Any) -> Any:
        """Run a part of a sampled call; if it raises, the sample has failed."""
        try:
            return make(*arguments)
        except BaseException:
            self.end(sample, failed=True)
            raise

    def take(self, call: CallSpec, stream: Any = None) -> _Sample | None:
        """Begin a sample before the call starts; None if the call is not sampled."""
        with self._lock:
            if not self._state.broken:
                self._advance()
            self._number += 1
            chosen = zlib.crc32(self._number.to_bytes(8, "little")) % self._every == 0  # not periodic
            if not chosen or self._state.size == 1 or call.name == "barrier" or self._state.broken:
                return None
            sample = _Sample(self._number, call.name)
            self._queue.append(sample)
        try:
            self._fill(sample, call, stream)
        except Exception as error:  # the call itself raises it
            sample.sums = None
            log.log("coll").debug("%s is not verified: %s", call.name, error)
        return sample

    def _fill(self, sample: _Sample, call: CallSpec, stream: Any) -> None:
        rank = self._state.rank
        bound = bind(call, self._state.size, rank)
        row, dtype = ROWS[bound.call.collective], bound.dtype
        how, op = reduction_of(call.name, dtype, call.op, rank)
        if dtype is None or (row.reduces and (how is None or bound.local)):
            return
        sample.label, sample.read = label_of(call.name, bound, op), lambda buffer: self._read(buffer, stream)
        sample.bound = bound
        if how is not None:
            sample.sums = ReducedData(bound.call, how, dtype, rank)
        else:
            sample.sums = MovedData(bound.call, dtype, rank, (bound.send_displs, bound.recv_displs))
        sample.take(rank)

    @cached_property
    def _bounce(self) -> Bounce:
        assert self._state.members.runtime is not None
        return Bounce(self._state.members.runtime)

    def _read(self, buffer: Buffer, stream: Any) -> Any:
        """The bytes of a buffer as of when ``stream`` reaches this point."""
        if buffer.vendor == "host":
            packed = pack(buffer)
        else:
            packed = self._bounce.memory_for(buffer)
            self._bounce.down(buffer, packed, stream)
            if stream is not None:
                self._bounce.wait(self._bounce.mark(stream))
        if not packed.nbytes:
            return np.empty(0, np.uint8)
        return np.frombuffer(ffi.buffer(ffi.cast("char *", packed.ptr), packed.nbytes), np.uint8).copy()

    def end(self, sample: _Sample, failed: bool = False) -> None:
        """End a sample and judge samples. ``DataError`` if data of this or an earlier call is wrong."""
        with self._lock:
            if failed and self._state.broken and sample in self._queue:  # ranks may have left over earlier samples
                progress_until(lambda: self._is_judged() or self._queue[0] is sample, _MOMENT, longest=1e-4)
            sample.finish(failed, int(lib.ucch_board_next(self._state.board.native)) - 1)
            if not (failed or self._state.broken):
                progress_until(lambda: self._is_judged(sample), _MOMENT, longest=1e-4)

    # --- judgement ----------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Exchange the checksums of ended samples, in order, and judge them."""
        while self._failure is None and self._queue and self._queue[0].over:
            try:
                if self._exchange is None:
                    self._exchange = self._start(self._queue[0].row(self._state.size))
                if not self._exchange[0].Test():
                    return
            except EXCHANGE_ERRORS as error:
                log.log("coll").debug("calls are not verified any more: %s", error)
                self._queue.clear()
                return
            rows, self._exchange = self._exchange[2], None
            self._judge(self._queue.popleft(), rows)

    def attend(self) -> None:
        """Advance while this rank waits in another call: other ranks may wait for its checksums."""
        if not self._queue or not self._queue[0].over or not self._lock.acquire(blocking=False):
            return
        try:
            if not self._state.broken:
                self._advance()
        except DataError as found:
            self._not_raised = found
        finally:
            self._lock.release()

    def found(self) -> DataError | None:
        """The failure found by :meth:`attend`, once; then None."""
        found, self._not_raised = self._not_raised, None
        return found

    def _is_judged(self, sample: _Sample | None = None) -> bool:
        """Advance. True if ``sample`` has been judged, or without one all samples."""
        self._advance()
        return sample not in self._queue if sample else not self._queue

    def _start(self, mine: Any) -> tuple[Any, Any, Any]:
        rows = np.zeros((self._state.size, len(mine)), np.int64)
        return self._mpi.Iallgather(mine, rows), mine, rows

    def _judge(self, sample: _Sample, rows: Any) -> None:
        sums = sample.sums
        compared = sums is not None and bool(rows[:, 1].all() and (rows[:, 0] == sample.number).all())
        self._judged[not compared] += 1
        if sums is None or not compared:
            return
        span, ranks = sums.suspect(rows[:, _HEAD:])
        if span is None:
            return
        fault = sums.vague(span, ranks)
        with suppress(*EXCHANGE_ERRORS):
            fault = self._search(sums, span, ranks) or fault
        where = f"rank {self._state.rank}: {sample.label} (call {sample.call} of this communicator)"
        flight.failed()
        self._failure = with_record_path(DataError(f"{where}: {fault.text}; {self._route_text(sample, fault.ranks)}"))
        self._state.abandon(str(self._failure))
        raise self._failure

    def _search(self, sums: MovedData | ReducedData, span: Span, ranks: Sequence[int]) -> Fault | None:
        if span.stop < 0:
            span = span._replace(stop=int(self._gather_words(np.array([sums.count(span)])).max()))
        span = span._replace(pieces=min(PIECES, span.stop - span.start))
        while True:
            answer = self._gather_words(sums.words(span))
            if span.stop - span.start == 1:
                return sums.describe(answer, span, ranks)
            number = sums.worse(answer, span)
            if number < 0:
                return None
            span = span.piece(number)

    def _gather_words(self, mine: Any) -> Any:
        """Gather the words of all ranks. ``OSError`` if they have not arrived in time."""
        request, _, rows = self._start(mine)
        with quarantine.unless_over((mine, rows)):
            if not progress_until(request.Test, _SEARCH_S, longest=1e-4):
                raise TimeoutError("other ranks do not take part")
        return rows

    def _route_text(self, sample: _Sample, ranks: Sequence[int]) -> str:
        """The algorithm, and the steps of the first rank with wrong data, as text."""
        choice = self._used.get(sample.label) or self._used.get(f"{sample.label} host")
        if choice is None or sample.sums is None:
            return "it is not known which way it went"
        rank = ranks[0] if ranks else self._state.rank
        plan = make_plan(self._state.members.topology, sample.sums.call, choice[0], rank)
        steps = [
            f"{step.kind} among ranks {list(step.ranks)}" for *_, step in plan.steps_of(rank) if step.link != "local"
        ]
        return f"it went by the algorithm {choice[0].algorithm}: on rank {rank} by {', '.join(dict.fromkeys(steps))}"

    def close(self, together: bool) -> DataError | None:
        """Judge the remaining samples if all ranks are closing (``together``); returns the failure, if any."""
        poll_hooks.remove(self.attend)
        failure = self.found()
        if not together:
            return failure
        gone = math.inf

        def is_abandoned() -> bool:
            """True if a rank has been known to be gone for ``_GRACE_S`` seconds."""
            nonlocal gone
            if gone == math.inf and self._state.board.dead() >= 0:
                gone = time.monotonic()
            return time.monotonic() > gone + _GRACE_S

        try:
            if not self._state.broken:
                progress_until(self._is_judged, self._state.timeout, is_abandoned)
        except DataError as found:
            failure = found
        if self._exchange is None:
            self._mpi.Free()
        log.log("coll").info(
            "%d calls of %d were verified, %d could not be", self._judged[0], self._number, self._judged[1]
        )
        return failure


def sampled() -> int:
    """N if one call in N is to be verified; 0: none."""
    wanted = env.get("CHECK")
    return wanted.every if isinstance(wanted, env.Sampling) else 0
