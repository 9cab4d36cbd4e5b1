"""bcast: the root's ``send`` comes to everybody else's ``recv``."""

from __future__ import annotations

from ucc_hetero.algorithms.parts import Dense, Owned, native_allgather, only, region, segments, stages, without
from ucc_hetero.algorithms.registry import Piece, Stages, algorithm
from ucc_hetero.collectives import Call
from ucc_hetero.plan import Region, Step
from ucc_hetero.topology import Island, Topology

__all__ = ["fan_out"]


def _bcast(ranks: tuple[int, ...], link: str, root: int, src: Region, dst: Region) -> Step:
    """``root`` is a rank here."""
    i, n = ranks.index(root), len(ranks)
    return Step("bcast", ranks, link, only(i, n, src), without(i, n, dst), i)


def leaders(topology: Topology, root: int) -> tuple[int, ...]:
    """One rank of each island: the root in its own, the first elsewhere."""
    home = topology.island_of[root]
    return tuple(root if island.index == home else island.ranks[0] for island in topology.islands)


def fan_out(topology: Topology, root: int, src: Region, dst: Region) -> Stages:
    """The root's ``src`` to the leaders' ``dst`` and its own island, then from the leaders to their islands."""
    team = leaders(topology, root)
    first: list[Step] = []
    second: list[Step] = []
    if len(team) > 1:
        first.append(_bcast(team, "bridge", root, src, dst))
    for island, leader in zip(topology.islands, team, strict=True):
        if island.size > 1 and leader == root:
            first.append(_bcast(island.ranks, "native", root, src, dst))
        elif island.size > 1:
            second.append(_bcast(island.ranks, "native", leader, dst, dst))
    return stages(first, second)


@algorithm("bcast", "tree")
def tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """To a leader of each island, while the root's island has it from the root; then inside the other islands.

    Stages: 2. Every island but the root's receives the data over the bridge once.
    """
    at = piece.vector(call)
    return fan_out(topology, call.root, region("send", at), region("recv", at)) if at.count else ()


@algorithm("bcast", "split_rail")
def split_rail(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Inside the root's island, then each of its ranks sends its segments over its rail, then allgather elsewhere.

    Stages: 3. Every other island receives the data over the bridge once, each rank its part of it; each rank of an
    island of s ranks sends 1/s of the data to s-1 others.
    """
    at = piece.vector(call)
    parts = segments(topology, [at])
    if not parts:
        return ()
    home: Island = topology.islands[topology.island_of[call.root]]
    owned = Owned(parts)
    first, across, last = [], [], []
    if home.size > 1:
        first.append(_bcast(home.ranks, "native", call.root, region("send", at), region("recv", at)))
    for part in parts if not topology.flat else []:
        owner = part.owners[home.index]
        src = Region("send" if owner == call.root else "recv", part.offset, part.count)
        across.append(_bcast(part.owners, "bridge", owner, src, Region("recv", part.offset, part.count)))
    for island in topology.islands:
        if island is not home:
            last += native_allgather(island, owned, Dense("recv"))
    return stages(first, across, last)
