"""Timed loops between pairs of ranks, with OSU's rules: rank r of the first half and rank r of the second are a
pair."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from .interleave import Open
from .memory import Block
from .output import Row
from .session import Session
from .stats import Floats
from .validate import complement, differences, draw
from .world import Peer

# OSU's tags: ping-pong, the two directions of a window, the reply.
_PING, _DATA, _BACK, _ANSWER = 1, 100, 10, 101


class Pairs:
    """A peer's messages of one size between all pairs. An iteration is a ping-pong, or a window of messages.

    ``directions``: number of directions in which a window is sent at once; 0 for ping-pongs.
    """

    def __init__(
        self, session: Session, peer: Peer, dtype: np.dtype[Any], size: int, once: Once, directions: int = 0
    ) -> None:
        world, options = session.world, session.options
        self.session, self.peer, self.dtype, self.size = session, peer, dtype, size
        self.once, self.window, self.directions, self.wrong = once, options.window, directions, 0
        self.pairs = options.pairs or world.size // 2
        self.first = world.rank < self.pairs
        partner = world.rank + (self.pairs if self.first else -self.pairs)
        #: The rank's partner; None without one.
        self.partner = partner if world.rank < 2 * self.pairs else None
        count = size // dtype.itemsize
        self.send, self.recv = (session.memory.block(dtype, count).head(count) for _ in range(2))
        self.reply = session.memory.block(np.dtype(np.int8), 1).head(1)

    def run(self, iterations: int, warmup: int) -> Floats:
        """Seconds of each iteration on this rank."""
        session, times = self.session, []
        barrier, validate = session.world.barrier, session.options.validate
        repeats = 1 + (session.options.validation_warmup if validate else 0)
        apart = session.bench.name in ("osu_mbw_mr", "osu_multi_lat")
        barrier()
        for i in range(warmup + iterations):
            if validate:
                self._load(i)
                barrier()
            spent = 0.0
            for _ in range(repeats):
                if apart:
                    barrier()
                if self.partner is not None:
                    start = perf_counter()
                    self.once(self)
                    spent = perf_counter() - start
            if i >= warmup:
                times.append(spent)
            if validate:
                self._compare(i)
        return np.asarray(times)

    def _data(self, rank: int, iteration: int) -> npt.NDArray[Any]:
        return draw(self.dtype, self.send.count, 2, rank, iteration)

    def _load(self, iteration: int) -> None:
        """Write new data to send, and its complement where it will arrive."""
        if self.partner is None:
            return
        self.send.put(self._data(self.session.world.rank, iteration))
        self.recv.put(complement(self._data(self.partner, iteration)))

    def _compare(self, iteration: int) -> None:
        """Compare all received elements; in a one-way window rank 0 of the pair receives none."""
        if self.partner is None or (self.first and self.once is _one_way):
            return
        self.wrong += int(differences(self.recv.get(), self._data(self.partner, iteration)).size) + self.recv.overrun()

    def row(self, samples: Floats) -> Row:
        """The mean one-way time in µs, or the rate of all pairs in MB/s."""
        session, size = self.session, self.size
        table = session.world.gather(samples)[: self.pairs]
        if not self.directions:
            # OSU's osu_multi_lat prints these columns' titles without values.
            one_way = table / 2 * 1e6
            percentiles = session.percentiles_of(one_way.mean(axis=0))
            return Row(size, float(one_way.mean()), iterations=table.shape[1], percentiles=percentiles)
        megabytes = size / 1e6 * self.window * self.pairs * self.directions  # of all pairs in an iteration
        value = megabytes / float(table.mean())
        percentiles = session.percentiles_of(megabytes / table.mean(axis=0))
        return Row(size, value, iterations=table.shape[1], percentiles=percentiles, rate=1e6 * value / size)

    def free(self) -> None:
        """Do nothing: messages need no release."""


Once = Callable[[Pairs], None]


def _ping_pong(pair: Pairs) -> None:
    """A blocking round trip."""
    send, recv = pair.peer.comm.Send, pair.peer.comm.Recv
    if pair.first:
        send(pair.send.array, pair.partner, _PING)
        recv(pair.recv.array, pair.partner, _PING)
    else:
        recv(pair.recv.array, pair.partner, _PING)
        send(pair.send.array, pair.partner, _PING)


def _begun(call: Callable[..., Any], block: Block, pair: Pairs, tag: int) -> list[Any]:
    """The requests of a window of messages."""
    return [call(block.array, pair.partner, tag) for _ in range(pair.window)]


def _one_way(pair: Pairs) -> None:
    """A window of messages to the second rank, and its reply."""
    comm = pair.peer.comm
    if pair.first:
        pair.peer.waitall(_begun(comm.Isend, pair.send, pair, _DATA))
        comm.Recv(pair.reply.array, pair.partner, _ANSWER)
    else:
        pair.peer.waitall(_begun(comm.Irecv, pair.recv, pair, _DATA))
        comm.Send(pair.reply.array, pair.partner, _ANSWER)


def _both_ways(pair: Pairs) -> None:
    """A window of messages in both directions at once."""
    comm, (out, back) = pair.peer.comm, (_DATA, _BACK) if pair.first else (_BACK, _DATA)
    receives = _begun(comm.Irecv, pair.recv, pair, back)
    sends = _begun(comm.Isend, pair.send, pair, out)
    pair.peer.waitall(sends)
    pair.peer.waitall(receives)


SERIES: dict[str, Open] = {
    "osu_latency": partial(Pairs, once=_ping_pong),
    "osu_multi_lat": partial(Pairs, once=_ping_pong),
    "osu_bw": partial(Pairs, once=_one_way, directions=1),
    "osu_bibw": partial(Pairs, once=_both_ways, directions=2),
    "osu_mbw_mr": partial(Pairs, once=_one_way, directions=1),
}
