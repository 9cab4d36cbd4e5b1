"""Scripts of ranks for calls that are captured in graphs, among devices of two vendors."""

from channel_scripts import CALLS

CAPTURE = CALLS
CAPTURE += """
import tempfile
from dataclasses import replace
from pathlib import Path
from ucc_hetero.trace import flight, flight_files

def flown():
    "What this rank's flight recorder has."
    with tempfile.TemporaryDirectory() as folder:
        return flight_files.parse(flight.dump(Path(folder) / "flight").read_bytes())

def there(stream, array, want, *about):
    got = array.copied(stream)
    assert (got == want).all(), (about, got[:8], want[:8])
"""

#: Random collectives of two communicators in two streams of each graph, short and long. Graphs are replayed in any
#: order with new data each time, among calls that are not captured, and after their communicators have ended: then they
#: wait for no rank, and do no harm.
REPLAYS = CAPTURE
REPLAYS += """
NAMES = "allreduce reduce bcast allgather allgatherv alltoall alltoallv reduce_scatter_block scatter gather".split()
dice = np.random.default_rng(int(os.environ["DICE"]))  # the same on every rank

def case(name, n):
    counts = {"allgatherv": [n, 2 * n, 1, n + 3][:p], "alltoallv": dice.integers(0, n + 2, p * p).tolist()}
    op, in_place = "SUM" if "reduce" in name else None, name == "allreduce" and bool(dice.integers(2))
    root = int(dice.integers(p)) if name in ("reduce", "bcast", "scatter", "gather") else -1
    counts = tuple(counts.get(name, [n]))
    return Case(name, "float32", op, "graph", in_place, root, counts, False, "plain", int(dice.integers(1 << 30)))

def give(call, stream):
    "Those of uneven exchanges wait: they go by what a rank knew of the others' counts the last time."
    names = call.case.name.capitalize(), "I" + call.case.name
    return getattr(call.comm, names[call.case.name != "alltoallv"])(*call.args(), stream=stream)

def like(call):
    "The same, but for what the last rank has for itself of an uneven exchange."
    *counts, last = call.case.counts
    return Call(replace(call.case, counts=(*counts, last + 7)), call.comm) if call.case.name == "alltoallv" else call

def captured(calls):
    "A graph of these calls, whose streams it leaves in order."
    for each in calls:
        give(like(each), streams[0])  # its kernels are loaded
    reached(streams[0])
    fork, join = runtime().event(), runtime().event()
    with Graph(streams[0]) as graph:
        fork.record(streams[0].handle)
        runtime().wait_event(streams[1].handle, fork)
        for each in calls:
            request = give(each, streams[int(dice.integers(2))])
            if request is not None and dice.integers(2):
                request.Wait()
        join.record(streams[1].handle)
        runtime().wait_event(streams[0].handle, join)
    return graph

with Communicator() as one, Communicator() as two:
    p, begun = one.size, flown().now
    streams = [runtime().stream() for _ in range(2)]
    x, y = Array(50).set(1), Array(50)
    for comm in (one, two):
        comm.Allreduce(x, y)
    with Graph(streams[0]) as again:
        two.Iallreduce(IN_PLACE, y, stream=streams[0])
    for n in map(int, os.environ["LENGTHS"].split(",")):
        parts = [NAMES[:5], NAMES[5:], dice.choice(NAMES, 3).tolist()]
        calls = [[Call(case(name, n), (one, two)[int(dice.integers(2))]) for name in names] for names in parts]
        graphs = [captured(each) for each in calls]
        for turn in range(3):
            for each in (call for part in calls for call in part):
                each.refill()
                [buffer.late(streams[0]) for buffer in each.buffers()]
            y.set(1)
            for pick in dice.permutation([0, 1, 2, 3, 3, 4]).tolist():
                if pick < 3:
                    graphs[pick].replay(streams[0])
                elif pick == 3:  # the sums of sums of one that is replayed at once, once more
                    again.replay(streams[0])
                else:  # in another stream, and behind graphs
                    one.Allreduce(x, other := Array(50))
                    one.Iallreduce(x, other, stream=streams[0])
            for each in (call for part in calls for call in part):
                right(each, streams[0])
            there(streams[0], y, p * p, n, turn)
        [graph.close() for graph in graphs]
    assert all(made.values())
    assert one._runner.launches == two._runner.launches == 0
    kept = flown().records
    kept = kept[kept["called"] > begun]  # not of scripts that ran here before
    assert (kept["kind"] == lib.UCCH_RECORD_GRAPH).any() and (kept["ended"] > 0).all() and (kept["status"] == 0).all()
    assert set(kept["kind"].tolist()) >= {lib.UCCH_RECORD_STREAM} or one._runner.topology.flat
with Communicator() as comm:
    for _ in range(3):
        again.replay(streams[0])
        reached(streams[0])
        comm.Allreduce(x, y.set(-1))
        assert (y.peek == p).all()
"""

