"""reduce: the root gets the reduction of all vectors."""

from __future__ import annotations

from functools import partial

from ..collectives import Block, Call
from ..plan import Region, Step
from ..topology import Group, Topology
from . import ranking
from .builders import Place, Windows, each, only, region, stages
from .partition import Segment
from .registry import Piece, Stages, algorithm
from .tree import Hierarchy, chain, levels, teams


@algorithm("reduce", "tree", suits=ranking.tree)
def tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce to a leader in each island, the root in its own, then to the root over the bridge.

    Stages: 2, and 1 for each further level. Every island but the root's sends the vector over the bridge once.
    """
    at = piece.vector(call)
    held: dict[int, Region] = {}

    def place(rank: int) -> Region:
        """Where a leader keeps the sum of its groups."""
        if rank not in held:
            held[rank] = region("recv", at) if rank == call.root else piece.tmp(rank, at.count)
        return held[rank]

    out: list[list[Step]] = []
    for of in teams(topology, piece, call.root):
        out.append([])
        for team in of:
            n, i = len(team), team.first
            src = tuple(region("send", at) if team.sole(k) else place(rank) for k, rank in enumerate(team.ranks))
            out[-1].append(Step("reduce", team.ranks, src, only(i, n, place(team.ranks[i])), i))
    return stages(*out)


@algorithm("reduce", "split_rail", suits=ranking.rails, most=ranking.overlapped)
def split_rail(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce-scatter in each island, reduce over every rail to the root's island, gather to the root inside it.

    Stages: 3, and 1 for each further level. Every other island sends the vector over the bridge once, spread over all
    its ranks' links.
    """
    at = piece.vector(call)
    leaves = {rank: group for group in topology.tree.walk() if not group.children for rank in group.ranks}
    held = Windows(piece, lambda rank: hierarchy.blocks(leaves[rank])[leaves[rank].ranks.index(rank)])
    home, *above = chain(topology.tree, call.root)

    def place(rank: int, block: Block) -> Region:
        """Where ranks keep what they have reduced: scratch for the parts that they own in their island, or ``recv`` of
        a root that is alone there. Of others it may be the source, too, and libucc's ranks must scatter alike."""
        return region("recv", block) if rank == call.root and home.size == 1 else held(rank, block)

    hierarchy = Hierarchy(topology, at, piece, place)
    on_the_way = {id(group): i for i, group in enumerate(above)}
    out: list[list[Step]] = []
    for groups in levels(topology.tree):
        out.append([])
        for group in groups:
            i = on_the_way.get(id(group))
            out[-1] += (
                hierarchy.scatter(group) if i is None else _to_home(hierarchy, place, group, [home, *above][i], home)
            )
    if home.size > 1 and piece.wants(home.ranks):
        blocks = [of[0] if of else Block(0, 0) for of in hierarchy.blocks(home)]
        own = tuple([place(rank, block) for rank, block in zip(home.ranks, blocks, strict=True)])
        i = home.ranks.index(call.root)
        dst = only(i, home.size, each("recv", blocks))
        out.append([Step("gather", home.ranks, own, dst, i)])
    return stages(*out)


def _to_home(hierarchy: Hierarchy, place: Place, group: Group, inner: Group, home: Group) -> list[Step]:
    """Over the rails of a group that contains the root: to the ranks of the root's island, which own the same parts as
    before."""
    where = next(i for i, child in enumerate(group.children) if child is inner)
    divided = [hierarchy.division(home if child is inner else child) for child in group.children]
    out = []
    for part in hierarchy.across(divided):
        block, n = Block(part.offset, part.count), len(part.owners)
        src = hierarchy.piece.members(part.owners, partial(_brought, place, group, part))
        to = only(where, n, place(part.owners[where], block))
        out.append(Step("reduce", part.owners, src, to, where))
    return out


def _brought(place: Place, group: Group, part: Segment, i: int) -> Region:
    """The part of a segment that the owner in the i-th child of a group has."""
    block = Block(part.offset, part.count)
    return region("send", block) if group.children[i].size == 1 else place(part.owners[i], block)
