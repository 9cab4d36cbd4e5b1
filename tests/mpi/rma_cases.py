"""Cases of one-sided transfers in host memory between all pairs of ranks."""

import asyncio
import time

import numpy as np

from ucc_hetero import rma
from ucc_hetero.errors import CollectiveTimeout, RefusedError, UCCHError
from ucc_hetero.native.libraries import ffi, lib

from mpi4py import MPI  # isort: skip

mpi = MPI.COMM_WORLD
r, p = mpi.rank, mpi.size
rng = np.random.default_rng()
N = 1_000_000


def refused(kind, words, call, *args, **options):
    try:
        found = call(*args, **options)
        if isinstance(found, rma.Request):
            found.Wait()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{call} takes {args}")


def everybody(worker, peers):
    """Rows to and from all ranks, this one included, with a notification each."""
    source, room = rng.integers(0, 256, N, np.uint8), np.zeros((p, N), np.uint8)
    mine, theirs = worker.register(source), worker.register(room)
    told = mpi.allgather((mine.descriptor, theirs.descriptor, source))
    targets = [peer.open(each[1]) for peer, each in zip(peers, told, strict=True)]
    sources = [peer.open(each[0]) for peer, each in zip(peers, told, strict=True)]
    for peer, target in zip(peers, targets, strict=True):
        peer.put(mine, target, 0, r * N, N, notify=b"row %d" % r)
    for _ in range(p):
        found = worker.wait_notification()
        rank = peers.index(found.peer)
        assert found.data == b"row %d" % rank and (room[rank] == told[rank][2]).all()
    mpi.Barrier()
    room[:] = 0
    order = rng.permutation(N // 100).astype(np.uint64) * 100
    for rank, peer in enumerate(peers):
        peer.get(theirs, sources[rank], order + np.uint64(rank * N), order, 100)
    for rank, peer in enumerate(peers):
        peer.flush().Wait()
        assert (room[rank] == told[rank][2]).all()
    assert peers[r].counts()["bytes"] == 2 * N
    mpi.Barrier()
    for region in (mine, theirs):
        region.close()


async def awaited(worker, peers):
    room, counter = np.zeros(p * 1000, np.int64), worker.counter()
    mine, theirs = worker.register(np.full(1000, r, np.int64)), worker.register(room)
    told = mpi.allgather((theirs.descriptor, counter.number))
    puts = [
        peer.put(mine, peer.open(descriptor), 0, r * 8000, counter=number)
        for peer, (descriptor, number) in zip(peers, told, strict=True)
    ]
    await asyncio.gather(counter.wait(p), *puts)
    assert counter.value == p and (room.reshape(p, 1000) == np.arange(p)[:, None]).all()
    assert not worker.notifications(), "a counter alone is no notification"


def in_order(worker, peers):
    """Notifications of a rank arrive in the order in which they were sent, long and short ones alike."""
    sizes = rng.choice([8, 1000, 65_528], 24).tolist()
    sent = [bytes([number]) + rng.bytes(size) for number, size in enumerate([*sizes, 65_528, 8])]
    right = peers[(r + 1) % p]
    mpi.Barrier()
    for each in [right.notify(data) for data in sent]:
        each.Wait()
    wanted = mpi.sendrecv(sent, dest=(r + 1) % p, source=(r - 1) % p)
    assert [worker.wait_notification().data for _ in wanted] == wanted


def one_by_one(worker, peers):
    """Single pieces of all lengths, many of which complete immediately."""
    n = 3 << 20
    source, room, back = rng.integers(0, 256, n, np.uint8), np.zeros((p, n), np.uint8), np.zeros(n, np.uint8)
    mine, theirs, home = (worker.register(each) for each in (source, room, back))
    told = mpi.allgather((theirs.descriptor, source))
    for rank, peer in enumerate(peers):
        target, at, wanted = peer.open(told[rank][0]), 0, np.zeros(n, np.uint8)
        before = peer.counts()
        for size in (0, 1, 8, 16384, 16385, 1 << 20, (1 << 20) + 1, *rng.integers(0, 40_000, 15).tolist()):
            put = peer.put(mine, target, at, r * n + at, size)
            put.Wait()
            assert put.Test()
            got = peer.get(home, target, at, r * n + at, size)
            while not got.Test():
                time.sleep(1e-4)  # others need the core
            wanted[at : at + size] = source[at : at + size]
            assert (back == wanted).all(), size
            at += size
        now = peer.counts()
        assert now["puts"] - before["puts"] == 22 and now["gets"] - before["gets"] == 22, (before, now)
        back[:] = 0
        near = peer.near and rank != r and {"cma", "xpmem"} & {*worker.info()["transports"]} == {"cma"}
        assert ("the kernel" in peer.info(mine, target)["put"]) == near
    target = peers[r].open(theirs.descriptor)
    refused(ValueError, "local_offsets[0]: 8 bytes", peers[r].put, mine, target, n - 7, 0, 8)
    refused(ValueError, "remote_offsets[0]: 8 bytes", peers[r].get, mine, target, 0, p * n - 7, 8)
    refused(ValueError, "local_offsets[0]: -1", peers[r].put, mine, target, -1, 0, 8)
    mpi.Barrier()
    for rank in range(p):
        assert (room[rank][: 2 << 20] == told[rank][1][: 2 << 20]).all()
    mpi.Barrier()


def bad_input(worker, peers):
    """Wrong arguments raise on their side."""
    right = peers[(r + 1) % p]
    room = np.full(4096, 7, np.uint8)
    mine = worker.register(room)
    told = mpi.allgather((mine.descriptor, worker.address))
    descriptor, address = told[(r + 1) % p]
    target = right.open(descriptor)
    refused(ValueError, "local_offsets[1]: 96 bytes at 4001", right.put, mine, target, [0, 4001], [0, 0], 96)
    refused(ValueError, "remote_offsets[0]", right.get, mine, target, 0, 4096, 1)
    refused(ValueError, "lengths[1]: -1", right.put, mine, target, [0, 0], [0, 0], [1, -1])
    refused(TypeError, "lengths", right.put, mine, target, 0, 0, 0.5)
    refused(ValueError, "another list has 3", right.put, mine, target, [0, 1], [1, 2], [1, 2, 3])
    refused(ValueError, "65537 bytes", right.notify, bytes(65537))
    refused(ValueError, "-1 is not the number of a counter", right.notify, counter=-1)
    refused(rma.FormatError, "not a valid descriptor", right.open, address)
    refused(rma.FormatError, "version 513", right.open, descriptor[:4] + b"\x01\x02" + descriptor[6:])
    refused(rma.FormatError, "damaged", right.open, descriptor[:-1] + bytes([descriptor[-1] ^ 1]))
    if p > 2:
        refused(ValueError, "another process", right.open, told[(r + 2) % p][0])
    # Without this side's checks the owner still checks, and refuses.
    forged = lib.ucch_target_new(right.native, int.from_bytes(descriptor[18:26], "little"), 0, 1 << 40, 1)
    outside = tuple(np.array([number], np.uint64) for number in (0, 4000, 97))
    places = [ffi.cast("uint64_t *", each.ctypes.data) for each in outside]
    for what in (lib.UCCH_RMA_PUT, lib.UCCH_RMA_GET):
        sides = {"what": what, "local": mine.native, "target": forged, "n": 1}
        order = sides | dict(zip(("mine", "theirs", "lengths"), places, strict=True))
        refused(RefusedError, "outside of the region", right._start, order, "transfer", outside, None, 30.0)
    mpi.Barrier()
    assert (room == 7).all()
    gone = worker.register(np.zeros(8, np.uint8))
    others = mpi.allgather(gone.descriptor)
    stale = right.open(others[(r + 1) % p])
    mpi.Barrier()
    gone.close()
    mpi.Barrier()
    assert stale.stale
    refused(RefusedError, "no longer registered", right.put, mine, stale, 0, 0, 8)
    refused(RefusedError, "no longer registered", right.open, others[(r + 1) % p])
    refused(ValueError, "closed", right.put, gone, target)
    refused(ValueError, "closed", right.put, gone, target, 0, 0, 8)
    if p > 1:
        refused(ValueError, "another peer", peers[r].put, mine, target, 0, 0, 8)
    refused(CollectiveTimeout, "no notification", worker.wait_notification, 0.01)
    refused(CollectiveTimeout, "counter 1", worker.counter().wait(1, timeout=0.05).Wait)
    right.put(mine, target).Wait()
    target.close()
    refused(ValueError, "closed", right.put, mine, target, 0, 0, 8)
    mpi.Barrier()


def main():
    """Run all cases, and some again with a new worker."""
    for anew in (False, True):
        with rma.Worker() as worker:
            peers = rma.connect_all(worker, mpi)
            everybody(worker, peers)
            asyncio.run(awaited(worker, peers))
            in_order(worker, peers)
            if not anew:
                one_by_one(worker, peers)
                bad_input(worker, peers)
            mpi.Barrier()
        refused((ValueError, UCCHError), "closed", worker.register, np.zeros(1))
