"""Cases of messages, for 2 or more ranks.

In host memory, or with ``FAKEGPU_LAYOUT`` on fake GPUs: each vector is then randomly on the device or the host. Each
case is collective and leaves no message behind.
"""

import gc
import itertools
import os
import random
import threading
import time
from functools import partial
from itertools import product
from unittest import mock

import numpy as np
import random_messages
from cases import neighbours, raises, seen
from mpi4py import MPI
from processes import in_threads, interrupted_at

from ucc_hetero import Message, PersistentRequest, Request, TruncationError
from ucc_hetero.p2p.messages import Messages

if ON_DEVICES := "FAKEGPU_LAYOUT" in os.environ:
    from arrays import Array

#: Too long for libucp's eager protocol.
LONG = 150_000


def pattern(size, rank, turn=0):
    return np.arange(size, dtype=np.float64) * (turn + 1) + 1000 * rank


def vector(values):
    return Array(values.size, values.dtype).set(values) if ON_DEVICES and random.random() < 0.7 else values


def blank(size):
    return vector(np.full(size, -1.0))


def case_random(comm):
    """Messages in every form, received in any order, with every way to wait."""
    random_messages.by_rules_of_mpi(comm)


def case_synchronous(comm):
    """A synchronous send completes when it is received, not before. Any number of probes see it, until it is taken out
    to be received; dropped, it is there again."""
    right, left = neighbours(comm)
    for size in (1, LONG):
        send = comm.Issend(vector(np.full(size, 5.0)), right, 12)
        for _ in range(2):
            assert comm.Probe(left, 12) and comm.Iprobe(left) and not comm.Iprobe(left, 99)
        assert not send.Test()
        comm.Barrier()
        found = comm.Mprobe(left)
        assert comm.Improbe(left) is None and not comm.Iprobe(left, 12)
        if size > 1:
            del found
            gc.collect()
            found = comm.Improbe(left, 12)
        found.Recv(into := blank(size))
        assert (seen(into) == 5).all()
        with raises(ValueError, "received already"):
            found.Recv(into)
        send.Wait()
        comm.Barrier()


def case_probes_of_either_kind(comm):
    """Both spellings of probes see buffers and Python objects, with source and tag, as a pool's rank receives them."""
    right, left = neighbours(comm)
    sends = {1: lambda: comm.send(["x"], right, 1), 2: lambda: comm.Send(vector(np.full(3, 4.0)), right, 2)}
    for probe, look in (comm.Probe, comm.Iprobe), (comm.probe, comm.iprobe):
        for tag in random.sample([*sends], 2):
            sends[tag]()
        for tag in random.sample([*sends], 2):
            status = MPI.Status()
            assert probe(left, tag, status) and look(left, tag) and not look(left, 9)
            assert (status.source, status.tag) == (left, tag) and status.count > 0
            if tag == 1:
                assert comm.recv(source=left, tag=tag) == ["x"]
            else:
                comm.Recv(into := blank(3), left, tag)
                assert (seen(into) == 4).all()
        comm.Barrier()
        assert not look(left)
        comm.Barrier()
        comm.send("taken out", right, 5)
        assert comm.mprobe(left, 5, status).recv() == "taken out" and (status.source, status.tag) == (left, 5)
        comm.Barrier()


def case_truncation(comm):
    """The receiver's error has the message's length; the sender and the communicator are not affected."""
    for size, there in product((4, 2000, 100_000, 1 << 20), (False, True)):
        if comm.rank == 0:
            send = comm.Isend(vector(np.arange(float(size))), 1, 9)
            comm.Ssend(np.array([5.0]), 1, 10)
            send.Wait()
        elif comm.rank == 1:
            into, status, one = blank(min(size - 1, 1000)), MPI.Status(), np.empty(1)
            if there:  # libucp then knows the length at once
                comm.Probe(0, 9)
            with raises(TruncationError, "rank 1", "rank 0 sent", f"{8 * size} bytes", "tag 9"):
                comm.Recv([into, 3, MPI.DOUBLE], 0, 9, status)
            assert (seen(into)[3:] == -1).all()
            assert (status.source, status.tag, status.error) == (0, 9, MPI.ERR_TRUNCATE)
            comm.Recv(one, 0, 10)
            assert one[0] == 5
    right, left, small = *neighbours(comm), np.zeros(1)
    with raises(TruncationError, "more than the buffer holds"):  # the message is not lost
        comm.Isendrecv(np.ones(4), right, 8, small, left, 8).Wait()
    comm.Isendrecv(np.ones(1), right, 9, small, left, 9).Free()
    comm.Sendrecv(np.ones(1), right, 10, small, left, 10)
    if comm.rank == 0:
        Request.Waitall([comm.Isend(np.zeros(9), 1, 1), comm.Isend(np.ones(1), 1, 2)])
    elif comm.rank == 1:
        statuses = []
        short, fine = np.zeros(2), np.zeros(1)
        with raises(TruncationError):
            Request.Waitall([comm.Irecv(short, 0, 1), comm.Irecv(fine, 0, 2)], statuses)
        assert [s.error for s in statuses] == [MPI.ERR_TRUNCATE, MPI.SUCCESS] and fine[0] == 1


