"""A rank that refuses a collective: ``mpirun -np N python refusal_cases.py``, N of 2 or more, runs every case.

All others learn of it at once, whoever it was, and the next call of any form is right on all ranks.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from ucc_hetero import Communicator, PersistentRequest, RefusedError, ucc

WORLD = MPI.COMM_WORLD


def run(request: Any) -> None:
    """A call to its end, whatever its form."""
    if isinstance(request, PersistentRequest):
        request.Start()
    if request is not None:
        request.Wait()


class Cases:
    """Calls as they should be, and as one rank makes them wrongly, by name."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, p, me = comm, comm.size, comm.rank
        a, b = np.ones(4), np.zeros(4)
        a.setflags(write=False)  # what `kept` sends: a rank's part of a refused call may have been done
        blocks = [np.zeros(4 * p), [4] * p]
        root = blocks if me == 0 else None
        big = np.ones(1 << 17)
        bigs, others = ([np.ones(p << 15), [1 << 15] * p] for _ in range(2))
        more = [np.zeros(4 * p), [4] * p]
        self.sums = np.zeros(4)
        self.kept = comm.Allreduce_init(a, self.sums)
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
        }  # fmt: skip
        #: Those in which a rank may have done its part, rightly, before another one refuses its own.
        self.loose = {"Bcast", "Igatherv", "Iscatterv"}
        near = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        self.far = near.size < p
        if self.far:  # a rank that has not waited may hear of it from another host in its next call
            for name in self.loose:
                del self.calls[name]
        near.Free()

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

    def refused(self, name: str, culprits: Iterable[int], *, late: bool = False) -> None:
        """Some ranks make a call wrongly; afterwards all is well. ``late``: rank 0 comes when others know of it."""
        comm, (right, wrong) = self.comm, self.calls[name]
        who = "|".join(map(str, culprits))
        if late and comm.rank == 0:
            for other in range(1, comm.size):  # the others wait for it to make their team
                WORLD.recv(source=other)
        elif late and comm.rank not in culprits:
            WORLD.send(None, 0)
        try:
            run(wrong() if comm.rank in culprits else right())
        except RefusedError as error:
            assert comm.rank not in culprits and f"rank {who}" in str(error).replace(f"rank {comm.rank}:", ""), error
            assert "Error: " in str(error)
        except (TypeError, ValueError):
            assert comm.rank in culprits
            if late:
                WORLD.send(None, 0)
        else:
            assert comm.rank not in culprits and name in self.loose, f"{name} passed on rank {comm.rank}"
        WORLD.Barrier()
        self.good()


def several_under_way(comm: Communicator) -> None:
    """Calls that others began behind a refused one come to nothing, too; those that they began before it end."""
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
    for i in range(3):
        if comm.rank == last and i == 0:
            continue  # it has refused this one
        with pytest.raises(RefusedError, match=f"rank {last} refused"):
            (comm.Iallreduce(np.ones(count), sums[2 + i]) if comm.rank == last else requests[2 + i]).Wait()


def many_in_a_row(comm: Communicator) -> None:
    """A rank that refuses many calls before others come to them: none of them is missed.

    It waits for the others once there is no room for more; ten have it.
    """
    last, freed = comm.size - 1, comm.Barrier_init()
    freed.Free()
    if comm.rank != last:
        WORLD.recv(source=last)
    for number in range(100):
        if comm.rank == last and number == 10:
            [WORLD.send(None, other) for other in range(last)]
        with pytest.raises(ValueError if comm.rank == last else RefusedError, match="freed"):
            freed.Start() if comm.rank == last else comm.Barrier()


def while_a_team_is_made(comm: Communicator) -> None:
    """Ranks that have begun to make a team end that together, although its call has come to nothing meanwhile.

    What libucc sends for it goes by one tag: a team that ranks leave one by one leaves messages to the next one.
    """
    other, last, out = comm.Dup(), comm.size - 1, np.zeros(1 << 15)
    make = ucc.Context.team

    def slow(self: ucc.Context, places: Any, timeout: float, look: Callable[[], None]) -> ucc.Team:
        ucc.Context.team = make  # type: ignore[method-assign]
        WORLD.send(None, last)
        WORLD.recv(source=last)
        time.sleep(0.3)  # all others have most likely heard of it as well; it is right if they have not
        return make(self, places, timeout, look)

    for turn in range(2):  # the first one makes new teams necessary
        if comm.rank == 0 and turn:
            ucc.Context.team = slow  # type: ignore[method-assign]
        elif comm.rank == last and turn:
            WORLD.recv(source=0)
        with pytest.raises(ValueError if comm.rank == last else RefusedError):
            other.Iallreduce(np.ones(1 << 15), out[: -1 if comm.rank == last else None]).Wait()
        if comm.rank == last and turn:
            WORLD.send(None, 0)
    for _ in range(3):
        out[:] = -1
        other.Iallreduce(np.ones(1 << 15), out).Wait()
        assert (out == comm.size).all()
    other.Free()


def refused_by_others_and_then_by_all(cases: Cases) -> None:
    """A call that one rank began before the others refused it counts, although it then refuses one with them."""
    comm, data = cases.comm, np.zeros(2)
    freed, begun = comm.Barrier_init(), comm.Ibcast(data) if comm.rank == 0 else None
    freed.Free()
    WORLD.Barrier()
    if begun is None:
        with pytest.raises(ValueError):
            comm.Ibcast(data, root=comm.size)
    WORLD.Barrier()
    with pytest.raises(ValueError, match="freed"):
        freed.Start()
    cases.good()
    if begun is not None:
        with suppress(RefusedError):  # its own part may have been done before
            begun.Wait()


def main() -> None:
    comm = Communicator(WORLD)
    cases = Cases(comm)
    cases.good()
    for culprits in ((comm.size - 1,), (0,), range(comm.size)):
        for name in cases.calls:
            cases.refused(name, culprits)
    for name in ("Allreduce", "Allreduce_init"):
        cases.refused(name, [comm.size - 1], late=True)
    several_under_way(comm)
    cases.good()
    many_in_a_row(comm)
    cases.good()
    if cases.far:  # on one host calls of host memory need no team
        while_a_team_is_made(comm)
    refused_by_others_and_then_by_all(cases)
    comm.Free()
    with Communicator(WORLD) as another:
        Cases(another).good()
    if WORLD.rank == 0:
        print(f"{len(cases.calls)} kinds of calls refused")


if __name__ == "__main__":
    main()
