"""State of one communicator for its calls: can it be used, and if not, or if a call has failed, why.

Reasons come from what the engine noted and what the arrival board knows of other ranks, as exceptions.
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

from ..bindings import quarantine
from ..bindings.ucc import status_name
from ..bootstrap import settings
from ..bootstrap.board import Board
from ..bootstrap.meeting import Seat
from ..bootstrap.membership import Membership
from ..errors import (
    CollectiveError,
    CollectiveTimeout,
    DeviceError,
    MismatchError,
    NotSupported,
    PeerError,
    RefusedError,
    RevokedError,
    TruncationError,
    UCCHError,
)
from ..native.libraries import ffi, lib
from ..native.waiting import progress_until
from ..trace import flight
from ..transport import wires
from .request import run_poll_hooks

_E = TypeVar("_E", bound=UCCHError)


#: End of error texts: the way out once a call was refused that other ranks make.
ANEW = "the communicator can no longer be used: free it and make a new one"


class Refusing:
    """A context in which an error is that of a call that this rank refuses."""

    def __init__(self, refuse: Callable[[Exception], None]) -> None:
        self._refuse = refuse

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            self._refuse(error)


class State:
    """One communicator as its calls see it: ranks, time limit, and if it can be used. Collective to create."""

    def __init__(self, mpi: Any, seat: Seat | None = None, queues: bool = True) -> None:
        timeout = settings.timeout()
        #: Seconds after which a call fails; 0 = never.
        self.timeout = 0.0 if math.isinf(timeout) else float(timeout)
        self.members = members = Membership(mpi, self.timeout or 3600.0, seat, queues)
        self.mpi, self.rank, self.size = mpi, members.rank, members.size
        self.topology, self.board = members.topology, members.board
        #: Why the communicator can no longer be used; empty while it can.
        self.broken = ""
        #: True if it is that of a parent process.
        self.orphaned = False
        self.refusing = Refusing(self.refuse)

    # --- its end ------------------------------------------------------------------------------------------------------

    def freed_text(self) -> str:
        """What to add to an error where ranks have freed the communicator, in which they take no more messages."""
        freed = self.board.freed_by()
        return f"; rank(s) {freed} have freed this communicator" if freed else ""

    def abandon(self, why: str) -> None:
        """From now on nothing is started, in Python or by the native engine."""
        self.broken = why
        lib.ucch_board_break(self.board.native)
        self.board.leave()  # ranks that come to later calls need not wait for the deadline

    def fail(self, failure: Exception, keep: object) -> None:
        """End the communicator after a failure, and keep what a library or stream may still use."""
        self.abandon(str(failure))
        if isinstance(failure, CollectiveTimeout):
            self.members.job.stale = True
        quarantine.keep(keep)

    def orphan(self) -> None:
        """Make the communicator unusable in a child that was forked: it is the parent's."""
        self.orphaned, self.broken = True, "it is the parent process's"
        lib.ucch_board_break(self.board.native)
        quarantine.keep(self)

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this one cannot make its next call.

        Where all ranks make the same mistake, all refuse the call, and go on. Else the communicator ends on all ranks.
        """
        if self.size > 1 and not self.broken and not isinstance(error, CollectiveError):
            self.board.refuse(f"{type(error).__name__}: {error}")
            self.ended_by_refusal(self.board.next)

    def ended_by_refusal(self, seq: int = 0) -> bool:
        """True if call ``seq`` or one before it was refused, by which the communicator ends; 0: if any was."""
        why = "" if self.broken else refusal_text(self.board, seq)
        if why:
            self.abandon(why)
        return bool(why)

    # --- reasons ------------------------------------------------------------------------------------------------------

    def failure_of(self, op: Any, label: str, timeout: float | None = None) -> CollectiveError:
        return explain(op.error, self.board, self.rank, label, self.timeout if timeout is None else timeout)

    def not_started(self, label: str, status: int) -> Exception:
        where = f"rank {self.rank}: {label}"
        # A rank may have refused it since the communicator was checked.
        if status == lib.UCCH_FAIL_BROKEN and (why := refusal_text(self.board, self.board.next)):
            return RefusedError(f"{where}: {why}; {ANEW}")
        if status == lib.UCCH_FAIL_BROKEN and lib.ucch_board_revoked(self.board.native):
            return RevokedError(f"{where}: {_TEXTS[lib.UCCH_FAIL_REVOKED][1]}")
        if status == lib.UCCH_FAIL_PINNED:  # no failure of the communicator's: the other ranks are told
            return DeviceError(
                f"{where} needs rings, and no pinned memory is left "
                f"({ffi.string(lib.ucch_device_error()).decode(errors='replace')}; {lib.ucch_channels_pinned() >> 20} "
                "MiB are pinned for rings): free communicators that are not needed, or set UCCH_WIRE_SLOT lower, or "
                "UCCH_CHANNELS=n, so that hosts take part in calls"
            )
        if status == lib.UCCH_FAIL_COLD:
            return NotSupported(f"{where}: make such a call once before capturing, so that its kernel is there")
        why = status_name(status)
        if status in (lib.UCCH_FAIL_DEVICE, lib.UCCH_FAIL_MEMORY):
            why = ffi.string(lib.ucch_device_error()).decode(errors="replace") or "out of memory"
        return CollectiveError(f"{where} could not be started ({why})")

    def earlier_failed(self, label: str) -> NoReturn:
        where = f"rank {self.rank}: {label}"
        first = lib.ucch_board_first_failure(self.board.native)
        if first == ffi.NULL and (why := refusal_text(self.board, self.board.next)):
            raise RefusedError(f"{where}: {why}; {ANEW}")
        if first == ffi.NULL:
            raise CollectiveError(f"{where} could not be started: an earlier call failed")
        failure = self.failure_of(first, "a call in a stream", 0.0)
        self.fail(failure, first)
        raise CollectiveError(f"{where} could not be started, because an earlier call failed: {failure}") from failure


def explain(error: Any, board: Board, rank: int, label: str, timeout: float) -> CollectiveError:
    """The exception for a ``ucch_error``; its ``peer`` is a slot of the board."""
    return with_record_path(_failure_for(error, board, rank, label, timeout))


#: Reason of what fails once libucp has thrown a message away.
LOST = (
    "this rank had no memory for a message that had come in, and libucp has thrown it away: give the rank more "
    "(ulimit -v); a communicator that is made anew can be used"
)


def with_record_path(failure: _E) -> _E:
    """A failure with the path of the flight record that the engine has written of it, if it has."""
    path = flight.usual_path()
    grave = isinstance(failure, CollectiveError) and not isinstance(
        failure, RefusedError | RevokedError | TruncationError
    )
    if path is not None and grave and os.path.exists(path):  # a full disk takes none, nor does another user's folder
        failure.args = (f"{failure}; the last calls are in {path} (ucch-doctor hang {shlex.quote(str(path.parent))})",)
    return failure


def _failure_for(error: Any, board: Board, rank: int, label: str, timeout: float) -> CollectiveError:
    status, seq = int(error.status), int(error.seq)
    peer = board.rank_of(error.peer)
    where = f"rank {rank}: {label} (call {seq} of this communicator)"
    if status == lib.UCCH_FAIL_MISMATCH:
        if peer < 0:  # found by a kernel
            return MismatchError(f"{where}: another rank replayed a graph with other calls")
        first = board.difference(seq)[0] if peer not in board.ranks else seq
        other = board.label(peer, seq) or "something else"
        earlier = f", where it should have been as call {first} here" if first < seq else " instead"
        return MismatchError(f"{where}: rank {peer} called {other}{earlier}")
    if status in _OF_A_PEER and max(board.hosts) > 0:
        progress_until(partial(_why_is_known, board, peer, seq), _WHY_S)
    if status in _BY_REFUSAL and (why := refusal_text(board, seq)):
        return RefusedError(f"{where}: {why}; {ANEW}")
    if status in _TEXTS:
        kind, text = _TEXTS[status]
        return kind(f"{where}: {text}")
    if status in _OF_A_PEER:
        return _failure_of_peer(status, board, peer, seq, rank, where)
    if status == lib.UCCH_FAIL_TIMEOUT:
        missing = board.missing(seq)
        who = f"; rank(s) {missing} have not called it" if missing else ""
        if elsewhere := [text for peer in missing if (text := board.elsewhere(peer))]:
            who += (
                f" (communicator {board.id}): {'; '.join(elsewhere[:4])}; use communicators in one order on all ranks"
            )
        return CollectiveTimeout(
            f"{where}: timeout, not complete after {error.elapsed:.3g} s ({settings.limit_text(timeout)}){who}"
        )
    ended = lib.ucch_endpoint_errors()
    lost = f"; {ended} operation(s) ended in endpoint errors, as a peer's host or process is gone" if ended else ""
    if not ended and lib.ucch_board_doubtful(board.native, seq):
        lost = "; an operation of another rank of this host ended in an endpoint error, as a peer is gone"
    return CollectiveError(f"{where}: {status_name(status)} in step {error.step}{lost}")


def _failure_of_peer(status: int, board: Board, peer: int, seq: int, rank: int, where: str) -> CollectiveError:
    """A peer takes no part in a call any more, or the connection with it has broken."""
    fate, failed = board.fate(peer), board.given_up(peer)
    if fate == lib.UCCH_LEFT:  # as ranks do that have seen calls differ
        first, odd = board.parted(seq)  # the first call that a rank made differently, and what it called
        called = board.label(odd, first) or "something else" if first else ""
        if not first:
            first, odd, called = board.difference(seq)
        if first:
            return MismatchError(f"{where}: rank {odd} called {called}, where it should have been as call {first} here")
    if status == lib.UCCH_FAIL_CONNECTION and (fate == lib.UCCH_THERE or (fate == lib.UCCH_LEFT and failed)):
        there = f", and call {failed} has failed there" if failed else ""
        return CollectiveError(f"{where}: {broken_text(board, peer)}{there}; {ANEW}")
    if fate <= lib.UCCH_LEFT and 0 < failed <= seq:
        why = f": {broken_text(board, peer)}" if board.is_cut(peer) else ""
        return CollectiveError(f"{where}: rank {peer} has given up, as call {failed} has failed there{why}; {ANEW}")
    return PeerError(f"{where}: {gone_text(board, peer, rank)}")


def broken_text(board: Board, peer: int) -> str:
    """What to say of a connection of network threads with a peer, which has broken."""
    return f"the connection with rank {peer} has broken: {wires.cut_text(board.link_to(peer))}"


def unheard_text(board: Board) -> str:
    """What to say of ranks of hosts to which a link was found to be cut; empty without one."""
    links = {rank: board.link_to(rank) for rank in range(len(board.hosts)) if board.is_cut(rank)}
    return f"; rank(s) {[*links]} cannot be heard: {wires.cut_text(max(links.values()))}" if links else ""


#: Failures with one reason each.
_TEXTS: dict[int, tuple[type[CollectiveError], str]] = {
    lib.UCCH_FAIL_REVOKED: (RevokedError, "a rank has revoked the communicator; Shrink() goes on without the dead"),
    lib.UCCH_FAIL_LOST: (CollectiveError, LOST),
    lib.UCCH_FAIL_OVERLAP: (
        CollectiveError,
        "two graphs with calls of this communicator ran at a time; replay them in one stream, or let one stream wait "
        "for the other",
    ),
    lib.UCCH_FAIL_BROKEN: (CollectiveError, "another call of this communicator failed while this one was under way"),
}
#: How calls and messages end where a refused call has ended the communicator: ranks leave it.
_BY_REFUSAL = (lib.UCCH_FAIL_REFUSED, lib.UCCH_FAIL_PEER, lib.UCCH_FAIL_CONNECTION, lib.UCCH_FAIL_BROKEN)

#: Statuses of what a peer's end may have caused: it is waited for why.
_OF_A_PEER = (lib.UCCH_FAIL_PEER, lib.UCCH_FAIL_CONNECTION)


#: Seconds in which a rank says why it has given a call up. That it has, rings of devices tell other hosts at once; who
#: has refused it or died goes beside the data, in turns of a tenth of a second (net/circle.c). The call has failed, and
#: nothing is under way that could end by then: no more is waited than it takes to name the right rank.
_WHY_S = 1.0


def _why_is_known(board: Board, peer: int, seq: int) -> bool:
    """True once this rank need not wait to learn why ``peer`` takes no part in call ``seq``.

    That a call has failed on ``peer`` is no reason: what made it fail, a rank of another host that refused a call, made
    another one or died, is heard of before or after that.
    """
    if refusal_text(board, seq) or board.difference(seq)[0] or board.parted(seq)[0] or board.dead() != -1:
        return True
    return bool(board.fate(peer)) and not board.given_up(peer)


def gone_text(board: Board, peer: int, rank: int) -> str:
    """What to say of a peer that is gone."""
    how = board.fate(peer)
    if peer == rank:
        return "the other hosts have given this rank up, as they did not hear of it for UCCH_HEARTBEAT seconds"
    if how == lib.UCCH_UNREACHABLE:
        return f"the host of rank {peer} is gone, or the link to it: nothing was heard for UCCH_HEARTBEAT seconds"
    if how == lib.UCCH_SILENT:
        many = "five times UCCH_HEARTBEAT seconds"
        return f"rank {peer} was stopped, or its host is overloaded: it said nothing for {many}"
    if how == lib.UCCH_LEFT:
        return f"rank {peer} has left the job or died, or a call has failed there, which ended this communicator for it"
    return f"rank {peer} has left the job or died"


def refusal_text(board: Board, seq: int = 0) -> str:
    """Which rank has refused a call, and why; empty while none has. ``seq``: only call ``seq`` and those before it."""
    found = board.refusal()
    if found is None or found[0] > seq > 0:
        return ""
    call, rank, text = found
    what = "refused its part" if call == seq else f"refused call {call}"
    return f"rank {rank} {what}: {text}" if rank >= 0 else "another rank has refused a call"


class Watch:
    """A call that is prepared or made of messages: ``show`` puts it on the board; timed, and compared."""

    def __init__(self, state: State, label: str, show: Callable[[str], tuple[int, int]] | None = None) -> None:
        self.state, self.board, self.label = state, state.board, label
        self.began = time.monotonic()
        self.seq, self.record = (show or self.board.publish)(label)

    def look(self) -> None:
        """Raise what makes the call hopeless: a peer that refused it, called another or is gone; the deadline."""
        run_poll_hooks()
        elapsed, timeout = time.monotonic() - self.began, self.state.timeout
        status, peer = self.board.verdict(self.seq)
        if not status:
            peer = lib.ucch_board_gone(self.board.native, self.seq)
            status = lib.UCCH_FAIL_PEER if peer != -1 else lib.UCCH_FAIL_TIMEOUT
        if status == lib.UCCH_FAIL_TIMEOUT and elapsed > 1 and (beyond := self.board.cut(elapsed)) != -1:
            status, peer = lib.UCCH_FAIL_CONNECTION, beyond
        if status == lib.UCCH_FAIL_TIMEOUT and not 0 < timeout < elapsed:
            return
        lib.ucch_record_end(self.record, status)
        error = ffi.new("ucch_error *", {"status": status, "seq": self.seq, "peer": peer, "elapsed": elapsed})
        raise explain(error, self.board, self.state.rank, self.label, timeout)

    def finish(self, nbytes: int) -> None:
        """Count the call, unless a rank has called something else."""
        if self.board.verdict(self.seq)[0]:
            self.look()
        lib.ucch_record_end(self.record, 0)
        lib.ucch_board_add(self.board.native, time.monotonic() - self.began, nbytes)
