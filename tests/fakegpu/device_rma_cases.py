"""Cases of one-sided transfers between devices of any vendors, through pinned slots, or by wires to another host."""

import ctypes
import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from arrays import Array, Gate, ndarray, runtime
from mpi4py import MPI

from ucc_hetero import Communicator, device, rma
from ucc_hetero.errors import CollectiveTimeout, DeviceError, PeerError, RefusedError, UCCHError
from ucc_hetero.native.libraries import ffi, lib
from ucc_hetero.rma import worker as workers
from ucc_hetero.rma.wire_format import Address

RNG = np.random.default_rng()


def drawn(n):
    return RNG.integers(0, 256, n, dtype=np.uint8)


class Side:
    """A rank with a worker and its peers, which it treats as being on another host if they are ``far``."""

    def __init__(self, far=False, connect=rma.connect_all):
        self.mpi = MPI.COMM_WORLD
        self.r, self.p = self.mpi.rank, self.mpi.size
        self.right, self.left = (self.r + 1) % self.p, (self.r - 1) % self.p
        self.gpu = runtime() if device.available() else None
        identity = (lambda: SimpleNamespace(memory=self.r)) if far else workers.host_identity
        with mock.patch.object(workers, "host_identity", identity):
            self.worker = rma.Worker()
        self.peers = connect(self.worker, self.mpi)

    def memory(self, n, on_device=True):
        """``n`` random bytes, and where a test can look at them."""
        if on_device and self.gpu:
            self.gpu.use(device.place_of().device)
        array = Array(n, np.uint8) if on_device and self.gpu else np.empty(n, np.uint8)
        seen = getattr(array, "peek", array)
        seen[:] = drawn(n)
        return self.worker.register(array), seen

    def opened(self, region, rank):
        """The memory that another rank registers as this one registers its own."""
        return self.peers[rank].open(self.mpi.allgather(region.descriptor)[rank])

    def driver(self):
        return ctypes.CDLL(self.gpu.path)


def pieces(n, count, most):
    """Places that do not overlap, in any order, on both sides, and lengths; some are empty."""
    lengths = RNG.integers(0, most, count).astype(np.uint64)

    def places():
        order = RNG.permutation(count)
        out = np.empty(count, np.uint64)
        out[order] = np.cumsum(lengths[order]) - lengths[order]
        return out

    assert lengths.sum() <= n
    return places(), places(), lengths


def moved(into, source, ours, theirs, lengths):
    """What a memory is after those pieces of another were moved."""
    out = into.copy()
    for a, b, k in zip(ours.tolist(), theirs.tolist(), lengths.tolist(), strict=True):
        out[b : b + k] = source[a : a + k]
    return out


