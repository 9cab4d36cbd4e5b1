"""Cases of completely queued calls among devices of two vendors: which ranks have channels, and how channels end."""

import ctypes
import os
import threading
from functools import partial
from itertools import pairwise, product

import numpy as np
from arrays import Array, Gate, runtime
from collective_call import Call, Case
from collective_cases import IN_STREAMS, start
from mpi4py import MPI
from processes import in_child, in_threads
from ranks import dice_of, numbers, own_device, queued, reached, right, sums

from ucc_hetero import IN_PLACE, MAX, MIN, SUM, Communicator
from ucc_hetero.errors import DeviceError, RefusedError
from ucc_hetero.native.libraries import lib

KIB, UNTIL_THE_END = 1024, []


def crowd(comm):
    """Short calls, which use one stream, and long ones, which use several, repeatedly, in several of the caller's
    streams, for which no host waits; far more calls than may be in progress."""
    calls, sizes, long_size = 320, (1, 200, 3000, 40_000, 90_000), 700_000
    r, dice, streams = comm.rank, dice_of(comm), [runtime().stream() for _ in range(3)]
    parts = [(n, Array(n), Array(n)) for n in sizes for _ in streams]
    long = Array(long_size), Array(long_size)  # many times what the rings of short messages hold
    checks = []
    for k in range(calls):
        which = int(dice.integers(len(streams)))
        stream, size = streams[which], int(dice.choice(len(sizes), p=[0.4, 0.3, 0.2, 0.06, 0.04]))
        n, x, y = parts[size * len(streams) + which]
        if k == 20 and r == 0:
            gate = Gate(stream)  # from here on nothing goes on; but 256 calls more can be made
            threading.Timer(0.5, gate.open).start()  # from another thread: this one waits once there are more
        source, result = Array(n).set(numbers(k, r, n)), Array(n)
        runtime().copy(x.block.handle, source.block.handle, 4 * n, stream.handle)
        request = comm.Iallreduce(x, y, stream=stream)
        runtime().copy(result.block.handle, y.block.handle, 4 * n, stream.handle)
        checks.append((k, n, source, result))  # the source, until it has been copied
        if k == 300:
            late = comm.Iallreduce(long[0].set(numbers(k, r, long_size)), long[1].set(-1), stream=streams[0])
        assert type(request).__name__ == "Launched", request
    for stream in streams:
        reached(stream)
    for k, n, _, result in checks:
        assert (result.peek == sums(comm, k, n)).all(), (k, n, result.peek[:5])
    late.Wait()
    assert (long[1].peek == sums(comm, 300, long_size)).all()
    assert queued(comm) == {"allreduce"} and comm.stats()["calls"] >= calls and "queued" in comm.plan_summary()


def replicas(comm):
    """All ranks have the same bits, also for zeros of different sign and NaNs."""
    odd = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1.0], np.float32)
    mine = np.array([each[comm.rank % 2] for each in product(odd, odd)], np.float32)
    for op, times, inside in product((MAX, MIN, SUM), (1, 5000), (False, True)):
        data = np.tile(mine, times)
        x, y = Array(data.size).set(data), Array(data.size).set(-7)
        comm.Allreduce(IN_PLACE if inside else x, x if inside else y, op)
        found = comm.mpi.allgather((x if inside else y).peek.tobytes())
        assert len(set(found)) == 1, (op, times, inside)
    assert "queued" in comm.plan_summary()


def several(comm):
    """Several communicators, each with its own memory; threads; communicators created and freed repeatedly."""
    pinned, others = [lib.ucch_channels_pinned()], []
    while len(others) < 12:  # none has less than those before
        others.append(Communicator(comm))
        pinned.append(lib.ucch_channels_pinned())
    # What cases before have left is used first.
    more = {after - before for before, after in pairwise(pinned)} - {0}
    assert len(more) < 2 and all(0 < each <= pinned[0] for each in more), pinned
    users = [comm, *others[:2], others[-1]]
    in_threads(*(partial(random_sums, user, 100 * i) for i, user in enumerate(users)))
    assert all(queued(each) == {"allreduce"} for each in users)
    [each.Free() for each in reversed(others)]
    made_again(comm)


