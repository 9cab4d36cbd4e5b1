"""Cases of test_p2p.py: messages that do not come, are interrupted, or whose peers end."""

import ctypes
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import processes
from world import LEFT, RANK, RIGHT, SIZE, WORLD, arrays, caught, meet

import ucc_hetero as u
from ucc_hetero import rma
from ucc_hetero.api.comm import runner_of

from mpi4py import MPI  # isort: skip

LONG = 300_000


def ring(comm, n):
    comm.Sendrecv(np.full(n, RANK), RIGHT, 5, into := np.zeros(n, int), LEFT, 5)
    assert (into == LEFT).all()


# --- on a crew


def what_never_comes(comm):
    """Every waiting call ends at the deadline and names what it waited for; the communicator stays usable."""
    one, long, messages = np.zeros(4), np.zeros(1 << 20), comm._messages
    if RANK == 0:
        messages.timeout = 0.3
        of_one, of_any = "rank 0: receive of up to 32 bytes from rank 1, tag 5: ", "32 bytes from any rank, any tag: "
        for call, said in (
            (lambda: comm.Recv(one, 1, 5), of_one + "timeout, not complete after 0.3"),
            (lambda: comm.Recv(one), of_any + "timeout"),
            (lambda: comm.Irecv(one, 1, 5).Wait(), of_one + "timeout"),
            (lambda: u.Request.Waitall([comm.Irecv(one, 1, 5), comm.Irecv(one, 1, 6)]), "tag 5"),
            (lambda: u.Request.Waitany([comm.Irecv(one, 1, 5), comm.Irecv(one, 1, 6)]), "tag 5"),
            (lambda: comm.Probe(1, 5), "probe for source 1, tag 5: no message within 0.3"),
            (comm.Mprobe, "no message within 0.3"),
            (lambda: comm.probe(1, 5), "within 0.3"),
            (lambda: comm.mprobe(1, 5), "within 0.3"),
            (lambda: comm.Ssend(one, 1, 7), "synchronous send of 32 bytes to rank 1, tag 7: timeout"),
            (lambda: comm.Isend(long, 1, 8).Wait(), "send of 8388608 bytes to rank 1, tag 8: timeout"),
            (lambda: comm.Sendrecv(one, 0, 1, one.copy(), 1, 1), "timeout"),
        ):
            caught(u.CollectiveTimeout, call, said)
        messages.timeout = 200.0
        comm.Recv(one, 0, 1)
    meet()
    for n in (1, 100_000):
        ring(comm, n)
    comm.Allreduce(np.ones(3), total := np.zeros(3))
    assert (total == SIZE).all()
    if RANK == 1:
        # What was sent before its sender gave up is a message all the same.
        comm.Recv(one, 0, 7)
        comm.Recv(np.ones(1 << 20), 0, 8)
    # A receive that nobody waits for has no deadline.
    messages.timeout = 0.01
    early = comm.Irecv(one, LEFT, 9)
    messages.timeout = 200.0
    time.sleep(0.02)  # it would be over by now
    comm.Send(np.full(4, 9.0), RIGHT, 9)
    WORLD.Barrier()
    early.Wait()
    assert (one == 9).all()


def freed_by_the_receiver(comm):
    """Without a call. The sender of the unreceived message gets an error from its wait and from Free, which used to
    blame requests that it had dropped."""
    other, freed = comm.Dup(), "rank(s) [1] have freed this communicator"
    if RANK == 0:
        WORLD.Barrier()
        other._runner.timeout = other._messages.timeout = 0.3
        long = np.zeros(1 << 20)
        caught(u.CollectiveTimeout, other.Isend(long, 1, 3).Wait, freed)
        other.Isend(long, 1, 3)
        dropped = "1 call(s) whose requests were dropped have not ended after 0.3 s"
        caught(u.CollectiveTimeout, other.Free, freed, dropped)
    else:
        other.Free()
        WORLD.Barrier()
    comm.Barrier()


