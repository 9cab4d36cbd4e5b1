"""The timed loops between pairs of ranks, by OSU's rule: each of the first half talks to its partner in the second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from . import output
from .memory import Block, label_of
from .output import WINDOWS, Row
from .session import Session
from .stats import sizes
from .validate import complement, differences, draw

# OSU's tags: ping-pong, the two directions of a window, its answer.
_PING, _DATA, _BACK, _ANSWER = 1, 100, 10, 101


@dataclass(slots=True)
class Side:
    """This rank's part: its partner (None for a rank left over), whether it begins, and its buffers."""

    partner: int | None
    first: bool
    pairs: int
    send: list[Block]
    recv: list[Block]
    answer: Block


def _side(session: Session, dtype: np.dtype[Any], size: int, window: int) -> Side:
    world, options = session.world, session.options
    pairs = options.pairs or world.size // 2
    partner = world.rank + pairs if world.rank < pairs else world.rank - pairs
    count = size // dtype.itemsize
    buffers = window if options.many_buffers else 1
    return Side(
        partner=partner if world.rank < 2 * pairs else None,
        first=world.rank < pairs,
        pairs=pairs,
        send=[session.memory.block(dtype, count).head(count) for _ in range(buffers)],
        recv=[session.memory.block(dtype, count).head(count) for _ in range(buffers)],
        answer=session.memory.block(np.dtype(np.int8), 1).head(1),
    )


@dataclass(slots=True)
class Check:
    """Fresh data before each iteration, every element compared after it."""

    session: Session
    side: Side
    dtype: np.dtype[Any]
    both_ways: bool

    def _data(self, rank: int, iteration: int, index: int) -> npt.NDArray[Any]:
        return draw(self.dtype, self.side.send[0].count, 2 + index, rank, iteration)

    def load(self, iteration: int) -> None:
        side, rank = self.side, self.session.world.rank
        if side.partner is None:
            return
        for k, block in enumerate(side.send):
            block.put(self._data(rank, iteration, k))
        for k, block in enumerate(side.recv):
            block.put(complement(self._data(side.partner, iteration, k)))

    def wrong(self, iteration: int) -> int:
        side = self.side
        if side.partner is None or (side.first and not self.both_ways):
            return 0
        errors = 0
        for k, block in enumerate(side.recv):
            want, got = self._data(side.partner, iteration, k), block.get()
            bad = differences(got, want)
            if bad.size and self.session.log is not None:
                size = want.size * want.itemsize
                self.session.log.write(size, iteration, f"message from rank {side.partner}", bad, got, want)
            errors += int(bad.size) + block.overrun()
        return errors


Once = Callable[[Session, Side, int], None]


def _ping_pong(session: Session, side: Side, window: int) -> None:
    """There and back, blocking."""
    comm, partner = session.peer.comm, side.partner
    if side.first:
        comm.Send(side.send[0].array, partner, _PING)
        comm.Recv(side.recv[0].array, partner, _PING)
    else:
        comm.Recv(side.recv[0].array, partner, _PING)
        comm.Send(side.send[0].array, partner, _PING)


def _one_way(session: Session, side: Side, window: int) -> None:
    """A window of messages to the second rank, and its answer."""
    peer, partner = session.peer, side.partner
    comm = peer.comm
    if side.first:
        peer.waitall([comm.Isend(side.send[j % len(side.send)].array, partner, _DATA) for j in range(window)])
        comm.Recv(side.answer.array, partner, _ANSWER)
    else:
        peer.waitall([comm.Irecv(side.recv[j % len(side.recv)].array, partner, _DATA) for j in range(window)])
        comm.Send(side.answer.array, partner, _ANSWER)


def _both_ways(session: Session, side: Side, window: int) -> None:
    """A window of messages in each direction at once."""
    peer, partner = session.peer, side.partner
    comm = peer.comm
    out, back = (_DATA, _BACK) if side.first else (_BACK, _DATA)
    receives = [comm.Irecv(side.recv[j % len(side.recv)].array, partner, back) for j in range(window)]
    sends = [comm.Isend(side.send[j % len(side.send)].array, partner, out) for j in range(window)]
    peer.waitall(sends)
    peer.waitall(receives)


