"""Scripts of ranks for test_channels.py: which ranks have channels, and how channels end."""

from channel_scripts import CALLS, COMMON

#: Several communicators, each with its own memory; threads; communicators created and freed repeatedly.
SEVERAL = CALLS
SEVERAL += """
def work(comm, seed, failures):
    gpu = runtime()
    gpu.use(comm._runner.members.place.device)
    stream, dice = gpu.stream(), np.random.default_rng(seed)
    try:
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
    except BaseException as error:
        failures.append(error)

def streams_of():
    return ctypes.CDLL(runtime().path).fakegpu_streams()

with Communicator() as comm:
    pinned = [lib.ucch_channels_pinned()]
    others = []
    while len(others) < 12:  # none has less than those before
        others.append(Communicator(comm))
        pinned.append(lib.ucch_channels_pinned())
    # What cases before have left is used first.
    more = {after - before for before, after in zip(pinned, pinned[1:])} - {0}
    assert len(more) < 2 and all(0 < each <= pinned[0] for each in more), pinned
    made.clear()
    failures = []
    users = [comm, *others[:2], others[-1]]
    threads = [threading.Thread(target=work, args=(c, 100 * i, failures)) for i, c in enumerate(users)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures, failures
    assert made["allreduce"] == {True}, made
    [c.Free() for c in reversed(others)]
    # Again and again.
    made.clear()
    grown = []
    for k in range(30):
        with Communicator(comm) as other:
            x, y = Array(70_000).set(numbers(k, other.rank, 70_000)), Array(70_000)
            other.Allreduce(x, y)
            other.Allgather(Array(9).set(other.rank), Array(9 * other.size))
            assert (y.peek == np.sum([numbers(k, q, 70_000) for q in range(other.size)], axis=0)).all()
            for n in (10, 2000, 90_000):  # scratch grows
                other.Allreduce(IN_PLACE, Array(n).set(1))
        ours = 4 * (2 * 70_000 + 9 * (1 + comm.size) + 10 + 2000 + 90_000)  # of these arrays, which stay
        grown.append((runtime().room() + (k + 1) * ours, streams_of(), lib.ucch_channels_pinned()))
    assert made["allreduce"] == made["allgather"] == {True}
    assert grown[-1] == grown[4], grown  # what was given back is used again
"""

#: Calls in progress at the end of the script, whose communicator is never freed; and a child that does not take part.
LEFT = COMMON
LEFT += """
comm = Communicator()
stream, n = runtime().stream(), 100_000
x, y = Array(n).set(comm.rank), Array(n).set(-1)
comm.Allreduce(x, y)
requests = [comm.Iallreduce(x, y, stream=stream) for _ in range(5)]
child = os.fork()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
repeated = comm.Allreduce_init(x, y)
repeated.Start()
repeated.Wait()
assert made["allreduce"] == {True}
comm.Iallreduce(x, y)
"""

#: The driver blocks every rank in turn, behind streams that wait for others; and these wait for a message of the rank
#: before they call.
KEPT = COMMON
KEPT += """
#: Of a message from the device. A longer one needs the driver once it has been received, and a full stream keeps that.
LENGTH = 8_000 if "FAKEGPU_AHEAD" in os.environ else 50_000

def tell(others, queued):
    "Send the others a word once the driver keeps this rank's first thread, or where it does not."
    driver = ctypes.CDLL(runtime().path)
    while not (driver.fakegpu_kept() or queued.wait(1e-3)):
        pass
    [MPI.COMM_WORLD.send(None, other, 99) for other in others]

with Communicator() as comm:
    p, r, n = comm.size, comm.rank, 200_000
    stream = runtime().stream()
    scaled = Array(10).set(1)
    for turn in range(p):
        x, y = Array(n).set(numbers(turn, r, n)), [Array(n).set(-4) for _ in range(20)]
        message, there = numbers(turn, turn, 500_000), Array(LENGTH).set(turn)
        if r == turn:
            sent = [comm.Isend(each, other, turn) for each in (message, there) for other in range(p) if other != r]
            queued = threading.Event()
            teller = threading.Thread(target=tell, args=({*range(p)} - {r}, queued))
            teller.start()
        else:
            MPI.COMM_WORLD.recv(source=turn, tag=99)
            comm.Recv(got := np.full_like(message, -9), turn, turn)
            comm.Recv(there.set(-9), turn, turn)
            assert (got == message).all() and (there.peek == turn).all()
        calls = [comm.Iallreduce(x, each, stream=stream) for each in y]
        scaled.scale(stream, 1)  # in the first turn it has to be loaded
        if r == turn:
            queued.set()
            teller.join()
            [request.Wait() for request in sent]
        want = np.sum([numbers(turn, q, n) for q in range(p)], axis=0)
        assert all((each.copied(stream) == want).all() for each in y)
    assert made["allreduce"] == {True}, made
"""

