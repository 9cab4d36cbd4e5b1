"""Scripts of ranks for test_channels.py: calls queued in streams whole, among devices of two vendors on one host."""

from ucc_hetero.planner.collectives import ROWS

#: Every collective as messages: the fake GPUs have no vendor's library that could do an island's part in a stream.
FLAT = "#".join(f"{name}:@flat" for name in ROWS if name != "barrier")

COMMON = """
import ctypes
import os
import threading
import time
import numpy as np
from arrays import Array, runtime
from mpi4py import MPI
from ucc_hetero import AVG, IN_PLACE, MAX, SUM, Communicator
from ucc_hetero.calls import prepare
from ucc_hetero.native.libraries import lib
# collective -> whether its calls on devices were queued in streams whole, for all that were prepared.
made = {}

class Noted(prepare.Prepared):
    def __init__(self, bound, kind, program, staged=None):
        if staged is not None or program.execution.name == "QUEUED":
            made.setdefault(bound.call.collective, set()).add(staged is None)
        super().__init__(bound, kind, program, staged)

prepare.Prepared = Noted

def numbers(k, rank, n, dtype=np.float32):
    "What a rank brings into the k-th call; every rank knows it. Sums of them are exact."
    return np.random.default_rng([k, rank]).integers(-40, 40, n).astype(dtype)

def bring(array, values, stream=None):
    "Contents that are there at once, or when the stream gets there, and garbage until then."
    if stream is None:
        array.set(values)
        return array
    source = Array(array.size, array.dtype).set(values)
    array.set(-77)
    array.runtime.copy(array.block.handle, source.block.handle, max(1, array.block.nbytes), stream.handle)
    array.source = source  # until it has been copied
    return array

def call(form, stream, comm, name, *args):
    "The same call in one of several ways; what is to be waited for, if anything."
    if form == "blocking":
        return getattr(comm, name)(*args)
    if form == "in stream":
        return getattr(comm, name)(*args, stream=stream)
    if form == "persistent":
        request = getattr(comm, name + "_init")(*args)
        request.Start()
        request.Wait()
        return request.Free()
    keywords = {"stream": stream} if form == "queued" else {}
    return getattr(comm, "I" + name.lower())(*args, **keywords)

def end(form, stream, request, y):
    "What is in `y` when such a call is over: seen by the stream where the call is a part of its work."
    got = None if y is None else y.copied(stream) if form == "queued" else y.peek
    if request:
        request.Wait()
    return got

FORMS = "blocking", "queued", "non-blocking", "in stream", "persistent"

class Gate:
    "What holds a stream until it is opened."

    def __init__(self, stream):
        self.memory = runtime().flag()
        self.word = ctypes.c_uint32.from_address(self.memory)
        self.word.value = 0
        runtime().wait_value(stream.handle, self.memory, 1)

    def open(self):
        self.word.value = 1

def reached(stream, seconds=30):
    "Wait until the stream has done all that it was given."
    done, until = runtime().event(), time.monotonic() + seconds
    done.record(stream.handle)
    while not done.done():
        assert time.monotonic() < until, "the stream does not get there"
        time.sleep(1e-3)

def failure(call):
    "The name of the error that something raises."
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"
"""

