"""Why a call failed: what the engine noted and what the arrival board knows of the other ranks, as an exception."""

from __future__ import annotations

from typing import Any

from ..bindings.ucc import status_name
from ..bootstrap.liveness import Board
from ..errors import CollectiveError, CollectiveTimeout, DeviceError, MismatchError, PeerError, RefusedError
from ..native.libraries import ffi, lib

__all__ = ["StaleError", "explain", "failure_of", "not_started"]


class StaleError(RefusedError):
    """Nothing was started: it has to be prepared anew, because an earlier call came to nothing."""


def failure_of(op: Any, board: Board, rank: int, label: str, timeout: float) -> CollectiveError:
    """The exception for a native operation that failed on ``rank``; ``label`` says what was called."""
    error = ffi.new("ucch_error *")
    lib.ucch_op_error(op, error)
    return explain(error, board, rank, label, timeout)


def not_started(rank: int, label: str, status: int) -> Exception:
    """The exception for a call that the engine did not begin."""
    if status == lib.UCCH_FAIL_PINNED:  # no failure of the communicator's: the other ranks are told
        return DeviceError(
            f"rank {rank}: {label} needs rings, and no pinned memory is left "
            f"({ffi.string(lib.ucch_device_error()).decode(errors='replace')}; {lib.ucch_channels_pinned() >> 20} MiB "
            "are pinned for rings): free communicators that are not needed, or set UCCH_WIRE_SLOT lower, or "
            "UCCH_CHANNELS=n, so that hosts take part in calls"
        )
    if status == lib.UCCH_STALE:
        return StaleError(f"rank {rank}: {label}: an earlier call came to nothing")
    why = status_name(status)
    if status in (lib.UCCH_FAIL_DEVICE, lib.UCCH_FAIL_MEMORY):
        why = ffi.string(lib.ucch_device_error()).decode(errors="replace") or "out of memory"
    return CollectiveError(f"rank {rank}: {label} could not be started ({why})")


def explain(error: Any, board: Board, rank: int, label: str, timeout: float) -> CollectiveError:
    """The exception for a ``ucch_error``; its ``peer`` is a slot of the board."""
    status, seq = int(error.status), int(error.seq)
    peer = board.rank_of(error.peer)
    where = f"rank {rank}: {label} (call {seq} of this communicator)"
    if status == lib.UCCH_FAIL_MISMATCH:
        other = board.label(peer, seq) or "something else"
        return MismatchError(f"{where}: rank {peer} called {other} instead")
    if status == lib.UCCH_FAIL_REFUSED:
        return RefusedError(f"{where}: {_refused(board.refusal(seq), seq)}")
    if status == lib.UCCH_FAIL_PEER:
        return PeerError(f"{where}: rank {peer} has left the job or died")
    if status == lib.UCCH_FAIL_TIMEOUT:
        missing = board.missing(seq)
        who = f"; on this host rank(s) {missing} have not called it" if missing else ""
        return CollectiveTimeout(
            f"{where}: timeout, not complete after {error.elapsed:.3g} s (UCCH_TIMEOUT={timeout:g}){who}"
        )
    if status == lib.UCCH_FAIL_BROKEN:
        return CollectiveError(f"{where}: another call of this communicator failed while this one was under way")
    ended = lib.ucch_endpoint_errors()
    lost = f"; {ended} operation(s) ended in endpoint errors, as a peer's host or process is gone" if ended else ""
    return CollectiveError(f"{where}: {status_name(status)} in step {error.step}{lost}")


def _refused(refusal: Any, seq: int) -> str:
    if refusal is None:
        return "another rank refused its part of it"
    what = "refused its part" if refusal.call == seq else f"refused call {refusal.call} before it"
    return f"rank {refusal.rank} {what}: {ffi.string(refusal.text).decode(errors='replace')}"