#: A rank whose device has no compiler: calls that need none are queued, and no other call is, on any rank.
NO_COMPILER = COMMON
NO_COMPILER += """
if int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")) == 0:
    os.environ["UCCH_RTC_LIB"] = "none"
with Communicator() as comm:
    p, r = comm.size, comm.rank
    for k, n in enumerate((1, 1000, 100_000)):
        x, y, z = Array(n).set(numbers(k, r, n)), Array(n).set(-4), Array(n * p).set(-4)
        comm.Allreduce(x, y)
        assert (y.peek == np.sum([numbers(k, q, n) for q in range(p)], axis=0)).all()
        comm.Allgather(x, z)
        assert (z.peek == np.concatenate([numbers(k, q, n) for q in range(p)])).all()
    assert made == {"allreduce": {False}, "allgather": {True}}, made
"""

#: A rank whose runtime cannot pin more memory: all ranks are told, and fall back.
PINNED_OUT = COMMON
PINNED_OUT += """
if int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")) == 1:
    os.environ["FAKEGPU_PINNED_MB"] = "180"
comms = [Communicator() for _ in range(10)]
n = 700_000
x, y = Array(n).set(1), Array(n)

def sums(each):
    each.Allreduce(x, y.set(-4))
    assert (y.peek == 2).all()

full = 0
try:
    while full < len(comms):
        sums(comms[full])
        full += 1
except (DeviceError, RefusedError) as error:
    assert "no pinned memory is left" in str(error) and isinstance(error, DeviceError) == (comms[full].rank == 1), error
assert 0 < full < len(comms)
for each in comms[:full] * 2:  # those that have their rings go on
    sums(each)
comms.pop(0).Free()
comms.append(Communicator())  # has what the first had
sums(comms[-1])
assert made["allreduce"] == {True}
os.environ["UCCH_CHANNELS"] = "n"
with Communicator() as without:
    assert "rings: none (ranks 0, 1: UCCH_CHANNELS=n)" in without.plan_summary()
    sums(without)
assert made["allreduce"] == {True, False}, made
"""

#: Many groups: each has memory for its calls, the same on all its ranks, and passes it on to later groups.
MANY = COMMON
MANY += """
KIB = 1024

def work(groups, lengths):
    "Calls in all groups under way at a time, with a stream of each."
    calls = []
    for k, (group, n) in enumerate(zip(groups, lengths)):
        stream, x, y = streams[k % len(streams)], Array(n).set(numbers(k, group.rank, n)), Array(n).set(-7)
        calls.append((group.Iallreduce(x, y, stream=stream), k, n, x, y))
    for request, k, n, x, y in calls:
        request.Wait()
        assert (y.peek == np.sum([numbers(k, q, n) for q in range(p)], axis=0)).all(), (k, n)

def held(group):
    return int(lib.ucch_channels_held(group._runner.members.channels.handle))

def ring(slot, wire):
    return -(-8 * (slot + 64 * wire) // 4096) * 4096

with Communicator() as comm:
    r, p = comm.rank, comm.size
    streams = [runtime().stream() for _ in range(2)]
    far = sum(host != comm.topology.hosts[r] for host in comm.topology.hosts)
    near, before = p - 1 - far, int(lib.ucch_channels_pinned())
    each = lambda slot, shared: near * ring(shared, 0) + 2 * far * ring(slot, 1)
    header, short, long = 2 * 64 * KIB, each(64 * KIB, 64 * KIB), each(64 * KIB, 128 * KIB)
    for turn in range(2):
        groups = [Communicator(comm) for _ in range(12)]
        if not turn:
            assert {held(group) for group in groups} == {header}
            assert lib.ucch_channels_pinned() == before + 12 * header
        work(groups, [100] * 12)
        if not turn:
            assert {held(group) for group in groups} == {header + short}, (held(groups[0]), header, short)
        work(groups, [130_000 * p] * 3 + [3000] * 9)
        assert [held(group) for group in groups] == [header + short + long] * 3 + [header + short] * 9
        assert lib.ucch_channels_pinned() == before + 12 * (header + short) + 3 * long
        work(groups, [130_000 * p, 10] * 6 if turn else [10] * 12)
        assert all("queued" in group.plan_summary() for group in groups)
        [group.Free() for group in groups]
        pinned = int(lib.ucch_channels_pinned())
    # One of fewer ranks finds what they have left.
    part = comm.Split(int(r == p - 1), r)
    for n in (100, 130_000 * part.size) if part.size > 1 else ():
        x, y = Array(n).set(numbers(n, r, n)), Array(n).set(-7)
        part.Allreduce(x, y)
        assert (y.peek == np.sum([numbers(n, q, n) for q in range(part.size)], axis=0)).all(), n
        assert lib.ucch_channels_pinned() == pinned, (lib.ucch_channels_pinned(), pinned)
        assert "queued" in part.plan_summary() and held(part) == header + short + long, part.plan_summary()
    part.Free()
    # A rank that is slow to take a communicator apart still looks at the rings of others, who make the next one.
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
    assert made["allreduce"] == {True}, made
"""