def random_sums(comm, seed):
    stream, dice = own_device(comm).stream(), np.random.default_rng(seed)
    for k in range(12):
        n, form = int(dice.choice([1, 3000, 80_000])), IN_STREAMS[(int(dice.integers(5)) + comm.rank) % 5]
        one = Call(Case("allreduce", "float32", "SUM", form, False, -1, (n,), False, "plain", seed + k), comm)
        one.refill()
        request = start(comm, one, stream)
        if form == "persistent":
            request.Start()
        if form == "queued":
            right(one, stream)
        if request is not None:
            request.Wait()
        assert not (wrong := one.verify()), (one.case, wrong)


def made_again(comm):
    """A communicator uses what those before it have given back."""
    grown, driver = [], ctypes.CDLL(runtime().path)
    for k in range(30):
        with Communicator(comm) as other:
            x, y = Array(70_000).set(numbers(k, other.rank, 70_000)), Array(70_000)
            other.Allreduce(x, y)
            other.Allgather(Array(9).set(other.rank), Array(9 * other.size))
            assert (y.peek == sums(other, k, 70_000)).all()
            for n in (10, 2000, 90_000):  # scratch grows
                other.Allreduce(IN_PLACE, Array(n).set(1))
            assert queued(other) == {"allreduce", "allgather"}
        ours = 4 * (2 * 70_000 + 9 * (1 + comm.size) + 10 + 2000 + 90_000)  # of these arrays, which stay
        grown.append((runtime().room() + (k + 1) * ours, driver.fakegpu_streams(), lib.ucch_channels_pinned()))
    assert grown[-1] == grown[4], grown


def left():
    """Calls in progress at the end of the program, whose communicator is never freed; and a child that does not take
    part."""
    comm, stream, n = Communicator(), runtime().stream(), 100_000
    x, y = Array(n).set(comm.rank), Array(n).set(-1)
    comm.Allreduce(x, y)
    requests = [comm.Iallreduce(x, y, stream=stream) for _ in range(5)]
    in_child(int)
    repeated = comm.Allreduce_init(x, y)
    repeated.Start()
    repeated.Wait()
    assert queued(comm) == {"allreduce"}
    UNTIL_THE_END.append((comm, stream, x, y, requests, comm.Iallreduce(x, y)))


def kept(comm):
    """The driver blocks every rank in turn, behind streams that wait for others; and these wait for a message of the
    rank before they call."""
    p, r, n, stream, driver = comm.size, comm.rank, 200_000, runtime().stream(), ctypes.CDLL(runtime().path)
    # Of a message from the device. A longer one needs the driver once it has been received, and a full stream keeps
    # that.
    length = 8_000 if "FAKEGPU_AHEAD" in os.environ else 50_000
    scaled, begun = Array(10).set(1), threading.Event()

    def tell():
        """Send the others a word once the driver keeps this rank's first thread, or where it does not."""
        while not (driver.fakegpu_kept() or begun.wait(1e-3)):
            pass
        [MPI.COMM_WORLD.send(None, other, 99) for other in range(p) if other != r]

    for turn in range(p):
        x, y = Array(n).set(numbers(turn, r, n)), [Array(n).set(-4) for _ in range(20)]
        message, there = numbers(turn, turn, 500_000), Array(length).set(turn)
        if r == turn:
            sent = [comm.Isend(each, other, turn) for each in (message, there) for other in range(p) if other != r]
            teller = threading.Thread(target=tell)
            teller.start()
        else:
            MPI.COMM_WORLD.recv(source=turn, tag=99)
            comm.Recv(got := np.full_like(message, -9), turn, turn)
            comm.Recv(there.set(-9), turn, turn)
            assert (got == message).all() and (there.peek == turn).all()
        for each in y:
            comm.Iallreduce(x, each, stream=stream)
        scaled.scale(stream, 1)  # in the first turn it has to be loaded
        if r == turn:
            begun.set()
            teller.join()
            [request.Wait() for request in sent]
        assert all((each.copied(stream) == sums(comm, turn, n)).all() for each in y)
    assert queued(comm) == {"allreduce"}


def no_compiler():
    """A rank whose device has no compiler: calls that need none are queued, and no other call is, on any rank."""
    if MPI.COMM_WORLD.rank == 0:
        os.environ["UCCH_RTC_LIB"] = "none"
    with Communicator() as comm:
        for k, n in enumerate((1, 1000, 100_000)):
            x, y, z = Array(n).set(numbers(k, comm.rank, n)), Array(n).set(-4), Array(n * comm.size).set(-4)
            comm.Allreduce(x, y)
            assert (y.peek == sums(comm, k, n)).all()
            comm.Allgather(x, z)
            assert (z.peek == np.concatenate([numbers(k, q, n) for q in range(comm.size)])).all()
        assert queued(comm) == {"allgather"}


