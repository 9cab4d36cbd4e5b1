"""Measurements of a job: collectives whose results are known, on all ranks together, and every pair of ranks."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import IN_PLACE, MAX, Communicator, UCCHError
from ...device import Vector, place_of, runtime_of
from .findings import Finding, finding, ok

Array = npt.NDArray[Any]

#: Bytes of a message that is short, and of one that shows the bandwidth.
SHORT, LONG = 8, 4 << 20
#: How often all pairs have their turn, and short messages of a turn. The best turn counts: what else goes on on the
#: hosts makes messages slower, and none faster than its link.
TURNS, TIMES = 4, 10
#: A pair is slow below this share of the median of pairs of its kind, where there are enough to compare.
SLOW_SHARE, ENOUGH = 0.25, 3


@contextlib.contextmanager
def _vectors(*values: Array) -> Iterator[list[Vector]]:
    runtime = runtime_of(place_of().vendor)
    made = [Vector(each, runtime) for each in values]
    try:
        yield made
    finally:
        for vector in made:
            vector.close()


def _gives(call: Callable[..., object], expected: Array, *buffers: Array) -> bool:
    """True if the call leaves these numbers in the last of its buffers."""
    with _vectors(*buffers) as vectors:
        call(*(vector.buffer for vector in vectors))
        return np.array_equal(vectors[-1].get(), expected)


def _allreduce(comm: Communicator, n: int, in_place: bool) -> bool:
    data = np.arange(n, dtype=np.float32) % 97 + comm.rank
    expected = (np.arange(n, dtype=np.float32) % 97) * comm.size + comm.size * (comm.size - 1) // 2
    if in_place:
        return _gives(lambda data: comm.Allreduce(IN_PLACE, data), expected, data)
    return _gives(comm.Allreduce, expected, data, np.zeros(n, np.float32))


def _replicas(comm: Communicator, n: int) -> bool:
    """The sum of numbers whose order of addition shows has the same bits on every rank, and again the same."""
    values = np.random.default_rng(comm.rank).standard_normal(n).astype(np.float32)
    results = set()
    with _vectors(values, np.zeros(n, np.float32)) as (send, receive):
        for _ in range(2):
            comm.Allreduce(send.buffer, receive.buffer)
            results.add(receive.get().tobytes())
        return len(results | set(comm.mpi.allgather(results.copy().pop()))) == 1


def _allgather(comm: Communicator, n: int) -> bool:
    receive = np.zeros(n * comm.size, np.int32)
    return _gives(comm.Allgather, np.repeat(np.arange(comm.size), n), np.full(n, comm.rank, np.int32), receive)


def _alltoall(comm: Communicator, n: int) -> bool:
    ranks = np.arange(comm.size)
    data = np.repeat(ranks + comm.size * comm.rank, n).astype(np.int32)
    return _gives(comm.Alltoall, np.repeat(ranks * comm.size + comm.rank, n), data, np.zeros_like(data))


def _reduce_scatter(comm: Communicator, n: int) -> bool:
    # Uneven on purpose: libraries divide such counts in ways of their own.
    counts = [n + rank % 3 for rank in range(comm.size)]
    data, receive = np.repeat(np.arange(comm.size, dtype=np.int64), counts), np.zeros(counts[comm.rank], np.int64)
    return _gives(
        lambda send, receive: comm.Reduce_scatter(send, receive, counts), receive + comm.rank * comm.size, data, receive
    )


def _bcast(comm: Communicator, n: int) -> bool:
    root, data = comm.size - 1, np.arange(n, dtype=np.float64)
    return _gives(lambda data: comm.Bcast(data, root), data, data * (comm.rank == root))


#: Name -> call: collectives that are known to go wrong where ranks differ, in the sizes at which they do.
CANARIES: tuple[tuple[str, Callable[[Communicator], bool]], ...] = (
    ("allreduce of 4 bytes", lambda comm: _allreduce(comm, 1, False)),
    ("allreduce of 8 MiB", lambda comm: _allreduce(comm, 1 << 21, False)),
    ("allreduce of 8 MiB in place", lambda comm: _allreduce(comm, 1 << 21, True)),
    ("allreduce of 1 MiB bit by bit", lambda comm: _replicas(comm, 1 << 18)),
    ("allgather of 64 KiB", lambda comm: _allgather(comm, 1 << 14)),
    ("alltoall of 64 KiB", lambda comm: _alltoall(comm, 1 << 14)),
    ("reduce_scatter of uneven parts", lambda comm: _reduce_scatter(comm, 1000)),
    ("bcast of 1 MiB", lambda comm: _bcast(comm, 1 << 17)),
)


def canaries(
    comm: Communicator, tried: tuple[tuple[str, Callable[[Communicator], bool]], ...] = CANARIES
) -> list[Finding]:
    """Run each; after a failure the communicator is no longer good for the next. Same findings on every rank."""
    for name, run in tried:
        failure, right = "", False
        try:
            right = run(comm)
        except UCCHError as error:
            failure = str(error)
        answers = comm.mpi.allgather((failure, right))
        failed = [(rank, text) for rank, (text, _) in enumerate(answers) if text]
        if failed:
            return [finding("run-failed", f"{name} failed: rank {failed[0][0]}: {failed[0][1]}")]
        wrong = [rank for rank, (_, good) in enumerate(answers) if not good]
        if wrong:
            return [finding("run-wrong", f"{name} gave wrong numbers on ranks {', '.join(map(str, wrong))}")]
    return [ok("collectives", f"{len(tried)} kinds gave the right numbers on {comm.size} ranks")]


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of ranks once, in rounds in which no rank has two partners."""
    players = list(range(size)) + [-1] * (size % 2)
    half = len(players) // 2
    for _ in range(len(players) - 1):
        matches = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in matches if -1 not in (a, b)]
        players = [players[0], players[-1], *players[1:-1]]


