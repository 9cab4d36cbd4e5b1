"""scan and exscan: every rank gets the reduction over the ranks up to (or before) it, in rank order.

UCC has neither. They are made of messages and local combinations, which keep the order and so serve any operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..collectives import Call
from ..plan import Region, Step
from ..topology import Topology
from .builders import LocalSteps, copy, message, region, stages
from .registry import Piece, Role, Stages, algorithm


class _Doubling:
    """Inclusive scan over ``ranks`` of their ``own`` regions into ``recv``, by recursive doubling.

    In the round of distance d member i sends its partial result to i + d and combines that of i - d with its own. The
    received data becomes the new partial result, so the operand of lower ranks is always on the left.
    """

    def __init__(self, ranks: Sequence[int], own: Callable[[int], Region], recv: Region, piece: Piece) -> None:
        self.ranks, self.own, self.recv, self.piece = ranks, own, recv, piece
        self.spare: dict[int, list[Region]] = {}

    def arrived(self, i: int, round_: int) -> Region:
        """Where member i receives in a round.

        The last message may be received in recv itself, unless a combination still has to read ``send`` there.
        """
        if i < 2 << round_ and round_ > 0:
            return self.recv
        if i not in self.spare:
            needed = min(2, i.bit_length() - 1) if i > 1 else 1
            self.spare[i] = [self.piece.tmp(self.ranks[i], self.recv.count) for _ in range(needed)]
        return self.spare[i][round_ % 2]

    def partial(self, i: int, round_: int) -> Region:
        """Partial result of member i before a round: from the last round in which it received."""
        last = min(round_, i.bit_length()) - 1
        return self.arrived(i, last) if last >= 0 else self.own(i)

    def stages(self) -> Stages:
        ranks, wants, n = self.ranks, self.piece.wants, len(self.ranks)
        out: list[list[Step]] = []
        for round_ in range((n - 1).bit_length()):
            distance = 1 << round_
            sends: list[Step] = []
            combines = LocalSteps()
            for i in self._near(distance):
                low, high = ranks[i - distance], ranks[i]
                to = self.arrived(i, round_)
                sends += message(low, high, self.partial(i - distance, round_), to)
                if wants((high,)):
                    combines.append(Step("combine", (high,), (self.partial(i, round_),), (to,)))
            out += [sends, combines]
        last = [(i, self.partial(i, n.bit_length())) for i in range(n) if wants((ranks[i],))]
        out.append(LocalSteps(s for i, at in last if at != self.recv for s in copy(ranks[i], at, self.recv)))
        return stages(*out)

    def _near(self, distance: int) -> Iterable[int]:
        """Members that receive in the round of a distance, and concern this plan's rank."""
        n, only = len(self.ranks), self.piece.only
        if only is None:
            return range(distance, n)
        if only not in self.ranks:
            return ()
        own = self.ranks.index(only)
        return [i for i in (own, own + distance) if distance <= i < n]


@algorithm("scan", "flat", role=Role.ONE_STEP)
def scan(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Recursive doubling over all ranks: 2 log2(P) + 1 stages, at most log2(P) vectors sent by each rank."""
    at = piece.vector(call)
    send = region("send", at)
    return _Doubling(range(call.ranks), lambda i: send, region("recv", at), piece).stages()


@algorithm("exscan", "flat", role=Role.ONE_STEP)
def exscan(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Every rank's vector moves to the next rank, then a scan without rank 0: one message more than scan."""
    at = piece.vector(call)
    if call.ranks == 1:
        return ()
    ranks = range(1, call.ranks)
    # not into recv: in place it still has to be sent
    own: dict[int, Region] = {}

    def held(i: int) -> Region:
        if i not in own:
            own[i] = piece.tmp(ranks[i], at.count)
        return own[i]

    shift: list[Step] = []
    for i, rank in enumerate(ranks):
        if piece.wants((rank - 1, rank)):
            shift += message(rank - 1, rank, region("send", at), held(i))
    return stages(shift) + _Doubling(ranks, held, region("recv", at), piece).stages()