def pinned_out():
    """A rank whose runtime cannot pin more memory: all ranks are told, and fall back."""
    if MPI.COMM_WORLD.rank == 1:
        os.environ["FAKEGPU_PINNED_MB"] = "180"
    comms, full, n = [Communicator() for _ in range(10)], 0, 700_000
    x, y = Array(n).set(1), Array(n)

    def add(comm):
        comm.Allreduce(x, y.set(-4))
        assert (y.peek == 2).all()
        return queued(comm) == {"allreduce"}

    try:
        while full < len(comms):
            assert add(comms[full])
            full += 1
    except (DeviceError, RefusedError) as error:
        assert "no pinned memory is left" in str(error), error
        assert isinstance(error, DeviceError) == (comms[full].rank == 1), error
    assert 0 < full < len(comms)
    for each in comms[:full] * 2:  # those that have their rings go on
        assert add(each)
    comms.pop(0).Free()
    comms.append(Communicator())  # has what the first had
    assert add(comms[-1])
    os.environ["UCCH_CHANNELS"] = "n"
    with Communicator() as without:
        assert "rings: none (ranks 0, 1: UCCH_CHANNELS=n)" in without.plan_summary()
        assert not add(without)


def held_by(group):
    return int(lib.ucch_channels_held(group._runner.members.channels.handle))


