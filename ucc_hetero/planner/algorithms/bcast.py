"""bcast: all other ranks receive the root's ``send`` in their ``recv``."""

from __future__ import annotations

from collections.abc import Callable

from ..collectives import Block, Call
from ..plan import Region, Step
from ..topology import Topology
from . import ranking
from .builders import dense, only, region, stages, without
from .registry import Piece, Stages, algorithm
from .tree import Hierarchy, chain, levels, teams


@algorithm("bcast", "tree", suits=ranking.tree)
def tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Send to a leader of each island, while the root's island receives from the root; then broadcast inside the other
    islands.

    Stages: 2, and 1 for each further level. Every island but the root's receives the data over the bridge once.
    """
    at = piece.vector(call)
    first: list[Step] = []
    later: list[list[Step]] = []
    for of in reversed(teams(topology, piece, call.root)):
        later.append([])
        for team in of:
            n, i = len(team), team.first
            mine = team.ranks[i] == call.root
            src, dst = only(i, n, region("send" if mine else "recv", at)), without(i, n, region("recv", at))
            (first if mine else later[-1]).append(Step("bcast", team.ranks, src, dst, i))
    return stages(first, *later)


@algorithm("bcast", "split_rail", suits=ranking.rails, most=ranking.overlapped)
def split_rail(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Scatter inside the root's island, then each of its ranks sends its segments over its rail, then allgather
    elsewhere.

    Stages: 3, and 2 for each further level. Every other island receives the data over the bridge once, each rank its
    part; each rank of an island of s ranks sends 1/s of the data to the s-1 other ranks.
    """

    def cross(owners: tuple[int, ...], where: int, held: Region, at: Region) -> list[list[Step]]:
        n = len(owners)
        src, dst = only(where, n, held), without(where, n, at)
        return [[Step("bcast", owners, src, dst, where)]]

    return along_rails(topology, call, piece, cross, lambda m: 1)


#: (owners, index of the one with the data, where it has it, where the others get it) -> stages of one rail.
Cross = Callable[[tuple[int, ...], int, Region, Region], list[list[Step]]]


def along_rails(topology: Topology, call: Call, piece: Piece, cross: Cross, hops: Callable[[int], int]) -> Stages:
    """Inside the root's island, by ``cross`` over the rails of every group that contains it, and inside all other
    islands.

    ``hops``: number of stages of ``cross`` between so many groups.
    """
    at = piece.vector(call)
    hierarchy = Hierarchy(topology, at, piece, dense("recv"))
    home, *above = chain(topology.tree, call.root)
    first: list[Step] = []
    if home.size > 1 and piece.wants(home.ranks):
        n, i = home.size, home.ranks.index(call.root)
        src, dst = only(i, n, region("send", at)), without(i, n, region("recv", at))
        first.append(Step("bcast", home.ranks, src, dst, i))
    out = [first]
    known = home
    for group in above:
        where = next(i for i, child in enumerate(group.children) if child is known)
        crossing: list[list[Step]] = [[] for _ in range(hops(len(group.children)))]
        for part in hierarchy.segments(group):
            block, owner = Block(part.offset, part.count), part.owners[where]
            held = region("send" if owner == call.root else "recv", block)
            for stage, steps in zip(crossing, cross(part.owners, where, held, region("recv", block)), strict=True):
                stage += steps
        out += crossing
        known = group
    on_the_way = {id(group) for group in (home, *above)}
    for groups in reversed(levels(topology.tree)):
        out.append([s for g in groups if id(g) not in on_the_way for s in hierarchy.gather(g)])
    return stages(*out)
