"""Scripts of ranks for test_channels.py: completely queued calls among devices of two vendors on one host."""

from pathlib import Path

HERE = Path(__file__).parents[1] / "mpi"

COMMON = """
from ranks import *
from ucc_hetero.calls import preparation
# collective -> whether its calls on devices were queued in streams whole, for all that were prepared.
made = {}

class Noted(getattr(preparation.Prepared, "noted", preparation.Prepared)):
    noted = getattr(preparation.Prepared, "noted", preparation.Prepared)  # not another script's that ran here before

    def __init__(self, bound, kind, program, rank, staged=None, stream=None):
        if staged is not None or program.execution.name == "QUEUED":
            made.setdefault(bound.call.collective, set()).add(staged is None)
        super().__init__(bound, kind, program, rank, staged, stream)

preparation.Prepared = Noted
"""

#: With the calls of tests/mpi/collective_call.py.
CALLS = f"{COMMON}\nsys.path.insert(0, {str(HERE)!r})"
CALLS += """
from collective_call import Call, Case
from collective_cases import IN_STREAMS, start

def right(call, stream):
    [buffer.seen(stream) for buffer in call.buffers()]
    assert not (wrong := call.verify()), (call.case, wrong)
"""

#: Short calls, which use one stream, and long ones, which use several, repeatedly, in several of the caller's streams,
#: for which no host waits; far more calls than may be in progress.
CROWD = COMMON
CROWD += """
CALLS, SIZES = 320, (1, 200, 3000, 40_000, 90_000)
with Communicator() as comm:
    p, r = comm.size, comm.rank
    streams = [runtime().stream() for _ in range(3)]
    parts = [(n, Array(n), Array(n)) for n in SIZES for _ in streams]
    long = Array(700_000), Array(700_000)  # many times what the rings of short messages hold
    checks, gate = [], None
    dice = np.random.default_rng(int(os.environ["DICE"]))  # the same on every rank
    for k in range(CALLS):
        which = int(dice.integers(len(streams)))
        stream, size = streams[which], int(dice.choice(len(SIZES), p=[0.4, 0.3, 0.2, 0.06, 0.04]))
        n, x, y = parts[size * len(streams) + which]
        if k == 20 and r == 0:
            gate = Gate(stream)  # from here on nothing goes on; but 256 calls more can be made
            threading.Timer(0.5, gate.open).start()  # from another thread: this one waits once there are more
        source = Array(n).set(numbers(k, r, n))
        runtime().copy(x.block.handle, source.block.handle, 4 * n, stream.handle)
        request = comm.Iallreduce(x, y, stream=stream)
        result = Array(n)
        runtime().copy(result.block.handle, y.block.handle, 4 * n, stream.handle)
        checks.append((k, n, source, result))  # the source, until it has been copied
        if k == 300:
            late = comm.Iallreduce(long[0].set(numbers(k, r, long[0].size)), long[1].set(-1), stream=streams[0])
        assert type(request).__name__ == "Launched", request
    for stream in streams:
        reached(stream)
    for k, n, _, result in checks:
        want = np.sum([numbers(k, q, n) for q in range(p)], axis=0)
        assert (result.peek == want).all(), (k, n, result.peek[:5], want[:5])
    want = np.sum([numbers(300, q, long[0].size) for q in range(p)], axis=0)
    assert (long[1].peek == want).all()
    assert made["allreduce"] == {True}, made
    assert comm.stats()["calls"] >= CALLS and "queued" in comm.plan_summary()
"""

#: All ranks have the same bits, also for zeros of different sign and NaNs.
REPLICAS = """
from ranks import *

with Communicator() as comm:
    odd = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1.0], np.float32)
    mine = np.array([each[comm.rank % 2] for each in product(odd, odd)], np.float32)
    for op, times, inside in product((MAX, MIN, SUM), (1, 5000), (False, True)):
        data = np.tile(mine, times)
        x, y = Array(data.size).set(data), Array(data.size).set(-7)
        comm.Allreduce(IN_PLACE if inside else x, x if inside else y, op)
        found = comm.mpi.allgather((x if inside else y).peek.tobytes())
        assert len(set(found)) == 1, (op, times, inside)
    assert "queued" in comm.plan_summary()
"""
