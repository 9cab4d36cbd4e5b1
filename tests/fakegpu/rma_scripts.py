"""Scripts of ranks for test_rma.py: one-sided transfers between devices of any vendors, through pinned slots."""

COMMON = """
import os, sys, time, traceback
import numpy as np
from arrays import Array, runtime
from ucc_hetero import device, rma
from ucc_hetero.errors import CollectiveTimeout, PeerError, RefusedError
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
    assert peers[right].info(mine, rooms[right])["put"].startswith("staged" if devices else "direct")

    lists = pieces(N, 3000, 1500)
    every = mpi.allgather(lists)
    peers[right].put(mine, rooms[right], *lists, notify=b"there").Wait()
    note = worker.wait_notification()
    assert note == (peers[left], b"there")
    assert (room_seen == moved(told[r][3], told[left][2], *every[left])).all(), "a put's pieces"
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
print("right", flush=True)
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


#: The same by wires.
FAR = far(EVERY).replace(
    """.startswith("staged" if devices else "direct")""",
    """.endswith("wires")""",
)

#: The same where no process can open another's slots.
APART = EVERY.replace(
    "N = 5_000_000\n",
    """N = 5_000_000
slots = [memory(10)[0] for _ in range(2)]
peers[r].put(slots[0], peers[r].open(slots[1].descriptor)).Wait()  # now they are there
for name in os.listdir("/proc/self/fd"):
    if os.path.islink(f"/proc/self/fd/{name}") and "memfd:ucc_hetero" in os.readlink(f"/proc/self/fd/{name}"):
        os.dup2(os.open(os.devnull, os.O_RDWR), int(name))
mpi.Barrier()
""",
).replace(
    "worker.close()\n",
    """assert "both sides" in peers[right].info(mine, rooms[right])["put"]
worker.close()
""",
)

#: A put starts when its stream gets there, a stream waits for a put's end, and another for a counter.
STREAMS = (
    COMMON
    + """
import ctypes
N = 3_000_000
array = Array(N // 4)
mine, room = worker.register(array), memory(N)
told = mpi.allgather((room[0].descriptor,))
target = peers[right].open(told[right][0])
counter = worker.counter()
stream, after, word = gpu.stream(), gpu.stream(), gpu.flag()
array.peek[:] = -1
room[1][:] = 0
mpi.Barrier()
gpu.wait_value(stream.handle, word, 1)
array.fill(stream, 5.0 + r)
come = counter.wait(1, peer=peers[left], stream=after)
landed = Array(N // 4)
gpu.copy(landed.block.handle, room[0]._owner.block.handle, N, after.handle)
request = peers[right].put(mine, target, counter=counter.number, stream=stream)
request.Wait(stream=stream)
array.fill(stream, -2.0)  # not before the put has read it
for _ in range(100):
    assert not request.Test() and counter.value == 0
mpi.Barrier()
ctypes.c_uint32.from_address(word).value = 1
request.Wait()
stream.synchronize()
after.synchronize()
come.Wait()
assert counter.value == 1 and (landed.peek == 5.0 + left).all(), landed.peek
assert (array.peek == -2.0).all()
mpi.Barrier()
worker.close()
print("right", flush=True)
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
