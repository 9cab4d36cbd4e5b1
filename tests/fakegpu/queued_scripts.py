"""Scripts of ranks for test_windows.py: messages that streams of both sides do alone (cffi_build/p2p/stream_copy.c)."""

from window_scripts import COMMON, TOLD

HELPERS = """
import ctypes
import threading
import time
from arrays import runtime, wait_until_held
from ucc_hetero.errors import CollectiveTimeout, TruncationError
from ucc_hetero.native.libraries import lib
from ucc_hetero.calls.p2p import Messages

def write(word, value):
    ctypes.c_uint32.from_address(word).value = value

def held(gpu):
    "A stream that waits for a word."
    stream, word = gpu.stream(), gpu.flag()
    write(word, 0)
    gpu.wait_value(stream.handle, word, 1)
    return stream, word

def receive(comm, array, source, tag):
    messages = comm._messages
    request = messages.start(messages.incoming(array, source, tag, taken=True))
    request._arm()
    return request

def hurry(request):
    "It has a second from now on, whatever has happened so far."
    request._timeout = 1.0
    request._arm()

def sure(request, right, *about):
    "What a stream has read is right; where its message failed meanwhile, that is why."
    if not right:
        failures = lib.ucch_failures()
        request.Wait()
        assert failures, "no data, and no error"
    assert right, about

def come(request):
    while not (state := lib.ucch_wait_matched(request._op, 0.05)):
        pass
    return state
"""

#: Beginning of jobs in which every rank sends to the next one.
ROUND = COMMON + HELPERS
ROUND += """
with Communicator() as comm:
    p, r = comm.size, comm.rank
    right, left = (r + 1) % p, (r - 1) % p
    gpu = runtime()
    gpu.use(comm._run.members.place.device)
"""

#: Streams of both sides do all of a message: the hosts go on, and the data is in order.
QUEUED = ROUND
QUEUED += """
    assert comm._messages._queues == set(range(p)) - {r}
    streams = [held(gpu) for _ in range(2)]
    # Several lengths at a time, before any data is there; what is behind in the stream sees it.
    lengths = [LONG, LONG + 1, 40000, 5 * LONG]
    requests, sends, arrays = [], [], []
    (outof, first), (into, second) = streams
    write(second, 1)
    for tag, n in enumerate(lengths):
        x, y = Array(n), Array(n).set(-1)
        x.fill(outof, 10.0 * tag + r)
        sends.append(comm.Isend(x, right, tag, stream=outof))
        requests.append(receive(comm, y, left, tag))
        arrays.append((x, y))
    for request, (x, y) in zip(requests, arrays):
        assert come(request) == 1, "the header goes at once"
        assert Messages.take(request, into.handle) and not Messages.take(request, into.handle)
        y.scale(into, 2.0)
    comm.mpi.Barrier()
    assert not any(request.Test() for request in requests + sends)
    comm.mpi.Barrier()
    write(first, 1)
    for tag, (x, y) in enumerate(arrays):
        sure(requests[tag], (y.copied(into) == 2 * (10 * tag + left)).all(), tag, y.peek[:3])
    for request in requests + sends:
        request.Wait()
    # The host receives what was queued: in its own time, by a probe, and too long for its room.
    stream, word = held(gpu)
    write(word, 1)
    x, y, z = Array(LONG), Array(LONG).set(-1), Array(LONG).set(-1)
    x.fill(stream, 5.0 + r)
    sends = [comm.Isend(x, right, 7, stream=stream) for _ in range(3)]
    comm.Recv(y, left, 7)
    comm.Mprobe(left, 7).Recv(z)
    assert (y.peek == 5 + left).all() and (z.peek == 5 + left).all()
    with pytest.raises(TruncationError):
        comm.Recv(Array(100), left, 7)
    [send.Wait() for send in sends]
    # More than half of the window: the rest goes another way, and nobody waits for what nobody receives.
    sends = [comm.Isend(x, right, 8, stream=stream) for _ in range(40)]
    sends.append(comm.Isend(x, right, 9, stream=stream))
    comm.Recv(y.set(-1), left, 9)
    assert (y.peek == 5 + left).all()
    for _ in range(40):
        request = receive(comm, y.set(-1), left, 8)
        if come(request) == 1:
            Messages.take(request, stream.handle)
            assert (y.copied(stream) == 5 + left).all()
        request.Wait()
        assert (y.peek == 5 + left).all()
    [send.Wait() for send in sends]
    # What is queued behind a message that does not come in time goes on; so do others.
    stream, word = held(gpu)
    other, open_word = held(gpu)
    write(open_word, 1)
    if r == 0:
        send = comm.Isend(x, right, 3, stream=stream)
    if r == right or r == 1 % p:
        request = receive(comm, y, left, 3) if r == 1 % p else None
        if request is not None:
            assert come(request) == 1 and Messages.take(request, other.handle)
            hurry(request)
            with pytest.raises(CollectiveTimeout, match="timeout"):
                request.Wait()
            y.copied(other)
    comm.mpi.Barrier()
    assert r or not send.Test(), "its stream has still to write where the next message would lie"
    write(word, 1)
    if r == 0:
        send.Wait()
    comm.mpi.Barrier()
    comm.Sendrecv(x.set(r), right, 4, y, left, 4, stream=stream)
    assert (y.peek == left).all()
print("right")
"""

