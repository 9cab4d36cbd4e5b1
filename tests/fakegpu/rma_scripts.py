"""Scripts of test_device_scripts.py: one-sided transfers between devices of any vendors, through pinned slots."""

COMMON = """
import os, sys, time, traceback
import numpy as np
from arrays import Array, Gate, runtime
from ucc_hetero import device, rma
from ucc_hetero.errors import CollectiveTimeout, PeerError, RefusedError, UCCHError
from mpi4py import MPI

mpi = MPI.COMM_WORLD

def end(*failure):
    traceback.print_exception(*failure)
    mpi.Abort(1)

sys.excepthook = end
r, p = mpi.rank, mpi.size
right, left = (r + 1) % p, (r - 1) % p
device.bind(device.place_of())
gpu = runtime() if device.available() else None
rng = np.random.default_rng()
worker = rma.Worker()
peers = rma.connect_all(worker, mpi)

def memory(n, on_device=True):
    "n random bytes, and where a test can look at them."
    array = Array(n, np.uint8) if on_device and gpu else np.empty(n, np.uint8)
    seen = getattr(array, "peek", array)
    seen[:] = rng.integers(0, 256, n, dtype=np.uint8)
    return worker.register(array), seen

def pieces(n, count, most):
    "Places that do not overlap, in any order, on both sides, and lengths; some are empty."
    lengths = rng.integers(0, most, count).astype(np.uint64)
    def places():
        order = rng.permutation(count)
        out = np.empty(count, np.uint64)
        out[order] = np.cumsum(lengths[order]) - lengths[order]
        return out
    assert lengths.sum() <= n
    return places(), places(), lengths

def moved(into, source, ours, theirs, lengths):
    "What a memory is after those pieces of another were moved."
    out = into.copy()
    for a, b, k in zip(ours.tolist(), theirs.tolist(), lengths.tolist()):
        out[b : b + k] = source[a : a + k]
    return out
"""

#: Put and get, whole and in pieces, from and to devices and host memory.
EVERY = (
    COMMON
    + """
N = 5_000_000
for here, there in ((True, True), (True, False), (False, True)):
    mine, my_seen = memory(N, here)
    room, room_seen = memory(N, there)
    told = mpi.allgather((mine.descriptor, room.descriptor, my_seen.copy(), room_seen.copy()))
    sources, rooms = zip(*[(peer.open(t[0]), peer.open(t[1])) for peer, t in zip(peers, told)])
    devices = {mine.memory, rooms[right].memory} != {"host"}
    opens = mine.memory == rooms[right].memory == "nvidia" and "FAKEGPU_NO_PEERS" not in os.environ
    info = peers[right].info(mine, rooms[right])
    assert info["put"].startswith("staged" if devices and not opens else "direct"), info
    assert ("not direct" in info) == (not opens and mine.memory == rooms[right].memory != "host"), info

    lists = pieces(N, 500, 9000)
    every = mpi.allgather(lists)
    peers[right].put(mine, rooms[right], *lists, notify=b"there").Wait()
    note = worker.wait_notification()
    assert note == (peers[left], b"there")
    assert (room_seen == moved(told[r][3], told[left][2], *every[left])).all(), "a put's pieces"
    mpi.Barrier()

    at = np.arange(0, N, 50_000, dtype=np.uint64)
    peers[right].put(mine, rooms[right], at, at[::-1], 50_000).Wait()
    mpi.Barrier()
    assert (room_seen.reshape(100, -1) == told[left][2].reshape(100, -1)[::-1]).all(), "pages that lie in a row here"
    mpi.Barrier()

    peers[right].put(mine, rooms[right]).Wait()
    mpi.Barrier()
    assert (room_seen == told[left][2]).all(), "a put of all"
    mpi.Barrier()
    room_seen[:] = told[r][3]
    ours, theirs, lengths = lists
    peers[right].get(room, sources[right], ours, theirs, lengths).Wait()
    assert (room_seen == moved(told[r][3], told[right][2], theirs, ours, lengths)).all(), "pieces of a get"
    requests = [peers[right].get(room, sources[right], i, i, 1000) for i in range(0, 200_000, 1000)]
    for request in requests:
        request.Wait()
    assert (room_seen[:200_000] == told[right][2][:200_000]).all()
    assert peers[right].counts()["failed"] == 0
    mpi.Barrier()
    for region in (mine, room):
        region.close()
worker.close()
"""
)