def received_by_the_wrong_method(comm):
    """Objects and buffers: neither waits longer than the deadline, and each error says what has arrived instead."""
    one, late = np.zeros(4), " none came within 0.3 s (UCCH_TIMEOUT)"
    if RANK == 1:
        sent = comm.isend("text", 0, 10), comm.Isend(np.ones(4), 0, 11)
    WORLD.Barrier()
    comm._messages.timeout = 0.3
    if RANK == 0:
        said = caught(u.CollectiveTimeout, lambda: comm.recv(source=1, tag=5))
        assert said.endswith("rank 0: recv of a Python object from rank 1, tag 5:" + late), said
        word = "(the limit was 0.3 s); a Python object of send() waits, which recv() receives"
        caught(u.CollectiveTimeout, lambda: comm.Recv(one, 1, 10), word)
        word = f"from rank 1, tag 11:{late}; a buffer of Send() waits, which Recv() receives"
        caught(u.CollectiveTimeout, lambda: comm.recv(source=1, tag=11), word)
        status = MPI.Status()
        assert comm.recv(status=status) == "text" and (status.source, status.tag) == (1, 10)
        caught(u.CollectiveTimeout, lambda: comm.recv(), f"from any rank, any tag:{late}; a buffer of Send() waits")
        comm.Recv(one, 1, 11)
        assert (one == 1).all() and comm.recv(source=MPI.PROC_NULL) is None
    WORLD.Barrier()
    if RANK == 1:
        assert [each.wait() if hasattr(each, "wait") else each.Wait() for each in sent]


#: The innermost function of the main thread while it waits.
WAITS = {"wait", "wait_in_slices", "probe", "progress_until", "Allreduce"}


def interrupt_soon():
    """Ctrl-C, once the main thread waits in caught()."""

    def act():
        called = []
        while "caught" not in called or called[0] not in WAITS:
            time.sleep(0.01)
            frame, called = sys._current_frames()[threading.main_thread().ident], []
            while frame:
                called, frame = [*called, frame.f_code.co_name], frame.f_back
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=act).start()


def interrupts():
    """Ctrl-C ends a wait at once; the awaited message goes to the next receive."""
    comm, one = u.Communicator(), np.zeros(4)
    for call in (
        lambda: comm.Recv(one, LEFT, 3),
        lambda: comm.Probe(LEFT, 3),
        lambda: comm.Irecv(np.zeros(1), LEFT, 4).Wait(),
        lambda: u.Request.Waitall([comm.Irecv(np.zeros(1), LEFT, 4)]),
        lambda: comm.Ssend(one, RIGHT, 6),
    ):
        interrupt_soon()
        caught(KeyboardInterrupt, call)
    WORLD.Barrier()  # what is sent from here on is nothing that another rank still waits for in vain
    comm.Sendrecv(np.full(4, RANK), RIGHT, 3, into := np.zeros(4, int), LEFT, 3)
    assert (into == LEFT).all()
    comm.Recv(one, LEFT, 6)
    for _ in range(2):  # for the receives that were dropped
        comm.Send(np.zeros(1), RIGHT, 4)
    WORLD.Barrier()
    ring(comm, 50_000)
    comm.Barrier()


def handlers(comm):
    """Handlers of signals run during a collective call that the other rank does not make, and their exceptions come out
    of it: of first calls, and of repeated ones, long and short, which are made in C."""
    x, y = arrays()

    def handler(*_):
        raise InterruptedError("asked to end")

    def persistent(own):
        request = own.Allreduce_init(x, y)
        request.Start()
        request.Wait()

    before = signal.signal(signal.SIGINT, handler)
    for known, call in (
        ([], lambda own: own.Allreduce(x, y)), ([1000], lambda own: own.Allreduce(x, y)),
        ([1], lambda own: own.Allreduce(x[:1], y[:1])), (None, lambda own: own.Iallreduce(x, y).Wait()),
        (None, persistent),
    ):  # fmt: skip
        own = u.Communicator(comm)  # the other rank does not leave it
        for n in known or ():
            own.Allreduce(x[:n], y[:n])
        if RANK == 0:
            interrupt_soon()
            caught(InterruptedError, lambda own=own, call=call: call(own), "asked to end")
        meet()
        if RANK and known is None:  # the request goes on, unless Ctrl-C came before it began
            with suppress(u.CollectiveError):
                call(own)
    signal.signal(signal.SIGINT, before)


# --- interrupts at each place of a call where Python may raise KeyboardInterrupt


places = partial(processes.places, within=str(Path(u.__file__).parent))


def begins(made, kind):
    """A call that begins, and its end."""
    data, into = np.ones(LONG), np.empty(LONG)
    if kind == "persistent":
        request = made.Allreduce_init(data, into)
        return request.Start, request.Wait
    begun = []
    call = {
        "collective": lambda: made.Iallreduce(data, into), "receive": lambda: made.Irecv(into, 1 - RANK, 3),
        "send": lambda: made.Isend(data, 1 - RANK, 3),
        "both": lambda: made.Isendrecv(data, 1 - RANK, 3, into, 1 - RANK, 3),
    }[kind]  # fmt: skip
    return lambda: begun.append(call()), lambda: begun.pop().Wait()


