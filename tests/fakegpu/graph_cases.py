"""Cases of calls that are captured in graphs, among devices of two vendors."""

import os
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from arrays import Array, Graph, runtime
from collective_call import Call, Case
from mpi4py import MPI
from ranks import around, dice_of, failure, numbers, reached, right

from ucc_hetero import IN_PLACE, Communicator, Request
from ucc_hetero.errors import CollectiveError, NotSupported, PeerError
from ucc_hetero.native.libraries import lib
from ucc_hetero.trace import flight, flight_files

NAMES = "allreduce reduce bcast allgather allgatherv alltoall alltoallv reduce_scatter_block scatter gather".split()


def flown():
    """What this rank's flight recorder has."""
    with tempfile.TemporaryDirectory() as folder:
        return flight_files.parse(flight.dump(Path(folder) / "flight").read_bytes())


def there(stream, array, want, *about):
    got = array.copied(stream)
    assert (got == want).all(), (about, got[:8], want)


class TwoStreams(Graph):
    """A graph that begins and ends in the first of two streams."""

    def __init__(self, streams):
        super().__init__(streams[0])
        self.streams = streams

    def __enter__(self):
        super().__enter__()
        self._follow(*self.streams)
        return self

    def __exit__(self, *failed):
        self._follow(*reversed(self.streams))
        super().__exit__(*failed)

    def _follow(self, before, after):
        event = runtime().event()
        event.record(before.handle)
        runtime().wait_event(after.handle, event)


def case(dice, p, name, n):
    counts = {"allgatherv": [n, 2 * n, 1, n + 3][:p], "alltoallv": dice.integers(0, n + 2, p * p).tolist()}
    op, in_place = "SUM" if "reduce" in name else None, name == "allreduce" and bool(dice.integers(2))
    root = int(dice.integers(p)) if name in ("reduce", "bcast", "scatter", "gather") else -1
    counts = tuple(counts.get(name, [n]))
    return Case(name, "float32", op, "graph", in_place, root, counts, False, "plain", int(dice.integers(1 << 30)))


def give(call, stream):
    """Those of uneven exchanges wait: they go by what a rank knew of the others' counts the last time."""
    names = call.case.name.capitalize(), "I" + call.case.name
    return getattr(call.comm, names[call.case.name != "alltoallv"])(*call.args(), stream=stream)


def like(call):
    """The same, but for what the last rank has for itself of an uneven exchange."""
    *counts, last = call.case.counts
    return Call(replace(call.case, counts=(*counts, last + 7)), call.comm) if call.case.name == "alltoallv" else call


def captured(calls, streams, dice):
    for each in calls:
        give(like(each), streams[0])  # its kernels are loaded
    reached(streams[0])
    with TwoStreams(streams) as graph:
        for each in calls:
            request = give(each, streams[int(dice.integers(2))])
            if request is not None and dice.integers(2):
                request.Wait()
    return graph


def replays(*lengths):
    """Random collectives of two communicators in two streams of each graph, short and long. Graphs are replayed in any
    order with new data each time, among calls that are not captured, and after their communicators have ended: then
    they wait for no rank, and do no harm."""
    with Communicator() as one, Communicator() as two:
        p, begun, dice = one.size, flown().now, dice_of(one)
        streams, x, y = [runtime().stream() for _ in range(2)], Array(50).set(1), Array(50)
        for comm in (one, two):
            comm.Allreduce(x, y)
        with Graph(streams[0]) as again:
            two.Iallreduce(IN_PLACE, y, stream=streams[0])
        for n in map(int, lengths):
            parts = [NAMES[:5], NAMES[5:], dice.choice(NAMES, 3).tolist()]
            calls = [
                [Call(case(dice, p, name, n), (one, two)[int(dice.integers(2))]) for name in part] for part in parts
            ]
            graphs, every = [captured(each, streams, dice) for each in calls], [each for part in calls for each in part]
            for turn in range(3):
                for each in every:
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
                for each in every:
                    right(each, streams[0])
                there(streams[0], y, p * p, n, turn)
            [graph.close() for graph in graphs]
        assert one._runner.launches == two._runner.launches == 0
        records = flown().records
        records = records[records["called"] > begun]  # not of cases that ran here before
        assert (records["kind"] == lib.UCCH_RECORD_GRAPH).any()
        assert (records["ended"] > 0).all() and (records["status"] == 0).all()
        assert (records["kind"] == lib.UCCH_RECORD_STREAM).any() or one._runner.topology.flat
    with Communicator() as comm:
        for _ in range(3):
            again.replay(streams[0])
            reached(streams[0])
            comm.Allreduce(x, y.set(-1))
            assert (y.peek == p).all()