def places(share):
    """Where pieces of a share are on both sides, and their lengths: any, pages, or one of the whole share."""
    pages = np.arange(share // 10_000, dtype=np.uint64) * np.uint64(10_000)
    kinds = (
        lambda: pieces(share, 200, share // 125),
        lambda: (pages, pages[::-1].copy(), np.full(pages.size, 10_000, np.uint64)),
        lambda: tuple(np.array([each], np.uint64) for each in (0, 0, share)),
    )
    return kinds[RNG.integers(3)]()


def calls(move, local, target, *lists):
    """One call, or one for each of some parts of the lists."""
    parts = 1 if RNG.integers(2) else min(len(lists[0]), 50)
    return [move(local, target, *each) for each in zip(*(np.array_split(every, parts) for every in lists), strict=True)]


def queue_bytes(region, values, stream):
    """Have a memory of the device hold these when the stream gets there."""
    region.source = Array(values.size, np.uint8).set(values)
    block = region._owner.array.block
    runtime().copy(block.handle, region.source.block.handle, values.size, stream.handle)


def everything(far=False):
    """Random transfers between all ranks, between devices and host memory: of pieces in any order, of pages, or of a
    whole region; as lists and many at a time, by hosts and, if streams do not share queues, in streams; with
    notifications and counters, during an allreduce."""
    me = Side(far)
    own_queues = me.gpu and os.environ["FAKEGPU_CONNECTIONS"] == "0"
    streams = [me.gpu.stream() for _ in range(2)] if own_queues else []
    with Communicator(me.mpi) as comm:
        counter = me.worker.counter()
        for turn in range(1, 4):
            transfer(me, comm, counter, streams, turn, far)
    me.worker.close()


def transfer(me, comm, counter, streams, turn, far):
    n, m, others = 8_000_000, 100_000, [q for q in range(me.p) if q != me.r]
    share = np.uint64(n // me.p)  # longer than slots
    (mine, sent), (shown, shows), (room, received), (back, fetched) = (
        me.memory(n, RNG.random() < 0.7) for _ in range(4)
    )
    queued = streams and mine.memory != "host" and RNG.random() < 0.7
    sent = drawn(n) if queued else sent.copy()
    puts, gets = ({q: places(int(share)) for q in others} for _ in range(2))
    values = RNG.integers(0, 9, m)
    told = me.mpi.allgather((room.descriptor, shown.descriptor, counter.number, sent, shows.copy(), puts, values))
    was, had = received.copy(), fetched.copy()
    rooms, sources = ({q: me.peers[q].open(told[q][k]) for q in others} for k in (0, 1))
    check_way(me.peers[me.right], mine, rooms[me.right], far)

    begun = [comm.Iallreduce(Array(m).set(values), total := Array(m))]
    if queued:
        queue_bytes(mine, sent, streams[0])
    how = {"stream": streams[0]} if queued else {}
    for q in others:
        local, remote, lengths = puts[q]
        at, notify = remote + me.r * share, b"%d" % me.r
        begun.append(me.peers[q].put(mine, rooms[q], local, at, lengths, notify=notify, counter=told[q][2], **how))
    if queued:
        [put.Wait(stream=streams[0]) for put in begun[1:]]
        queue_bytes(mine, np.zeros(n, np.uint8), streams[0])  # not before puts have read it
    for q in others:
        local, remote, lengths = gets[q]
        begun += calls(me.peers[q].get, back, sources[q], local + q * share, remote, lengths)
    landed = None
    if streams and room.memory != "host":
        counter.wait(turn * len(others), stream=streams[1])
        landed = Array(n, np.uint8)
        me.gpu.copy(landed.block.handle, room._owner.array.block.handle, n, streams[1].handle)
    counter.wait(turn * len(others)).Wait()
    notes = [me.worker.wait_notification() for _ in others]
    assert sorted(int(each.data) for each in notes) == others
    assert all(me.peers[int(each.data)] == each.peer for each in notes)
    for each in begun:
        each.Wait()
    [stream.synchronize() for stream in streams]
    for q in others:
        local, remote, lengths = told[q][5][me.r]
        was = moved(was, told[q][3], local, remote + q * share, lengths)
        local, remote, lengths = gets[q]
        had = moved(had, told[q][4], remote, local + q * share, lengths)
    assert (received == was).all() and (fetched == had).all(), turn
    assert landed is None or (landed.peek == was).all(), turn
    assert (getattr(total, "peek", total) == sum(each[6] for each in told)).all()
    assert all(me.peers[q].counts()["failed"] == 0 for q in others)
    me.mpi.Barrier()
    [region.close() for region in (mine, shown, room, back)]


def check_way(peer, mine, target, far):
    """Devices of one vendor open each other's memory if the driver allows it; others use slots, or wires."""
    same = mine.memory == target.memory != "host"
    opens = mine.memory == target.memory == "nvidia" and "FAKEGPU_NO_PEERS" not in os.environ
    info = peer.info(mine, target)
    assert {mine.memory, target.memory} == {"host"} or (
        info["put"].endswith("wires") if far else info["put"].startswith("direct" if opens else "staged")
    ), info
    assert ("not direct" in info) == (not opens and same), info


def opened():
    """Memory that a peer's device opens: parts of one allocation, opened repeatedly; memory that cannot be shared;
    memory that its owner unregisters during a peer's put, on a device with waiting streams; two workers of one
    process."""
    me, n = Side(), 3_000_000
    peer = me.peers[me.right]
    whole = Array(2 * n + 1000, np.uint8)
    parts = [ndarray(whole, first, n, np.uint8) for first in (104, n + 777)]
    for part in parts:
        part.peek[:] = drawn(n)
    regions = [me.worker.register(part) for part in parts]
    short, _ = me.memory(1000)  # the runtime does not lend that
    theirs, was = me.mpi.allgather(([region.descriptor for region in regions], [part.peek for part in parts]))[me.right]
    targets = [peer.open(theirs[k]) for k in (0, 1, 0)]
    for target in targets:
        assert peer.info(regions[0], target)["put"].startswith("direct"), peer.info(regions[0], target)
    info = peer.info(short, me.opened(short, me.right))
    assert info["put"].startswith("staged") and "does not lend" in info["not direct"], info
    for k in RNG.permutation(3):  # closed in any order, those that are left stay open
        into, seen = me.memory(n)
        peer.get(into, targets[k]).Wait()
        assert (seen == was[k % 2]).all(), k
        targets[k].close()
        into.close()
    me.mpi.Barrier()
    taken_back(me, n)
    two_workers(me, n)
    me.worker.close()
    assert me.driver().fakegpu_misuses() == 0


def naps(name):
    """How often the process's thread of this name has slept."""
    status = [(task / "status").read_text() for task in Path("/proc/self/task").iterdir()]
    (mine,) = [text for text in status if text.startswith(f"Name:\t{name}\n")]
    return int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", mine, re.M)[1])


def taken_back(me, n):
    """Memory is unregistered while it is written to."""
    (mine, _), (room, seen) = me.memory(n), me.memory(n)
    rooms = me.mpi.allgather(room.descriptor)
    peer, counter, stream = me.peers[me.right], me.worker.counter(), me.gpu.stream()
    target = peer.open(rooms[me.right])
    counters = me.mpi.allgather(counter.number)
    counter.wait(1, stream=stream)  # held: who waits for this device waits for a peer
    begun = [peer.put(mine, target, i, i, 1000) for i in range(0, 100_000, 1000)]
    me.mpi.Barrier()
    lib.ucch_region_revoke(room.native)
    for request in begun:
        with suppress(RefusedError):
            request.Wait()
    while not target.stale:
        lib.ucch_progress_once()
    looked = naps("ucch-rma") + 10  # between naps it looks whether it may close the memory
    while naps("ucch-rma") < looked:
        assert not me.driver().fakegpu_closing(), "the driver waits for a stream that waits for a peer"
    me.mpi.Barrier()
    me.peers[me.left].notify(counter=counters[me.left]).Wait()  # only now its stream goes on
    room.close()
    left_over = seen.copy()
    with pytest.raises(RefusedError):
        while True:
            peer.put(mine, target).Wait()
    assert target.stale and peer.info(mine, target)["put"].startswith("staged")
    stream.synchronize()
    me.mpi.Barrier()
    assert (seen == left_over).all()
    with pytest.raises(RefusedError):
        peer.open(rooms[me.right])


def two_workers(me, n):
    (mine, seen), other, array = me.memory(n), rma.Worker(), Array(n, np.uint8).set(0)
    between = me.worker.connect(other.address)
    other.connect(me.worker.address)
    near = between.open(other.register(array).descriptor)
    assert between.info(mine, near)["put"].startswith("direct")
    between.put(mine, near).Wait()
    assert (array.peek == seen).all()
    other.close()


def closing():
    """While the driver waits for a user's kernel before it closes a peer's memory, peers put, and streams do not start
    to wait."""
    me, n = Side(), 3_000_000
    (mine, given), (room, seen) = me.memory(n), me.memory(n, False)
    was = me.mpi.bcast(given, 1)
    target, place = me.opened(mine, me.right), me.opened(room, me.right)
    stream, counter, driver = me.gpu.stream(), me.worker.counter(), me.driver()
    numbers = me.mpi.allgather(counter.number)
    if me.r == 0:
        assert me.peers[1].info(mine, target)["put"].startswith("direct")
        gate = Gate(stream)  # a kernel that takes long
        target.close()
        while not driver.fakegpu_closing():
            time.sleep(1e-3)
    me.mpi.Barrier()
    if me.r == 1:
        me.peers[0].put(mine, place, notify=b"there", counter=numbers[0]).Wait()
    else:
        other = me.gpu.stream()
        counter.wait(1, stream=other)
        other.synchronize()
        assert me.worker.wait_notification(10.0).data == b"there" and (seen == was).all()
        assert driver.fakegpu_closing() == 1, "the driver has come back already"
        gate.open()
        while driver.fakegpu_closing():
            time.sleep(1e-3)
    me.mpi.Barrier()
    mine.close()
    me.worker.close()
    assert driver.fakegpu_misuses() == 0


def all_kinds():
    """Memory of all kinds by one interface: allocated and wrapped, copied into each other, put to each other."""
    me, n = Side(), 3_000_000
    was = drawn(n)
    given, out = rma.Memory.allocate(n), rma.Memory.allocate(n, on="host")
    other, wrapped = rma.Memory.allocate(n), rma.Memory(np.empty(n, np.uint8))
    assert given.vendor == (me.gpu.vendor if me.gpu else "host") and out.vendor == wrapped.vendor == "host"
    out.copy(was)
    given.copy(out)
    other.copy(given)
    wrapped.copy(other)
    assert (wrapped.array == was).all()
    mine, room = me.worker.register(given), me.worker.register(other)
    me.peers[me.right].put(mine, me.opened(room, me.right)).Wait()
    me.mpi.Barrier()
    wrapped.copy(other)
    assert (wrapped.array == me.mpi.sendrecv(was, me.right, source=me.left)).all()
    for wrong in (
        lambda: out.copy(was[1:]),
        lambda: rma.Memory.allocate(0),
        lambda: rma.Memory.allocate(1, on="nowhere"),
    ):
        with pytest.raises(ValueError):
            wrong()
    me.worker.close()
    for each in (given, out, other, wrapped):
        each.close()
        each.close()


def leaving():
    """Peers that connect and disconnect leave no mapped memory behind."""
    me, mapped = Side(), []
    room, seen = me.memory(100_000)
    for _ in range(5):
        other = rma.Worker()
        theirs, ours = other.connect(me.worker.address), me.worker.connect(other.address)
        given = drawn(100_000)
        theirs.put(other.register(given), theirs.open(room.descriptor)).Wait()
        assert (seen == given).all()
        other.close()
        ours.close()
        mapped.append(Path("/proc/self/maps").read_text().count("memfd:ucc_hetero"))
    assert len({*mapped}) == 1, mapped
    me.worker.close()


class Info(ctypes.Structure):
    """What malloc has: of bytes in use those that are mapped, and the rest."""

    _fields_ = [(name, ctypes.c_size_t) for name in "a b c d mapped f g rest i j".split()]


def late():
    """Data that arrives by wires for a closed peer is not kept."""
    me = Side(far=True)
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Info
    n, turns, before = 30_000_000, 12, []
    region, values = me.memory(n)
    values[:] = 0
    me.mpi.Barrier()
    told = me.mpi.allgather((me.worker.address, region.descriptor))
    for turn in range(1, turns + 3):
        peer = me.worker.connect(told[1 - me.r][0])
        me.mpi.Barrier()
        if me.r == 0:
            target = peer.open(told[1][1])
            values[:] = turn
            with suppress(PeerError):
                peer.put(region, target).Wait()
        while values[0] != turn:  # the first of it is here
            pass
        peer.close()
        me.mpi.Barrier()
        found = ask()
        before.append(found.mapped + found.rest)
    assert before[-1] - before[1] < turns * 300_000, before
    me.worker.close()  # some slots were never handed over


@contextmanager
def stopped(process):
    os.kill(process, signal.SIGSTOP)
    try:
        tasks = [*Path(f"/proc/{process}/task").iterdir()]
        while not all((task / "stat").read_text().rpartition(") ")[2][0] == "T" for task in tasks):
            time.sleep(1e-3)
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def memfds():
    """Numbers of memory that others may open."""
    every = Path("/proc/self/fd").iterdir()
    return {int(file.name) for file in every if "memfd:ucc_hetero" in os.path.realpath(file)}


def beside_stopped():
    """A stopped process delays no transfers with others, however many are for it. Notifications that it reads later
    are not taken for another transfer's."""
    me, pids = Side(), MPI.COMM_WORLD.allgather(os.getpid())
    n = 20_000_000  # more than slots hold
    mine, _ = me.memory(n)
    spot, at = me.memory(9000)
    had, spots = at.copy(), [me.opened(spot, rank) for rank in range(me.p)]
    source, given = me.memory(9000, on_device=False)
    me.mpi.Barrier()
    if me.r == 0:
        with stopped(pids[2]):
            before = memfds()
            me.peers[2].put(source, spots[2], 0, 0, 1000)
            (slots,) = memfds() - before
            me.peers[2].leave()
            while os.dup(0) != slots:
                pass
            os.close(slots)  # the number that the next file has
            me.peers[1].put(source, spots[1], 0, 5000, 1000).Wait()
    me.mpi.Barrier()
    given, address = me.mpi.bcast(given), me.mpi.allgather(me.worker.address)
    if me.r in (0, 2):
        while me.peers[2 - me.r].alive:
            time.sleep(1e-3)
        me.peers[2 - me.r] = me.worker.connect(address[2 - me.r])
    room, seen = me.memory(n)
    targets = [me.opened(room, rank) for rank in range(me.p)]
    if me.r == 0:
        with stopped(pids[2]):
            begun = me.peers[2].put(mine, targets[2])
            me.peers[1].put(mine, targets[1]).Wait()
            assert not begun.Test()
        begun.Wait()
    sent = me.mpi.bcast(mine._owner.array.peek if me.r == 0 else None)
    assert me.r == 0 or (seen == sent).all()
    owed_answers(me, pids)
    assert me.r != 2 or (at[1000:] == had[1000:]).all()
    assert me.r != 1 or (at[5000:6000] == given[:1000]).all()
    me.worker.close()


def owed_answers(me, pids):
    """A peer that has died owes no answers; those that others owe are waited for."""
    ours, worker = [me.memory(10)[0] for _ in range(5)], me.worker
    if me.r == 0:
        with stopped(pids[1]), stopped(pids[2]):
            [region.revoke() for region in ours]
            me.peers[1].lose()
            for region in ours:
                with pytest.raises(CollectiveTimeout):
                    region.close(0)
            while lib.ucch_region_users(ours[0].native, 0.05):
                pass
            late, limit, worker.timeout = me.memory(10)[0], worker.timeout, 0.05
            late.revoke()
            while lib.ucch_region_users(late.native, -1) > 1:  # this rank's own worker answers
                lib.ucch_progress_once()
            assert not lib.ucch_region_users(late.native, 0.05), "a silent peer is waited for once for each region"
            with pytest.raises(CollectiveTimeout, match="after 0.05 s"):
                late.close()
            worker.timeout = limit
            ours.append(late)
        [region.close() for region in ours]
    me.mpi.Barrier()


def apart():
    """Processes unexpectedly cannot open each other's slots: an error says so, and others continue."""
    other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # whose files they look for

    def connect(worker, mpi):
        addresses = [Address.unpack(each)._replace(process=other.pid).pack() for each in mpi.allgather(worker.address)]
        peers = [worker.connect(each) for each in addresses]
        mpi.Barrier()
        return peers

    me = Side(connect=connect)
    peer = me.peers[me.right]
    slots = [me.memory(10)[0] for _ in range(2)]
    there = me.opened(slots[1], me.right)
    for move in (peer.put, peer.get):
        with pytest.raises(UCCHError, match="no common memory"):
            move(slots[0], there).Wait()
    (host, given), (room, seen) = me.memory(100, False), me.memory(100, False)
    peer.put(host, me.opened(room, me.right)).Wait()
    me.mpi.Barrier()
    assert (seen == me.mpi.sendrecv(given, me.right, source=me.left)).all()
    me.worker.close()
    other.kill()


def death(far):
    """The last of three ranks dies during transfers; these fail, and transfers with others continue. Each three ranks
    are a job: MPI's own libucp may end a process that copies to one that is killed."""
    MPI.COMM_WORLD = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank // 3)
    me, n = Side(far), 8_000_000
    (mine, _), (room, seen) = me.memory(n), me.memory(n)
    targets = [me.opened(room, rank) for rank in range(me.p)]
    me.mpi.Barrier()
    if me.r == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dead, other = me.peers[2], me.peers[1 - me.r]
    with pytest.raises(PeerError, match="put failed: the peer has ended"):
        while True:
            dead.put(mine, targets[2]).Wait()
    while dead.alive:  # it may still be ending
        time.sleep(0.01)
    assert other.alive
    for _ in range(5):
        other.put(mine, targets[1 - me.r], notify=b"still").Wait()
        assert me.worker.wait_notification() == (other, b"still")
    assert (seen != 0).any()
    with pytest.raises(PeerError):
        dead.get(mine, targets[2])
    other.notify(b"end").Wait()
    assert me.worker.wait_notification().data == b"end"
    mine.close()
    room.close()
    me.worker.close()
    print("right", flush=True)
    os._exit(0)  # MPI waits for the dead


def given_up(far=False):
    """Transfers whose time is over while their data is on its way: the next one, of other memory, is whole."""
    me, n, late = Side(far), 20_000_000, 0  # more than slots hold
    (first, _), (second, given), (other, _), (room, seen) = (me.memory(n) for _ in range(4))
    aside, target = me.opened(other, me.right), me.opened(room, me.right)
    for turn in range(6):
        given[:] = drawn(n)
        me.mpi.Barrier()
        move = me.peers[me.right].put if turn % 2 else me.peers[me.right].get
        try:
            move(first, aside, timeout=RNG.uniform(1e-3, 5e-3)).Wait()
        except CollectiveTimeout:
            late += 1
        me.peers[me.right].put(second, target).Wait()
        me.mpi.Barrier()
        assert (seen == me.mpi.sendrecv(given, me.right, source=me.left)).all(), turn
    assert late
    me.worker.close()


def starved(me, mine, given, target, seen):
    """No pinned memory is left while a stream waits: a transfer goes on with what it has. To return memory to the
    driver would wait for the stream."""
    peer, counter, first = me.peers[me.right], me.worker.counter(), np.zeros(1, np.uint64)
    given[:] = drawn(given.size)
    told = me.mpi.allgather((counter.number, given.copy()))
    if me.r == 1:
        stream = me.gpu.stream()
        peer.put(mine, target, first, first, 1).Wait()
        idle = [iter(partial(lib.ucch_pool_take, 1, 1 << bits, ffi.NULL, 0), ffi.NULL) for bits in range(12, 26)]
        used = [block for each in idle for block in each]
        lib.ucch_pool_give(lib.ucch_pool_take(1, 64 << 20, ffi.NULL, 1))  # too long for what the transfer needs
        counter.wait(1, stream=stream)
        assert lib.ucch_gates_held()
        os.environ["FAKEGPU_PINNED_MB"] = "0"
        peer.put(mine, target).Wait()
        del os.environ["FAKEGPU_PINNED_MB"]
        [lib.ucch_pool_give(block) for block in used]
    me.mpi.Barrier()
    if me.r == 0:
        assert (seen == told[1][1]).all()
        peer.notify(counter=told[1][0]).Wait()
    else:
        stream.synchronize()


def driver_fails(far=False):
    """A call of the driver fails for the first or a later chunk, while others are being copied: the transfer tells why,
    and the next one is whole. A region that is closed meanwhile is refused, and waits for no timeout."""
    me = Side(far)
    (mine, given), (room, seen) = (me.memory(20_000_000) for _ in range(2))  # more than slots hold
    peer, target = me.peers[me.right], me.opened(room, me.right)
    for name, before in (b"cuEventCreate", 1), (b"cuEventRecord", 0), (b"cuEventRecord", 1), (b"cuEventQuery", 1):
        given[:] = drawn(given.size)
        me.mpi.Barrier()
        if me.r == 0:
            me.driver().fakegpu_fail(name, before)
            with pytest.raises(DeviceError, match=r"FAKE_ERROR \(719\)"):
                peer.put(mine, target).Wait()
            peer.put(mine, target).Wait()
        there = me.mpi.bcast(given)
        assert me.r == 0 or (seen == there).all(), name
    if not far:
        starved(me, mine, given, target, seen)
    for _ in range(4):
        room, _ = me.memory(20_000_000)
        target = me.opened(room, me.right)
        me.mpi.Barrier()
        if me.r == 0:
            with suppress(RefusedError):
                peer.put(mine, target).Wait()
        else:
            room.close()
        me.mpi.Barrier()
    me.worker.close()


def behind():
    """A call of the driver fails for copies that stand behind another stream's wait: as sender and as receiver. The
    transfer fails once none of them is under way, and the engine goes on meanwhile."""
    me, n = Side(), 3_000_000
    (mine, given), (room, seen) = (me.memory(n) for _ in range(2))
    peer, target, stream = me.peers[me.right], me.opened(room, me.right), me.gpu.stream()
    every = np.array([0, n // 2, n - 1000], np.uint64)  # so few are copied each for itself
    counter, lists = me.worker.counter(), (every, every, 1000)
    number = me.mpi.allgather(counter.number)[me.right]
    peer.put(mine, target, *lists).Wait()
    fails = (b"cuMemcpyAsync", 1), (b"cuEventRecord", 0), (b"cuEventQuery", 0)
    senders = range(1 if peer.info(mine, target)["put"].startswith("direct") else 2)  # then its device does it all
    for sender, (name, before) in [(sender, each) for each in fails for sender in senders]:
        given[:] = drawn(n)
        if me.r == 0:
            gate = Gate(stream)
            me.driver().fakegpu_fail(name, before)
        me.mpi.Barrier()
        begun = peer.put(mine, target, *lists, counter=number) if me.r == sender else None
        while me.r == 0 and sender == 1 and not lib.ucch_rma_arriving(me.worker.native, counter.number):
            lib.ucch_progress_once()
        for _ in range(100):
            lib.ucch_progress_once()
        assert me.r != sender or not begun.Test(), "it fails while copies are under way"
        me.mpi.Barrier()
        if me.r == 0:
            gate.open()
        if me.r == sender:
            with pytest.raises(UCCHError):
                begun.Wait()
            peer.put(mine, target).Wait()
        there = me.mpi.bcast(given, sender)
        assert me.r == sender or (seen == there).all(), (sender, name)
    if me.r == 0:
        gate = Gate(stream)
        with pytest.raises(CollectiveTimeout):
            peer.put(mine, target, timeout=0.05).Wait()
        with pytest.raises(CollectiveTimeout, match="still in use"):
            mine.close(0.05)
        gate.open()
        mine.close()
    me.mpi.Barrier()
    me.worker.close()
    assert me.driver().fakegpu_misuses() == 0
