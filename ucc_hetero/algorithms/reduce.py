"""reduce: the root gets the reduction of all vectors."""

from __future__ import annotations

from ucc_hetero.algorithms.bcast import leaders
from ucc_hetero.algorithms.parts import (
    Owned,
    Place,
    Window,
    each,
    native_reduce_scatter,
    only,
    region,
    segments,
    stages,
)
from ucc_hetero.algorithms.registry import Piece, Stages, algorithm
from ucc_hetero.collectives import Block, Call
from ucc_hetero.plan import Region, Step
from ucc_hetero.topology import Topology

__all__: list[str] = []


@algorithm("reduce", "tree")
def tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce to a leader in each island, the root in its own, then to the root over the bridge.

    Stages: 2. Every island but the root's sends the vector over the bridge once.
    """
    at = piece.vector(call)
    if not at.count:
        return ()
    team = leaders(topology, call.root)
    own, inside = [], []
    for island, leader in zip(topology.islands, team, strict=True):
        if island.size == 1:
            own.append(region("send", at))
            continue
        to = region("recv", at) if leader == call.root else piece.tmp(leader, at.count)
        i = island.ranks.index(leader)
        inside.append(
            Step("reduce", island.ranks, "native", (region("send", at),) * island.size, only(i, island.size, to), i)
        )
        own.append(to)
    if len(team) == 1:
        return stages(inside)
    root = team.index(call.root)
    across = Step("reduce", team, "bridge", tuple(own), only(root, len(team), region("recv", at)), root)
    return stages(inside, [across])


@algorithm("reduce", "split_rail")
def split_rail(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce-scatter in each island, reduce over every rail to the root's island, gather to the root inside it.

    Stages: 3. Every other island sends the vector over the bridge once, spread over all its ranks' links.
    """
    parts = segments(topology, [piece.vector(call)])
    if not parts:
        return ()
    home = topology.islands[topology.island_of[call.root]]
    owned = Owned(parts)
    windows: dict[int, Window] = {}
    for island in topology.islands:
        if island.size > 1:
            for rank, blocks in zip(island.ranks, owned.shares(island), strict=True):
                if rank != call.root:
                    windows[rank] = Window(piece, rank, blocks)
    place = _place(call, windows)
    inside = [s for island in topology.islands for s in native_reduce_scatter(island, owned, place)]
    across = []
    for part in parts if not topology.flat else []:
        block = Block(part.offset, part.count)
        src = tuple(place(rank, block) for rank in part.owners)
        if home.size == 1:  # nobody reduced into recv yet
            src = tuple(
                region("send", block) if rank == call.root else at for rank, at in zip(part.owners, src, strict=True)
            )
        to = place(part.owners[home.index], block)
        dst = only(home.index, len(src), to)
        across.append(Step("reduce", part.owners, "bridge", src, dst, home.index))
    last = []
    if home.size > 1:
        blocks = [share[0] if share else Block(0, 0) for share in owned.shares(home)]
        own = tuple(place(rank, block) for rank, block in zip(home.ranks, blocks, strict=True))
        i = home.ranks.index(call.root)
        last.append(Step("gather", home.ranks, "native", own, only(i, home.size, each("recv", blocks)), i))
    return stages(inside, across, last)


def _place(call: Call, windows: dict[int, Window]) -> Place:
    """Scratch where a rank has some, ``recv`` at the root, ``send`` in one-rank islands."""

    def place(rank: int, block: Block) -> Region:
        if rank in windows:
            return windows[rank](block)
        return region("recv" if rank == call.root else "send", block)

    return place