#: Streams wait for messages that nobody has sent yet.
EARLY = ROUND
EARLY += """
    (outof, first), (into, second) = streams = [held(gpu) for _ in range(2)]
    write(second, 1)
    early = []

    def expect(n, tag):
        y = Array(n).set(-1)
        request = receive(comm, y, left, tag)
        early.append(Messages.take(request, into.handle, early=True))  # its sender may promise no more just now
        return request, y, early[-1]

    def there(request, y, taken):
        if not taken and come(request) == 1:
            assert Messages.take(request, into.handle)
        elif not taken:
            request.Wait()
        return y.copied(into)

    def sure_expect(n, tag):
        y = Array(n).set(-1)
        request = receive(comm, y, left, tag)
        while not Messages.take(request, into.handle, early=True):  # its sender has yet to see that all was received
            time.sleep(0.001)
        return request, y

    def all_expect(n, tag):
        expected = sure_expect(n, tag)
        comm.mpi.Barrier()  # nobody sends before
        return expected
    # Sent in another order than expected, of lengths from one element to several pieces; mailboxes have room again.
    for turn in range(3):
        wanted = [(tag, n) for tag, n in enumerate([LONG, 1, 40000, 5 * LONG, LONG + 1]) for _ in range(2)]
        coming = [(tag, k % 2, *expect(n, tag)) for k, (tag, n) in enumerate(wanted)]
        comm.mpi.Barrier()
        sends = []
        for tag, n in reversed(wanted[::2]):
            for k in range(2):
                x = Array(n)
                x.fill(outof, 100.0 * turn + 10 * tag + 2 * r + k)
                sends.append((comm.Isend(x, right, tag, stream=outof), x))
        if not turn:
            assert early[0]
            wait_until_held(into)
            assert not any(request.Test() for _, _, request, _, _ in coming)
            comm.mpi.Barrier()
            write(first, 1)
        for tag, k, *expected in coming:
            request, y, _ = expected
            got = there(*expected)
            sure(request, (got == 100 * turn + 10 * tag + 2 * left + k).all(), turn, tag, k, y.peek[:3])
        for request in [each[2] for each in coming] + [send for send, _ in sends]:
            request.Wait()
    # What does not come from a stream is received by the host: from the host, short and long; where there is no room
    # for streams; less than expected. The stream waits for that.
    for n in (3, LONG):
        request, y = all_expect(n, 20)
        comm.Send(np.full(n, r, np.float32), right, 20)
        sure(request, (y.copied(into) == left).all())
        request.Wait()
    request, y = all_expect(LONG, 21)
    x = Array(LONG).set(r)
    send = comm.Isend(x, right, 21)
    sure(request, (y.copied(into) == left).all())
    [each.Wait() for each in (request, send)]
    request, y = all_expect(LONG, 21)
    comm.Send(Array(7).set(r), right, 21, stream=outof)
    assert (y.copied(into)[:7] == left).all() and (y.peek[7:] == -1).all()
    request.Wait()
    many = [Array(LONG).set(k) for k in range(40)]
    expected = [expect(LONG, 22) for _ in range(40)]
    comm.mpi.Barrier()
    sends = [comm.Isend(x, right, 22, stream=outof) for x in many]
    for k, each in enumerate(expected):
        sure(each[0], (there(*each) == k).all(), k)
        each[0].Wait()
    [send.Wait() for send in sends]
    # Longer than what there is room for: a part at a time, taken by a stream, by the host, and to memory of the host.
    BIG = 6 << 20
    base = np.arange(BIG, dtype=np.float32)
    big, landing = [Array(BIG).set(base + k) for k in range(4)], Array(BIG)
    for way in ("stream", "device", "host"):
        expected = [expect(BIG, 30) for _ in big if way == "stream"]
        comm.mpi.Barrier()
        sends = [comm.Isend(x, right, 30, stream=outof) for x in big]
        for k in range(len(big)):
            if way == "stream":
                got = there(*expected[k])
                expected[k][0].Wait()
            else:
                y = landing.set(-1) if way == "device" else np.full(BIG, -1, np.float32)
                comm.Recv(y, left, 30)
                got = y.peek if way == "device" else y
            assert (got == base + k).all(), (way, k)
        [send.Wait() for send in sends]
    # However little room there is, what a stream waits for is left to no host; and no stream waits early for a sender
    # that has left something to hosts.
    request, y = all_expect(LONG, 33)
    x, sends, apart = Array(LONG).set(r), [], gpu.stream()
    while not (full := lib.ucch_messages_by_hosts(0)):
        sends.append(comm.Isend(big[0], right, 32, stream=outof))
        assert len(sends) < 100
    last = [comm.Isend(x, right, 33, stream=apart)]
    assert lib.ucch_messages_by_hosts(0) == full == 1
    sure(request, (y.copied(into) == left).all())
    request.Wait()
    comm.mpi.Barrier()
    y = Array(LONG).set(-1)
    request = receive(comm, y, left, 34)
    assert not Messages.take(request, into.handle, early=True)
    comm.mpi.Barrier()
    last.append(comm.Isend(x, right, 34, stream=apart))
    [comm.Recv(landing, left, 32) for _ in sends]
    sure(request, (there(request, y, False) == left).all())
    [each.Wait() for each in (request, *sends, *last)]
    assert not lib.ucch_messages_by_hosts(0)
    # Too long for its room: an error, and the stream goes on.
    request, y = all_expect(100, 23)
    send = comm.Isend(x, right, 23, stream=outof)
    assert (y.copied(into) == -1).all()
    with pytest.raises(TruncationError):
        request.Wait()
    send.Wait()
    # Never sent: likewise; and who has given up a receive, or receives from anyone, no longer knows what comes.
    request, y = sure_expect(LONG, 24)
    failures = lib.ucch_failures()
    hurry(request)
    assert (y.copied(into) == -1).all()
    assert lib.ucch_failures() == failures + 1, "before the stream goes on"
    with pytest.raises(CollectiveTimeout, match="timeout"):
        request.Wait()
    comm.mpi.Barrier()
    comm.Sendrecv(x, right, 24, y, left, 24, stream=outof)
    assert (y.peek == left).all()
    request = receive(comm, y.set(-1), left, 25)
    assert not Messages.take(request, into.handle, early=True)
    comm.mpi.Barrier()
    send = comm.Isend(x, right, 25, stream=outof)
    assert come(request) == 1 and Messages.take(request, into.handle, early=True)
    sure(request, (y.copied(into) == left).all())
    [each.Wait() for each in (request, send)]
    for x in big:  # what nobody wants keeps nobody
        comm.Isend(x, right, 31, stream=outof)
print("right")
"""