def drawn(dice, p):
    """(from, to, elements, tag) of some messages."""
    for _ in range(dice.integers(1, 12)):
        source, dest = dice.choice(p, 2, replace=False).tolist()
        n = int(dice.choice([0, 1, 3, 1000, 8192, 8193, 40_000, 200_001, 1_200_000 if dice.random() < 0.3 else 17]))
        yield source, dest, n, int(dice.integers(0, 1 << 31))


def copy(into, outof, stream):
    if into.size:
        runtime().copy(into.block.handle, outof.block.handle, 4 * into.size, stream.handle)


def post(comm, mine, streams, own):
    """Requests of these messages, with their streams, in any order, but for that of each pair of ranks, which they
    have."""
    left, requests = list(range(len(mine))), []
    while left:
        pair = mine[own.choice(left)][1][:2]
        pick = next(k for k in left if mine[k][1][:2] == pair)
        left.remove(pick)
        _, (source, dest, _, tag), array, beside = mine[pick]
        stream = streams[own.integers(2)]
        if source == comm.rank:
            copy(array, beside, stream)
            requests.append((comm.Isend(array, dest, tag, stream=stream), stream, None))
        else:
            requests.append((comm.Irecv(array, source, tag, stream=stream), stream, (beside, array)))
    return requests


def messages(comm):
    """Messages between random ranks, of random lengths and tags, posted and waited for in any order and in two streams;
    replayed with new data each time, among messages and calls that are not captured."""
    r, (right, left), dice, own = comm.rank, around(comm), dice_of(comm), np.random.default_rng()
    streams, x, y, status = [runtime().stream() for _ in range(2)], Array(50).set(1), Array(50), MPI.Status()
    comm.Sendrecv(x, right, 0, y, left, 0, stream=streams[0])  # its kernels are loaded
    comm.Allreduce(x, y)
    for turn in range(5):
        mine = [
            (k, each, Array(each[2]), Array(each[2])) for k, each in enumerate(drawn(dice, comm.size)) if r in each[:2]
        ]
        outof, into = Array(999), Array(999)
        with TwoStreams(streams) as graph:
            requests = post(comm, mine, streams, own)
            if turn % 2:
                Request.Waitall([request for request, *_ in requests])
            for k in own.permutation(len(requests)):
                request, stream, copied = requests[k]
                request.Wait()
                if copied is not None:
                    copy(*copied, stream)
            comm.Sendrecv(outof, right, 5, into, left, 5, status, stream=streams[0])
            assert (status.source, status.tag, status.Get_count(MPI.BYTE)) == (left, 5, 999 * 4)
            comm.Iallreduce(x, y, stream=streams[0])
            comm.Send(x, MPI.PROC_NULL, 3, stream=streams[0])
        for replay in range(3):
            for k, (source, _, n, _), array, beside in mine:
                array.set(-9)
                beside.set(numbers(replay * 100 + k, source, n) if source == r else -9)
            outof.set(numbers(replay, r, 999))
            into.set(-9)
            graph.replay(streams[0])
            if replay:
                comm.Sendrecv(x, right, 7, y, left, 7, stream=streams[1])
            reached(streams[0])
            for k, about, array, beside in mine:
                want = numbers(replay * 100 + k, about[0], about[2])
                assert (array.peek == want).all(), (turn, replay, about, array.peek[:5], want[:5])
                assert (beside.peek == want).all(), (turn, replay, about, beside.peek[:5], want[:5])
            assert (into.peek == numbers(replay, left, 999)).all(), (turn, replay)
        graph.close()


def next_error(comm, failures, streams, x, y, match=""):
    """After graphs with a missing message: streams continue, and the next call raises the reason, which is returned."""
    for each in streams:
        reached(each)
    until = time.monotonic() + 60  # a rank that replays nothing may have nothing that fails before its next call
    while lib.ucch_failures() == failures and time.monotonic() < until:
        time.sleep(1e-3)
    with pytest.raises(CollectiveError, match=match) as caught:
        comm.Iallreduce(x, y, stream=streams[0]).Wait()
    assert match or caught.type is CollectiveError
    return str(caught.value)


def unlike_messages(way):
    """Captured messages that differ in tag or length, or that only one rank replays. Before that: unawaited messages,
    which are not in a graph."""
    comm, failures, stream = Communicator(), lib.ucch_failures(), runtime().stream()
    r, x, y = comm.rank, Array(1000).set(1), Array(1000)
    n, tag = (900 if way == "length" and r else 1000), (4 if way == "tag" and r else 3)
    comm.Sendrecv(x, 1 - r, 0, y, 1 - r, 0, stream=stream)
    with Graph(stream):
        left = comm.Isend(x, 1 - r, stream=stream)
    assert failure(lambda: comm.Isend(x, 1 - r, stream=stream)) == "CollectiveError"
    left.Wait()
    comm._messages.timeout = 1.0
    x, y = Array(n).set(1), Array(n)
    with Graph(stream) as graph:
        requests = [comm.Irecv(y, 1 - r, tag, stream=stream), comm.Isend(x, 1 - r, tag, stream=stream)]
        requests[0].Wait()
    comm.mpi.Barrier()
    if way != "missing" or r == 0:
        graph.replay(stream)
    next_error(comm, failures, [stream], x, y)
    MPI.COMM_WORLD.Barrier()


