"""Ranks that refuse a collective: ``mpirun -np N python refusal_cases.py``, N of 2 or more, runs every case.

Where all refuse it they go on. Else the communicator has ended on all ranks, each of which says who has refused what.
"""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from bad_input_cases import drawn
from mpi4py import MPI

from ucc_hetero import CollectiveError, Communicator, NotSupported, PersistentRequest, RefusedError, ucc
from ucc_hetero.native.libraries import lib

WORLD = MPI.COMM_WORLD


def add(a: Any, b: Any, datatype: Any) -> None:
    """Sum up two vectors."""
    np.frombuffer(b, np.float64)[:] += np.frombuffer(a, np.float64)


#: An operation of the user's own, which MPI runs.
OWN = MPI.Op.Create(add, commute=True)


def run(request: Any) -> None:
    """A call to its end, whatever its form."""
    if isinstance(request, PersistentRequest):
        request.Start()
    if request is not None:
        request.Wait()


def waited(request: Any) -> None:
    """A call that has begun, to its end: MPI's are persistent requests that have been started."""
    request.Wait()


class Cases:
    """Calls as they should be, and as one rank makes them wrongly, by name."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, p, me = comm, comm.size, comm.rank
        a, b = np.ones(4), np.zeros(4)
        blocks = [np.zeros(4 * p), [4] * p]
        root = blocks if me == 0 else None
        big = np.ones(1 << 17)
        bigs, others = ([np.ones(p << 15), [1 << 15] * p] for _ in range(2))
        more = [np.zeros(4 * p), [4] * p]
        self.sums = np.zeros(4)
        self.kept = comm.Allreduce_init(np.ones(4), self.sums)
        freed, well = (comm.Allreduce_init(big, big.copy()) for _ in range(2))
        freed.Free()
        self.calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "Allreduce": (lambda: comm.Allreduce(a, b), lambda: comm.Allreduce(a, b[:3])),
            "long": (lambda: comm.Allreduce(MPI.IN_PLACE, big), lambda: comm.Allreduce(big, b)),
            "Iallreduce": (lambda: comm.Iallreduce(a, b), lambda: comm.Iallreduce(a, b[:3])),
            "Allreduce_init": (lambda: comm.Allreduce_init(a, b), lambda: comm.Allreduce_init(a, b[:3])),
            "Start": (lambda: well, lambda: freed),
            "Bcast": (lambda: comm.Bcast(b, 1), lambda: comm.Bcast(b, root=p)),
            "Barrier": (comm.Barrier, lambda: comm.Allreduce(a, b, "AVERAGE")),
            "Gatherv": (lambda: comm.Gatherv(a, root), lambda: comm.Gatherv(None, None)),
            "Igatherv": (lambda: comm.Igatherv(a, root), lambda: comm.Igatherv(None, None)),
            "Gatherv_init": (lambda: comm.Gatherv_init(a, root), lambda: comm.Gatherv_init(None, None)),
            "Scatterv": (lambda: comm.Scatterv(root, b), lambda: comm.Scatterv(None, None)),
            "Iscatterv": (lambda: comm.Iscatterv(root, b), lambda: comm.Iscatterv(None, None)),
            "Alltoallv": (lambda: comm.Alltoallv(blocks, more), lambda: comm.Alltoallv(None, None)),
            "Ialltoallv": (lambda: comm.Ialltoallv(bigs, others), lambda: comm.Ialltoallv(None, None)),
            "by MPI": (lambda: comm.Allreduce(a, b, OWN), lambda: comm.Allreduce(a, None, OWN)),
            "I by MPI": (lambda: waited(comm.Iallreduce(a, b, OWN)), lambda: comm.Iallreduce(b, None, OWN)),
        }  # fmt: skip
        #: Those in which a rank may have done its part, rightly, before another one refuses its own.
        self.loose = {"Bcast", "Igatherv", "Iscatterv"}

    def good(self) -> None:
        """Calls of all forms, with what ranks know of earlier ones and without."""
        comm = self.comm
        p, me = comm.size, comm.rank
        for turn in range(2):
            out, data = np.zeros(3), np.full(2, float(me))
            comm.Allreduce(np.full(3, me + 1.0 + turn), out)
            assert (out == p * (p + 1) / 2 + p * turn).all()
            comm.Bcast(data, root=p - 1)
            assert (data == p - 1).all()
            gathered = np.full(p, -1.0)
            comm.Gatherv(np.full(1, float(me)), [gathered, [1] * p] if me == 0 else None)
            later = np.full(p, -1.0)
            comm.Igatherv(np.full(1, float(me)), [later, [1] * p] if me == 0 else None).Wait()
            assert me or ((gathered == np.arange(p)).all() and (later == np.arange(p)).all())
            self.sums[:] = -1
            run(self.kept)
            assert (self.sums == p).all()

    def refused(self, name: str, culprits: Sequence[int]) -> None:
        """Some ranks make a call wrongly, the others rightly."""
        comm, (right, wrong) = self.comm, self.calls[name]
        try:
            run(wrong() if comm.rank in culprits else right())
        except RefusedError as error:
            assert comm.rank not in culprits and named(error, culprits), (name, culprits, error)
        except (TypeError, ValueError, NotSupported):
            assert comm.rank in culprits
        else:
            assert comm.rank not in culprits and name in self.loose, f"{name} of {culprits} passed on rank {comm.rank}"
        if len(culprits) == comm.size:
            self.good()
        else:
            ended(comm, culprits)


def named(error: Exception, culprits: Sequence[int]) -> bool:
    """True if an error says which of some ranks refused the call, why, and what to do."""
    text = str(error)
    who = any(f"rank {culprit} refused " in text for culprit in culprits)
    return who and ("Error: " in text or "NotSupported: " in text) and "make a new one" in text


def ended(comm: Communicator, culprits: Sequence[int]) -> None:
    """All ranks learn of it, wherever they are, and every later call of any kind says so at once."""
    a, out = np.ones(2), np.zeros(2)
    with pytest.raises(CollectiveError) as caught:
        while True:  # one that has done its part, or refused it, may not know yet; others have ended
            comm.Barrier()
    assert named(caught.value, culprits), caught.value
    later: list[Callable[[], Any]] = [
        lambda: comm.Allreduce(a, out), lambda: comm.Iallreduce(a, out), lambda: comm.Bcast(a, comm.size),
        lambda: comm.Allreduce_init(a, out), lambda: comm.Isend(a, 0), lambda: comm.Recv(out),
    ]  # fmt: skip
    for call in later:
        with pytest.raises(CollectiveError, match="refused") as caught:
            call()
        assert named(caught.value, culprits), caught.value


def several_under_way(comm: Communicator) -> None:
    """Calls that were begun before a refused one end well, those behind it do not."""
    p, last, count = comm.size, comm.size - 1, 1 << 15
    sums = [np.full(count, -1.0) for _ in range(5)]
    requests = [comm.Iallreduce(np.ones(count), into) for into in sums[:2]]
    if comm.rank != last:
        requests += [comm.Iallreduce(np.ones(count), into) for into in sums[2:]]
    WORLD.Barrier()
    if comm.rank == last:
        with pytest.raises(ValueError):
            comm.Iallreduce(np.ones(count), sums[2][:-1])
    for request in requests[:2]:
        request.Wait()
    assert all((into == p).all() for into in sums[:2])
    for request in requests[2:]:
        with pytest.raises(RefusedError, match=f"rank {last} refused"):
            request.Wait()
    ended(comm, [last])


def before_others_come(comm: Communicator) -> None:
    """A rank refuses calls and makes others, long before the others come to the first one."""
    last, freed, out = comm.size - 1, comm.Barrier_init(), np.zeros(1)
    freed.Free()
    if comm.rank == last:
        for _ in range(3):
            with pytest.raises(ValueError, match="freed"):
                freed.Start()
        requests = [comm.Iallreduce(np.ones(1), out) for _ in range(10)]
        WORLD.Barrier()
        for request in requests:
            with pytest.raises(RefusedError, match=f"rank {last} refused"):
                request.Wait()
    else:
        WORLD.Barrier()
        with pytest.raises(RefusedError, match=f"rank {last} refused"):
            comm.Barrier()
    ended(comm, [last])


def behind(comm: Communicator) -> None:
    """Rank 0 makes calls late, when it is known that a rank has refused a later one: they end well on all ranks."""
    p, last, board = comm.size, comm.size - 1, comm._run.board
    counts = [1, 5000, 1 << 17] * 5
    sent = [np.random.default_rng().integers(-9, 9, count).astype(np.float32) for count in counts]
    out = [np.full(count, np.nan, np.float32) for count in counts]
    requests = [comm.Iallreduce(*both) for both in zip(sent, out, strict=True)] if comm.rank else []
    if comm.rank == last:
        with pytest.raises(ValueError):
            comm.Iallreduce(np.ones(4), np.ones(3))
    elif comm.rank:
        with pytest.raises(RefusedError, match=f"rank {last} refused its part"):
            comm.Iallreduce(np.ones(4), np.ones(4)).Wait()
    while p > 2 and board.refusal() is None:  # with two ranks nobody but rank 0 makes it
        time.sleep(0.001)
    for both in zip(sent, out, strict=True) if comm.rank == 0 else ():
        comm.Iallreduce(*both).Wait()
    for request in requests:
        request.Wait()
    for mine, found in zip(sent, out, strict=True):
        assert (found == sum(WORLD.allgather(mine))).all()
    ended(comm, [last])


def many_by_all(comm: Communicator) -> None:
    """All ranks refuse many calls, each at its own time."""
    freed = comm.Barrier_init()
    freed.Free()
    for turn in range(500):
        with pytest.raises(ValueError, match="freed"):
            freed.Start()
        if turn % 50 == 0:
            comm.Barrier()
    Cases(comm).good()


def while_a_team_is_made(comm: Communicator) -> None:
    """Ranks that have begun to make a team end that together, although its call has come to nothing meanwhile.

    What libucc sends for it goes by one tag: a team that ranks leave one by one leaves messages to the next one.
    """
    other, last, out = comm.Dup(), comm.size - 1, np.zeros(1 << 15)
    make = ucc.Context.team

    def slow(self: ucc.Context, places: Any, timeout: float, look: Callable[[], None]) -> ucc.Team:
        while not lib.ucch_board_broken(other._run.board.native):
            with suppress(RefusedError):
                look()
            time.sleep(0.001)
        return make(self, places, timeout, look)

    ucc.Context.team = slow  # type: ignore[method-assign]
    # Of a scan the ranks before the last one may do their parts without it.
    with pytest.raises(ValueError) if comm.rank == last else suppress(RefusedError):
        other.Iscan(np.ones(1 << 15), out[: -1 if comm.rank == last else None]).Wait()
    ucc.Context.team = make  # type: ignore[method-assign]
    ended(other, [last])
    WORLD.Barrier()
    other.Free()
    for _ in range(3):
        with comm.Dup() as another:
            Cases(another).good()


def refused_by_others(comm: Communicator) -> None:
    """A call that one rank has begun before all others refuse it."""
    data = np.zeros(2)
    begun = comm.Ibcast(data) if comm.rank == 0 else None
    WORLD.Barrier()
    if begun is None:
        with pytest.raises((ValueError, RefusedError)):  # the latter where another one was first
            comm.Ibcast(data, root=comm.size)
    else:
        with suppress(RefusedError):  # its own part may have been done before
            begun.Wait()
    ended(comm, range(1, comm.size))


def on_its_own(check: Callable[[Communicator], None]) -> None:
    """Run a case on a communicator of its own."""
    comm = Communicator(WORLD)
    check(comm)
    WORLD.Barrier()
    comm.Free()


def main() -> None:
    with Communicator(WORLD) as comm:
        kept = Cases(comm)
        kept.good()
        for name in kept.calls:
            kept.refused(name, range(comm.size))
        for name in (list(kept.calls)[index] for index in drawn(len(kept.calls))):
            culprit = WORLD.bcast(random.choice([0, comm.size - 1]))
            on_its_own(lambda comm, name=name, culprit=culprit: Cases(comm).refused(name, [culprit]))
        kept.good()  # others are not concerned
        for check in (several_under_way, before_others_come, behind, refused_by_others):
            on_its_own(check)
        kept.good()
        many_by_all(comm)
        while_a_team_is_made(comm)
    if WORLD.rank == 0:
        print(f"{len(kept.calls)} kinds of calls refused")


if __name__ == "__main__":
    main()
