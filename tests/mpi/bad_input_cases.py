"""Wrong arguments, and calls that do not match: a clear exception each, then the job goes on."""

import os
import random
import re
import time
from functools import partial

import numpy as np
import pytest
from cases import ADD
from collective_reference import FOREIGN as FOREIGN_TYPES
from collective_reference import NUMPY_TYPES
from mpi4py import MPI
from world import WORLD, meet

from ucc_hetero import (
    CollectiveError,
    CollectiveTimeout,
    Communicator,
    MismatchError,
    NotSupported,
    PersistentRequest,
)
from ucc_hetero.native.libraries import lib


def goes_on(comm):
    out = np.zeros(3)
    comm.Allreduce(np.full(3, comm.rank + 1.0), out)
    assert (out == comm.size * (comm.size + 1) / 2).all()


def drawn(count):
    """A random half of ``count`` cases, different in each run and layout, and equal on all ranks."""
    dice = random.Random(
        f"{os.environ.get('TESTS_DRAW', time.time_ns())} {WORLD.size} {os.environ.get('UCCH_EMULATE')}"
    )
    return WORLD.bcast(dice.sample(range(count), (count + 1) // 2))


def unsupported():
    """Arrays that are not supported, and operations without a library for their types."""
    ops = {"f4": "BAND", "f8": "LXOR", "c8": "MAX", "c16": "LAND", "?": "AVG", "f2": "BOR"}
    for name in FOREIGN_TYPES[1:]:
        if name in NUMPY_TYPES:
            ops[name] = "SUM"
    for name, op in ops.items():
        yield np.ones(4, NUMPY_TYPES.get(name, name)), op


def wrong_arguments(comm):
    """(exception, regular expression of its message, call) of mistakes that a single rank can make. Those in one buffer
    are in tests/unit/test_buffers.py."""
    p, me = comm.size, comm.rank
    a, b, many = np.ones(4), np.zeros(4), np.zeros(4 * p)
    fixed = np.zeros(4)
    fixed.flags.writeable = False
    every = [b.copy() for _ in range(p)]

    found = [
        (TypeError, "sendbuf is float64 and recvbuf is float32", lambda: comm.Allreduce(a, b.astype("f4"))),
        (TypeError, "sendbuf is float64 and recvbuf is int64", lambda: comm.Allgather(a, many.astype("i8"))),
        (NotSupported, "cast long double to float64", lambda: comm.Allreduce(a.astype("g"), b.astype("g"))),
        (TypeError, "recvbuf", lambda: comm.Allreduce(a, 5)),
        (TypeError, r"recvbuf on rank .*: None \(IN_PLACE\) is not a buffer", lambda: comm.Allreduce(a, None)),
        (TypeError, "MPI.IN_PLACE is not a buffer", lambda: comm.Bcast(MPI.IN_PLACE)),
        (TypeError, f"recvbuf on rank {me}: a list of numbers is not a buffer: pass numpy.array",
         lambda: comm.Allreduce(a, [0.0] * 4)),
        (TypeError, f"buf on rank {me}: a tuple of numbers is not a buffer", lambda: comm.Isend((1, 2), 0)),
        (TypeError, "a list of arrays is not a message: pass one array", lambda: comm.Allgather(a, every)),
        (BufferError, "recvbuf on rank .*read-only", lambda: comm.Allreduce(a, fixed)),
        (BufferError, "ascontiguousarray", lambda: comm.Allreduce(a, np.zeros(8)[::2])),
        (BufferError, "ascontiguousarray", lambda: comm.Allgather_init(np.zeros((4, 2))[:, 0], many)),
        (ValueError, "recvbuf has 3 elements, 4 are due", lambda: comm.Allreduce(a, b[:3])),
        (ValueError, "recvbuf", lambda: comm.Allgather(a, many[:-1])),
        (ValueError, "recvbuf", lambda: comm.Alltoall(many, many[: 3 * p].copy())),
        (ValueError, rf"counts\[{me}\]", lambda: comm.Allgatherv(a[:3], [many, [4] * p])),
        (ValueError, "recvcounts", lambda: comm.Reduce_scatter(many, b, [4] * (p - 1))),
        (ValueError, "recvcounts", lambda: comm.Reduce_scatter(many, b, [5] + [4] * (p - 1))),
        (ValueError, "recvcounts is needed", lambda: comm.Reduce_scatter(MPI.IN_PLACE, many)),
        (ValueError, f"communicator of {p}", lambda: comm.Alltoallw([a, ["f8"]], [b, ["f8"]])),
        (ValueError, f"allreduce on rank {me}: .*overlap", lambda: comm.Allreduce(many[: 2 * p], many[p : 3 * p])),
        (ValueError, "overlap", lambda: comm.Ialltoall(many[: 2 * p], many[p : 3 * p])),
        (ValueError, f"root {p} is not a rank", lambda: comm.Bcast(a, root=p)),
        (ValueError, "root -1", lambda: comm.Bcast(a, root=-1)),
        (ValueError, "root -2", lambda: comm.Ireduce(a, b, root=-2)),
        (TypeError, "root", lambda: comm.Gather(a, many, root=1.5)),
        (ValueError, f"dest {p} on rank {me}", lambda: comm.Send(a, p)),
        (ValueError, "tag -5", lambda: comm.Isend(a, 0, -5)), (ValueError, "tag -5", lambda: comm.Send(a, 0, -5)),
        (ValueError, f"tag {1 << 31}", lambda: comm.Recv(a, 0, 1 << 31)),
        (ValueError, f"dest {MPI.ANY_SOURCE} ", lambda: comm.Isend(a, MPI.ANY_SOURCE)),
        (ValueError, "dest 77", lambda: comm.Isendrecv(a, 77, 0, b, 0)),
        (ValueError, "(?s)source 77.*ANY_SOURCE", lambda: comm.Recv(a, 77)),
        (TypeError, "(?s)dest 0.5.*integers", lambda: comm.Send(a, 0.5)),
        (TypeError, f"buf on rank {me}", lambda: comm.Send(object(), 0)),
        (BufferError, f"buf on rank {me}", lambda: comm.Recv(b"constant", 0)),
        (ValueError, "'AVERAGE' is not one of", lambda: comm.Scan(a, b, "AVERAGE")),
        (ValueError, f"allreduce on rank {me}: op 'product' .* did you mean PROD",
         lambda: comm.Allreduce(a, b, "product")),
        (TypeError, f"allreduce on rank {me}: stream 's' is neither", lambda: comm.Iallreduce(a, b, stream="s")),
        (TypeError, f"allreduce on rank {me}: stream 's' is neither", lambda: comm.Allreduce(a, b, stream="s")),
        (TypeError, f"reduce on rank {me}: op must be .*Op.Create", lambda: comm.Reduce(a, b, op=np.add)),
    ]  # fmt: skip
    for call in (comm.Bcast, comm.Ibcast, comm.Bcast_init):
        found.append((TypeError, r"root array\(\[0\]\) is not an integer", partial(call, a, root=np.array([0]))))
    for each, op in unsupported():
        found.append((NotSupported, f"{op} on {each.dtype}", partial(comm.Allreduce, each, each.copy(), op)))
    return found


def arguments():
    """All ranks make each mistake: nothing is sent, and the next call succeeds. A mistake of one rank in a message does
    not affect the others; refusal_cases.py has those of one rank in collectives."""
    with Communicator(WORLD) as comm:
        for error, text, call in (found := wrong_arguments(comm)):
            made(comm, error, text, call)
            if comm.rank == comm.size - 1 and re.search("^(dest|tag|buf)", text):
                made(comm, error, text, call)
        goes_on(comm)
    if WORLD.rank == 0:
        print(f"{len(found)} mistakes refused")


def made(comm, error, text, call):
    with pytest.raises(error, match=text) as caught:
        call()
    assert f"rank {comm.rank}" in str(caught.value) or error is not BufferError


def disagreements(comm):
    """(regular expression of the message, call): rank 1 makes another call than the other ranks."""
    odd = comm.rank == 1
    a, b, big = np.ones(8), np.zeros(8), np.zeros(300_000)
    p = comm.size
    uneven = [1] * p if not odd else [0, 2] + [1] * (p - 2)

    def started(request):
        if isinstance(request, PersistentRequest):
            request.Start()
        request.Wait()

    def own_counts():
        send, out = np.ones(uneven[comm.rank]), np.zeros(p)
        comm.Allgatherv(send, [out, uneven])

    return [
        (CALLED, lambda: comm.Allreduce(a[: 4 + odd], b[: 4 + odd])),
        ("allreduce float64", lambda: comm.Allreduce(big[: 300_000 - odd], big.copy()[: 300_000 - odd])),
        ("float32|float64", lambda: comm.Allreduce(*([a, b] if odd else [a.astype("f4"), b.astype("f4")]))),
        ("SUM|MAX", lambda: comm.Allreduce(a, b, MPI.MAX if odd else MPI.SUM)),
        ("root=", lambda: comm.Bcast(a, root=1 if odd else 0)),
        ("called (bcast|allreduce)", lambda: comm.Bcast(a) if odd else comm.Allreduce(a, b)),
        ("barrier|allreduce", lambda: comm.Barrier() if odd else comm.Allreduce(big, big.copy())),
        ("allreduce", lambda: started(comm.Iallreduce(a[: 4 + odd], b[: 4 + odd]))),
        ("allreduce", lambda: started(comm.Allreduce_init(a[: 4 + odd], b[: 4 + odd]))), ("allgatherv", own_counts),
        ("reduce_scatter", lambda: comm.Reduce_scatter(np.ones(p), np.zeros(uneven[comm.rank]), uneven)),
        ("float32|int32", lambda: comm.Allreduce(*(each.astype("i4" if odd else "f4") for each in (a, b)))),
        ("allgather|allreduce", lambda: comm.Allgather(a, np.zeros(8 * p)) if odd else comm.Allreduce(a, b)),
        ("alltoall|reduce_scatter_block", lambda: comm.Alltoall(big, big.copy()) if odd
         else comm.Reduce_scatter_block(big, big[: 300_000 // p].copy())),
        ("bcast|reduce", lambda: comm.Bcast(a) if odd else comm.Reduce(a, b if comm.rank == 0 else None)),
        ("MAXLOC|MINLOC", lambda: comm.Allreduce([a, 2, MPI.DOUBLE_INT], [b, 2, MPI.DOUBLE_INT], PAIRED[odd])),
        ("[45] x 8 B", lambda: comm.Allreduce(a[: 4 + odd], b[: 4 + odd], ADD)),
        (OWN, lambda: comm.Allreduce(a, b, ADD if odd else MPI.SUM)),
        (OWN, lambda: comm.Allreduce(a, b, ADD) if odd else comm.Dup()),
        (OWN, lambda: comm.Split() if odd else started(comm.Iallreduce(a, b, ADD))),
        (OWN, lambda: comm.Reduce(a, b, ADD) if odd else comm.bcast("any")),
        (OWN, lambda: comm.gather("any") if odd else comm.Scan(a, b, ADD)),
        ("called (Dup|gather)", lambda: comm.Dup() if odd else comm.gather("any")),
    ]  # fmt: skip


CALLED = r"rank \d: allreduce float64\[[45]\] SUM \(call 1\b.* rank \d called allreduce float64\[[45]\]"
OWN = "called (Dup|Split|bcast of|gather of|allreduce|reduce|scan)"
PAIRED = (MPI.MAXLOC, MPI.MINLOC)

#: Indices of the rooted calls among them.
LOOSE = (4, 5, 14, 20)


def uneven_disagreements(comm):
    """Likewise, but the ranks compare counts before anything is sent, so the communicator stays usable."""
    odd, p, me = comm.rank == 1, comm.size, comm.rank
    mine, out = np.ones(3 + odd), np.zeros(3 * p)
    table = [3] * p

    def matrix():
        counts = [1 + (odd and peer == 0) for peer in range(p)]
        comm.Alltoallv([np.ones(sum(counts)), counts], [np.zeros(p), [1] * p])

    return [
        ("rank 1, which has 4", lambda: comm.Gatherv(mine, [out, table] if me == 0 else None)),
        ("rank 1, which has 4", lambda: comm.Scatterv([out, table] if me == 0 else None, np.zeros(3 + odd))),
        ("rank 1, which has 4", lambda: comm.Gatherv_init(mine, [out, table] if me == 0 else None)),
        ("rank 1 sends 2 elements to rank 0, which expects 1", matrix),
    ]


def in_flight(comm):
    """A non-blocking call of uneven blocks cannot compare first: it raises at its end, and never returns wrong data."""
    odd, p, me = comm.rank == 1, comm.size, comm.rank
    request = comm.Igatherv(np.ones(3 - odd), [np.zeros(3 * p), [3] * p] if me == 0 else None)
    if me in (0, 1):
        with pytest.raises(CollectiveError, match=f"rank {1 - me} says {2 + me} elements, this rank {3 - me}|gatherv"):
            request.Wait()
    else:
        request.Wait()
    request = comm.Ialltoallv([np.ones(p), [1] * p], [np.zeros(2 * p), [1] * (p - 1) + [1 + odd]])
    if odd:
        with pytest.raises(CollectiveError, match=f"rank {p - 1} says 1 elements, this rank 2|alltoallv"):
            request.Wait()
    else:
        request.Wait()


def too_long(late):
    """A block longer than its receiver expects, in a call that cannot compare first: the receiver raises.

    ``late``: the block arrives before its receiver makes the call, which then fails before it has sent anything.
    """
    comm = Communicator(WORLD)
    p, me = comm.size, comm.rank
    counts = [1 + (me == 0 and r == 1) for r in range(p)]
    if late and me == 1:
        WORLD.Barrier()
        for _ in range(300):
            lib.ucch_progress_once()
    out = np.zeros(p)
    request = comm.Ialltoallv([np.ones(sum(counts)), counts], [out, [1] * p])
    if me == 1:
        with pytest.raises(MismatchError, match="rank 0 says 2 elements, this rank 1"):
            request.Wait()
    else:
        if late:
            request.Test()
            WORLD.Barrier()
        try:
            request.Wait()
        except CollectiveError as error:  # rank 1 has revoked the communicator
            assert re.search("rank [0-9] has given up, as call [0-9] has failed there", str(error)), error
        else:
            assert (out == 1).all()
    comm.Free()  # ranks whose communicator is usable must not wait for the others in Free


def freed_at_once():
    """One rank makes another call, and all free the communicator as soon as they see that."""
    comm, odd = Communicator(WORLD), WORLD.bcast(random.randrange(WORLD.size))
    with pytest.raises(MismatchError):
        comm.Barrier() if comm.rank == odd else comm.Allreduce(np.ones(9), np.empty(9))
    comm.Free()


def mismatches(long_blocks=True):
    """Every rank that takes part raises soon; a new communicator works at once.

    ``long_blocks``: also `too_long`, which ranks of other hosts notice only after seconds, as with `given_up`.
    """
    with Communicator(WORLD) as comm:
        count = len(disagreements(comm))
        for text, call in uneven_disagreements(comm):
            with pytest.raises(MismatchError, match=text):
                call()
            goes_on(comm)
        in_flight(comm)
    for late in (False, True) if long_blocks else ():
        too_long(late)
    for index in drawn(count):
        comm = Communicator(WORLD)
        text, call = disagreements(comm)[index]
        noticed = 0
        try:
            call()
        except MismatchError as error:
            noticed = 1
            assert re.search(text, str(error)) and f"rank {comm.rank}" in str(error)
        else:
            # A rank of a rooted call may succeed before the wrong call arrives. It raises now, or soon if that comes
            # from another host.
            # or a moment later where that is on another host.
            assert index in LOOSE, f"case {index} passed on rank {comm.rank}"
            with pytest.raises(CollectiveError) as caught:
                while True:
                    comm.Barrier()
                    time.sleep(0.01)
            noticed = isinstance(caught.value, MismatchError)
        assert WORLD.allreduce(noticed) > 0
        with pytest.raises(CollectiveError, match="can no longer be used.*make a new one"):
            comm.Barrier()
        comm.Free()
    freed_at_once()
    os.environ["UCCH_CHECK"] = "y"
    with Communicator(WORLD) as comm:
        with pytest.raises(MismatchError, match="rank 1 called"):
            comm.Allreduce(*(np.ones(3 + (comm.rank == 1)) for _ in range(2)), op="MAX")
        goes_on(comm)  # compared before anything was sent
    if WORLD.rank == 0:
        print(f"{count} mismatches noticed")


def given_up():
    """Rank 1 fails alone in a call that the last rank never makes: waiting ranks name rank 1, although it has freed the
    communicator and goes on."""
    comm = Communicator(WORLD)
    last, me = comm.size - 1, comm.rank
    request = comm.Iallreduce(np.ones(1 << 15), np.zeros(1 << 15)) if me != last else None
    if request is not None and me == 1:
        request._timeout = 1.0
        with pytest.raises(CollectiveTimeout, match=f"rank.s. .{last}. have not called it"):
            request.Wait()
    elif request is not None:
        text = "rank [0-9] has given up, as call 1 has failed there; .*make a new one"
        with pytest.raises(CollectiveError, match=text):
            while me and not request.Test():
                time.sleep(0.01)
            request.Wait()
    if me != last:
        comm.Free()
        WORLD.send(None, last)
    else:
        for other in range(last):
            while not WORLD.iprobe(source=other):
                time.sleep(0.01)
            WORLD.recv(source=other)
        comm.Free()
    meet()
    with Communicator(WORLD) as another:
        goes_on(another)


def absent():
    """A rank does not make a call: the others name it when the deadline passes."""
    comm = Communicator(WORLD)
    last = comm.size - 1
    request = comm.Iallreduce(np.ones(4), np.zeros(4)) if comm.rank != last else None
    WORLD.Barrier()
    ends = []
    if request:
        request._timeout = 1.0
        try:
            request.Wait()
        except CollectiveError as error:  # a rank that is late may instead learn that another one has given up
            ends.append(error)
        assert ends
    meet()  # the failed communicator is kept to the end of the job
    late = [isinstance(error, CollectiveTimeout) and str(error) for error in ends]
    told = [text for each in WORLD.allgather(late) for text in each if text]
    assert told and all(f"rank(s) [{last}] have not called it" in text for text in told), told
    with Communicator(WORLD) as another:
        # libucp may have dropped a connection silently: communicators after a deadline make new ones.
        assert another._runner.members.job is not comm._runner.members.job
        goes_on(another)
    if WORLD.rank == 0:
        print("absence noticed")


def in_no_other_call():
    """A rank that does not make a call is not reported to be in a call of another communicator that failed there."""
    one, other = Communicator(WORLD), Communicator(WORLD)
    for comm, alone in ((other, 1), (one, 0)):
        if WORLD.rank == alone:
            with pytest.raises(CollectiveTimeout, match=rf"rank\(s\) \[{1 - alone}\] have not called it; the last"):
                comm.Barrier()
        meet()


def order(both=False):
    """Rank 0 uses two communicators in another order than the rest: errors name the other communicator's call.

    ``both``: once rank 0 waits longer, once the others do, so that each side is in its call when the other times out.
    """
    numbers, me = set(), WORLD.rank
    for patient in ("0", "[1-9]") if both else ("",):
        os.environ["UCCH_TIMEOUT"] = "4" if re.fullmatch(patient, str(me)) else "2"
        comms, said = [Communicator(WORLD) for _ in range(2)], ""
        WORLD.Barrier()  # start all timeouts together
        for comm in comms if me else comms[::-1]:
            try:
                comm.Allreduce(np.ones(4), np.zeros(4))
            except CollectiveError as error:
                said = f"{type(error).__name__} {error}"
                break
        meet()
        told = WORLD.allgather(said)
        for who, other in (("0", "[1-9]"), ("[1-9]", "0")):
            pattern = (
                rf"CollectiveTimeout rank {who}: .*call 1 of .* have not called it \(communicator (\d+)\): "
                rf".*rank {other} is in call 1 of communicator (\d+) \(allreduce .*\) for [.\d]+ s.*; "
                "use communicators in one order on all ranks"
            )
            found = [each for text in told if (each := re.search(pattern, text))]
            numbers |= {(int(each[2]) - int(each[1])) * (1 if other == "0" else -1) for each in found}
            assert found or other != patient, told
    assert numbers == {1}, told