def case_null_process(comm):
    """MPI.PROC_NULL: every call completes at once, and nothing is written."""
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
            comm.Recv_init(buffer, nobody), comm.Bsend_init(buffer, nobody), comm.Send_init(buffer, nobody),
        ):  # fmt: skip
            started.Start()
            started.Wait()
    message = comm.Mprobe(nobody)
    assert message and message == MPI.MESSAGE_NO_PROC
    message.Recv(None)
    assert not message and message == MPI.MESSAGE_NULL


def case_cancel(comm):
    """An unmatched receive is cancelled; the message goes to the next receive."""
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
    again.Cancel()  # no effect, as it has ended
    sent = comm.Isend(first, comm.rank, 6)
    sent.Cancel()  # MPI allows that sends go on
    comm.Recv(second, comm.rank, 6)
    sent.Wait()


def case_interrupted_as_it_begins(comm):
    """Ctrl-C between the start of a message and its request, if Python makes it: a send goes on, a receive is
    cancelled."""
    right, left = neighbours(comm)
    data, first, second = vector(pattern(LONG, comm.rank)), blank(LONG), blank(LONG)
    ctrl_c = mock.patch.object(Messages, "request", side_effect=KeyboardInterrupt)
    with ctrl_c, raises(KeyboardInterrupt):
        comm.Irecv([first, MPI.DOUBLE], left, 6)
    comm.Barrier()
    with ctrl_c, raises(KeyboardInterrupt):
        comm.Isend([data, MPI.DOUBLE], right, 6)
    del data
    gc.collect()
    poison = [pattern(LONG, -1, turn) for turn in range(3)]
    comm.Recv(second, left, 6)
    assert (seen(first) == -1).all() and (seen(second) == pattern(LONG, left)).all()
    assert all((each == pattern(LONG, -1, turn)).all() for turn, each in enumerate(poison))


def case_interrupted_as_it_is_taken_out(comm):
    """Wherever a signal's exception comes in a probe, the next receives find the messages, in order; Free discards
    them."""
    right, left = neighbours(comm)
    receives = (
        comm.Recv, lambda into, *at: comm.Irecv(into, *at).Wait(), lambda into, *at: comm.Mprobe(*at).Recv(into),
        lambda into, *at: Message.Probe(comm, *at).Irecv(into).Wait(), lambda into, *at: comm.Recv(into),
    )  # fmt: skip
    sizes, (look, other) = itertools.cycle([3, LONG]), random.sample([comm.Mprobe, comm.Improbe], 2)
    for at in range(50):
        size = next(sizes)
        sends = [comm.Isend(vector(np.full(size, float(turn))), right, 4) for turn in range(3)]
        comm.Probe(left, 4)
        interrupted_at(at, partial(look, left, 4))
        taken = [other(left, 4), look(left, 4)]
        while taken:
            del taken[random.randrange(len(taken))]
        for turn, receive in enumerate(random.sample(receives, 3)):
            receive(into := blank(size), left, 4)
            assert (seen(into) == turn).all()
        Request.Waitall(sends)
    made = comm.Dup()
    made.Isend(vector(np.zeros(LONG)), right).Free()
    made.Mprobe(left)
    made.Free()


def case_dropped_while_a_thread_waits(comm):
    """A thread may wait for a request that another one frees, or drops: the message arrives all the same."""
    right, left = neighbours(comm)
    for size, drops in product((3, LONG), (Request.Free, list.clear)):
        arrays = [(np.full(size, float(tag)), np.full(size, -1.0)) for tag in range(20)]
        comm.Sendrecv(arrays[0][0], right, 99, np.empty(size), left, 99)
        requests = [comm.Irecv(into, left, tag) for tag, (_, into) in enumerate(arrays)]
        waiting, ends = [threading.Event() for _ in requests], []

        def wait(request, event, ends=ends):
            event.set()
            ends.append(request.Wait())

        threads = [threading.Thread(target=wait, args=both) for both in zip(requests, waiting, strict=True)]
        for thread, event in zip(threads, waiting, strict=True):
            thread.start()
            event.wait()
        for request in requests if drops is Request.Free else [requests]:
            drops(request)
        del request
        for tag, (data, _) in enumerate(arrays):
            comm.Send(data, right, tag)
        for thread in threads:
            thread.join()
        assert ends == [True] * len(waiting)
        for tag, (_, into) in enumerate(arrays):
            while (into != tag).any():
                comm.Iprobe(left, 98)
        comm.Barrier()