def far(script: str) -> str:
    """A script between processes that take each other for those of another host."""
    return script.replace(
        "worker = rma.Worker()\n",
        """from types import SimpleNamespace
from ucc_hetero.rma import worker as workers
workers.host_identity = lambda: SimpleNamespace(memory=r)
worker = rma.Worker()
""",
    )


#: Memory that a peer's device opens: parts of one allocation, opened again and again; what cannot be lent; memory that
#: its owner takes back from who is writing there, and whose device has streams that wait.
OPENED = (
    COMMON
    + """
import ctypes
from arrays import ndarray
from ucc_hetero.native.libraries import lib

N = 3_000_000
whole = Array(2 * N + 1000, np.uint8)
parts = [ndarray(whole, first, N, np.uint8) for first in (104, N + 777)]
for part in parts:
    part.peek[:] = rng.integers(0, 256, N, dtype=np.uint8)
regions = [worker.register(part) for part in parts]
short, _ = memory(1000)  # the runtime does not lend that
mine = [region.descriptor for region in regions], short.descriptor, [part.peek.copy() for part in parts]
theirs, their_short, was = mpi.allgather(mine)[right]
peer = peers[right]
targets = [peer.open(theirs[k]) for k in (0, 1, 0)]
for target in targets:
    assert peer.info(regions[0], target)["put"].startswith("direct"), peer.info(regions[0], target)
info = peer.info(short, peer.open(their_short))
assert info["put"].startswith("staged") and "does not lend" in info["not direct"], info

# Closed in any order, those that are left stay open.
order = rng.permutation(3)
for k in order:
    into, seen = memory(N)
    peer.get(into, targets[k]).Wait()
    assert (seen == was[k % 2]).all(), k
    targets[k].close()
    into.close()
mpi.Barrier()

# Taken back while it is written to.
mine, seen = memory(N)
room, room_seen = memory(N)
rooms = mpi.allgather(room.descriptor)
target = peer.open(rooms[right])
counter = worker.counter()
counters = mpi.allgather(counter.number)
stream = gpu.stream()
counter.wait(1, stream=stream)  # held: who waits for this device waits for a peer
begun = [peer.put(mine, target, i, i, 1000) for i in range(0, 100_000, 1000)]
mpi.Barrier()
lib.ucch_region_revoke(worker.native, room.native)
peers[left].notify(counter=counters[left]).Wait()  # only now its stream goes on
room.close()
left_over = room_seen.copy()
for request in begun:
    try:
        request.Wait()
    except RefusedError:
        pass
try:
    while True:
        peer.put(mine, target).Wait()
except RefusedError:
    pass
assert target.stale and peer.info(mine, target)["put"].startswith("staged")
stream.synchronize()
mpi.Barrier()
assert (room_seen == left_over).all()
try:
    peer.open(rooms[right])
    raise SystemExit("a stale descriptor is opened")
except RefusedError:
    pass

# Two workers of one process.
other = rma.Worker()
between = worker.connect(other.address)
other.connect(worker.address)
array = Array(N, np.uint8)
array.peek[:] = 0
near = between.open(other.register(array).descriptor)
assert between.info(mine, near)["put"].startswith("direct")
between.put(mine, near).Wait()
assert (array.peek == seen).all()
other.close()
worker.close()
assert ctypes.CDLL(gpu.path).fakegpu_misuses() == 0
"""
)