def interrupted_anywhere(seed):
    """Transfers in progress keep their memory; Free ends them."""
    comm, dice, (x, y) = u.Communicator(), random.Random(seed), arrays()
    comm.Dup().Free()
    made = comm.Dup()
    if RANK == 0:  # what calls need is made with the first one
        assert places(lambda: made.Allreduce(x, y), 5) is None
        said = "KeyboardInterrupt has ended its first call; ", "make a new one"
        caught(u.CollectiveError, lambda: made.Allreduce(x, y), *said)
    made.Free()
    for kind in ("collective", "receive", "send", "both", "persistent"):
        interrupted_as_it_begins(comm, dice, kind)
    interrupted_as_it_ends(comm)
    interrupted_when_repeated(comm, x, y)
    ring(comm, 5000)
    print("end", flush=True)


def interrupted_as_it_begins(comm, dice, kind):
    kind = {"receive": "send", "send": "receive"}.get(kind, kind) if RANK else kind
    with comm.Dup() as made:
        for _ in range(2):
            begin, end = begins(made, kind)
            count = places(begin)
            end()
        last = WORLD.bcast(count)
    for at in {*dice.sample(range(last), min(last, 2)), *range(max(last - 7, 0), last)}:
        made = comm.Dup()
        runner_of(made).timeout = 0.05
        begin, end = begins(made, kind)
        with suppress(u.UCCHError):
            places(begin, -1 if RANK else at)
        WORLD.Barrier()
        with suppress(u.UCCHError):
            if RANK:
                end()
        del begin, end
        with suppress(u.UCCHError):
            made.Free()
        WORLD.Barrier()


def interrupted_as_it_ends(comm):
    """A request whose wait was interrupted is waited for again, also where its data is being copied; so is one of
    several messages."""
    many = np.zeros((LONG, 2))
    if RANK:
        comm.Send(np.full(LONG, 3.0), 0, 9)
    else:
        request, n = comm.Irecv(many[:, 1], 1, 9), 0
        while not request.Get_status():
            pass
        while places(request.Wait, n) is None:
            n += 1
        assert n > 4 and (many == [0, 3]).all()
        request = comm.Isendrecv(np.ones(LONG), 1, 9, into := np.zeros(LONG), 1, 9)
        assert places(request.Wait, 5) is None
    WORLD.Barrier()
    if RANK:
        comm.Sendrecv(np.full(LONG, 2.0), 0, 9, into := np.zeros(LONG), 0, 9)
    else:
        request.Wait()
    assert (into == 2 - RANK).all()


def interrupted_when_repeated(comm, x, y):
    """A blocking call that was made before is in C at once, and the next line of Python comes once it has waited
    there."""
    made = comm.Dup()
    for _ in range(3):
        made.Allreduce(x, y)
    if RANK == 0:
        assert places(lambda: made.Allreduce(x, y), 1) is None
        caught(u.CollectiveError, lambda: made.Allreduce(x, y), "allreduce float64[1000] SUM was interrupted")
    WORLD.Barrier()
    with suppress(u.CollectiveError):  # other ranks may finish it
        if RANK:
            made.Allreduce(x, y)
    made.Free()


# --- ends of peers, messages of MPI's, and long ones


def messages_of_mpi(seed):
    """They move while a call waits: their sender is in a call of this package, which the receiver joins after the
    message; by TCP, for which the sender must poll."""
    comm, one = u.Communicator(), np.zeros(4)
    data, into = (np.random.default_rng([seed, r]).random(4 << 20) for r in range(2))
    worker = rma.Worker()
    peer, counter = rma.connect_all(worker, WORLD)[1 - RANK], worker.counter()
    number = WORLD.bcast(counter.number)
    both = (
        comm.Barrier, lambda: comm.Ibarrier().Wait(), lambda: u.Request.Waitall([comm.Ibarrier()]),
        lambda: ring(comm, 3),
    )  # fmt: skip
    calls = [(call, call) for call in both] + [
        (lambda: comm.Probe(1, 7), lambda: comm.Send(one, 0, 7)),
        (lambda: comm.Recv(one, 1, 7), lambda: None),
        (lambda: counter.wait(1).Wait(), lambda: peer.notify(counter=number).Wait()),
        (worker.wait_notification, lambda: peer.notify(b"there").Wait()),
    ]
    for wait, send in calls:
        if RANK == 0:
            request = WORLD.Isend(data, 1)
            wait()
            request.Wait()
        else:
            into[:] = 0
            WORLD.Recv(into, 0)
            assert (into == data).all()
            send()
    worker.close()
    comm.Free()
    print("end", flush=True)


