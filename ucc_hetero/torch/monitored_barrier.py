"""Barrier that names the ranks which do not come, over the group's store."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

#: Seconds that stand for "no limit" where a store needs one.
NO_LIMIT = 1e7

#: Word of rank 0 in the store when all ranks have arrived.
_ALL = b"all"
#: Seconds by which the others wait longer than rank 0, for its word on who is missing.
_GRACE = 1.0


def monitored_barrier(store: Any, key: str, place: tuple[int, int], seconds: float, wait_all_ranks: bool) -> None:
    """Wait for all ranks; on rank 0 the error says which have not come, in the words of gloo's.

    ``key`` is that of this barrier alone, ``place`` rank and size.
    Rank 0 looks for the first rank that is missing, or for all that are. The group stays usable.
    """
    rank, size = place
    if rank == 0:
        _collect(store, key, size, seconds, wait_all_ranks)
        return
    store.set(f"{key}/{rank}", b"here")
    done = f"{key}/done"
    if not _came(store, done, seconds + _GRACE):
        found = f"nothing came within {seconds:g} s"
    elif (word := store.get(done)) != _ALL:
        found = word.decode()
    else:
        return
    raise dist.DistBackendError(
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
        f"rank 0: {found}"
    )


def _collect(store: Any, key: str, size: int, seconds: float, wait_all_ranks: bool) -> None:
    """Wait for the other ranks' words, and tell them what became of it."""
    end = time.monotonic() + seconds
    missing: list[int] = []
    for other in range(1, size):
        left = end - time.monotonic()
        if left <= 0 and not missing:
            raise dist.DistBackendError(f"Rank 0 timed out in monitoredBarrier after {seconds * 1000:g} ms.")
        if not _came(store, f"{key}/{other}", max(left, 1e-3)):
            missing.append(other)
            if not wait_all_ranks:
                break
    who = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    verdict = f"{who} failed to pass monitoredBarrier in {seconds * 1000:g} ms" if missing else ""
    store.set(f"{key}/done", verdict.encode() or _ALL)
    if missing:
        raise dist.DistBackendError(f"Rank 0: {verdict}")


def _came(store: Any, key: str, seconds: float) -> bool:
    if store.check([key]):
        return True
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError:  # the store's time is up
        return False
    return True