def _ping(comm: Communicator, data: Vector, peer: int, first: bool, times: int) -> float:
    """Seconds of one way."""
    start = time.perf_counter()
    for _ in range(times):
        if first:
            comm.Send(data.buffer, peer)
            comm.Recv(data.buffer, peer)
        else:
            comm.Recv(data.buffer, peer)
            comm.Send(data.buffer, peer)
    return (time.perf_counter() - start) / (2 * times)


def pairs(comm: Communicator, seconds: float) -> dict[tuple[int, int], tuple[float, float]]:
    """(latency in seconds, bytes per second) of each pair, as far as the time goes; equal on every rank."""
    end = time.monotonic() + seconds
    mine: dict[tuple[int, int], tuple[float, float]] = {}
    worst = np.zeros(1)
    with _vectors(np.zeros(SHORT, np.uint8), np.zeros(LONG, np.uint8)) as (short, long):
        for matches in (each for _ in range(TURNS) for each in rounds(comm.size)):
            comm.Allreduce(np.array([float(time.monotonic() > end)]), worst, op=MAX)
            if worst[0]:
                break
            for pair in matches:
                if comm.rank in pair:
                    peer, first = sum(pair) - comm.rank, comm.rank == pair[0]
                    _ping(comm, short, peer, first, 2)
                    latency = _ping(comm, short, peer, first, TIMES)
                    speed = LONG / _ping(comm, long, peer, first, 1)
                    least, most = mine.get(pair, (latency, speed))
                    if first:  # it has its own back, where the other's last Send may have left it in buffers
                        mine[pair] = min(latency, least), max(speed, most)
    return {pair: values for each in comm.mpi.allgather(mine) for pair, values in each.items()}


def slow_pairs(measured: dict[tuple[int, int], tuple[float, float]], hosts: list[str]) -> list[Finding]:
    """Pairs far below others of their kind, and what is usual for each kind."""
    found = []
    for kind, inside in (("within hosts", True), ("between hosts", False)):
        those = {p: v for p, v in measured.items() if (hosts[p[0]] == hosts[p[1]]) == inside}
        if not those:
            continue
        usual = statistics.median_high(sorted(speed for _, speed in those.values()))
        latency = statistics.median(latency for latency, _ in those.values())
        words = f"{len(those)} pairs {kind}: {latency * 1e6:.1f} us, {usual / 1e9:.2f} GB/s (medians)"
        slow = [pair for pair, (_, speed) in those.items() if speed < SLOW_SHARE * usual]
        if slow and len(those) >= ENOUGH:
            names = ", ".join(f"{a}-{b} ({those[a, b][1] / 1e9:.2f} GB/s)" for a, b in slow[:8])
            between = sorted({hosts[rank] for pair in slow for rank in pair})
            found.append(finding("pair-slow", f"ranks {names} are slow; {words}; hosts: {', '.join(between[:8])}"))
        else:
            found.append(ok("pairs", words))
    return found
