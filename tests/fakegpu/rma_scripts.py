"""Scripts of test_device_scripts.py: one-sided transfers between devices of any vendors, through pinned slots."""

COMMON = """
import traceback
from ranks import *

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

#: Random transfers between all ranks, between devices and host memory: of pieces in any order, of pages, or of a whole
#: region; as lists and many at a time, by hosts and, if streams do not share queues, in streams; with notifications
#: and counters, during an allreduce.
EVERY = COMMON
EVERY += """
N, M = 8_000_000, 100_000  # shares are longer than slots
comm, counter, share = Communicator(mpi), worker.counter(), N // p
others, streams = [q for q in range(p) if q != r], []
if gpu and os.environ["FAKEGPU_CONNECTIONS"] == "0":
    streams = [gpu.stream() for _ in range(2)]

def places():
    "Where pieces of a share are on both sides, and their lengths."
    pages = np.arange(share // 10_000, dtype=np.uint64) * np.uint64(10_000)
    kinds = (
        lambda: pieces(share, 200, share // 125),
        lambda: (pages, pages[::-1].copy(), np.full(pages.size, 10_000, np.uint64)),
        lambda: tuple(np.array([each], np.uint64) for each in (0, 0, share)),
    )
    return kinds[rng.integers(3)]()

def calls(move, local, target, *lists):
    "One call, or one for each of some parts of the lists."
    parts = 1 if rng.integers(2) else min(len(lists[0]), 50)
    return [move(local, target, *each) for each in zip(*(np.array_split(every, parts) for every in lists))]

def bytes_of(device_memory, values, stream):
    "Have a memory of the device hold these when the stream gets there."
    device_memory.source = Array(N, np.uint8).set(values)
    gpu.copy(device_memory._owner.array.block.handle, device_memory.source.block.handle, N, stream.handle)

for turn in range(1, 4):
    (mine, sent), (shown, shows), (room, received), (back, fetched) = (memory(N, rng.random() < 0.7) for _ in range(4))
    queued = streams and mine.memory != "host" and rng.random() < 0.7
    sent = rng.integers(0, 256, N, dtype=np.uint8) if queued else sent.copy()
    puts, gets, values = {q: places() for q in others}, {q: places() for q in others}, rng.integers(0, 9, M)
    told = mpi.allgather((room.descriptor, shown.descriptor, counter.number, sent, shows.copy(), puts, values))
    was, had = received.copy(), fetched.copy()
    rooms, sources = ({q: peers[q].open(told[q][k]) for q in others} for k in (0, 1))
    devices = {mine.memory, rooms[right].memory} != {"host"}
    opens = mine.memory == rooms[right].memory == "nvidia" and "FAKEGPU_NO_PEERS" not in os.environ
    info = peers[right].info(mine, rooms[right])
    assert not devices or info["put"].startswith("direct" if opens else "staged"), info
    assert ("not direct" in info) == (not opens and mine.memory == rooms[right].memory != "host"), info

    begun = [comm.Iallreduce(Array(M).set(values), total := Array(M))]
    if queued:
        bytes_of(mine, sent, streams[0])
    how = {"stream": streams[0]} if queued else {}
    for q in others:
        local, remote, lengths = puts[q]
        at = remote + np.uint64(r * share)
        begun.append(peers[q].put(mine, rooms[q], local, at, lengths, notify=b"%d" % r, counter=told[q][2], **how))
    if queued:
        [put.Wait(stream=streams[0]) for put in begun[1:]]
        bytes_of(mine, np.zeros(N, np.uint8), streams[0])  # not before puts have read it
    for q in others:
        local, remote, lengths = gets[q]
        begun += calls(peers[q].get, back, sources[q], local + np.uint64(q * share), remote, lengths)
    landed = None
    if streams and room.memory != "host":
        counter.wait(turn * len(others), stream=streams[1])
        landed = Array(N, np.uint8)
        gpu.copy(landed.block.handle, room._owner.array.block.handle, N, streams[1].handle)
    counter.wait(turn * len(others)).Wait()
    notes = [worker.wait_notification() for _ in others]
    assert sorted(int(note.data) for note in notes) == others and all(peers[int(n.data)] == n.peer for n in notes)
    [request.Wait() for request in begun]
    [stream.synchronize() for stream in streams]
    for q in others:
        local, remote, lengths = told[q][5][r]
        was = moved(was, told[q][3], local, remote + np.uint64(q * share), lengths)
        local, remote, lengths = gets[q]
        had = moved(had, told[q][4], remote, local + np.uint64(q * share), lengths)
    assert (received == was).all() and (fetched == had).all(), turn
    assert landed is None or (landed.peek == was).all(), turn
    assert (getattr(total, "peek", total) == sum(each[6] for each in told)).all()
    assert all(peers[q].counts()["failed"] == 0 for q in others)
    mpi.Barrier()
    [region.close() for region in (mine, shown, room, back)]
comm.Free()
worker.close()
"""


def far(script):
    """Return a script for processes that treat each other as being on another host."""
    return script.replace(
        "worker = rma.Worker()\n",
        """from types import SimpleNamespace
from unittest import mock
from ucc_hetero.rma import worker as workers
with mock.patch.object(workers, "host_identity", lambda: SimpleNamespace(memory=r)):
    worker = rma.Worker()
""",
    )


#: Memory that a peer's device opens: parts of one allocation, opened repeatedly; memory that cannot be shared; memory
#: that its owner unregisters during a peer's put, on a device with waiting streams.
OPENED = COMMON
OPENED += """
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
lib.ucch_region_revoke(room.native)
peers[left].notify(counter=counters[left]).Wait()  # only now its stream goes on
room.close()
left_over = room_seen.copy()
for request in begun:
    with suppress(RefusedError):
        request.Wait()
with pytest.raises(RefusedError):
    while True:
        peer.put(mine, target).Wait()
assert target.stale and peer.info(mine, target)["put"].startswith("staged")
stream.synchronize()
mpi.Barrier()
assert (room_seen == left_over).all()
with pytest.raises(RefusedError):
    peer.open(rooms[right])

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

#: While the driver waits for a user's kernel before it closes a peer's memory, peers put, and streams do not start to
#: wait.
CLOSING = COMMON
CLOSING += """
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

#: Memory of all kinds by one interface: allocated and wrapped, copied into each other, put to each other.
MEMORY = COMMON
MEMORY += """
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
    with pytest.raises(ValueError):
        wrong()
worker.close()
for each in (given, out, other, wrapped):
    each.close()
    each.close()
"""

#: Peers that connect and disconnect leave no mapped memory behind.
LEAVING = COMMON
LEAVING += """
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

#: Data that arrives by wires for a closed peer is not kept.
LATE = (
    far(COMMON)
    + """
class Info(ctypes.Structure):
    "What malloc has: of bytes in use those that are mapped, and the rest."
    _fields_ = [(name, ctypes.c_size_t) for name in "a b c d mapped f g rest i j".split()]

ask = ctypes.CDLL(None).mallinfo2
ask.restype = Info
N, TURNS = 30_000_000, 12
region, values = memory(N)
values[:] = 0
mpi.Barrier()
told = mpi.allgather((worker.address, region.descriptor))
before = []
for turn in range(1, TURNS + 3):
    peer = worker.connect(told[1 - r][0])
    mpi.Barrier()
    if r == 0:
        target = peer.open(told[1][1])
        values[:] = turn
        with suppress(PeerError):
            peer.put(region, target).Wait()
    while values[0] != turn:  # the first of it is here
        pass
    peer.close()
    mpi.Barrier()
    found = ask()
    before.append(found.mapped + found.rest)
assert before[-1] - before[1] < TURNS * 300_000, before
worker.close()  # some slots were never handed over
"""
)

#: A stopped process delays no transfers with others, however many are for it. Notifications that it reads later are
#: not taken for another transfer's.
STOPPED = COMMON
STOPPED += """
from contextlib import contextmanager

@contextmanager
def stopped(process):
    os.kill(process, signal.SIGSTOP)
    try:
        while not all(Path(task, "stat").read_text().rpartition(") ")[2][0] == "T"
                      for task in Path(f"/proc/{process}/task").iterdir()):
            time.sleep(1e-3)
        yield
    finally:
        os.kill(process, signal.SIGCONT)

def files():
    "Numbers of memory that others may open."
    every = Path("/proc/self/fd").iterdir()
    return {int(file.name) for file in every if "memfd:ucc_hetero" in os.path.realpath(file)}

def rooms(n):
    "Memory of this rank's, what was in it, and that of all ranks."
    room, seen = memory(n)
    return seen, seen.copy(), [peer.open(told) for peer, told in zip(peers, mpi.allgather(room.descriptor))]

other = mpi.allgather(os.getpid())[2]
N = 20_000_000  # more than slots hold
mine = memory(N)[0]
spot, had, spots = rooms(9000)
source, given = memory(9000, on_device=False)
mpi.Barrier()
if r == 0:
    with stopped(other):
        before = files()
        peers[2].put(source, spots[2], 0, 0, 1000)
        (slots,) = files() - before
        peers[2].leave()
        while os.dup(0) != slots:
            pass
        os.close(slots)  # the number that the next file has
        peers[1].put(source, spots[1], 0, 5000, 1000).Wait()
mpi.Barrier()
given = mpi.bcast(given)

address = mpi.allgather(worker.address)
if r in (0, 2):
    while peers[2 - r].alive:
        time.sleep(1e-3)
    peers[2 - r] = worker.connect(address[2 - r])
seen, _, targets = rooms(N)
if r == 0:
    with stopped(other):
        begun = peers[2].put(mine, targets[2])
        peers[1].put(mine, targets[1]).Wait()
        assert not begun.Test()
    begun.Wait()
sent = mpi.bcast(mine._owner.array.peek.copy() if r == 0 else None)
assert r == 0 or (seen == sent).all()

# A peer that has died owes no answers; those that others owe are waited for.
ours = [memory(10)[0] for _ in range(5)]
pids = mpi.allgather(os.getpid())
if r == 0:
    with stopped(pids[1]), stopped(pids[2]):
        [region.revoke() for region in ours]
        peers[1].lose()
        for region in ours:
            with pytest.raises(CollectiveTimeout):
                region.close(0)
        while lib.ucch_region_users(ours[0].native, 0.05):
            pass
        late, limit, worker.timeout = memory(10)[0], worker.timeout, 0.05
        late.revoke()
        while lib.ucch_region_users(late.native, -1) > 1:  # this rank's own worker answers
            lib.ucch_progress_once()
        assert not lib.ucch_region_users(late.native, 0.05), "a silent peer is waited for once for each region"
        with pytest.raises(CollectiveTimeout, match="after 0.05 s"):
            late.close()
        worker.timeout = limit
        ours.append(late)
    [region.close() for region in ours]
mpi.Barrier()
assert r != 2 or (spot[1000:] == had[1000:]).all()
assert r != 1 or (spot[5000:6000] == given[:1000]).all()
worker.close()
"""

#: The same over wires.
FAR = far(EVERY).replace(""".startswith("direct" if opens else "staged")""", """.endswith("wires")""")

#: Processes unexpectedly cannot open each other's slots: an error says so, and others continue.
APART = COMMON.replace(
    "rma.connect_all(worker, mpi)",
    """[
    worker.connect(Address.unpack(each)._replace(process=other.pid).pack()) for each in mpi.allgather(worker.address)
]
mpi.Barrier()""",
).replace(
    "worker = rma",
    """import subprocess
from ucc_hetero.rma.wire_format import Address
other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # whose files they look for
worker = rma""",
)
APART += """
slots = [memory(10)[0] for _ in range(2)]
there = peers[right].open(mpi.allgather(slots[1].descriptor)[right])
for move in (peers[right].put, peers[right].get):
    with pytest.raises(UCCHError, match="no common memory"):
        move(slots[0], there).Wait()
host, room = memory(100, False), memory(100, False)
told = mpi.allgather((room[0].descriptor, host[1].copy()))
peers[right].put(host[0], peers[right].open(told[right][0])).Wait()
mpi.Barrier()
assert (room[1] == told[left][1]).all()
worker.close()
other.kill()
"""

#: A peer dies during transfers; these fail, and transfers with others continue.
DEATH = COMMON
DEATH += """
N = 8_000_000
mine, room = memory(N), memory(N)
told = mpi.allgather(room[0].descriptor)
targets = [peer.open(t) for peer, t in zip(peers, told)]
mpi.Barrier()
if r == p - 1:
    os.kill(os.getpid(), 9)
dead, other = peers[p - 1], peers[1 - r]
with pytest.raises(PeerError, match="put failed: the peer has ended"):
    while True:
        dead.put(mine[0], targets[p - 1]).Wait()
while dead.alive:  # it may still be ending
    time.sleep(0.01)
assert other.alive
for _ in range(5):
    other.put(mine[0], targets[1 - r], notify=b"still").Wait()
    assert worker.wait_notification() == (other, b"still")
assert (room[1] != 0).any()
with pytest.raises(PeerError):
    dead.get(mine[0], targets[p - 1])
other.notify(b"end").Wait()
assert worker.wait_notification().data == b"end"
for region, _ in (mine, room):
    region.close()
worker.close()
print("right", flush=True)
os._exit(0)  # MPI waits for the dead
"""

#: Transfers whose time is over while their data is on its way: the next one, of other memory, is whole.
GIVEN_UP = COMMON
GIVEN_UP += """
N, late = 20_000_000, 0  # more than slots hold
(first, _), (second, given), (other, _), (room, seen) = (memory(N) for _ in range(4))
aside, target = (peers[right].open(mpi.allgather(each.descriptor)[right]) for each in (other, room))
for turn in range(6):
    given[:] = rng.integers(0, 256, N, dtype=np.uint8)
    mpi.Barrier()
    move = peers[right].put if turn % 2 else peers[right].get
    try:
        move(first, aside, timeout=rng.uniform(1e-3, 5e-3)).Wait()
    except CollectiveTimeout:
        late += 1
    peers[right].put(second, target).Wait()
    mpi.Barrier()
    assert (seen == mpi.sendrecv(given, right, source=left)).all(), turn
assert late
worker.close()
"""

#: A call of the driver fails for the first or a later chunk, while others are being copied: the transfer tells why,
#: and the next one is whole. A region that is closed meanwhile is refused, and waits for no timeout.
FAILS = COMMON
FAILS += """
driver = ctypes.CDLL(gpu.path)
(mine, given), (room, seen) = (memory(20_000_000) for _ in range(2))  # more than slots hold
target = peers[right].open(mpi.allgather(room.descriptor)[right])
for name, before in (b"cuEventCreate", 1), (b"cuEventRecord", 0), (b"cuEventRecord", 1), (b"cuEventQuery", 1):
    given[:] = rng.integers(0, 256, given.size, dtype=np.uint8)
    mpi.Barrier()
    if r == 0:
        driver.fakegpu_fail(name, before)
        with pytest.raises(DeviceError, match=r"FAKE_ERROR \\(719\\)"):
            peers[right].put(mine, target).Wait()
        peers[right].put(mine, target).Wait()
    there = mpi.bcast(given)
    assert r == 0 or (seen == there).all(), name
# The owner closes the region.
for turn in range(4):
    room, _ = memory(20_000_000)
    target = peers[right].open(mpi.allgather(room.descriptor)[right])
    mpi.Barrier()
    if r == 0:
        with suppress(RefusedError):
            peers[right].put(mine, target).Wait()
    else:
        room.close()
    mpi.Barrier()
worker.close()
"""