#: Every collective in every form, the ranks in different ones; in place and out of it, short and long.
EVERY = COMMON
EVERY += """
def expected(name, k, n, counts, root):
    "(this rank's contribution, its result or None, how the call is made: (sendbuf, recvbuf) -> arguments)"
    starts, total = np.cumsum([0, *counts])[:-1], int(sum(counts))
    whole = lambda m: np.sum([numbers(k, q, m) for q in range(p)], axis=0)
    every = lambda m: np.concatenate([numbers(k, q, m) for q in range(p)])
    columns = lambda m, part: np.concatenate([numbers(k, q, m)[part] for q in range(p)])
    at_root = lambda value: value if r == root else None
    mine, own = numbers(k, r, n), numbers(k, r, counts[r])
    ragged = np.concatenate([numbers(k, q, c) for q, c in enumerate(counts)])
    block, even = slice(starts[r], starts[r] + counts[r]), slice(r * n, r * n + n)
    plain, rooted = lambda x, y: (x, y), lambda x, y: (x, y, root)
    return {
        "Allreduce": lambda: (mine, whole(n), plain),
        "Reduce": lambda: (mine, at_root(whole(n)), lambda x, y: (x, y, SUM, root)),
        "Bcast": lambda: (None, numbers(k, root, n), lambda x, y: (y, root)),
        "Allgather": lambda: (mine, every(n), plain),
        "Allgatherv": lambda: (own, ragged, lambda x, y: (x, [y, counts])),
        "Gather": lambda: (mine, at_root(every(n)), rooted),
        "Gatherv": lambda: (own, at_root(ragged), lambda x, y: (x, at_root([y, counts]), root)),
        "Scatter": lambda: (at_root(numbers(k, root, n * p)), numbers(k, root, n * p)[even], rooted),
        "Scatterv": lambda: (
            at_root(numbers(k, root, total)), numbers(k, root, total)[block],
            lambda x, y: (at_root([x, counts]), y, root),
        ),
        "Reduce_scatter_block": lambda: (numbers(k, r, n * p), whole(n * p)[even], plain),
        "Reduce_scatter": lambda: (numbers(k, r, total), whole(total)[block], lambda x, y: (x, y, counts)),
        "Alltoall": lambda: (numbers(k, r, n * p), columns(n * p, even), plain),
        "Alltoallv": lambda: (
            numbers(k, r, total), columns(total, block), lambda x, y: ([x, counts], [y, [counts[r]] * p]),
        ),
    }[name]()

# Those of which only some ranks know the counts: all ranks talk about them, or none does.
TALK = "Gatherv", "Scatterv", "Alltoallv"
NAMES = (
    "Allreduce", "Reduce", "Bcast", "Allgather", "Allgatherv", "Gather", "Gatherv", "Scatter", "Scatterv",
    "Reduce_scatter_block", "Reduce_scatter", "Alltoall", "Alltoallv",
)
with Communicator() as comm:
    p, r = comm.size, comm.rank
    stream, root, k = runtime().stream(), comm.size - 1, 0
    for n, counts in ((1, [1, 0, 2, 3][:p]), (1000, [1, 1000, 0, 3000][:p]), (50_000, [40_000, 1, 70_001, 0][:p])):
        for name in NAMES:
            for turn in range(len(FORMS) if n == 1000 else 1):
                k += 1
                form = FORMS[(r + turn + (n > 1)) % len(FORMS)]
                if name in TALK:
                    form = ("blocking", "in stream")[(r + turn) % 2] if turn % 2 == 0 else "non-blocking"
                mine, want, arguments = expected(name, k, n, counts, root)
                late = stream if form in ("queued", "in stream") else None
                x = None if mine is None else bring(Array(len(mine)), mine, late)
                y = None if want is None else Array(len(want)).set(-55)
                if name == "Bcast" and r == root:
                    bring(y, want, late)
                request = call(form, stream, comm, name, *arguments(x, y))
                got = end(form, stream, request, y)
                assert want is None or (got == want).all(), (name, n, form, got[:9], want[:9])
                assert x is None or (x.peek == mine).all(), (name, n, form)
    # In place.
    for n, counts in ((3, [2, 0, 5, 1][:p]), (1000, [1, 1000, 0, 3000][:p]), (30_000, [1, 90_000, 2, 30_000][:p])):
        starts, total = np.cumsum([0, *counts]), sum(counts)
        for turn, form in enumerate(FORMS):
            form, k = FORMS[(r + turn) % len(FORMS)], k + 1
            late = stream if form in ("queued", "in stream") else None
            finish = lambda request, y: end(form, stream, request, y)
            y = bring(Array(n), numbers(k, r, n), late)
            got = finish(call(form, stream, comm, "Allreduce", IN_PLACE, y), y)
            assert (got == np.sum([numbers(k, q, n) for q in range(p)], axis=0)).all(), (form, n, got[:9])
            y = np.full(n * p, -1, np.float32)
            y[r * n : r * n + n] = numbers(k, r, n)
            y = bring(Array(n * p), y, late)
            got = finish(call(form, stream, comm, "Allgather", IN_PLACE, y), y)
            assert (got == np.concatenate([numbers(k, q, n) for q in range(p)])).all(), (form, n)
            # The result goes to the beginning, over what it may overlap.
            y = bring(Array(total), numbers(k, r, total), late)
            got = finish(call(form, stream, comm, "Reduce_scatter", IN_PLACE, y, counts), y)
            want = np.sum([numbers(k, q, total) for q in range(p)], axis=0)[starts[r] : starts[r + 1]]
            assert (got[: counts[r]] == want).all(), (form, counts, got[:9], want[:9])
            y = bring(Array(n * p), numbers(k, r, n * p), late)
            got = finish(call(form, stream, comm, "Reduce_scatter_block", IN_PLACE, y), y)
            want = np.sum([numbers(k, q, n * p) for q in range(p)], axis=0)[r * n : r * n + n]
            assert (got[:n] == want).all(), (form, n)
    names = {name.lower() for name in NAMES}
    found = {name: how for name, how in made.items() if name in names}
    # Calls whose counts are not known to all before their end are not; these were made in both ways.
    mixed = {name.lower() for name in TALK}
    assert set(found) == names and all(how == {True} for name, how in found.items() if name not in mixed), made
    assert all(made[name] == {True, False} for name in mixed), made
print("right")
"""