def case_idioms_of_mpi4py(comm):
    """Ranks and tags as numpy integers; MPI's null requests and messages in lists and comparisons."""
    right, left = neighbours(comm)
    ranks, tags, data, into = np.array([left, right]), np.arange(3), pattern(5, comm.rank), np.empty(5)
    comm.Sendrecv(data, ranks[1], tags[2], into, ranks[0], tags[2])
    assert (into == pattern(5, left)).all()
    requests = [MPI.REQUEST_NULL, comm.Irecv(into, ranks[0], tags[1]), comm.Isend(data, ranks[1], tags[1])]
    assert requests[1] and requests[1] != MPI.REQUEST_NULL and requests[1] != requests[2]
    assert Request.waitall(requests, statuses := []) == [None] * 3 and statuses[1].source == left
    assert not any(requests) and requests[1] == requests[2] == MPI.REQUEST_NULL
    assert Request.Waitany(requests) == MPI.UNDEFINED and Request.testall(requests) == (True, [None] * 3)
    assert Request.waitsome(requests) == (None, None) and Request.Get_status_all(requests)
    assert Request.waitany(requests) == (MPI.UNDEFINED, None) and Request.testsome(requests) == (None, None)
    assert Request.testany(requests) == (MPI.UNDEFINED, True, None)
    again = comm.Send_init(data, right, 1)
    comm.Sendrecv(data, right, 2, into, left, 2)
    again.Start()
    comm.Recv(into, left, 1)
    again.Wait()
    assert again and again != MPI.REQUEST_NULL
    again.Free()
    assert not again and again == MPI.REQUEST_NULL
    assert again.wait() is None and again.test() == (True, None)
    sent = comm.Isend(data, right, 7)
    message = Message.Probe(comm, left, 7)
    assert message and message not in (MPI.MESSAGE_NULL, MPI.MESSAGE_NO_PROC)
    message.Recv(into)
    assert not message and message == MPI.MESSAGE_NULL and Message.Iprobe(comm, left, 7) is None
    sent.Wait()


def case_partitions(comm):
    """Partitions of a send arrive as they are marked ready, however the receiver divides the data."""
    right, left = neighbours(comm)

    def headers():
        return sum(type(each).__name__ == "_Header" for each in gc.get_objects())

    before = headers()
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
    assert headers() <= before + 1  # only the last header is left


def case_partitions_in_any_order(comm):
    """Waitany returns for a partition that is marked ready late; matching follows the order of creation."""
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
    # Two with the same tag match in order of creation; a count is that of one partition.
    first, second = comm.Psend_init([np.ones(8), 2], 4, right, 1), comm.Psend_init([np.full(8, 2.0), 4], 2, right, 1)
    parts = [comm.Precv_init([np.empty(8), 8], 1, left, 1), comm.Precv_init([into := np.empty(8), 8], 1, left, 1)]
    for request in (first, second, *parts):
        request.Start()
    second.Pready_range(0, 1)
    parts[1].Wait()
    assert (into == 2).all()
    first.Pready_range(0, 3)
    Request.Waitall([first, second, parts[0]])


def case_partitions_in_threads(comm):
    """Threads make, start and wait for partitioned messages at once; a thread may receive another one's header."""
    right, left = neighbours(comm)
    size, count = 240, 5
    made = threading.Barrier(count)

    def work(tag):
        data, into = pattern(size, comm.rank, tag), np.full(size, -1.0)
        incoming = comm.Precv_init(into, 3, left, tag)
        incoming.Start()
        made.wait()
        if tag % 2:
            outgoing = comm.Psend_init(data, 4, right, tag)
        askers = [threading.Thread(target=asks, args=(incoming,)) for _ in range(2)]
        for asker in askers:
            asker.start()
        if not tag % 2:
            outgoing = comm.Psend_init(data, 4, right, tag)
        outgoing.Start()
        outgoing.Pready_range(0, 3)
        incoming.Wait()
        for asker in askers:
            asker.join()
        outgoing.Wait()
        assert (into == pattern(size, left, tag)).all()

    def asks(incoming):
        while not incoming.Parrived(1):
            time.sleep(0)

    for _ in range(6):
        in_threads(*(partial(work, tag) for tag in range(count)))


def case_mistakes_with_partitions(comm):
    right, left = neighbours(comm)
    first, into = comm.Psend_init([np.ones(8), 2], 4, right, 1), np.empty(8)
    part = comm.Precv_init([into, 8], 1, left, 1)
    PersistentRequest.Startall([part, first])

    def wrong(words, call):
        with raises(ValueError, words, f"rank {comm.rank}"):
            call()

    wrong("there is no partition 4 among the 4", lambda: first.Pready(4))
    wrong("partition 1 has been marked ready already", lambda: first.Pready_list([1, 1]))
    first.Pready_list([0, 2, 3])
    Request.Waitall([part, first])
    wrong("has not been started", lambda: first.Pready(0))
    wrong("needs the rank of its source", lambda: comm.Precv_init(into, 2, MPI.ANY_SOURCE, 1))
    wrong("partitions", lambda: comm.Psend_init(into, 0, right))
    wrong("divided evenly", lambda: comm.Psend_init(into, 3, right))
    wrong("Pready is for sends", lambda: part.Pready(0))
