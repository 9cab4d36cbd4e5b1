"""Messages under a real mpirun: failures, interruptions, dead peers, sizes. test_cases.py tests MPI's rules."""

import os
import random
import re

import pytest

from .scripts import HEAD, Job

#: Messages around a ring, and a limit for messages that never arrive.
HEAD += """
def limit(seconds):
    comm._messages.timeout = seconds

def ring(comm, n):
    comm.Sendrecv(np.full(n, rank), right, 5, into := np.zeros(n, int), left, 5)
    assert (into == left).all()
"""

#: For ranks that have run other scripts before.
ON_A_CREW = {
    # Every waiting call ends at the deadline and names what it waited for; the communicator stays usable.
    "what never comes": Job("""
if rank == 0:
    big = np.zeros(1 << 20)
    limit(0.3)
    for call in (
        lambda: comm.Recv(one, 1, 5),
        lambda: comm.Recv(one),
        lambda: comm.Irecv(one, 1, 5).Wait(),
        lambda: u.Request.Waitall([comm.Irecv(one, 1, 5), comm.Irecv(one, 1, 6)]),
        lambda: u.Request.Waitany([comm.Irecv(one, 1, 5), comm.Irecv(one, 1, 6)]),
        lambda: comm.Probe(1, 5),
        lambda: comm.Mprobe(),
        lambda: comm.probe(1, 5),
        lambda: comm.mprobe(1, 5),
        lambda: comm.Ssend(one, 1, 7),
        lambda: comm.Isend(big, 1, 8).Wait(),
        lambda: comm.Sendrecv(one, 0, 1, one.copy(), 1, 1),
    ):
        caught(u.CollectiveTimeout, call)
    limit(200.0)
    comm.Recv(one, 0, 1)
gone = world.Ibarrier()
while not gone.Test():  # in MPI's Barrier the other rank would take a core for all those seconds
    time.sleep(0.01)
for n in (1, 100_000):
    ring(comm, n)
comm.Allreduce(np.ones(3), total := np.zeros(3))
assert (total == size).all()
if rank == 1:
    # What was sent before its sender gave up is a message all the same.
    comm.Recv(one, 0, 7)
    comm.Recv(np.ones(1 << 20), 0, 8)
# A receive that nobody waits for has no deadline.
limit(0.01)
early = comm.Irecv(one, left, 9)
limit(200.0)
time.sleep(0.02)  # it would be over by now
comm.Send(np.full(4, 9.0), right, 9)
world.Barrier()
early.Wait()
assert (one == 9).all()
print("end", flush=True)
""", 2, {"caught": 12, "^end": 2} | dict.fromkeys((
        "rank 0: receive of up to 32 bytes from rank 1, tag 5: timeout, not complete after 0.3",
        "receive of up to 32 bytes from any rank, any tag: timeout",
        "probe for source 1, tag 5: no message within 0.3",
        "synchronous send of 32 bytes to rank 1, tag 7: timeout",
        "send of 8388608 bytes to rank 1, tag 8: timeout",
    )), head=HEAD),
    # The receiver has freed the communicator without a call. The sender of the unreceived message gets an error from
    # its wait and from Free, which used to blame requests that it had dropped.
    "a communicator that the receiver has freed": Job("""
other = comm.Dup()
if rank == 0:
    world.Barrier()
    other._runner.timeout = other._messages.timeout = 0.3
    big = np.zeros(1 << 20)
    caught(u.CollectiveTimeout, other.Isend(big, 1, 3).Wait)
    other.Isend(big, 1, 3)
    caught(u.CollectiveTimeout, other.Free)
else:
    other.Free()
    world.Barrier()
comm.Barrier()
print("end", flush=True)
""", said={
        "caught": 2, "^end": 2, r"rank\(s\) \[1\] have freed this communicator": 2,
        r"1 call\(s\) whose requests were dropped have not ended after 0.3 s": 1,
    }, head=HEAD),
    # Neither waits longer than the deadline, and each error says what has arrived instead.
    "objects and buffers that are received by the wrong method": Job("""
if rank == 1:
    sent = comm.isend("text", 0, 10), comm.Isend(np.ones(4), 0, 11)
world.Barrier()
limit(0.3)
if rank == 0:
    caught(u.CollectiveTimeout, lambda: comm.recv(source=1, tag=5))
    caught(u.CollectiveTimeout, lambda: comm.Recv(one, 1, 10))
    caught(u.CollectiveTimeout, lambda: comm.recv(source=1, tag=11))
    status = MPI.Status()
    assert comm.recv(status=status) == "text" and (status.source, status.tag) == (1, 10)
    caught(u.CollectiveTimeout, lambda: comm.recv())
    comm.Recv(one, 1, 11)
    assert (one == 1).all() and comm.recv(source=MPI.PROC_NULL) is None
world.Barrier()
print("end", flush=True)
""", 2, {"caught": 4, "^end": 2} | dict.fromkeys(map(re.escape, (
        "rank 0: recv of a Python object from rank 1, tag 5: none came within 0.3 s (UCCH_TIMEOUT)\n",
        "(the limit was 0.3 s); a Python object of send() waits, which recv() receives",
        "from rank 1, tag 11: none came within 0.3 s (UCCH_TIMEOUT); a buffer of Send() waits, which Recv() receives",
        "from any rank, any tag: none came within 0.3 s (UCCH_TIMEOUT); a buffer of Send() waits",
    ))), head=HEAD),
    # Ctrl-C ends a wait at once; the awaited message goes to the next receive.
    "interrupts": Job("""
calls = [
    lambda: comm.Recv(one, left, 3),
    lambda: comm.Probe(left, 3),
    lambda: comm.Irecv(np.zeros(1), left, 4).Wait(),
    lambda: u.Request.Waitall([comm.Irecv(np.zeros(1), left, 4)]),
    lambda: comm.Ssend(one, right, 6),
]
WAITS = {"wait", "wait_in_slices", "probe", "progress_until"}

def interrupt_soon():
    "Once the main thread waits in caught(), which the innermost of its functions shows."
    def act():
        called = []
        while "caught" not in called or called[0] not in WAITS:
            time.sleep(0.01)
            frame, called = sys._current_frames()[threading.main_thread().ident], []
            while frame:
                called, frame = [*called, frame.f_code.co_name], frame.f_back
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=act).start()

for call in calls:
    interrupt_soon()
    caught(KeyboardInterrupt, call)
world.Barrier()  # what is sent from here on is nothing that another rank still waits for in vain
comm.Sendrecv(np.full(4, rank), right, 3, into := np.zeros(4, int), left, 3)
assert (into == left).all()
comm.Recv(one, left, 6)
for _ in range(2):  # for the receives that were dropped
    comm.Send(np.zeros(1), right, 4)
world.Barrier()
ring(comm, 50_000)
comm.Barrier()
if rank == 0:
    interrupt_soon()
    caught(KeyboardInterrupt, lambda: comm.Allreduce(np.ones(4), np.ones(4)))
    caught(u.CollectiveError, lambda: comm.Send(one, 0))
world.Barrier()
print("end", flush=True)
""", 2, {"^end": 2, "can no longer be used": None}, head=HEAD),
}  # fmt: skip