def a_peer_ends():
    """Calls with it fail long before the deadline; a message that it has sent is received even after its end."""
    comm, other = u.Communicator(), u.Communicator()
    if RANK == 1:
        comm.Isend(np.full(100, 5.0), 0, 1)  # received after its sender has come to its end
        sys.exit(0)
    left = "rank 1 has left the job or died"
    caught(u.PeerError, lambda: other.Allreduce(*arrays()), left)
    if RANK == 0:
        while not comm._messages.is_gone(1):
            time.sleep(0.01)
        comm.Recv(five := np.zeros(100), 1, 1)
        assert (five == 5).all()
        caught(u.PeerError, lambda: comm.Recv(five, 1, 2), left)


def a_peer_dies():
    """All operations with it fail at once; others continue."""
    comm, one = u.Communicator(), np.zeros(4)
    ring(comm, 10)
    if RANK == 2:
        [WORLD.recv(source=other) for other in range(RANK)]
        os.kill(os.getpid(), signal.SIGKILL)
    WORLD.send(None, 2)
    said = f"rank {RANK}: receive of up to 32 bytes from rank 2, tag 5: rank 2 has left"
    caught(u.PeerError, lambda: comm.Recv(one, 2, 5), said)
    caught(u.PeerError, lambda: comm.Ssend(one, 2, 5))
    caught(u.PeerError, lambda: comm.Irecv(one, 2, 5).Wait())
    caught(u.PeerError, lambda: comm.Probe(2, 5))
    other = 1 - RANK
    comm.Sendrecv(np.full(3, RANK), other, 5, into := np.zeros(3, int), other, 5)
    assert (into == other).all()
    print("end", flush=True)
    os._exit(0)  # MPI_Finalize would wait for the dead


def a_sender_dies():
    """While its memory is read: the receiver has the whole message, or an error says that the sender has gone."""
    comm = u.Communicator()
    if RANK == 1:
        send = comm.Isend(np.full(8 << 20, 7.0), 0, 5)
        WORLD.send(os.getpid(), 0)
        time.sleep(1000)
        send.Wait()
    victim = WORLD.recv(source=1)
    comm.Probe(1, 5)
    os.kill(victim, signal.SIGKILL)
    into = np.full(8 << 20, -1.0)
    try:
        comm.Recv(into, 1, 5)
        assert (into == 7).all()
    except u.PeerError as error:
        assert "rank 1 has left the job or died" in str(error)
    print("end", flush=True)
    os._exit(0)  # MPI_Finalize would wait for the dead


def two_gib_and_more(comm, gib, seed):
    """Lengths beyond 31 bits. Most of the memory is one piece that is mapped repeatedly: finding that many pages takes
    a machine longer than copying them."""
    count, window = int(gib * 1024) * 2**20 + 5, 1 << 26
    place, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    mmap = ctypes.CFUNCTYPE(place, place, size, number, number, number, ctypes.c_long)(("mmap", ctypes.CDLL(None)))
    whole = -(-count // window) * window
    file = os.memfd_create("two windows")
    os.ftruncate(file, 2 * window)
    at = mmap(None, whole, 0, 0x22, -1, 0)  # private and anonymous
    for first in range(0, whole, window):  # shared and fixed
        assert mmap(at + first, window, 3, 0x11, file, window * (first + window == whole)) == at + first
    data = np.frombuffer((ctypes.c_uint8 * count).from_address(at), np.uint8)
    first, last = (
        np.random.default_rng([seed, part]).integers(1, 255, n, np.uint8)
        for part, n in enumerate((window, count - (whole - window)))
    )
    if RANK == 0:
        data[:window], data[whole - window :] = first, last
        comm.Send(data, 1)
    else:
        status = MPI.Status()
        comm.Recv(data, 0, status=status)
        assert np.array_equal(data[window : 2 * window], first) and np.array_equal(data[whole - window :], last)
        assert status.Get_elements(MPI.BYTE) == count