def many(comm):
    """Many groups: each has memory for its calls, the same on all its ranks, and passes it on to later groups."""
    r, p, hosts = comm.rank, comm.size, comm.topology.hosts
    streams = [runtime().stream() for _ in range(2)]
    far = sum(host != hosts[r] for host in hosts)
    near, before = p - 1 - far, int(lib.ucch_channels_pinned())

    def ring(slot, wire):
        return -(-8 * (slot + 64 * wire) // 4096) * 4096

    def rings(slot, shared):
        return near * ring(shared, 0) + 2 * far * ring(slot, 1)

    def work(groups, lengths):
        """Calls in all groups under way at a time, with a stream of each."""
        calls = []
        for k, (group, n) in enumerate(zip(groups, lengths, strict=True)):
            x, y = Array(n).set(numbers(k, r, n)), Array(n).set(-7)
            calls.append((group.Iallreduce(x, y, stream=streams[k % 2]), k, n, x, y))
        for request, k, n, _, y in calls:
            request.Wait()
            assert (y.peek == sums(groups[0], k, n)).all(), (k, n)
        assert all(queued(group) == {"allreduce"} for group in groups)

    header, short, long = 2 * 64 * KIB, rings(64 * KIB, 64 * KIB), rings(64 * KIB, 128 * KIB)
    for turn in range(2):
        groups = [Communicator(comm) for _ in range(12)]
        if not turn:
            assert {held_by(group) for group in groups} == {header}
            assert lib.ucch_channels_pinned() == before + 12 * header
        work(groups, [100] * 12)
        if not turn:
            assert {held_by(group) for group in groups} == {header + short}, (held_by(groups[0]), header, short)
        work(groups, [130_000 * p] * 3 + [3000] * 9)
        assert [held_by(group) for group in groups] == [header + short + long] * 3 + [header + short] * 9
        assert lib.ucch_channels_pinned() == before + 12 * (header + short) + 3 * long
        work(groups, [130_000 * p, 10] * 6 if turn else [10] * 12)
        [group.Free() for group in groups]
        pinned = int(lib.ucch_channels_pinned())
    # One of fewer ranks finds what they have left.
    with comm.Split(int(r == p - 1), r) as part:
        for n in (100, 130_000 * part.size) if part.size > 1 else ():
            work([part], [n])
            assert lib.ucch_channels_pinned() == pinned, (lib.ucch_channels_pinned(), pinned)
            assert held_by(part) == header + short + long, part.plan_summary()
    late_to_free(comm)


def late_to_free(comm):
    """A rank that is slow to take a communicator apart still looks at the rings of others, who make the next one."""
    r, p = comm.rank, comm.size
    with comm.Split(int(r == 1), r) as others, Communicator(comm) as freed:
        x, y = Array(130_000 * p).set(r), Array(130_000 * p)
        freed.Allreduce(x, y)
        members = freed._runner.members
        await_quiet = members.await_quiet

        def late(hopeless):
            if r == 1 and p > 2:
                MPI.COMM_WORLD.recv(source=0)
                assert members.channels.quiet()
            await_quiet(hopeless)

        members.await_quiet = late
        freed.Free()
        if r != 1:
            with Communicator(others) as after:
                after.Allreduce(x, y)
                assert (y.peek == sum(range(p)) - 1).all()
                if r == 0 and p > 2:
                    MPI.COMM_WORLD.send(None, 1)


def grows(comm):
    """Rings are made when calls need them, between the ranks that need them, and the summary says so."""

    def rings():
        (line,) = [line for line in comm.plan_summary().splitlines() if line.startswith("rings: ")]
        return line

    r = comm.rank
    assert "not used yet" in rings() and " x " not in rings() and "0.1 MiB pinned" in rings(), rings()
    x, y = Array(10).set(numbers(1, 0, 10)), Array(10).set(-1)
    comm.Bcast(x if r == 0 else y, root=0)
    assert r == 0 or (y.peek == numbers(1, 0, 10)).all()
    assert "(8 x 64 KiB)" in rings() and ("not used yet" in rings()) == (r > 0 and comm.size > 2), rings()
    for k, (n, slots) in enumerate(((200_000, "8 x 512 KiB)"), (3_000_000, "8 x 512 KiB, 8 x "))):
        x, y = Array(n).set(numbers(k, r, n)), Array(n).set(-1)
        comm.Allreduce(x, y)
        assert (y.peek == sums(comm, k, n)).all()
        assert slots in rings() and "not used yet" not in rings(), rings()
    assert queued(comm) == {"allreduce", "bcast"}
    hosts = comm.topology.hosts
    assert ("wire" in rings(), "shared" in rings()) == (len({*hosts}) > 1, hosts.count(hosts[r]) > 1), rings()


def long(comm):
    """Calls between hosts that fit into rings, which one kernel moves, and longer ones, several slots at a time and,
    for the longest messages, slots of twice the length: with few driver calls."""
    names, dice = ("allreduce", "allgather", "alltoall", "reduce_scatter_block"), dice_of(comm)
    p, x, y = comm.size, Array(1 << 20).set(numbers(0, comm.rank, 1 << 20)), Array(1 << 20).set(-1)
    streams, driver = [runtime().stream() for _ in range(2)], ctypes.CDLL(runtime().path)
    few, begun = runtime().holds and "shared" not in comm.plan_summary(), []

    def most(nbytes, slot=65536):
        """Calls of the driver for a message: two for a chunk, and one for its end."""
        length = 2 * slot if nbytes > 16 * slot and p == 2 else slot  # more ranks exchange shares
        return 8 if nbytes <= 4 * slot else 2 * (-(-nbytes // length) // 4 + 4) + 1

    for _ in range(3 if p == 2 else 0):  # as many pieces as 128 MiB have by default: chunks of 1, 3, 6 times 4, 3, 1
        before = driver.fakegpu_given()
        comm.Iallreduce(x, y, stream=streams[0])
        given = driver.fakegpu_given() - before
        assert given <= 13 + 2 * (2 * 10 + 1), given
    reached(streams[0])
    assert p > 2 or (y.peek == sums(comm, 0, 1 << 20)).all()
    for k in range(16):
        name, stream = names[k % 4], streams[int(dice.integers(2))]
        full = 16384 * dice.integers(7, 25)  # of slots
        n = int(dice.choice([dice.integers(70_000, 130_000), dice.integers(300_000, 700_000), full, full + 1]))
        count, op = n // (1 if k % 4 < 2 else p), "SUM" if "reduce" in name else None
        one = Call(Case(name, "float32", op, "queued", False, -1, (count,), False, "plain", k), comm)
        if k < 4:  # what it takes to be made
            getattr(comm, name.capitalize())(*one.args(), stream=stream)
        one.refill()
        [buffer.late(stream) for buffer in one.buffers()]
        before, movers = driver.fakegpu_given(), driver.fakegpu_movers()
        request = getattr(comm, "I" + name)(*one.args(), stream=stream)
        given = driver.fakegpu_given() - before
        if few and name == "allgather":  # its messages are longer than half a ring: copy engines move them
            assert driver.fakegpu_movers() == movers, n
        assert given <= 36 + 2 * (p - 1) * most(4 * n) or not few, (name, n, given)
        begun.append((one, stream, request))
    for one, stream, request in begun:
        right(one, stream)
        request.Wait()
    assert queued(comm) == {*names}
