"""Scripts of ranks for test_channels.py in which queued calls fail."""

from channel_scripts import COMMON

#: A rank that never calls: the others' streams continue, and an error is raised at the latest in their next call; also
#: for a call that the host waits for, and for one whose request is never checked. A failed blocking call no longer
#: writes to its buffers. A new communicator works.
MISSING = COMMON
MISSING += """
WAYS = {"waited for": (1000, 300_000), "blocking": (1000, 300_000), "not looked at": (1000,)}
for way, n in [(way, n) for way, lengths in WAYS.items() for n in lengths]:
    comm, stream, x, y = Communicator(), runtime().stream(), Array(n).set(1), Array(n).set(-1)
    comm.Allreduce(x, y)
    assert made["allreduce"] == {True} and (y.peek == comm.size).all()
    if comm.rank == 0:
        comm._runner.timeout, begin, said = 0.5, lambda: comm.Iallreduce(x, y, stream=stream), ""
        if way == "blocking":
            said = failure(lambda: comm.Allreduce(x, y))
            y.set(7)
            while not lib.ucch_channels_passed(comm._runner.members.channels.handle):
                time.sleep(1e-3)
            assert (y.peek == 7).all()
        else:
            waits = [begin().Wait]
            for _ in range(2 * (way == "waited for")):
                with suppress(CollectiveError):  # on a busy machine the first one has failed by now
                    waits.append(begin().Wait)
            reached(stream)
            said = [failure(wait) for wait in waits] if way == "waited for" else ""
        print(f"{way}: {said} next: {failure(begin)}", flush=True)
    MPI.COMM_WORLD.Barrier()
"""

#: A rank that gives up lets its streams continue with garbage, which must not be reported as a result.
GARBAGE = COMMON
GARBAGE += """
def part(comm, n):
    r, p = comm.rank, comm.size
    gpu = runtime()
    gpu.use(comm._runner.members.place.device)
    stream, x, y, z = gpu.stream(), Array(n).set(r + 1), Array(n).set(-1), Array(n).set(-1)
    good = comm.Iallreduce(x, z, stream=stream)
    reached(stream)
    good.Wait()
    if r:
        MPI.COMM_WORLD.recv(source=0, tag=n)  # the last one comes once the first has given up, the others before
    else:
        comm._runner.timeout = 1.0

    def attempt():
        request = comm.Iallreduce(x, y, stream=stream)
        if not r:
            [MPI.COMM_WORLD.send(None, other, tag=n) for other in range(1, p - 1)]
        request.Wait()

    outcome = failure(attempt)
    if not r:
        MPI.COMM_WORLD.send(None, p - 1, tag=n)
    reached(stream)  # until then it writes to the memory
    # What the first has sent before it gives up may be all that another one needs.
    assert outcome != "nothing" or (r and (y.peek == p * (p + 1) / 2).all()), (r, y.peek[:5])
    assert (z.peek == p * (p + 1) / 2).all()
    print("outcome", outcome, flush=True)

threads = [threading.Thread(target=part, args=(Communicator(), n)) for n in (1000, 300_000)]
[t.start() for t in threads]
[t.join() for t in threads]
assert made["allreduce"] == {True}
MPI.COMM_WORLD.Barrier()
"""

#: Ranks make different calls; earlier results stay correct, or are reported as wrong. Data of another call that would
#: fit is not accepted for this one.
DIFFERENT = COMMON
DIFFERENT += """
for n in (1, 70_000):
    comm, x, y, z = Communicator(), Array(n).set(1), Array(2 * n).set(2), Array(2 * n)
    comm.Allgather(x, z)
    assert failure(lambda: comm.Alltoall(y, z) if comm.rank else comm.Allgather(x, z)) == "MismatchError"
for comm, n in zip([Communicator(), Communicator()], (1000, 300_000)):
    r = comm.rank
    stream, x, y, z = runtime().stream(), Array(n).set(r + 1), Array(n).set(-1), Array(n).set(-1)
    comm.Allreduce(x, y)
    comm.Reduce(x, y)  # or the other rank sees what we are about to call before we call it
    assert made["allreduce"] == made["reduce"] == {True}
    gate = Gate(stream) if r == 1 else None
    before = comm.Iallreduce(x, y.set(-1), stream=stream)
    MPI.COMM_WORLD.Barrier()
    differ = lambda: comm.Iallreduce(x, z, stream=stream) if r else comm.Ireduce(x, z, SUM, 0, stream=stream)
    outcomes = [failure(lambda: differ().Wait())]
    if gate:
        gate.open()
    reached(stream)
    outcomes.append(failure(before.Wait))
    assert outcomes[1] != "nothing" or (y.peek == comm.size * (comm.size + 1) / 2).all(), (r, y.peek[:5])
    print(f"{outcomes[0]} before {outcomes[1]} after {failure(lambda: comm.Allreduce(x, y))}", flush=True)
    MPI.COMM_WORLD.Barrier()
"""