def _timed(
    session: Session, side: Side, once: Once, check: Check | None, loops: tuple[int, int], window: int, apart: bool
) -> tuple[npt.NDArray[np.float64], int]:
    """(seconds of each iteration after the warm-up, wrong elements on this rank). ``apart``: a barrier before each."""
    iterations, warmup = loops
    barrier, times, wrong = session.world.barrier, [], 0
    repeats = session.options.validation_warmup if check else 0
    barrier()
    for i in range(warmup + iterations):
        if check:
            check.load(i)
            barrier()
        spent = 0.0
        for _ in range(repeats + 1):
            if apart:
                barrier()
            if side.partner is not None:
                start = perf_counter()
                once(session, side, window)
                spent = perf_counter() - start
        if i >= warmup:
            times.append(spent)
        if check:
            wrong += check.wrong(i)
    return np.asarray(times), wrong


def _measure(
    session: Session, dtype: np.dtype[Any], size: int, once: Once, window: int
) -> tuple[npt.NDArray[np.float64], Side, int]:
    """(one row of seconds per pair and one column per iteration, this rank's side, wrong elements of all ranks)."""
    window = max(window, 1)
    side = _side(session, dtype, size, window)
    check = Check(session, side, dtype, both_ways=once is not _one_way) if session.options.validate else None
    apart = session.bench.name in ("osu_mbw_mr", "osu_multi_lat")
    times, wrong = _timed(session, side, once, check, session.options.loops(session.bench, size), window, apart)
    table = session.world.gather(times)[: side.pairs]
    session.samples[size] = table.mean(axis=0) * 1e6
    return table, side, session.world.total(wrong) if check else 0


def _latency(session: Session, dtype: np.dtype[Any], size: int) -> Row:
    table, _, wrong = _measure(session, dtype, size, _ping_pong, 1)
    one_way = table / 2 * 1e6
    # OSU's osu_multi_lat prints the titles of these columns and nothing under them.
    percentiles = session.percentiles_of(one_way.mean(axis=0))
    return Row(size, float(one_way.mean()), iterations=table.shape[1], wrong=wrong, percentiles=percentiles)


def _windowed(once: Once, directions: int) -> Callable[[Session, np.dtype[Any], int], Row]:
    return lambda session, dtype, size: _bandwidth(session, dtype, size, once, directions, session.options.window)


def _bandwidth(session: Session, dtype: np.dtype[Any], size: int, once: Once, directions: int, window: int) -> Row:
    table, side, wrong = _measure(session, dtype, size, once, window)
    megabytes = size / 1e6 * window * side.pairs * directions  # of all pairs in one iteration
    value = megabytes / float(table.mean())
    percentiles, rate = session.percentiles_of(megabytes / table.mean(axis=0)), 1e6 * value / size
    return Row(size, value, iterations=table.shape[1], wrong=wrong, percentiles=percentiles, rate=rate)


def varied_windows(session: Session, dtypes: list[np.dtype[Any]]) -> int:
    """``osu_mbw_mr -V``: bandwidth, then message rate, a column per window size."""
    options = session.options
    for dtype in dtypes:
        session.print(output.datatype(label_of(dtype)))
        session.print(output.window_header())
        rates: list[tuple[int, list[float]]] = []
        for size in sizes(options.min_size, options.max_size, dtype.itemsize):
            rows = [_bandwidth(session, dtype, size, _one_way, 1, window) for window in WINDOWS]
            for window, row in zip(WINDOWS, rows, strict=True):
                session.results.add(dtype.name, row, window=window)
            session.print(output.window_row(size, [row.value for row in rows]))
            rates.append((size, [row.rate for row in rows]))
            if any(row.wrong for row in rows):
                session.print(f"DATA VALIDATION ERROR: osu_mbw_mr exited with status 1 on message size {size}.\n")
                return 1
        if options.print_rate:
            session.print("\n# Message Rate Profile\n" + output.window_header())
            session.print("".join(output.window_row(size, values) for size, values in rates))
    return 0


MEASURES: dict[str, Callable[[Session, np.dtype[Any], int], Row]] = {
    "osu_latency": _latency,
    "osu_multi_lat": _latency,
    "osu_bw": _windowed(_one_way, 1),
    "osu_bibw": _windowed(_both_ways, 2),
    "osu_mbw_mr": _windowed(_one_way, 1),
}