#: Between hosts: streams wait for messages that nobody has sent yet, and no host has a part in their copies.
FAR = ROUND
FAR += """
    (outof, first), (into, second) = held(gpu), held(gpu)
    write(second, 1)
    wanted = [(tag, n) for tag, n in enumerate([LONG, 1, 40000, 5 * LONG, LONG + 1]) for _ in range(2)]
    for turn in range(3):
        coming = []
        for tag, n in wanted:
            y = Array(n).set(-1)
            request = receive(comm, y, left, tag)
            if not turn:
                assert Messages.take(request, into.handle, early=True)
                y.scale(into, 2.0)  # behind the message
            coming.append((tag, request, y))
        comm.mpi.Barrier()
        sends = []
        for k, (tag, n) in reversed([*enumerate(wanted)]):  # in another order than expected
            x = Array(n)
            x.fill(outof, 100.0 * turn + 10 * tag + r)
            sends.append((comm.Isend(x, right, tag, stream=outof), x))
        if not turn:
            wait_until_held(into)
            assert not any(request.Test() for _, request, _ in coming)
            comm.mpi.Barrier()
            write(first, 1)
        for tag, request, y in coming:
            if turn == 1:  # it may have come before a stream asks for it
                assert Messages.take(request, into.handle)
            if turn == 2:  # to no stream
                request.Wait()
            right_data = (1 if turn else 2) * (100 * turn + 10 * tag + left)
            sure(request, (y.copied(into) == right_data).all(), turn, tag, y.peek[:3])
            request.Wait()
        [send.Wait() for send, _ in sends]
    # From the host's memory; too long for its room: an error, and the stream goes on.
    y = Array(LONG).set(-1)
    request = receive(comm, y, left, 20)
    assert Messages.take(request, into.handle, early=True)
    comm.mpi.Barrier()  # nobody sends before
    comm.Send(np.full(LONG, r, np.float32), right, 20)
    sure(request, (y.copied(into) == left).all())
    request.Wait()
    request = receive(comm, Array(100), left, 21)
    assert Messages.take(request, into.handle, early=True)
    comm.mpi.Barrier()  # nobody sends before
    send = comm.Isend(Array(LONG).set(r), right, 21, stream=outof)
    y.copied(into)
    with pytest.raises(TruncationError):
        request.Wait()
    send.Wait()
    # Never sent.
    request, failures = receive(comm, y, left, 24), lib.ucch_failures()
    assert Messages.take(request, into.handle, early=True)
    hurry(request)
    y.copied(into)
    assert lib.ucch_failures() == failures + 1, "before the stream goes on"
    with pytest.raises(CollectiveTimeout, match="timeout"):
        request.Wait()
    comm.mpi.Barrier()
    # Memory that a stream has still to copy from is nobody else's.
    stream, word = held(gpu)
    y, z, x = Array(LONG).set(-1), Array(LONG).set(-1), Array(LONG).set(r)
    request = receive(comm, y, left, 25)
    assert Messages.take(request, stream.handle, early=True)
    comm.mpi.Barrier()  # nobody sends before
    comm.Send(x, right, 25)
    request.Wait()
    del request
    comm.Sendrecv(x.set(-5), right, 26, z, left, 26, stream=into)
    request = receive(comm, z.set(-1), left, 27)
    comm.Send(x, right, 27)
    request.Wait()
    write(word, 1)
    assert (y.copied(stream) == left).all() and (z.peek == -5).all()
    comm.mpi.Barrier()
print("right")
"""