#: Messages between random ranks, of random lengths and tags, posted and waited for in any order and in two streams;
#: replayed with new data each time, among messages and calls that are not captured.
MESSAGES = CAPTURE
MESSAGES += """
rng = np.random.default_rng(int(os.environ["DICE"]))
own = np.random.default_rng([int(os.environ["DICE"]), MPI.COMM_WORLD.rank])

def drawn(p):
    "(from, to, elements, tag) of some messages."
    for _ in range(rng.integers(1, 12)):
        source, dest = rng.choice(p, 2, replace=False).tolist()
        n = int(rng.choice([0, 1, 3, 1000, 8192, 8193, 40_000, 200_001, 1_200_000 if rng.random() < 0.3 else 17]))
        yield source, dest, n, int(rng.integers(0, 1 << 31))

def copy(into, outof, stream):
    if into.size:
        runtime().copy(into.block.handle, outof.block.handle, 4 * into.size, stream.handle)

def post(comm, mine, streams):
    "Requests of these messages, with their streams, in any order, but for that of each pair of ranks, which they have."
    left, requests = list(range(len(mine))), []
    while left:
        pick = own.choice(left)
        pair = mine[pick][1][:2]
        pick = next(k for k in left if mine[k][1][:2] == pair)
        left.remove(pick)
        _, (source, dest, n, tag), array, beside = mine[pick]
        stream = streams[own.integers(2)]
        if source == comm.rank:
            copy(array, beside, stream)
            requests.append((comm.Isend(array, dest, tag, stream=stream), stream, None))
        else:
            requests.append((comm.Irecv(array, source, tag, stream=stream), stream, (beside, array)))
    return requests

with Communicator() as comm:
    p, r = comm.size, comm.rank
    streams = [runtime().stream() for _ in range(2)]
    x, y = Array(50).set(1), Array(50)
    status, near = MPI.Status(), ((r + 1) % p, (r - 1) % p)
    comm.Sendrecv(x, near[0], 0, y, near[1], 0, stream=streams[0])  # its kernels are loaded
    comm.Allreduce(x, y)
    for turn in range(5):
        mine = [(k, each, Array(each[2]), Array(each[2])) for k, each in enumerate(drawn(p)) if r in each[:2]]
        fork, join = runtime().event(), runtime().event()
        around = Array(999), Array(999)
        with Graph(streams[0]) as graph:
            fork.record(streams[0].handle)
            runtime().wait_event(streams[1].handle, fork)
            requests = post(comm, mine, streams)
            if turn % 2:
                Request.Waitall([request for request, *_ in requests])
            for k in own.permutation(len(requests)):
                request, stream, copied = requests[k]
                request.Wait()
                if copied is not None:
                    copy(*copied, stream)
            comm.Sendrecv(around[0], near[0], 5, around[1], near[1], 5, status, stream=streams[0])
            assert (status.source, status.tag, status.Get_count(MPI.BYTE)) == (near[1], 5, 999 * 4)
            comm.Iallreduce(x, y, stream=streams[0])
            comm.Send(x, MPI.PROC_NULL, 3, stream=streams[0])
            join.record(streams[1].handle)
            runtime().wait_event(streams[0].handle, join)
        for replay in range(3):
            for k, (source, dest, n, tag), array, beside in mine:
                array.set(-9)
                beside.set(numbers(replay * 100 + k, source, n) if source == r else -9)
            around[0].set(numbers(replay, r, 999))
            around[1].set(-9)
            graph.replay(streams[0])
            if replay:
                comm.Sendrecv(x, near[0], 7, y, near[1], 7, stream=streams[1])
            reached(streams[0])
            for k, about, array, beside in mine:
                want = numbers(replay * 100 + k, about[0], about[2])
                assert (array.peek == want).all(), (turn, replay, about, array.peek[:5], want[:5])
                assert (beside.peek == want).all(), (turn, replay, about, beside.peek[:5], want[:5])
            assert (around[1].peek == numbers(replay, near[1], 999)).all(), (turn, replay)
        graph.close()
"""

#: After graphs with a missing message: streams continue, and the next call raises the reason.
FAILS = CAPTURE
FAILS += """
comm, way, failures = Communicator(), os.environ["WAY"], lib.ucch_failures()
r, streams = comm.rank, [runtime().stream() for _ in range(2)]
stream = streams[0]

def next_call():
    for each in streams:
        reached(each)
    until = time.monotonic() + 60  # a rank that replays nothing may have nothing that fails before its next call
    while lib.ucch_failures() == failures and time.monotonic() < until:
        time.sleep(1e-3)
    with pytest.raises(CollectiveError) as caught:
        comm.Iallreduce(x, y, stream=stream).Wait()
    print(f"next: {type(caught.value).__name__} {caught.value}", flush=True)
"""