#: Rings are made when calls need them, between the ranks that need them, and the summary says so.
GROWS = COMMON
GROWS += """
def rings():
    (line,) = [line for line in comm.plan_summary().splitlines() if line.startswith("rings: ")]
    return line

with Communicator() as comm:
    r, p = comm.rank, comm.size
    assert "not used yet" in rings() and " x " not in rings() and "0.1 MiB pinned" in rings(), rings()
    x, y = Array(10).set(numbers(1, 0, 10)), Array(10).set(-1)
    comm.Bcast(x if r == 0 else y, root=0)
    assert r == 0 or (y.peek == numbers(1, 0, 10)).all()
    assert "(8 x 64 KiB)" in rings() and ("not used yet" in rings()) == (r > 0 and p > 2), rings()
    for k, (n, slots) in enumerate(((200_000, "8 x 512 KiB)"), (3_000_000, "8 x 512 KiB, 8 x "))):
        x, y = Array(n).set(numbers(k, r, n)), Array(n).set(-1)
        comm.Allreduce(x, y)
        assert (y.peek == np.sum([numbers(k, q, n) for q in range(p)], axis=0)).all()
        assert slots in rings() and "not used yet" not in rings(), rings()
    assert made["allreduce"] == made["bcast"] == {True}
    print("right", rings(), flush=True)
"""

#: Calls between hosts that fit into rings, which one kernel moves, and longer ones, several slots at a time and, for
#: the longest messages, slots of twice the length: with few driver calls.
LONG = CALLS
LONG += """
def most(nbytes, slot=65536):
    "Calls of the driver for a message: two for a chunk, and one for its end."
    length = 2 * slot if nbytes > 16 * slot and p == 2 else slot  # more ranks exchange shares
    return 8 if nbytes <= 4 * slot else 2 * (-(-nbytes // length) // 4 + 4) + 1

NAMES = "allreduce", "allgather", "alltoall", "reduce_scatter_block"
with Communicator() as comm:
    p, r, dice = comm.size, comm.rank, np.random.default_rng(int(os.environ["DICE"]))  # the same on every rank
    streams, library = [runtime().stream() for _ in range(2)], ctypes.CDLL(runtime().path)
    few, begun = runtime().holds and "shared" not in comm.plan_summary(), []
    x, y = Array(1 << 20).set(numbers(0, r, 1 << 20)), Array(1 << 20).set(-1)
    for k in range(3 if p == 2 else 0):  # as many pieces as 128 MiB have by default: chunks of 1, 3, 6 times 4, 3, 1
        before = library.fakegpu_given()
        comm.Iallreduce(x, y, stream=streams[0])
        given = library.fakegpu_given() - before
        assert given <= 13 + 2 * (2 * 10 + 1), given
    reached(streams[0])
    assert p > 2 or (y.peek == sum(numbers(0, q, 1 << 20) for q in range(p))).all()
    for k in range(16):
        name, stream = NAMES[k % 4], streams[int(dice.integers(2))]
        full = 16384 * dice.integers(7, 25)  # of slots
        n = int(dice.choice([dice.integers(70_000, 130_000), dice.integers(300_000, 700_000), full, full + 1]))
        count, op = n // (1 if k % 4 < 2 else p), "SUM" if "reduce" in name else None
        one = Call(Case(name, "float32", op, "queued", False, -1, (count,), False, "plain", k), comm)
        if k < 4:  # what it takes to be made
            getattr(comm, name.capitalize())(*one.args(), stream=stream)
        one.refill()
        [buffer.late(stream) for buffer in one.buffers()]
        before, movers = library.fakegpu_given(), library.fakegpu_movers()
        request = getattr(comm, "I" + name)(*one.args(), stream=stream)
        given = library.fakegpu_given() - before
        if few and name == "allgather":  # its messages are longer than half a ring: copy engines move them
            assert library.fakegpu_movers() == movers, n
        assert given < 30 + 2 * (p - 1) * most(4 * n) or not few, (name, n, given)
        begun.append((one, stream, request))
    for one, stream, request in begun:
        right(one, stream)
        request.Wait()
    assert all(ways == {True} for ways in made.values()) and len(made) == 4, made
"""