#: Between hosts where kernels are loaded at their first launch, which waits for the device: no stream waits then.
FAR_LAZY = ROUND
FAR_LAZY += """
    stream, x, y = gpu.stream(), Array(LONG).set(r), Array(LONG).set(-1)
    request = receive(comm, y, left, 1)
    assert not Messages.take(request, stream.handle, early=True)
    comm.mpi.Barrier()
    comm.Send(x, right, 1, stream=stream)
    request.Wait()
    assert (y.peek == left).all()
print("right")
"""

#: Many groups with calls of their own, and then short messages both ways. Streams that are full keep hosts from the
#: devices, so that what a stream waits for must not need a host.
GROUPS = COMMON + HELPERS
GROUPS += """
with Communicator() as comm:
    other = 1 - comm.rank
    gpu = runtime()
    gpu.use(comm._run.members.place.device)
    stream, groups = gpu.stream(), [Communicator(comm) for _ in range(16)]
    x, y = Array(LONG).set(comm.rank), Array(LONG)
    for group in groups:
        group.Allreduce(x, y.set(-1))
        assert (y.peek == 1).all()
    last, under_way, early = groups[-1], [], 0
    into = [Array(2) for _ in range(50)]
    for k in range(2000):
        message = Array(2).set(10 * k + comm.rank) if k % 50 == 0 else message
        under_way.append(last.Isend(message, other, 1, stream=stream))
        request = receive(last, into[k % 50], other, 1)
        if Messages.take(request, stream.handle, early=True):
            early += 1
        elif come(request) == 1 and not Messages.take(request, stream.handle):
            request.Wait()  # no mailbox is free while nobody has looked which of them are done with
        under_way.append(request)
        if k % 50 == 49:
            assert (into[0].copied(stream) == 10 * (k - 49) + other).all(), k
            assert (into[49].peek == 10 * (k - 49) + other).all(), k
            under_way = [each for each in under_way if not each.Test()]
    [each.Wait() for each in under_way]
    assert early
    [group.Free() for group in groups]
print("right")
"""

#: How a job begins whose rank 1 dies, and how rank 0, which waits for a message of it, ends.
DYING = COMMON + HELPERS + TOLD
DYING += """
with Communicator() as comm:
    gpu, r = runtime(), comm.rank
    gpu.use(comm._run.members.place.device)
    stream, word = held(gpu)
"""
SURVIVED = """
    comm.mpi.Barrier()
    y.copied(stream)
    told(request.Wait)
"""

#: A sender that dies before its stream gets to the data: the receiver's stream goes on, and somebody hears of it. What
#: has come and is not wanted is given back.
DEATH = (
    DYING
    + """
    x, y = Array(LONG).set(r), Array(LONG)
    if r == 1:
        send, unwanted = comm.Isend(x, 0, 5, stream=stream), comm.Isend(x, 0, 6, stream=stream)
        comm.mpi.Barrier()
        comm.mpi.Barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    dropped, request = receive(comm, y, 1, 6), receive(comm, y, 1, 5)
    comm.mpi.Barrier()
    assert come(request) == 1 and come(dropped) == 1
    dropped.Cancel()
    status = MPI.Status()
    dropped.Wait(status)
    assert status.Is_cancelled()
    write(word, 1)
    assert Messages.take(request, stream.handle)
"""
    + SURVIVED
)

#: A sender that dies before it sends what a stream waits for.
EARLY_DEATH = (
    DYING
    + """
    write(word, 1)
    if r == 1:
        comm.mpi.Barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    y = Array(LONG)
    request = receive(comm, y, 1, 5)
    assert Messages.take(request, stream.handle, early=True)
"""
    + SURVIVED
)
