"""Scripts of ranks for test_channels.py: who has channels and who has not, and what is left of them."""

from channel_scripts import COMMON

#: Several communicators, each with memory of its own; threads; made and freed over and over.
SEVERAL = COMMON
SEVERAL += """
def work(comm, seed, failures):
    gpu = runtime()
    gpu.use(comm._run.members.place.device)
    stream, dice = gpu.stream(), np.random.default_rng(seed)
    try:
        for k in range(12):
            n, form = int(dice.choice([1, 3000, 80_000])), FORMS[(int(dice.integers(5)) + comm.rank) % 5]
            x, y = Array(n).set(numbers(seed + k, comm.rank, n)), Array(n).set(-3)
            request = call(form, stream, comm, "Allreduce", x, y)
            got = end(form, stream, request, y)
            want = np.sum([numbers(seed + k, q, n) for q in range(comm.size)], axis=0)
            if not (got == want).all():
                failures.append((seed, k, form, got[:5], want[:5]))
    except BaseException as error:
        failures.append(error)

def streams_of():
    return ctypes.CDLL(runtime().path).fakegpu_streams()

with Communicator() as comm:
    first, pinned = lib.ucch_window_room(), [lib.ucch_channels_pinned()]
    others = []
    while len(others) < 12:  # none has less than those before, and messages have what they had
        others.append(Communicator(comm))
        pinned.append(lib.ucch_channels_pinned())
        assert lib.ucch_window_room() == first
    assert {after - before for before, after in zip(pinned, pinned[1:])} == {pinned[0]}, pinned
    made.clear()
    failures = []
    users = [comm, *others[:2], others[-1]]
    threads = [threading.Thread(target=work, args=(c, 100 * i, failures)) for i, c in enumerate(users)]
    [t.start() for t in threads]
    [t.join(50) for t in threads]
    assert not failures and not any(t.is_alive() for t in threads), failures
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
        grown.append((lib.ucch_pool_bytes(0, 0), streams_of()))
    assert made["allreduce"] == made["allgather"] == {True}
    assert grown[-1] == grown[4], grown
    assert lib.ucch_channels_pinned() == pinned[-1], "what was given back is used again"
print("right")
"""

#: Calls under way at the end of the script, whose communicator nobody frees; and a child that has no part in them.
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
print("right", flush=True)
"""

#: Every rank in turn is kept by the driver, behind streams that wait for others; and those wait for a message of its
#: before they call.
KEPT = COMMON
KEPT += """
with Communicator() as comm:
    p, r, n = comm.size, comm.rank, 200_000
    stream = runtime().stream()
    scaled = Array(10).set(1)
    for turn in range(p):
        x, y = Array(n).set(numbers(turn, r, n)), [Array(n).set(-4) for _ in range(20)]
        message = numbers(turn, turn, 500_000)
        if r == turn:
            sent = [comm.Isend(message, other, turn) for other in range(p) if other != r]
        else:
            time.sleep(0.3)  # the other one is in the driver by now
            comm.Recv(got := np.full_like(message, -9), turn, turn)
            assert (got == message).all()
        calls = [comm.Iallreduce(x, each, stream=stream) for each in y]
        scaled.scale(stream, 1)  # in the first turn it has to be loaded
        if r == turn:
            [request.Wait() for request in sent]
        want = np.sum([numbers(turn, q, n) for q in range(p)], axis=0)
        assert all((each.copied(stream) == want).all() for each in y)
    assert made["allreduce"] == {True}, made
print("right")
"""

#: A rank whose device has no compiler: what needs none is queued all the same, and the rest on no rank.
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
print("right")
"""

#: Without channels, for whatever reason, results are the same.
WITHOUT = COMMON
WITHOUT += """
with Communicator() as comm:
    p, r = comm.size, comm.rank
    assert comm._run.members.channels is None
    stream = runtime().stream()
    for k, n in enumerate((1, 1000, 100_000)):
        x, y = Array(n).set(numbers(k, r, n)), Array(n).set(-4)
        for turn in range(len(FORMS)):
            form = FORMS[(r + turn) % len(FORMS)]
            request = call(form, stream, comm, "Allreduce", x, y.set(-4))
            got = end(form, stream, request, y)
            assert (got == np.sum([numbers(k, q, n) for q in range(p)], axis=0)).all(), (form, n)
    assert made["allreduce"] == {False}, made
    assert "queued" not in comm.plan_summary()
print("right")
"""

#: A rank whose runtime pins no more: all are told, what there is goes on, and there is a way to do without.
PINNED_OUT = COMMON
PINNED_OUT += """
from ucc_hetero.errors import DeviceError
others = []
if int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")) == 1:
    os.environ["FAKEGPU_PINNED_MB"] = "180"
with Communicator() as comm:
    try:
        while len(others) < 40:
            others.append(Communicator(comm))
    except DeviceError as error:
        assert "rank 1 has no pinned memory" in str(error) and "UCCH_CHANNEL_MEMORY" in str(error), error
    assert 0 < len(others) < 40
    os.environ["UCCH_CHANNELS"] = "n"
    others.append(Communicator(comm))
    assert others[-1]._run.members.channels is None
    n = 100_000
    for each in (comm, *others):
        x, y = Array(n).set(each.rank), Array(n).set(-4)
        each.Allreduce(x, y)
        assert (y.peek == 1).all()
    assert made["allreduce"] == {True, False}, made
    os.environ["UCCH_CHANNELS"] = "y"
    others.pop(0).Free()
    others.append(Communicator(comm))  # has what the first had
    [each.Free() for each in others]
print("right")
"""

#: Short calls go from every rank straight to every other, in one kernel; long ones, and those on the host, as ever.
SHORT = COMMON
SHORT += """
with Communicator() as comm:
    p, r = comm.size, comm.rank
    for k, n in enumerate((1, 1000, 60_000, 400_000)):
        x, y = Array(n).set(numbers(k, r, n)), Array(n).set(-4)
        comm.Allreduce(x, y)
        assert (y.peek == np.sum([numbers(k, q, n) for q in range(p)], axis=0)).all()
        choice, _, execution = comm._run.used[f"allreduce float32[{n}] SUM"]
        assert (choice.algorithm == "flat", execution.name == "QUEUED") == (n < 100_000,) * 2, (n, choice, execution)
    comm.Allreduce(numbers(9, r, 1000), total := np.zeros(1000, np.float32))
    assert (total == np.sum([numbers(9, q, 1000) for q in range(p)], axis=0)).all()
    ((choice, *_),) = [found for label, found in comm._run.used.items() if label.endswith(" host")]
    assert choice.path == "staged"
print("right")
"""