JOBS = {
    # At each place of a call where Python may raise KeyboardInterrupt. Transfers in progress keep their memory; Free
    # ends them.
    "interrupted anywhere": Job(lambda: f"dice = random.Random({random.random()})" + """
class Interrupts:
    "Ctrl-C as a function is entered, or one of C's has returned: at the n-th such place."
    def __init__(self, n):
        self.left = n

    def __call__(self, frame, event, _):
        code = frame.f_code
        if event in ("call", "c_return") and code.co_filename.startswith(PACKAGE) and code.co_name != "__del__":
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

def places(call, n=0):
    "How many there are in a call, the n-th of which interrupts it."
    hook = Interrupts(n)
    sys.setprofile(hook)
    try:
        call()
    except KeyboardInterrupt:
        return 0
    finally:
        sys.setprofile(None)
    return -hook.left

def begins(made, kind):
    "A call that begins, and its end."
    data, into = np.ones(LONG), np.empty(LONG)
    if kind == "persistent":
        request = made.Allreduce_init(data, into)
        return request.Start, request.Wait
    begun = []
    call = {
        "collective": lambda: made.Iallreduce(data, into), "receive": lambda: made.Irecv(into, 1 - rank, 3),
        "send": lambda: made.Isend(data, 1 - rank, 3),
        "both": lambda: made.Isendrecv(data, 1 - rank, 3, into, 1 - rank, 3),
    }[kind]
    return lambda: begun.append(call()), lambda: begun.pop().Wait()

def other(kind):
    return {"receive": "send", "send": "receive"}.get(kind, kind) if rank else kind

comm.Dup().Free()
made = comm.Dup()
if rank == 0:  # what calls need is made with the first one
    assert places(lambda: made.Allreduce(x, y), 6) == 0
    caught(u.CollectiveError, lambda: made.Allreduce(x, y))
made.Free()

for kind in ("collective", "receive", "send", "both", "persistent"):
    with comm.Dup() as made:
        for _ in range(2):
            begin, end = begins(made, other(kind))
            count = places(begin)
            end()
        last = world.bcast(count)
    for at in {*dice.sample(range(1, last + 1), min(last, 2)), *range(max(last - 6, 1), last + 1)}:
        made = comm.Dup()
        runner_of(made).timeout = 0.05
        begin, end = begins(made, other(kind))
        with suppress(u.UCCHError):
            places(begin, at * (rank == 0))
        world.Barrier()
        with suppress(u.UCCHError):
            if rank:
                end()
        del begin, end
        with suppress(u.UCCHError):
            made.Free()
        world.Barrier()

# One whose wait was interrupted is waited for again, also where its data is being copied.
many = np.zeros((LONG, 2))
if rank:
    comm.Send(np.full(LONG, 3.0), 0, 9)
else:
    request, n = comm.Irecv(many[:, 1], 1, 9), 1
    while not request.Get_status():
        pass
    while not places(request.Wait, n):
        n += 1
    assert n > 5 and (many == [0, 3]).all()

# So is one of several messages.
if rank == 0:
    request = comm.Isendrecv(np.ones(LONG), 1, 9, into := np.zeros(LONG), 1, 9)
    assert places(request.Wait, 6) == 0
world.Barrier()
if rank:
    comm.Sendrecv(np.full(LONG, 2.0), 0, 9, into := np.zeros(LONG), 0, 9)
else:
    request.Wait()
assert (into == 2 - rank).all()

# A blocking call that was made before is in C at once, and the next line of Python comes once it has waited there.
made = comm.Dup()
for _ in range(3):
    made.Allreduce(x, y)
if rank == 0:
    assert places(lambda: made.Allreduce(x, y), 2) == 0
    caught(u.CollectiveError, lambda: made.Allreduce(x, y))
world.Barrier()
with suppress(u.CollectiveError):  # other ranks may finish it
    if rank:
        made.Allreduce(x, y)
made.Free()
ring(comm, 5000)
print("end", flush=True)
""", 2, {"^end": 2, "KeyboardInterrupt has ended its first call; .* make a new one": 1,
        "allreduce float64.1000. SUM was interrupted": None}, head=HEAD + """
import random
from contextlib import suppress
from pathlib import Path
from ucc_hetero.api.comm import runner_of
PACKAGE, LONG = str(Path(u.__file__).parent), 300_000
"""),
    # Its sender is in a call of this package, which the receiver joins after the message; by TCP, for which the sender
    # must poll.
    "messages of MPI's move while a call waits": Job(lambda: f"seed = {random.randrange(10**6)}" + """
data, into = (np.random.default_rng([seed, r]).random(4 << 20) for r in range(2))
from ucc_hetero import rma
worker = rma.Worker()
peer, counter = rma.connect_all(worker, world)[1 - rank], worker.counter()
number = world.bcast(counter.number)
both = comm.Barrier, lambda: comm.Ibarrier().Wait(), lambda: u.Request.Waitall([comm.Ibarrier()]), lambda: ring(comm, 3)
calls = [(call, call) for call in both] + [
    (lambda: comm.Probe(1, 7), lambda: comm.Send(one, 0, 7)),
    (lambda: comm.Recv(one, 1, 7), lambda: None),
    (lambda: counter.wait(1).Wait(), lambda: peer.notify(counter=number).Wait()),
    (worker.wait_notification, lambda: peer.notify(b"there").Wait()),
]
for wait, send in calls:
    if rank == 0:
        request = world.Isend(data, 1)
        wait()
        request.Wait()
    else:
        into[:] = 0
        world.Recv(into, 0)
        assert (into == data).all()
        send()
worker.close()
comm.Free()
print("moved", flush=True)
""", 2, {"^moved": 2}, head=HEAD,
        env={"UCCH_TIMEOUT": "20", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"}),
    # A receive from it fails after some seconds; a message that it has sent is received even after its end.
    "a peer ends": Job("""
if rank == 1:
    comm.Isend(np.full(100, 5.0), 0, 1)  # received after its sender has come to its end
    sys.exit(0)
while not comm._messages.is_gone(1):
    time.sleep(0.01)
comm.Recv(five := np.zeros(100), 1, 1)
assert (five == 5).all()
caught(u.PeerError, lambda: comm.Recv(one, 1, 2))
print("end", flush=True)
""", 2, {"^end": 1, "rank 1 has left the job or died": None}, head=HEAD),
}  # fmt: skip

DEATHS = {
    # All operations with it fail at once; others continue.
    "a peer dies": Job("""
ring(comm, 10)
if rank == size - 1:
    [world.recv(source=other) for other in range(rank)]
    os.kill(os.getpid(), signal.SIGKILL)
world.send(None, size - 1)
caught(u.PeerError, lambda: comm.Recv(one, size - 1, 5))
caught(u.PeerError, lambda: comm.Ssend(one, size - 1, 5))
caught(u.PeerError, lambda: comm.Irecv(one, size - 1, 5).Wait())
caught(u.PeerError, lambda: comm.Probe(size - 1, 5))
other = 1 - rank
comm.Sendrecv(np.full(3, rank), other, 5, into := np.zeros(3, int), other, 5)
assert (into == other).all()
print("end", flush=True)
os._exit(0)  # MPI_Finalize would wait for the dead
""", 3, {"^end": 2, "rank 0: receive of up to 32 bytes from rank 2, tag 5: rank 2 has left": None}, head=HEAD),
    # The receiver has the whole message, or an error says that the sender has gone.
    "a sender dies while its memory is read": Job("""
if rank == 1:
    send = comm.Isend(np.full(8 << 20, 7.0), 0, 5)
    world.send(os.getpid(), 0)
    time.sleep(1000)
victim = world.recv(source=1)
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
""", 2, {"^end": 1}, head=HEAD),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_A_CREW)
def test_calls(crew, name):
    ON_A_CREW[name].run(crew)


@pytest.mark.parametrize("name", JOBS)
def test_jobs(mpirun, name):
    JOBS[name].run(mpirun)


@pytest.mark.parametrize("name", DEATHS)
def test_deaths(mpirun, recovery, name):
    """Where mpirun lets the other ranks live; otherwise they may end before they can print anything."""
    if not recovery:
        pytest.skip("needs Open MPI 5")
    DEATHS[name].run(mpirun, mpi_args=recovery, check=False)


@pytest.mark.slow
def test_two_gib_and_more(mpirun):
    """Lengths beyond 31 bits; UCCH_TEST_GIB sets another size (4 GiB was tried). Most of the memory is one piece that
    is mapped repeatedly: finding that many pages takes a machine longer than copying them.
    """
    script = """
import ctypes
gib, seed = float(sys.argv[1]), int(sys.argv[2])
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
first, last = (np.random.default_rng([seed, part]).integers(1, 255, n, np.uint8)
               for part, n in enumerate((window, count - (whole - window))))
if rank == 0:
    data[:window], data[whole - window :] = first, last
    comm.Send(data, 1)
else:
    status = MPI.Status()
    comm.Recv(data, 0, status=status)
    assert np.array_equal(data[window : 2 * window], first) and np.array_equal(data[whole - window :], last)
    assert status.Get_elements(MPI.BYTE) == count
    print("end", flush=True)
"""
    args = [os.environ.get("UCCH_TEST_GIB", "2.0625"), str(random.randrange(10**6))]
    job = mpirun(HEAD + script, 2, args=args, env={"UCCH_TIMEOUT": "120"}, timeout=170)
    assert "end" in job.stdout.splitlines()
