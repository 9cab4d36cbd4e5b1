"""Measurements of a job: collectives with known results on all ranks, and messages between every pair."""

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
from ...errors import counted
from .findings import Finding, finding, ok

Array = npt.NDArray[Any]

#: Bytes of a short message, and of one that shows the bandwidth.
SHORT, LONG = 8, 4 << 20
#: Rounds over all pairs, and short messages per round. The best round counts: other load on the hosts makes messages
#: slower, and never faster than the link.
TURNS, TIMES = 4, 10
#: A pair is slow below this share of the median of similar pairs, if there are at least this many.
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


def _numbers(comm: Communicator, n: int, dtype: str = "f4") -> Array:
    """Numbers that differ by rank, with sums that are exact."""
    return (np.arange(n) % 97 + comm.rank).astype(dtype)


def _as_mpi(comm: Communicator, name: str, *arguments: Any) -> bool:
    """True if the call's last argument gets what MPI's own call gives in host memory."""
    known = [each.copy() if isinstance(each, np.ndarray) else each for each in arguments]
    getattr(comm.mpi, name)(*known)
    with _vectors(*(each for each in arguments if isinstance(each, np.ndarray))) as vectors:
        places = iter(vectors)
        getattr(comm, name)(*(next(places).buffer if isinstance(each, np.ndarray) else each for each in arguments))
        result = [each for each in known if isinstance(each, np.ndarray)][-1]
        return np.array_equal(vectors[-1].get(), result)


def _replicas(comm: Communicator, n: int) -> bool:
    """True if a sum that depends on the order of addition has the same bits on every rank, and when repeated."""
    values = np.random.default_rng(comm.rank).standard_normal(n).astype(np.float32)
    results = set()
    with _vectors(values, np.zeros(n, np.float32)) as (send, receive):
        for _ in range(2):
            comm.Allreduce(send.buffer, receive.buffer)
            results.add(receive.get().tobytes())
        return len(results | set(comm.mpi.allgather(results.copy().pop()))) == 1


def _uneven(comm: Communicator) -> bool:
    """True if uneven counts work; libraries divide them in different ways."""
    counts = [1000 + rank % 3 for rank in range(comm.size)]
    total, mine = _numbers(comm, sum(counts), "i8"), _numbers(comm, counts[comm.rank], "i8")
    return _as_mpi(comm, "Reduce_scatter", total, mine, counts)


#: Name -> test: collectives in sizes that are known to fail if ranks differ.
CANARIES: tuple[tuple[str, Callable[[Communicator], bool]], ...] = (
    ("allreduce of 4 bytes", lambda c: _as_mpi(c, "Allreduce", _numbers(c, 1), _numbers(c, 1))),
    ("allreduce of 8 MiB", lambda c: _as_mpi(c, "Allreduce", _numbers(c, 1 << 21), _numbers(c, 1 << 21))),
    ("allreduce of 8 MiB in place", lambda c: _as_mpi(c, "Allreduce", IN_PLACE, _numbers(c, 1 << 21))),
    ("allreduce of 1 MiB bit by bit", lambda c: _replicas(c, 1 << 18)),
    ("allgather of 64 KiB", lambda c: _as_mpi(c, "Allgather", _numbers(c, 1 << 14), _numbers(c, c.size << 14))),
    ("alltoall of 64 KiB", lambda c: _as_mpi(c, "Alltoall", _numbers(c, c.size << 14), _numbers(c, c.size << 14))),
    ("reduce_scatter of uneven parts", _uneven),
    ("bcast of 1 MiB", lambda c: _as_mpi(c, "Bcast", _numbers(c, 1 << 17, "f8"), c.size - 1)),
)


def canaries(
    comm: Communicator, tried: tuple[tuple[str, Callable[[Communicator], bool]], ...] = CANARIES
) -> list[Finding]:
    """Run each test. After a failure the communicator is not used again. The findings are equal on every rank."""
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
    return [ok("collectives", f"{counted(len(tried), 'kind')} gave the right numbers on {counted(comm.size, 'rank')}")]


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of ranks, in rounds in which each rank has at most one partner."""
    players = list(range(size)) + [-1] * (size % 2)
    half = len(players) // 2
    for _ in range(len(players) - 1):
        matches = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in matches if -1 not in (a, b)]
        players = [players[0], players[-1], *players[1:-1]]


def _ping(comm: Communicator, data: Vector, peer: int, first: bool, times: int) -> float:
    """One-way latency in seconds."""
    turns = (comm.Send, comm.Recv) if first else (comm.Recv, comm.Send)
    start = time.perf_counter()
    for turn in turns * times:
        turn(data.buffer, peer)
    return (time.perf_counter() - start) / (2 * times)


def pairs(comm: Communicator, seconds: float) -> dict[tuple[int, int], tuple[float, float]]:
    """(latency in seconds, bytes per second) of each pair, until the time is over; equal on every rank."""
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
                    if first:  # rank `first` has its data back; the peer's last Send may still be buffered
                        mine[pair] = min(latency, least), max(speed, most)
    return {pair: values for each in comm.mpi.allgather(mine) for pair, values in each.items()}


def slow_pairs(measured: dict[tuple[int, int], tuple[float, float]], hosts: list[str]) -> list[Finding]:
    """Pairs much slower than similar pairs, and the medians of each kind of pair."""
    found = []
    for kind, inside in (("within hosts", True), ("between hosts", False)):
        those = {p: v for p, v in measured.items() if (hosts[p[0]] == hosts[p[1]]) == inside}
        if not those:
            continue
        usual = statistics.median_high(sorted(speed for _, speed in those.values()))
        latency = statistics.median(latency for latency, _ in those.values())
        words = f"{counted(len(those), 'pair')} {kind}: {latency * 1e6:.1f} us, {usual / 1e9:.2f} GB/s (medians)"
        slow = [pair for pair, (_, speed) in those.items() if speed < SLOW_SHARE * usual]
        if slow and len(those) >= ENOUGH:
            names = ", ".join(f"{a}-{b} ({those[a, b][1] / 1e9:.2f} GB/s)" for a, b in slow[:8])
            between = sorted({hosts[rank] for pair in slow for rank in pair})
            found.append(finding("pair-slow", f"ranks {names} are slow; {words}; hosts: {', '.join(between[:8])}"))
        else:
            found.append(ok("pairs", words))
    return found