#: A rank dies before its messages, or in the middle: no rank waits for ever, or gets garbage for a sum.
HALFWAY = COMMON
HALFWAY += """
comm = Communicator()
r, p, n = comm.rank, comm.size, 2_000_000
stream, x, y = runtime().stream(), Array(n).set(r + 1), Array(n).set(-1)
comm.Allreduce(x, y)
assert made["allreduce"] == {True} and (y.peek == p * (p + 1) / 2).all()
MPI.COMM_WORLD.Barrier()
request = comm.Iallreduce(x, y.set(-1), stream=stream)
if r == p - 1:
    time.sleep(float(os.environ["AFTER"]))
    os.kill(os.getpid(), signal.SIGKILL)
reached(stream)
outcome = failure(request.Wait)
assert outcome != "nothing" or (y.peek == p * (p + 1) / 2).all()
print("died:", outcome, failure(lambda: comm.Allreduce(x, y)), flush=True)
os._exit(0)
"""

#: Connections of network threads break, but no rank dies: calls fail with an error, and the next communicator
#: reconnects.
CUT = COMMON
CUT += """
import socket
from ucc_hetero.transport import wires

meet, made_there = wires.connect, set()

def sockets():
    "Where each of this process is."
    found = {}
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{file}")] = int(file)
    return {name: file for name, file in found.items() if name.startswith("socket")}

def noted(*args):
    before = {*sockets()}
    reached = meet(*args)
    made_there.update({*sockets()} - before)
    return reached

wires.connect, n = noted, 2_000_000
comm = Communicator()
x, y, z = Array(n).set(1), Array(n), Array(1000)
comm.Allreduce(x, y)
late = comm.Irecv(z, 1 - comm.rank, stream=runtime().stream())
MPI.COMM_WORLD.Barrier()
if comm.rank == 0:
    for name, file in sockets().items():
        if name in made_there:
            with suppress(OSError), socket.socket(fileno=os.dup(file)) as each:
                each.shutdown(socket.SHUT_RDWR)
for what, waits in ("cut", lambda: [comm.Allreduce(x, y) for _ in range(1000)]), ("message", late.Wait):
    try:
        waits()
    except CollectiveError as error:
        print(f"{what}:", type(error).__name__, f"connection with rank {1 - comm.rank}" in str(error), flush=True)
with Communicator() as other:
    other.Allreduce(x, y.set(-1))
    assert made["allreduce"] == {True} and (y.peek == other.size).all()
print("right", flush=True)
"""

#: One of two links is cut from outside once all ranks are ready, and restored once all have failed. A new communicator
#: works. Ranks are pairs between hosts, with a wire on each link, and with one wire on the link that is cut.
CUT_LINK = COMMON
CUT_LINK += """
n, folder, everyone = 1_000_000, Path(os.environ["FOLDER"]), MPI.COMM_WORLD
name, env = [("both", {"UCCH_WIRES": "2"}), ("one", {"UCCH_WIRES": "1", "UCX_NET_DEVICES": "eth1"})][everyone.rank % 2]
os.environ.update(env)
pair = everyone.Split(everyone.rank % 2)
comm = Communicator(pair)
x, y = Array(n).set(1), Array(n)
comm.Allreduce(x, y)
(folder / f"up{everyone.rank}").touch()
try:
    while True:
        comm.Allreduce(x, y)
except CollectiveError as error:
    print(f"{name}:", error, flush=True)
(folder / f"down{everyone.rank}").touch()
while not (folder / "back").exists():
    time.sleep(0.01)
with Communicator(pair) as other:
    other.Allreduce(x, y.set(-1))
    assert made["allreduce"] == {True} and (y.peek == other.size).all()
print(f"{name}: right", flush=True)
"""