#: Captured messages that differ in tag or length, or that only one rank replays. Before that: unawaited messages, which
#: are not in a graph.
UNLIKE_MESSAGES = FAILS
UNLIKE_MESSAGES += """
n, tag = (900 if way == "length" and r else 1000), (4 if way == "tag" and r else 3)
x, y = Array(1000).set(1), Array(1000)
comm.Sendrecv(x, 1 - r, 0, y, 1 - r, 0, stream=stream)
with Graph(stream) as graph:
    left = comm.Isend(x, 1 - r, stream=stream)
print("not waited for:", failure(lambda: comm.Isend(x, 1 - r, stream=stream)), flush=True)
left.Wait()
comm._messages.timeout = 1.0
x, y = Array(n).set(1), Array(n)
with Graph(stream) as graph:
    requests = [comm.Irecv(y, 1 - r, tag, stream=stream), comm.Isend(x, 1 - r, tag, stream=stream)]
    requests[0].Wait()
comm.mpi.Barrier()
if way != "missing" or r == 0:
    graph.replay(stream)
next_call()
MPI.COMM_WORLD.Barrier()
"""

#: Calls that cannot be captured raise on all ranks, and do no damage.
REFUSED = CAPTURE
REFUSED += """
def refused(words, call, *args):
    with pytest.raises(NotSupported, match=words), Graph(stream):
        call(*args, stream=stream)

with Communicator() as comm:
    n, stream, peer = 1000, runtime().stream(), (comm.rank + 1) % comm.size
    x, y = Array(n).set(1), Array(n)
    refused(os.environ["WHY"], comm.Iallreduce, x, y)
    comm.Allreduce(x, y.set(-1))
    assert (y.peek == comm.size).all()
    for call, *about in (
        (comm.Issend, x, peer), (comm.Irecv, x), (comm.Irecv, x, peer), (comm.Isend, x, comm.rank)
    ):
        refused("name another rank and a tag", call, *about)
    refused("of this rank's device", comm.Isend, np.ones(3), peer)
    refused("host memory", comm.Iallreduce, np.ones(3), np.ones(3))
    if "once before" in os.environ["WHY"]:
        with Graph(stream) as graph:
            comm.Iallreduce(x, y, stream=stream)
        graph.replay(stream)
        there(stream, y, comm.size)
"""

#: A rank that does not replay a graph, makes another call, or replays two graphs at once.
BROKEN = FAILS
BROKEN += """
n = int(os.environ["LENGTH"])
x, y = Array(n).set(1), Array(n)
comm.Allreduce(x, y)
comm.Bcast(x, 0)
def captured():
    graphs = [Graph(streams[0]) for _ in range(2)]
    with graphs[0]:
        comm.Iallreduce(x, y, stream=stream)
    with graphs[1]:
        comm.Ibcast(x, 0, stream=stream)
    return graphs
graphs = captured()
for graph in graphs:
    graph.replay(stream)
there(stream, y, comm.size)
if way != "different":  # of the others, one waits for somebody who does not come
    comm._runner.timeout = 1.0
    graphs = captured()
comm.mpi.Barrier()
if way == "different":
    [graph.replay(stream) for graph in (graphs if r == 0 else graphs[::-1])]
elif r == 0:
    [graph.replay(each) for graph, each in zip(graphs, streams[: 1 + (way == "overlap")])]
next_call()
graphs[0].replay(stream)
reached(stream)  # at once, with nobody
MPI.COMM_WORLD.Barrier()
"""

#: The last rank is lost while the others replay: killed, stopped, or disconnected from outside. No call or
#: message of another communicator takes one that is stopped for one that has left.
LOST = FAILS
LOST += """
x, y, folder, other = Array(1000).set(1), Array(1000), Path(os.environ["FOLDER"]), comm.Dup()
comm.Allreduce(x, y)
other.Allreduce(one := np.ones(3), np.empty(3))
with Graph(stream) as graph:
    comm.Iallreduce(x, y, stream=stream)
graph.replay(stream)
there(stream, y, comm.size)
comm.mpi.Barrier()
(folder / f"up{r}").touch()
if r == comm.size - 1 and way.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, way))
while way == "cut" and not (folder / "cut").exists():
    time.sleep(0.01)
if r < comm.size - 1:
    graph.replay(stream)
    next_call()
    for call in (lambda: other.Probe(1), lambda: other.Recv(one, 1), lambda: other.Allreduce(one, one * 0)):
        if way == "SIGSTOP":
            with pytest.raises(PeerError, match="rank 1 was stopped"):
                call()
            print("told", flush=True)
    (folder / "known").touch()
os._exit(way != "SIGKILL")  # ends a job one of whose ranks is stopped
"""