#: Types for which no kernel can be made go through the hosts, on all ranks alike; and other kinds of data.
OTHER_DATA = COMMON
OTHER_DATA += """
with Communicator() as comm:
    p, r = comm.size, comm.rank
    stream = runtime().stream()
    for k, n in enumerate((1, 1000, 100_000)):
        mine, every = numbers(k, r, n), [numbers(k, q, n) for q in range(p)]
        x, y = Array(n).set(mine), Array(n)
        for turn, form in enumerate(FORMS):
            form = FORMS[(r + turn) % len(FORMS)]
            for op, want in ((MAX, np.max(every, axis=0)), (AVG, np.mean(every, axis=0)), (SUM, np.sum(every, axis=0))):
                request = call(form, stream, comm, "Allreduce", x, y.set(-9), op)
                got = end(form, stream, request, y)
                assert np.allclose(got, want), (op, form, n, got[:5], want[:5])
        for name, want in (("Scan", np.sum(every[: r + 1], axis=0)), ("Exscan", np.sum(every[:r], axis=0))):
            form = FORMS[(r + k) % 3]
            got = end(form, stream, call(form, stream, comm, name, x, y.set(-9)), y)
            assert (name == "Exscan" and r == 0) or (got == want).all(), (name, n, got[:5], want[:5])
        half, out = Array(n, np.float16).set(numbers(k, r, n, np.float16)), Array(n, np.float16)
        comm.Allreduce(half, out)
        assert (out.peek == np.sum(every, axis=0)).all()
        comm.Bcast(half, p - 1)
        assert (half.peek == numbers(k, p - 1, n, np.float16)).all()
        big, out = Array(n, np.complex128).set(r + 1j * mine), Array(n * p, np.complex128)
        comm.Allgather(big, out)
        assert (out.peek.reshape(p, n) == [q + 1j * row for q, row in enumerate(every)]).all()
    assert made["allreduce"] == {True, False} and made["scan"] == made["exscan"] == {False}, made
    assert made["allgather"] == made["bcast"] == {True}, made
print("right")
"""

#: Short calls, which are queued in one stream, and long ones, in several, over and over, in several of the caller's
#: streams, of which no host waits for one; far more calls than may be under way.
CROWD = COMMON
CROWD += """
CALLS, SIZES = 320, (1, 200, 3000, 40_000, 90_000)
with Communicator() as comm:
    p, r = comm.size, comm.rank
    streams = [runtime().stream() for _ in range(3)]
    parts = [(n, Array(n), Array(n)) for n in SIZES for _ in streams]
    long = Array(700_000), Array(700_000)  # many times what a small window's rings hold
    checks, gate = [], None
    dice = np.random.default_rng(int(os.environ["DICE"]))  # the same on every rank
    for k in range(CALLS):
        which = int(dice.integers(len(streams)))
        stream, size = streams[which], int(dice.choice(len(SIZES), p=[0.4, 0.3, 0.2, 0.06, 0.04]))
        n, x, y = parts[size * len(streams) + which]
        if k == 20 and r == 0:
            gate = Gate(stream)  # from here on nothing goes on; but 256 calls more can be made
            threading.Timer(0.5, gate.open).start()
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
        reached(stream, 60)
    for k, n, _, result in checks:
        want = np.sum([numbers(k, q, n) for q in range(p)], axis=0)
        assert (result.peek == want).all(), (k, n, result.peek[:5], want[:5])
    want = np.sum([numbers(300, q, long[0].size) for q in range(p)], axis=0)
    assert (long[1].peek == want).all()
    assert made["allreduce"] == {True}, made
    assert comm.stats()["calls"] >= CALLS and "queued" in comm.plan_summary()
print("right")
"""

#: One rank's stream is held, its data comes late; nothing of the others' goes on, and none of them fails.
LATE = COMMON
LATE += """
with Communicator() as comm:
    p, r = comm.size, comm.rank
    for n in (100, 200_000):
        stream = runtime().stream()
        x, y, z = Array(n).set(-1), Array(n).set(-2), Array(n).set(-3)
        gate = Gate(stream) if r == p - 1 else None
        bring(x, numbers(n, r, n), stream)
        requests = [comm.Iallreduce(x, y, stream=stream), comm.Iallreduce(y, z, stream=stream)]
        comm.mpi.Barrier()
        time.sleep(0.3)
        assert not any(request.Test() for request in requests)
        comm.mpi.Barrier()
        if gate:
            gate.open()
        assert (z.copied(stream) == p * np.sum([numbers(n, q, n) for q in range(p)], axis=0)).all()
        # Blocking here, in a held stream there.
        gate = Gate(stream) if r == 0 else None
        timer = threading.Timer(0.2, gate.open) if gate else None
        timer and timer.start()
        request = comm.Iallreduce(x, y.set(-1), stream=stream) if r == 0 else comm.Allreduce(x, y.set(-1))
        request and request.Wait()
        assert (y.peek == np.sum([numbers(n, q, n) for q in range(p)], axis=0)).all()
    assert made["allreduce"] == {True}
print("right")
"""

#: All ranks have the same bits, whichever of them holds zeros of which sign and what is no number.
REPLICAS = """
from itertools import product
import numpy as np
from arrays import Array
from ucc_hetero import MAX, MIN, SUM, IN_PLACE, Communicator

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
print("right")
"""