#: While the driver waits for a kernel of the user's before it gives a peer's memory back, peers put, and streams do not
#: begin to wait.
CLOSING = (
    COMMON
    + """
import ctypes
N = 3_000_000
mine, _ = memory(N)
room, seen = memory(N, False)
told, was = mpi.allgather((mine.descriptor, room.descriptor)), mpi.bcast(mine._owner.array.peek.copy(), 1)
target, place = (peers[right].open(each) for each in told[right])
device = ctypes.CDLL(gpu.path)
stream = gpu.stream()
counter = worker.counter()
numbers = mpi.allgather(counter.number)
if r == 0:
    assert peers[right].info(mine, target)["put"].startswith("direct")
    gate = Gate(stream)  # a kernel that takes long
    target.close()
    while not device.fakegpu_closing():
        time.sleep(1e-3)
mpi.Barrier()
if r == 1:
    peers[left].put(mine, place, notify=b"there", counter=numbers[left]).Wait()
else:
    other = gpu.stream()
    counter.wait(1, stream=other)
    other.synchronize()
    assert worker.wait_notification(10.0).data == b"there" and (seen == was).all()
    assert device.fakegpu_closing() == 1, "the driver has come back already"
    gate.open()
    while device.fakegpu_closing():
        time.sleep(1e-3)
mpi.Barrier()
mine.close()
worker.close()
assert device.fakegpu_misuses() == 0
"""
)

#: Memory of all kinds by one interface: made here and wrapped, copied into each other, put to each other.
MEMORY = (
    COMMON
    + """
N = 3_000_000
was = rng.integers(0, 256, N, dtype=np.uint8)
given, out = rma.Memory.allocate(N), rma.Memory.allocate(N, on="host")
other, wrapped = rma.Memory.allocate(N), rma.Memory(np.empty(N, np.uint8))
assert given.vendor == (gpu.vendor if gpu else "host") and out.vendor == wrapped.vendor == "host"
out.copy(was)
given.copy(out)
other.copy(given)
wrapped.copy(other)
assert (wrapped.array == was).all()
mine, room = worker.register(given), worker.register(other)
targets = mpi.allgather(room.descriptor)
peers[right].put(mine, peers[right].open(targets[right])).Wait()
mpi.Barrier()
wrapped.copy(other)
assert (wrapped.array == mpi.sendrecv(was, right, source=left)).all()
for wrong in (lambda: out.copy(was[1:]), lambda: rma.Memory.allocate(0), lambda: rma.Memory.allocate(1, on="nowhere")):
    try:
        wrong()
    except ValueError:
        continue
    raise AssertionError("no error")
worker.close()
for each in (given, out, other, wrapped):
    each.close()
    each.close()
"""
)

#: Peers that come and go leave no memory mapped that they have put from.
LEAVING = (
    COMMON
    + """
room, seen = memory(100_000)

def mapped():
    with open("/proc/self/maps") as lines:
        return sum("memfd:ucc_hetero" in line for line in lines)

for turn in range(5):
    other = rma.Worker()
    theirs, ours = other.connect(worker.address), worker.connect(other.address)
    given = rng.integers(0, 256, 100_000, dtype=np.uint8)
    theirs.put(other.register(given), theirs.open(room.descriptor)).Wait()
    assert (seen == given).all()
    other.close()
    ours.close()
    before = mapped() if not turn else before
    assert mapped() == before, (mapped(), before)
worker.close()
"""
)

#: Allreduces of devices while puts and gets are under way.
CROWD = (
    COMMON
    + """
from ucc_hetero import Communicator
comm = Communicator(mpi)
N, M, SOME = 5_000_000, 500_000, 400_000
(mine, my_seen), (room, room_seen), (back, back_seen) = memory(N), memory(N), memory(N)
told = mpi.allgather((mine.descriptor, room.descriptor, my_seen.copy()))
target, source = peers[right].open(told[right][1]), peers[left].open(told[left][0])
given, first, second = Array(M), Array(M), Array(M)
for _ in range(3):
    values = rng.integers(0, 1000, M).astype(np.float32)
    wanted = sum(mpi.allgather(values))
    given.peek[:], first.peek[:], second.peek[:] = values, -1, -1
    room_seen[:] = back_seen[:] = 7
    mpi.Barrier()
    begun = [peers[right].put(mine, target, at, at, min(SOME, N - at)) for at in range(0, N, SOME)]
    call = comm.Iallreduce(given, first)
    begun += [peers[left].get(back, source, at, at, min(SOME, N - at)) for at in range(0, N, SOME)]
    comm.Allreduce(given, second)
    call.Wait()
    for request in begun:
        request.Wait()
    mpi.Barrier()
    assert (first.peek == wanted).all() and (second.peek == wanted).all()
    assert (room_seen == told[left][2]).all() and (back_seen == told[left][2]).all()
comm.Free()
worker.close()
"""
)

