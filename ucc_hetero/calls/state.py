"""State of one communicator for its calls: whether it can be used, and why it or a call has failed.

Reasons come from the engine and from what the arrival board shows of other ranks; they are raised as exceptions.
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
from ..native.libraries import c_text, ffi, lib
from ..native.waiting import progress_until
from ..trace import flight
from ..transport import wires
from .request import run_poll_hooks

_E = TypeVar("_E", bound=UCCHError)


#: In error texts after a call that ended the communicator.
ANEW = "the communicator can no longer be used: free it and make a new one"


class Refusing:
    """A context manager: an error inside means that this rank refuses the call."""

    def __init__(self, refuse: Callable[[Exception], None]) -> None:
        self._refuse = refuse

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            self._refuse(error)


class Limited:
    """What has a time limit, and an object in C that does the same and has the limit, too; None if there is none."""

    in_c: Any = None

    @property
    def timeout(self) -> float:
        """Seconds after which a call, or a wait for a message, fails; 0: never."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = seconds
        if self.in_c is not None:
            self.in_c.timeout = seconds


class State(Limited):
    """One communicator as its calls see it: ranks, time limit, usability. Collective to create."""

    def __init__(self, mpi: Any, seat: Seat | None = None, queues: bool = True) -> None:
        timeout = settings.timeout()
        #: Seconds after which a call fails; 0: never.
        self.timeout = 0.0 if math.isinf(timeout) else float(timeout)
        self.members = members = Membership(mpi, self.timeout or 3600.0, seat, queues)
        self.mpi, self.rank, self.size = mpi, members.rank, members.size
        self.topology, self.board = members.topology, members.board
        #: Why the communicator can no longer be used; empty while it can.
        self.broken = ""
        #: True in a child of the process that made it, and after ``MPI.Finalize``.
        self.orphaned = False
        self.refusing = Refusing(self.refuse)
        #: Objects of C: they have begun calls whose requests are not in ``under_way``.
        self.posters: list[Any] = []

    # --- its end ------------------------------------------------------------------------------------------------------

    def freed_text(self) -> str:
        """Text to add to an error if ranks have freed the communicator and take no more messages."""
        freed = self.board.freed_by()
        return f"; rank(s) {freed} have freed this communicator" if freed else ""

    def abandon(self, why: str) -> None:
        """Start nothing more, in Python or in the engine."""
        self.broken = why
        lib.ucch_board_break(self.board.native)
        self.board.leave()  # ranks in later calls need not wait for the deadline

    def fail(self, failure: Exception, keep: object) -> None:
        """End the communicator after a failure, and keep the objects that a library or stream may still use."""
        self.abandon(str(failure))
        if isinstance(failure, CollectiveTimeout):
            self.members.job.stale = True
        quarantine.keep(keep)

    def orphan(self) -> None:
        """Make the communicator unusable in a forked child, as it belongs to the parent, or after MPI.Finalize."""
        self.orphaned, self.broken = True, self.broken or "this process has no part in it"
        if self.board.native is not None:
            lib.ucch_board_break(self.board.native)
        quarantine.keep(self)

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this one refuses its next call.

        If all ranks make the same mistake all refuse the call, and can go on. If not the communicator ends on all
        ranks.
        """
        if self.size > 1 and not self.broken and not isinstance(error, CollectiveError):
            self.board.refuse(f"{type(error).__name__}: {error}")
            self.ended_by_refusal(self.board.next)

    def ended_by_refusal(self, seq: int = 0) -> bool:
        """True if call ``seq`` or an earlier one was refused, which ends the communicator; 0: any call."""
        why = "" if self.broken else refusal_text(self.board, seq)
        if why:
            self.abandon(why)
        return bool(why)

    # --- reasons ------------------------------------------------------------------------------------------------------

    def failure_of(self, op: Any, label: str, timeout: float | None = None) -> CollectiveError:
        return explain(op.error, self.board, self.rank, label, self.timeout if timeout is None else timeout)

    def not_started(self, label: str, status: int) -> Exception:
        where = f"rank {self.rank}: {label}"
        # A rank may have refused the call since the communicator was checked.
        if status == lib.UCCH_FAIL_BROKEN and (why := refusal_text(self.board, self.board.next)):
            return RefusedError(f"{where}: {why}; {ANEW}")
        if status == lib.UCCH_FAIL_BROKEN and lib.ucch_board_revoked(self.board.native):
            return RevokedError(f"{where}: {_TEXTS[lib.UCCH_FAIL_REVOKED][1]}")
        if status == lib.UCCH_FAIL_PINNED:  # the communicator has not failed: this rank refuses the call
            return DeviceError(
                f"{where} needs rings, and no pinned memory is left ({c_text(lib.ucch_device_error())}; "
                f"{lib.ucch_channels_pinned() >> 20} MiB are pinned for rings): free communicators that are not "
                "needed, or set UCCH_WIRE_SLOT lower, or UCCH_CHANNELS=n, so that hosts take part in calls"
            )
        if status == lib.UCCH_FAIL_COLD:
            return NotSupported(f"{where}: make such a call once before capturing, so that its kernel is there")
        why = status_name(status)
        if status in (lib.UCCH_FAIL_DEVICE, lib.UCCH_FAIL_MEMORY):
            why = c_text(lib.ucch_device_error()) or "out of memory"
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


#: Reason of failures after libucp has dropped a message.
LOST = (
    "this rank had no memory for a message that had come in, and libucp has thrown it away: give the rank more "
    "(ulimit -v); a communicator that is made anew can be used"
)


def with_record_path(failure: _E) -> _E:
    """Add the path of the flight record of a failure to its text, if the engine has written one."""
    path = flight.usual_path()
    grave = isinstance(failure, CollectiveError) and not isinstance(
        failure, RefusedError | RevokedError | TruncationError
    )
    if path is not None and grave and os.path.exists(path):  # none if the disk is full or the folder another user's
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
    if status == lib.UCCH_FAIL_DEVICE:
        return CollectiveError(f"{where}: {c_text(lib.ucch_device_last_error())}")
    ended = lib.ucch_endpoint_errors()
    lost = f"; {ended} operation(s) ended in endpoint errors, as a peer's host or process is gone" if ended else ""
    if not ended and lib.ucch_board_doubtful(board.native, seq):
        lost = "; an operation of another rank of this host ended in an endpoint error, as a peer is gone"
    return CollectiveError(f"{where}: {status_name(status)} in step {error.step}{lost}")


def _failure_of_peer(status: int, board: Board, peer: int, seq: int, rank: int, where: str) -> CollectiveError:
    """The exception for a peer that no longer takes part in a call, or whose connection has broken."""
    fate, failed = board.fate(peer), board.given_up(peer)
    if fate == lib.UCCH_LEFT:  # ranks leave when they see that calls differ
        first, odd = board.parted(seq)  # first call that a rank made differently, and that rank
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
    """Text for a broken connection of wires with a peer."""
    return f"the connection with rank {peer} has broken: {wires.cut_text(board.link_to(peer))}"


def unheard_text(board: Board) -> str:
    """Text for ranks of hosts to which a link is cut; empty if there are none."""
    links = {rank: board.link_to(rank) for rank in range(len(board.hosts)) if board.is_cut(rank)}
    return f"; rank(s) {[*links]} cannot be heard: {wires.cut_text(max(links.values()))}" if links else ""


#: Failures with a fixed reason.
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
#: Statuses of calls and messages that a refusal may have caused: ranks leave the communicator then.
_BY_REFUSAL = (lib.UCCH_FAIL_REFUSED, lib.UCCH_FAIL_PEER, lib.UCCH_FAIL_CONNECTION, lib.UCCH_FAIL_BROKEN)

#: Statuses that the death of a peer may cause: wait for the reason.
_OF_A_PEER = (lib.UCCH_FAIL_PEER, lib.UCCH_FAIL_CONNECTION)


#: Seconds to wait for the reason why a rank failed in a call. Rings of devices tell other hosts of a failure at once;
#: which rank refused or died is sent over links ten times a second (net/host_exchange.c). The call has failed already:
#: the wait only serves to name the right rank.
_WHY_S = 1.0


def _why_is_known(board: Board, peer: int, seq: int) -> bool:
    """True once the reason why ``peer`` takes no part in call ``seq`` is known.

    That the call failed on ``peer`` is no reason: its cause, a rank of another host that refused, made another call or
    died, may be reported before or after that.
    """
    if refusal_text(board, seq) or board.difference(seq)[0] or board.parted(seq)[0] or board.dead() != -1:
        return True
    return bool(board.fate(peer)) and not board.given_up(peer)


def gone_text(board: Board, peer: int, rank: int) -> str:
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
    """Which rank has refused a call, and why; empty if none has. ``seq``: only calls up to this one; 0: all."""
    found = board.refusal()
    if found is None or found[0] > seq > 0:
        return ""
    call, rank, text = found
    what = "refused its part" if call == seq else f"refused call {call}"
    return f"rank {rank} {what}: {text}" if rank >= 0 else "another rank has refused a call"


class Watch:
    """A call that is being prepared or is made of messages: on the board (by ``show``), with a deadline, and compared
    with others."""

    def __init__(self, state: State, label: str, show: Callable[[str], tuple[int, int]] | None = None) -> None:
        self.state, self.board, self.label = state, state.board, label
        self.began = time.monotonic()
        self.seq, self.record = (show or self.board.publish)(label)

    def check(self) -> None:
        """Raise if the call can no longer succeed: a peer refused it, made another call, or is gone; or the deadline
        has passed."""
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
        """Count the call; raise if a rank has called something else."""
        if self.board.verdict(self.seq)[0]:
            self.check()
        lib.ucch_record_end(self.record, 0)
        lib.ucch_board_add(self.board.native, time.monotonic() - self.began, nbytes)