def refused(comm, *why):
    """Calls that cannot be captured raise on all ranks, and do no damage."""
    n, stream, peer, words = 1000, runtime().stream(), (comm.rank + 1) % comm.size, " ".join(why)
    x, y = Array(n).set(1), Array(n)

    def not_in_graphs(match, call, *args):
        with pytest.raises(NotSupported, match=match), Graph(stream):
            call(*args, stream=stream)

    not_in_graphs(words, comm.Iallreduce, x, y)
    comm.Allreduce(x, y.set(-1))
    assert (y.peek == comm.size).all()
    for call, *about in (comm.Issend, x, peer), (comm.Irecv, x), (comm.Irecv, x, peer), (comm.Isend, x, comm.rank):
        not_in_graphs("name another rank and a tag", call, *about)
    not_in_graphs("of this rank's device", comm.Isend, np.ones(3), peer)
    not_in_graphs("host memory", comm.Iallreduce, np.ones(3), np.ones(3))
    if "once before" in words:
        with Graph(stream) as graph:
            comm.Iallreduce(x, y, stream=stream)
        graph.replay(stream)
        there(stream, y, comm.size)


def broken(way, *lengths):
    """A rank does not replay a graph, makes another call, or replays two graphs at once."""
    comm, failures, streams = Communicator(), lib.ucch_failures(), [runtime().stream() for _ in range(2)]
    stream, n = streams[0], int(dice_of(comm).choice([*map(int, lengths)]))
    x, y = Array(n).set(1), Array(n)
    comm.Allreduce(x, y)
    comm.Bcast(x, 0)

    def two_graphs():
        with Graph(stream) as one:
            comm.Iallreduce(x, y, stream=stream)
        with Graph(stream) as other:
            comm.Ibcast(x, 0, stream=stream)
        return one, other

    graphs = two_graphs()
    for graph in graphs:
        graph.replay(stream)
    there(stream, y, comm.size)
    if way != "different":  # of the others, one waits for a rank that does not come
        comm._runner.timeout = 1.0
        graphs = two_graphs()
    comm.mpi.Barrier()
    if way == "different":
        [graph.replay(stream) for graph in (graphs if comm.rank == 0 else graphs[::-1])]
    elif comm.rank == 0:
        [graph.replay(each) for graph, each in zip(graphs, streams[: 1 + (way == "overlap")], strict=False)]
    error = next_error(comm, failures, streams, x, y)
    graphs[0].replay(stream)
    reached(stream)  # at once, with nobody
    words = {"missing": ["not complete"], "overlap": ["not complete", "at a time"]}
    words = words.get(way, ["other calls", "left the job"])
    told = MPI.COMM_WORLD.allgather(any(each in error for each in words))
    assert sum(told) == (2 if way == "different" else 1), error


def lost(way, folder):
    """The last rank is lost while the others replay: killed, stopped, or disconnected from outside. No call or message
    of another communicator takes one that is stopped for one that has left."""
    comm, failures, stream, folder = Communicator(), lib.ucch_failures(), runtime().stream(), Path(folder)
    x, y, other, one = Array(1000).set(1), Array(1000), comm.Dup(), np.ones(3)
    comm.Allreduce(x, y)
    other.Allreduce(one, np.empty(3))
    with Graph(stream) as graph:
        comm.Iallreduce(x, y, stream=stream)
    graph.replay(stream)
    there(stream, y, comm.size)
    comm.mpi.Barrier()
    (folder / f"up{comm.rank}").touch()
    is_last = comm.rank == comm.size - 1
    if is_last and way.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, way))
    while way == "cut" and not (folder / "cut").exists():
        time.sleep(0.01)
    if not is_last:
        graph.replay(stream)
        why = "rank 1 was stopped" if way == "SIGSTOP" else "(rank 1 has left|host of rank 1 is gone)"
        next_error(comm, failures, [stream], x, y, why)
        calls = (lambda: other.Probe(1), lambda: other.Recv(one, 1), lambda: other.Allreduce(one, one * 0))
        for call in calls if way == "SIGSTOP" else ():
            with pytest.raises(PeerError, match=why):
                call()
        print("told", flush=True)
        (folder / "known").touch()
    os._exit(way != "SIGKILL")  # ends a job one of whose ranks is stopped