#: The same by wires.
FAR = far(EVERY).replace(
    """.startswith("staged" if devices and not opens else "direct")""",
    """.endswith("wires")""",
)

#: Processes that cannot open each other's slots, which neither has foreseen: an error says so, and others go on.
APART = (
    COMMON
    + """
slots = [memory(10)[0] for _ in range(2)]
peers[r].put(slots[0], peers[r].open(slots[1].descriptor)).Wait()  # now they are there
for name in os.listdir("/proc/self/fd"):
    if os.path.islink(f"/proc/self/fd/{name}") and "memfd:ucc_hetero" in os.readlink(f"/proc/self/fd/{name}"):
        os.dup2(os.open(os.devnull, os.O_RDWR), int(name))
mpi.Barrier()
there = peers[right].open(mpi.allgather(slots[1].descriptor)[right])
for move in (peers[right].put, peers[right].get):
    try:
        move(slots[0], there).Wait()
    except UCCHError as error:
        assert "no common memory" in str(error), error
    else:
        raise AssertionError("that cannot be there")
host, room = memory(100, False), memory(100, False)
told = mpi.allgather((room[0].descriptor, host[1].copy()))
peers[right].put(host[0], peers[right].open(told[right][0])).Wait()
mpi.Barrier()
assert (room[1] == told[left][1]).all()
worker.close()
"""
)

#: A put starts when its stream gets there, a stream waits for a put's end, and another for a counter.
STREAMS = (
    COMMON
    + """
N = 3_000_000
array = Array(N // 4)
mine, room = worker.register(array), memory(N)
told = mpi.allgather((room[0].descriptor,))
target = peers[right].open(told[right][0])
counter = worker.counter()
stream, after = gpu.stream(), gpu.stream()
array.peek[:] = -1
room[1][:] = 0
mpi.Barrier()
gate = Gate(stream)
array.fill(stream, 5.0 + r)
come = counter.wait(1, peer=peers[left], stream=after)
landed = Array(N // 4)
gpu.copy(landed.block.handle, room[0]._owner.array.block.handle, N, after.handle)
request = peers[right].put(mine, target, counter=counter.number, stream=stream)
request.Wait(stream=stream)
array.fill(stream, -2.0)  # not before the put has read it
for _ in range(100):
    assert not request.Test() and counter.value == 0
mpi.Barrier()
gate.open()
request.Wait()
stream.synchronize()
after.synchronize()
come.Wait()
assert counter.value == 1 and (landed.peek == 5.0 + left).all(), landed.peek
assert (array.peek == -2.0).all()
mpi.Barrier()
worker.close()
"""
)

#: A peer dies in the middle; transfers with it fail, and those with others go on.
DEATH = (
    COMMON
    + """
N = 8_000_000
mine, room = memory(N), memory(N)
told = mpi.allgather(room[0].descriptor)
targets = [peer.open(t) for peer, t in zip(peers, told)]
mpi.Barrier()
if r == p - 1:
    os.kill(os.getpid(), 9)
dead, other = peers[p - 1], peers[1 - r]
try:
    while True:
        dead.put(mine[0], targets[p - 1]).Wait()
except PeerError as error:
    assert "put failed: the peer has ended" in str(error), error
while dead.alive:  # it may still be ending
    time.sleep(0.01)
assert other.alive
for _ in range(5):
    other.put(mine[0], targets[1 - r], notify=b"still").Wait()
    assert worker.wait_notification() == (other, b"still")
assert (room[1] != 0).any()
try:
    dead.get(mine[0], targets[p - 1])
    raise SystemExit("a dead peer is read")
except PeerError:
    pass
other.notify(b"end").Wait()
assert worker.wait_notification().data == b"end"
for region, _ in (mine, room):
    region.close()
worker.close()
print("right", flush=True)
os._exit(0)  # MPI waits for the dead
"""
)
