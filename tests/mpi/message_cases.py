"""Messages under a real mpirun: ``mpirun -np N python message_cases.py`` with N of 2 or more runs every case below.

On host memory, or with ``FAKEGPU_LAYOUT`` on fake GPUs: each vector then lies on the device or on the host, drawn.
Each case is collective and leaves no message behind. The first wrong one ends the job with its traceback.
"""

import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import cases
import numpy as np
from mpi4py import MPI

from ucc_hetero import Communicator, Message, PersistentRequest, Request, TruncationError

if ON_DEVICES := "FAKEGPU_LAYOUT" in os.environ:
    from arrays import Array

#: Elements (float64) around the borders of UCX's protocols: nothing, inline, eager, rendezvous.
SIZES = (0, 1, 12, 13, 100, 1023, 1024, 1025, 5000, 8192, 8193, 70_001, 1 << 20)
#: More than libucp sends unasked.
LONG = 150_000


def neighbours(comm: Communicator) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def pattern(size: int, rank: int, turn: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(size, dtype=np.float64) * (turn + 1) + 1000 * rank


def vector(values: np.ndarray[Any, Any]) -> Any:
    """Memory with these contents, wherever it is."""
    return Array(values.size, values.dtype).set(values) if ON_DEVICES and random.random() < 0.7 else values


def blank(size: int) -> Any:
    """Memory to receive into."""
    return vector(np.full(size, -1.0))


def seen(memory: Any) -> np.ndarray[Any, Any]:
    """Its contents."""
    found: np.ndarray[Any, Any] = getattr(memory, "peek", memory)
    return found


def raises(kind: type[BaseException], *words: str) -> Any:
    class Context:
        def __enter__(self) -> None:
            pass

        def __exit__(self, found: type[BaseException] | None, value: BaseException | None, tb: object) -> bool:
            assert found is not None, f"no {kind.__name__}"
            if not issubclass(found, kind):
                return False
            for word in words:
                assert word in str(value), (word, str(value))
            return True

    return Context()


def case_every_form_at_every_size(comm: Communicator) -> None:
    """Blocking, synchronous, ready, buffered, non-blocking; each receives what was sent, no more."""
    right, left = neighbours(comm)
    forms: list[Callable[[Any, int, int], Any]] = [
        comm.Isend, comm.Issend, comm.Irsend, comm.Ibsend,
        *(lambda *a, f=f: f(*a) for f in (comm.Bsend,)),
    ]  # fmt: skip
    for size in SIZES:
        data, status = vector(pattern(size, comm.rank)), MPI.Status()
        for tag, form in enumerate(forms):
            incoming = comm.Irecv(into := blank(size + 2), left, tag)
            outgoing = form(data, right, tag)
            incoming.Wait(status)
            if outgoing is not None:
                outgoing.Wait()
            got = seen(into)
            assert (got[:size] == pattern(size, left)).all() and (got[size:] == -1).all(), (size, tag)
            assert (status.source, status.tag) == (left, tag)
            assert status.Get_count(MPI.DOUBLE) == size and status.Get_elements(MPI.BYTE) == 8 * size
            assert not status.Is_cancelled()
        for blocking in (comm.Send, comm.Ssend, comm.Rsend):
            into = blank(size + 2)
            if comm.rank % 2:
                comm.Recv(into, left, 9)
                blocking(data, right, 9)
            else:
                incoming = comm.Irecv(into, left, 9)
                blocking(data, right, 9)
                incoming.Wait()
            assert (seen(into)[:size] == pattern(size, left)).all()


def case_sendrecv(comm: Communicator) -> None:
    """With neighbours and with oneself; in place; the two messages of different length."""
    right, left = neighbours(comm)
    for size in SIZES:
        into, status = blank(size + 3), MPI.Status()
        comm.Sendrecv(vector(pattern(size, comm.rank)), right, 3, into, left, 3, status)
        assert (seen(into)[:size] == pattern(size, left)).all() and status.Get_count(MPI.DOUBLE) == size
        comm.Sendrecv(sendbuf=vector(pattern(size, 7)), dest=comm.rank, recvbuf=into, source=comm.rank)
        assert (seen(into)[:size] == pattern(size, 7)).all()
        both = vector(pattern(size, comm.rank))
        comm.Sendrecv_replace(both, right, 1, left, 1)
        assert (seen(both) == pattern(size, left)).all()
        comm.Bsend(both, right, 2)  # which has taken a copy
        seen(both)[:] = -5
        comm.Recv(into, left, 2)
        assert (seen(into)[:size] == pattern(size, (left - 1) % comm.size)).all()


def case_isendrecv(comm: Communicator) -> None:
    """One request for both messages, alone and among others; the status is the receive's."""
    right, left = neighbours(comm)
    for size in SIZES:
        into, status, statuses = blank(size + 3), MPI.Status(), list[MPI.Status]()
        request = comm.Isendrecv(vector(pattern(size, comm.rank)), right, 3, into, left, 3)
        while not request.Test(status):
            time.sleep(1e-4)  # others need the core
        assert (seen(into)[:size] == pattern(size, left)).all() and request.finished and request.Test()
        assert status.Get_count(MPI.DOUBLE) == size and status.Get_source() == left
        both, other = (vector(pattern(size, comm.rank + more)) for more in (0, 1))
        requests = [comm.Isendrecv_replace(both, right, 1, left, 1), comm.Irecv(into, left, 2), comm.Ibarrier()]
        requests.append(comm.Isendrecv(other, right, 2, blank(size), MPI.PROC_NULL))
        if size % 2:
            assert Request.Waitall(requests, statuses) and statuses[0].Get_source() == left
        while Request.Waitsome(requests) is not None:
            pass
        assert (seen(both) == pattern(size, left)).all() and (seen(into)[:size] == pattern(size, left + 1)).all()
    if comm.size > 1:  # what the receive finds wrong comes out of Wait, and the send is not lost
        small = np.zeros(1)
        with raises(TruncationError, "more than the buffer holds"):
            comm.Isendrecv(np.ones(4), right, 8, small, left, 8).Wait()
        comm.Isendrecv(np.ones(1), right, 9, small, left, 9).Free()
        comm.Sendrecv(np.ones(1), right, 10, small, left, 10)


def case_buffer_forms(comm: Communicator) -> None:
    """mpi4py's forms, strided arrays on both sides, other datatypes."""
    right, left = neighbours(comm)
    grid = np.arange(40.0).reshape(5, 8) + 100 * comm.rank
    into = np.full((5, 8), -1.0)
    comm.Sendrecv(grid[:, ::2], right, 0, into[:, 1::2], left, 0)
    assert (into[:, 1::2] == np.arange(40.0).reshape(5, 8)[:, ::2] + 100 * left).all() and (into[:, ::2] == -1).all()
    ints = np.arange(10, dtype=np.int32)
    comm.Sendrecv([ints, 4, MPI.INT], right, 0, [into.reshape(-1).view(np.int32), MPI.INT], left, 0)
    assert (into.reshape(-1).view(np.int32)[:4] == ints[:4]).all()
    comm.Sendrecv(bytearray(b"four"), right, 0, word := bytearray(4), left, 0)
    assert word == b"four"
    comm.Sendrecv(np.array([1 + 2j], "c8"), right, 0, z := np.zeros(1, "c8"), left, 0)
    assert z[0] == 1 + 2j


def case_wild_receives(comm: Communicator) -> None:
    """Any source, any tag, by default and by name; every message once, those of a pair in their order."""
    count = 20
    others = [r for r in range(comm.size) if r]
    if comm.rank == 0:
        tags: dict[int, list[int]] = {r: [] for r in others}
        status = MPI.Status()
        for _ in range(count * len(others)):
            value = blank(LONG)
            comm.Recv(value, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            assert seen(value)[0] == 100 * status.source + status.tag
            tags[status.source].append(status.tag)
        assert all(each == list(range(count)) for each in tags.values()), tags
        comm.Barrier()
        for r in others:
            comm.Recv(value, source=r, status=status)
            assert status.tag == 8
        for _ in others:
            comm.Recv(value, tag=7, status=status)
            assert seen(value)[0] == status.source
    else:
        for tag in range(count):
            comm.Send(vector(np.full((1, LONG)[tag % 2], 100.0 * comm.rank + tag)), 0, tag)
        comm.Barrier()
        for tag in (8, 7):
            comm.Send(vector(np.full(1, float(comm.rank))), 0, tag)


def case_order_of_many(comm: Communicator) -> None:
    """Hundreds in flight per pair, small and large mixed, all with one tag: matched in the order of sending."""
    right, left = neighbours(comm)
    rng = np.random.default_rng(7)
    sizes = [int(s) for s in rng.choice((0, 1, 10, 500, 3000, 9000, 40_000), 300)]
    wanted = [vector(np.full(size, turn, np.float64)) for turn, size in enumerate(sizes)]
    into = [blank(40_000) for _ in sizes]
    status = [MPI.Status() for _ in sizes]
    incoming = [comm.Irecv(array, left, 5) for array in into[::2]]
    outgoing = [comm.Isend(array, right, 5) for array in wanted]
    # The first half was posted before, the other half is posted while messages arrive.
    incoming += [comm.Irecv(array, left, 5) for array in into[1::2]]
    Request.Waitall(incoming, status)
    Request.Waitall(outgoing)
    order = into[::2] + into[1::2]
    for turn, (array, found) in enumerate(zip(order, status, strict=True)):
        assert found.Get_count(MPI.DOUBLE) == sizes[turn], turn
        assert (seen(array)[: sizes[turn]] == turn).all(), turn


def case_any_order_of_tags(comm: Communicator) -> None:
    right, left = neighbours(comm)
    outgoing = [comm.Isend(vector(np.full(LONG, 100.0 * comm.rank + tag)), right, tag) for tag in range(12)]
    for tag in reversed(range(12)):
        comm.Recv(into := blank(LONG), left, tag)
        assert (seen(into) == 100 * left + tag).all(), tag
    Request.Waitall(outgoing)
    send = comm.Issend(vector(np.full(LONG, 5.0)), right, 12)
    assert not send.Test()
    comm.Barrier()
    comm.Recv(into, left, 12)
    send.Wait()
    assert (seen(into) == 5).all()


def case_a_look_at_a_later_message(comm: Communicator) -> None:
    """It does not overtake an earlier one; two that were taken out are apart."""
    right, left = neighbours(comm)
    status, sizes = MPI.Status(), {20: 3, 21: LONG, 22: LONG}
    outgoing = [comm.Isend(vector(np.full(size, float(tag))), right, min(tag, 21)) for tag, size in sizes.items()]
    comm.Probe(left, 21, status)
    assert status.Get_count(MPI.DOUBLE) == LONG
    comm.Recv(blank(3), left, MPI.ANY_TAG, status)
    assert status.tag == 20
    one, two = comm.Mprobe(left, 21), comm.Mprobe(left, 21, status)
    assert status.Get_count(MPI.DOUBLE) == LONG and not comm.Iprobe(left, 21)
    del two  # thrown away: its sender goes on
    one.Recv(into := blank(LONG))
    assert (seen(into) == 21).all()
    Request.Waitall(outgoing)


def case_truncation(comm: Communicator) -> None:
    """The receiver is told how long the message was; sender and communicator go on."""
    for size, there in product((4, 2000, 100_000, 1 << 20), (False, True)):
        if comm.rank == 0:
            send = comm.Isend(vector(np.arange(float(size))), 1, 9)
            comm.Ssend(np.array([5.0]), 1, 10)
            send.Wait()
        elif comm.rank == 1:
            into, status, one = blank(min(size - 1, 1000)), MPI.Status(), np.empty(1)
            if there:  # libucp then knows at once
                comm.Probe(0, 9)
            with raises(TruncationError, "rank 1", "rank 0 sent", f"{8 * size} bytes", "tag 9"):
                comm.Recv([into, 3, MPI.DOUBLE], 0, 9, status)
            assert (seen(into)[3:] == -1).all()
            assert (status.source, status.tag, status.error) == (0, 9, MPI.ERR_TRUNCATE)
            comm.Recv(one, 0, 10)
            assert one[0] == 5
    if comm.rank == 0:
        Request.Waitall([comm.Isend(np.zeros(9), 1, 1), comm.Isend(np.ones(1), 1, 2)])
    elif comm.rank == 1:
        statuses: list[MPI.Status] = []
        short, fine = np.zeros(2), np.zeros(1)
        with raises(TruncationError):
            Request.Waitall([comm.Irecv(short, 0, 1), comm.Irecv(fine, 0, 2)], statuses)
        assert [s.error for s in statuses] == [MPI.ERR_TRUNCATE, MPI.SUCCESS] and fine[0] == 1


def case_probes(comm: Communicator) -> None:
    """A probed message stays, a matched one belongs to its probe; sizes are known before the receive."""
    right, left = neighbours(comm)
    for size in (0, 3, 100_000):
        outgoing = [comm.Isend(vector(pattern(size, comm.rank)), right, tag) for tag in (71, 72, 73)]
        status = MPI.Status()
        assert comm.Probe(left, 72, status)
        assert status.Get_count(MPI.DOUBLE) == size and (status.source, status.tag) == (left, 72)
        while not comm.Iprobe(left, 73, status):
            time.sleep(1e-4)  # others need the core
        assert not comm.Iprobe(left, 99)
        found = comm.Mprobe(left, status=status)
        assert status.tag == 71 and isinstance(found, Message)
        into = blank(size)
        comm.Recv(into, left, MPI.ANY_TAG, status)
        assert status.tag == 72
        seen(into)[:] = -1
        found.Recv(into, status)
        assert status.tag == 71 and (seen(into) == pattern(size, left)).all()
        with raises(ValueError, "received already"):
            found.Recv(into)
        while (last := comm.Improbe(left)) is None:
            time.sleep(1e-4)  # others need the core
        last.Irecv(into := blank(size)).Wait(status)
        assert status.tag == 73 and (seen(into) == pattern(size, left)).all()
        assert comm.Improbe(left) is None
        Request.Waitall(outgoing)
        comm.Barrier()
    # A message taken out and dropped is gone, and its sender goes on.
    outgoing = [comm.Issend(vector(pattern(100_000, 0)), right, 74)]
    found = comm.Mprobe(left, 74)
    del found
    gc.collect()
    Request.Waitall(outgoing)
    assert not comm.Iprobe(left, 74)


def case_null_process(comm: Communicator) -> None:
    """MPI.PROC_NULL: everything ends at once and nothing is written."""
    into, status = np.full(3, -1.0), MPI.Status()
    comm.Recv(into, MPI.PROC_NULL, 5, status)
    assert (status.source, status.tag) == (MPI.PROC_NULL, MPI.ANY_TAG) and status.Get_count(MPI.DOUBLE) == 0
    for send in (comm.Send, comm.Ssend, comm.Bsend):
        send(into, MPI.PROC_NULL)
    assert comm.Probe(MPI.PROC_NULL) and comm.Iprobe(MPI.PROC_NULL)
    comm.Mprobe(MPI.PROC_NULL).Recv(into, status)
    assert status.source == MPI.PROC_NULL
    comm.Sendrecv(into, MPI.PROC_NULL, 0, into.copy(), MPI.PROC_NULL)
    again = [comm.Send_init(into, MPI.PROC_NULL), comm.Recv_init(into, MPI.PROC_NULL)]
    for _ in range(2):
        PersistentRequest.Startall(again)
        Request.Waitall(again)
    assert (into == -1).all()
    assert comm.Irecv(into, MPI.PROC_NULL).Test()
    nobody = MPI.PROC_NULL
    for buffer in (None, [1, 2], "no buffer"):
        comm.Sendrecv(buffer, nobody, 0, buffer, nobody, 0)
        comm.Sendrecv_replace(buffer, nobody, 0, nobody)
        comm.Bsend(buffer, nobody)
        for started in (
            comm.Recv_init(buffer, nobody),
            comm.Bsend_init(buffer, nobody),
            comm.Send_init(buffer, nobody),
        ):
            started.Start()
            started.Wait()
    message = comm.Mprobe(nobody)
    assert message and message == MPI.MESSAGE_NO_PROC
    message.Recv(None)
    assert not message and message == MPI.MESSAGE_NULL


def case_mistakes(comm: Communicator) -> None:
    """Refused before anything is sent, by name, rank and value."""
    one = np.zeros(1)
    me = f"rank {comm.rank}"
    with raises(ValueError, f"dest {comm.size}", me):
        comm.Send(one, comm.size)
    with raises(ValueError, f"dest {MPI.ANY_SOURCE} ", me):
        comm.Isend(one, MPI.ANY_SOURCE)
    with raises(ValueError, "source 77", me, "ANY_SOURCE"):
        comm.Recv(one, 77)
    with raises(ValueError, "tag -5", me):
        comm.Send(one, 0, -5)
    with raises(ValueError, f"tag {1 << 31}", me):
        comm.Recv(one, 0, 1 << 31)
    with raises(TypeError, "buf", me):
        comm.Send(object(), 0)
    with raises(BufferError, "buf", me):
        comm.Recv(b"constant", 0)
    with raises(AttributeError, "comm.mpi.Create_intercomm"):
        comm.Create_intercomm  # noqa: B018
    with raises(ValueError, "dest 77", me):
        comm.Isendrecv(one, 77, 0, one.copy(), 0)
    comm.Sendrecv(one, comm.rank, (1 << 31) - 1, one.copy(), comm.rank, (1 << 31) - 1)


def case_persistent(comm: Communicator) -> None:
    """Started again and again with what the buffers then hold, strided ones too."""
    right, left = neighbours(comm)
    data, into = np.zeros((4, 6)), np.zeros((4, 6))
    sends = (comm.Send_init, comm.Ssend_init, comm.Bsend_init, comm.Rsend_init)
    for send in sends:
        for a, b in ((vector(np.zeros(LONG)), blank(LONG)), (data[:, ::3], into[:, ::3])):
            requests = [comm.Recv_init(b, left, 4), send(a, right, 4)]
            for turn in range(4):
                seen(a)[:] = turn + 10 * comm.rank
                PersistentRequest.Startall(requests)
                if turn == 1:
                    with raises(ValueError, "still active"):
                        requests[0].Start()
                status = [MPI.Status(), MPI.Status()]
                Request.Waitall(requests, status)
                assert (seen(b) == turn + 10 * left).all() and status[0].source == left
                assert requests[0].Wait(status[0]) and status[0].source == MPI.ANY_SOURCE
            for request in requests:
                request.Free()
            with raises(ValueError, "freed"):
                requests[0].Start()


def case_cancel(comm: Communicator) -> None:
    """A receive that nothing has matched is taken back; the message goes to the next one."""
    right, left = neighbours(comm)
    first, second, status = blank(2), blank(2), MPI.Status()
    request = comm.Irecv(first, left, 6)
    request.Cancel()
    request.Wait(status)
    assert status.Is_cancelled()
    comm.Barrier()
    comm.Sendrecv(vector(pattern(2, comm.rank)), right, 6, second, left, 6, status)
    assert not status.Is_cancelled() and (seen(first) == -1).all() and (seen(second) == pattern(2, left)).all()
    again = comm.Recv_init(first, left, 6)
    again.Start()
    again.cancel()
    again.Wait(status)
    assert status.Is_cancelled()
    comm.Barrier()
    again.Start()
    comm.Send(vector(pattern(2, comm.rank)), right, 6)
    again.Wait(status)
    assert not status.Is_cancelled() and (seen(first) == pattern(2, left)).all()
    again.Cancel()  # it has ended: nothing to do
    sent = comm.Isend(first, comm.rank, 6)
    sent.Cancel()  # MPI lets a send go on
    comm.Recv(second, comm.rank, 6)
    sent.Wait()


def case_idioms_of_mpi4py(comm: Communicator) -> None:
    """Ranks and tags that are numpy's; MPI's null requests and messages in lists and comparisons."""
    right, left = neighbours(comm)
    ranks, tags, data, into = np.array([left, right]), np.arange(3), pattern(5, comm.rank), np.empty(5)
    comm.Sendrecv(data, ranks[1], tags[2], into, ranks[0], tags[2])
    assert (into == pattern(5, left)).all()
    requests: list[Any] = [MPI.REQUEST_NULL, comm.Irecv(into, ranks[0], tags[1]), comm.Isend(data, ranks[1], tags[1])]
    assert requests[1] and requests[1] != MPI.REQUEST_NULL and requests[1] != requests[2]
    assert Request.waitall(requests, statuses := []) == [None] * 3 and statuses[1].source == left
    assert not any(requests) and requests[1] == requests[2] == MPI.REQUEST_NULL
    assert Request.Waitany(requests) == MPI.UNDEFINED and Request.testall(requests) == (True, [None] * 3)
    assert Request.waitsome(requests) == (None, None) and Request.Get_status_all(requests)
    again = comm.Send_init(data, right, 1)
    comm.Sendrecv(data, right, 2, into, left, 2)
    again.Start()
    comm.Recv(into, left, 1)
    again.Wait()
    assert again and again != MPI.REQUEST_NULL
    again.Free()
    assert not again and again == MPI.REQUEST_NULL
    sent = comm.Isend(data, right, 7)
    message = Message.Probe(comm, left, 7)
    assert message and message not in (MPI.MESSAGE_NULL, MPI.MESSAGE_NO_PROC)
    message.Recv(into)
    assert not message and message == MPI.MESSAGE_NULL and Message.Iprobe(comm, left, 7) is None
    sent.Wait()
    with raises(TypeError, "dest 0.5", "integers"):
        comm.Send(data, 0.5)  # type: ignore[arg-type]


def case_partitions(comm: Communicator) -> None:
    """Partitions of a send arrive as they are marked ready, however the receiver divides the data."""
    right, left = neighbours(comm)
    for mine, theirs, each in ((4, 4, 3), (6, 4, 2), (2, 6, 9), (3, 1, 70_000), (1, 5, 5), (4, 2, 0)):
        data, into = np.empty(mine * each), np.full(mine * each, -1.0)
        outgoing, incoming = comm.Psend_init(data, mine, right, 5), comm.Precv_init(into, theirs, left, 5)
        other = comm.Precv_init(np.empty(0), 1, MPI.PROC_NULL, 5)
        for turn in range(3):
            comm.Barrier()
            data[:], into[:], status = pattern(mine * each, comm.rank, turn), -1, MPI.Status()
            PersistentRequest.Startall([incoming, outgoing, other] if turn else [outgoing, incoming, other])
            assert not each or not any(incoming.Parrived(i) for i in range(theirs))
            assert not outgoing.Test() and not incoming.Test()
            comm.Barrier()
            if mine > 1:
                outgoing.Pready_range(1, mine - 1)
            if mine == theirs and turn == 1:
                while not incoming.Parrived(mine - 1):
                    time.sleep(1e-4)  # others need the core
                assert not incoming.Parrived(0)
                assert (into[(mine - 1) * each :] == pattern(mine * each, left, turn)[(mine - 1) * each :]).all()
                comm.Barrier()
            outgoing.Pready_list(np.array([0]))
            Request.Waitall([outgoing, incoming, other], [MPI.Status(), status, MPI.Status()])
            assert (into == pattern(mine * each, left, turn)).all() and incoming.Parrived(0)
            assert status.Get_count(MPI.DOUBLE) in (0, mine * each)
        for request in (outgoing, incoming, other):
            request.Free()


def case_partitions_in_any_order(comm: Communicator) -> None:
    """Waiting for one of several comes back for a partition that is marked ready late; the order of making holds."""
    right, left = neighbours(comm)
    outgoing, incoming = (
        comm.Psend_init(data := np.ones(6), 2, right, 3),
        comm.Precv_init(into := np.empty(6), 3, left, 3),
    )
    PersistentRequest.Startall([incoming, outgoing])
    outgoing.Pready(1)
    soon = threading.Timer(0.1, outgoing.Pready, (0,))
    soon.start()
    assert {Request.Waitany([incoming, outgoing]), Request.Waitany([incoming, outgoing])} == {0, 1}
    soon.join()
    assert (into == data).all()
    # Two of one tag belong together in the order of their making; a count is that of one partition.
    first, second = comm.Psend_init([np.ones(8), 2], 4, right, 1), comm.Psend_init([np.full(8, 2.0), 4], 2, right, 1)
    parts = [comm.Precv_init([np.empty(8), 8], 1, left, 1), comm.Precv_init([into := np.empty(8), 8], 1, left, 1)]
    for request in (first, second, *parts):
        request.Start()
    second.Pready_range(0, 1)
    parts[1].Wait()
    assert (into == 2).all()
    first.Pready_range(0, 3)
    Request.Waitall([first, second, parts[0]])


def case_mistakes_with_partitions(comm: Communicator) -> None:
    right, left = neighbours(comm)
    first, into = comm.Psend_init([np.ones(8), 2], 4, right, 1), np.empty(8)
    parts, me = [comm.Precv_init([into, 8], 1, left, 1)], f"rank {comm.rank}"
    parts[0].Start()
    with raises(ValueError, "there is no partition 4 among the 4", me):
        first.Start()
        first.Pready(4)
    with raises(ValueError, "partition 1 has been marked ready already", me):
        first.Pready_list([1, 1])
    first.Pready_list([0, 2, 3])
    Request.Waitall([parts[0], first])
    with raises(ValueError, "has not been started", me):
        first.Pready(0)
    with raises(ValueError, "needs the rank of its source", me):
        comm.Precv_init(into, 2, MPI.ANY_SOURCE, 1)
    with raises(ValueError, "partitions", "0", me):
        comm.Psend_init(into, 0, right)
    with raises(ValueError, "divided evenly", me):
        comm.Psend_init(into, 3, right)
    with raises(ValueError, "only partitions of a send", me):
        parts[0].Pready(0)


def case_dropped_requests(comm: Communicator) -> None:
    """Dropping a request neither stops the call nor frees its memory early."""
    right, left = neighbours(comm)
    big = np.full(1 << 18, float(comm.rank))
    gone = weakref.ref(big)
    comm.Isend(big, right, 11)
    into = np.full(1 << 18, -1.0)
    comm.Irecv(into, left, 12)
    comm.Iallreduce(np.ones(5000), np.empty(5000))
    starting = comm.Recv_init(other := np.full(3, -1.0), left, 13)
    starting.Start()
    del big, starting
    gc.collect()
    for _ in range(20):  # whatever was freed too early would be used for these
        np.full(1 << 18, 123.0)
    comm.Barrier()
    received = np.zeros(1 << 18)
    comm.Recv(received, left, 11)
    assert (received == left).all()
    comm.Send(received, right, 12)
    comm.Send(np.full(3, 8.0), right, 13)
    comm.Sendrecv(np.zeros(1), right, 14, np.zeros(1), left, 14)
    comm.Barrier()
    comm.Sendrecv(np.zeros(1), right, 14, np.zeros(1), left, 14)
    assert (into == (left - 1) % comm.size).all() and (other == 8).all()
    gc.collect()
    assert gone() is None, "the memory of a dropped send is never released"


def case_objects(comm: Communicator) -> None:
    """The lower-case methods are MPI's, on messages of their own."""
    right, left = neighbours(comm)
    assert comm.sendrecv({"rank": comm.rank}, right, 5, None, left, 5) == {"rank": left}
    pending = comm.irecv(source=left, tag=6)
    comm.Sendrecv(np.ones(1), right, 6, into := np.zeros(1), left, 6)
    comm.send("text", right, 6)
    assert pending.wait() == "text" and into[0] == 1


if __name__ == "__main__":
    cases.run(globals())
