"""allreduce: every rank gets the reduction of all vectors.

Each segment is reduced by one owner, and all ranks receive its result, so results are equal to the last bit on all
ranks. Between two groups an allreduce of two operands has that property (a + b is b + a); between more it is a
reduction to an owner and a distribution.
"""

from __future__ import annotations

from collections.abc import Callable

from ..collectives import Block, Call
from ..plan import Step
from ..topology import Group, Topology
from . import ranking
from .builders import dense, only, region, stages, without
from .registry import Piece, Stages, algorithm
from .tree import Hierarchy, Team, levels, up_and_down


@algorithm("allreduce", "tree", suits=ranking.tree)
def tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce to a leader in each group, level by level, exchange between the last leaders, broadcast all the way back.

    Stages: 3 with two islands, 4 with more (reduce to the first leader and broadcast from it), 2 for each further
    level. Each leader sends the vector over the bridge once (the first one, with m islands, as often as the broadcast's
    tree requires), every other rank sends it once inside its island.
    """
    at = piece.vector(call)
    send, recv = region("send", at), region("recv", at)

    def steps(team: Team) -> tuple[list[Step], list[Step]]:
        n, first = len(team), team.first
        src = tuple([send if team.sole(i) else recv for i in range(n)])
        if team.group is topology.tree and n == 2 and team.group.children:
            return [Step("allreduce", team.ranks, src, (recv,) * n)], []
        held = only(first, n, recv)
        up = Step("reduce", team.ranks, src, held, first)
        return [up], [Step("bcast", team.ranks, held, without(first, n, recv), first)]

    return up_and_down(topology, piece, steps)


#: (division of the vector, root of the tree) -> stages that turn the owned parts of the root's groups into sums over
#: all.
Across = Callable[[Hierarchy, Group], list[list[Step]]]


def over_rails(topology: Topology, call: Call, piece: Piece, across: Across) -> Stages:
    """Reduce-scatter inward through the levels, ``across`` between the last groups, allgather back outward."""
    at = piece.vector(call)
    hierarchy = Hierarchy(topology, at, piece, dense("recv"))
    *below, (root,) = levels(topology.tree)
    up = [[step for group in groups for step in hierarchy.scatter(group)] for groups in below]
    down = [[step for group in groups for step in hierarchy.gather(group)] for groups in below]
    if not root.children:
        return stages(hierarchy.scatter(root), hierarchy.gather(root))
    return stages(*up, *across(hierarchy, root), *reversed(down))


@algorithm("allreduce", "split_rail", suits=ranking.rails, most=ranking.overlapped)
def split_rail(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce-scatter in each island, reduce across on every rail, allgather in each island; and so on every level.

    Stages: 3 with two islands, else 4 (reduce-scatter and allgather on the rail), 2 for each further level. With n
    bytes and m islands, an island of s ranks sends 2(m-1)/m * n over the bridge, spread over all its ranks' links, and
    each of its ranks sends 2(s-1)/s * n inside.
    """

    def across(hierarchy: Hierarchy, root: Group) -> list[list[Step]]:
        if len(root.children) != 2:
            return [hierarchy.scatter(root), hierarchy.gather(root)]
        out = []
        for part in hierarchy.segments(root):
            at = Block(part.offset, part.count)
            src = tuple([region("send" if child.size == 1 else "recv", at) for child in root.children])
            out.append(Step("allreduce", part.owners, src, (region("recv", at),) * 2))
        return [out]

    return over_rails(topology, call, piece, across)
