"""Cases of calls between devices of several hosts, carried by network threads."""

import os
import time
from pathlib import Path
from subprocess import run

from arrays import Array
from mpi4py import MPI
from ranks import dice_of, numbers, queued, sums

from ucc_hetero import Communicator
from ucc_hetero.bootstrap import meeting
from ucc_hetero.native.libraries import ffi, lib


def rings(without):
    """One rank may have no wires."""
    if MPI.COMM_WORLD.rank == without:
        os.environ["UCCH_WIRES"] = "0"
    with Communicator() as comm:
        x, y = Array(1000).set(comm.rank), Array(1000)
        comm.Allreduce(x, y)
        assert (y.peek == sum(range(comm.size))).all()
        (line,) = [line for line in comm.plan_summary().splitlines() if line.startswith("rings: ")]
        print("queued" if queued(comm) else "by hosts", line)


def parts(comm):
    """Ranks 0 and 1 are on one host, 0 and 2 on two: a communicator's ring to rank 1 has another pinned length if both
    ranks map it than if wires carry it."""
    for colors in ([0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1]):
        with comm.Split(colors[comm.rank], comm.rank) as part:
            for n in (100, 300_000):
                x, y = Array(n).set(numbers(n, part.rank, n)), Array(n).set(-7)
                part.Allreduce(x, y)
                assert (y.peek == sums(part, n, n)).all(), n
            assert queued(part) == {"allreduce"}, part.plan_summary()


def has_left():
    """True once the timeline shows that this rank's data has left."""
    first = ffi.cast("char *", lib.ucch_trace_memory(ffi.new("uint64_t *"))) + lib.UCCH_TRACE_HEADER
    events = ffi.cast("ucch_event *", first)
    return any(events[i].end and events[i].bytes > 60_000 and not events[i].step % 2 for i in range(64))


def early(comm):
    """Data that comes before its ring is kept, however many communicators there were. Once rank 0's data has left, its
    wire sends that of a call on another communicator, so the other rank has met the first data when this call ends."""
    n = 300_000
    with comm.Split(comm.rank % 2, comm.rank) as beside:
        for k, made_before in enumerate([0, 2**18 - 2, 2**18 - 1]):
            meeting._last[0] += made_before  # first: the next one's number is that of `beside`, but for its upper bits
            with comm.Split(comm.rank % 2, comm.rank) as part:
                x, y = Array(n).set(numbers(k, part.rank, n)), Array(n).set(-7)
                assert lib.ucch_trace_open(ffi.NULL, 64) == 0
                if part.rank == 0:
                    request = part.Iallreduce(x, y)
                    while not has_left():
                        time.sleep(1e-3)
                beside.Allreduce(Array(100).set(1), Array(100))
                if part.rank == 1:
                    request = part.Iallreduce(x, y)
                request.Wait()
                lib.ucch_trace_stop()
                assert (y.peek == sums(part, k, n)).all()


def sent():
    """The bytes that this host has sent by each of its two links."""
    return [int(Path(f"/sys/class/net/eth{k}/statistics/tx_bytes").read_text()) for k in (0, 1)]


def carried(comm, count, times):
    """The bytes that each link carries in so many calls of this length, after a first one."""
    x, y = Array(count).set(1), Array(count)
    comm.Allreduce(x, y)
    before = sent()
    for _ in range(times):
        comm.Allreduce(x, y)
    assert (y.peek == comm.size).all()
    return [after - then for then, after in zip(before, sent(), strict=True)]


def shared_ports(comm):
    each = carried(comm, 2_000_000, 3)
    assert min(each) > 0.3 * max(each) > 1e6, each


def slower_link():
    """A ninth of the other link's data, and what is in flight at the end. The next communicator reuses the rings."""
    pinned = set()
    for _ in range(2):
        with Communicator() as comm:
            values = dice_of(comm).random(5_000_000).astype("f4")
            x, before = Array(values.size).set(values if comm.rank == 0 else -7), sent()
            comm.Bcast(x, 0)
            assert (x.peek == values).all()
            slow, fast = [after - then for then, after in zip(before, sent(), strict=True)]
            assert comm.rank or 0 < slow < 0.3 * fast, (slow, fast)
            pinned.add(lib.ucch_channels_pinned())
    assert len(pinned) == 1, pinned


def ports_of_different_speed(folder):
    """Short calls use the faster port, long ones both, in either direction."""
    for name, speed in (("eth0", "200"), ("eth1", "300")):  # the kernel says 10 Gbit/s of all emulated ports
        run(["mount", "--bind", f"{folder}/{speed}", f"/sys/class/net/{name}/speed"], check=True)
    for _ in range(3):  # which of the wires it is differs
        with Communicator() as comm:
            slow, fast = carried(comm, 10_000, 5)
            assert slow < 0.1 * fast, (slow, fast)
    with Communicator() as comm:
        most = 0.0
        for _ in range(20):  # where cores are busy, the thread of the slower port's wire comes late to some calls
            slow, fast = carried(comm, 1_000_000, 5)
            assert slow < fast, (slow, fast)
            most = max(most, slow / fast)
            if comm.mpi.allreduce(most > 0.1, MPI.LAND):
                return
        raise AssertionError(f"the slower port has carried {most:.3f} of the faster one's data at most")
