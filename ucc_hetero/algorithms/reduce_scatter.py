"""reduce_scatter and reduce_scatter_block: rank r gets block r of the reduction of all vectors."""

from __future__ import annotations

from collections.abc import Sequence

from ucc_hetero.algorithms.parts import (
    Owned,
    Place,
    Window,
    alike,
    each,
    island_blocks,
    island_segments,
    merge,
    native_reduce_scatter,
    one_each,
    only,
    rails,
    region,
    rounds,
    shifted,
    stages,
)
from ucc_hetero.algorithms.registry import Piece, Stages, algorithm
from ucc_hetero.collectives import Block, Call, Shape
from ucc_hetero.plan import Blocks, Operand, Region, Step
from ucc_hetero.topology import Island, Topology

__all__: list[str] = []

_BOTH = ("reduce_scatter_block", "reduce_scatter")


@algorithm(_BOTH, "tree")
def tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce to a leader in each island, reduce-scatter between the leaders, scatter in each island.

    Stages: 3. Each leader sends over the bridge what belongs to other islands, once.
    """
    shape = Shape(call)
    blocks = [island_blocks(island, shape, piece) for island in topology.islands]
    runs = merge(sorted((b for of in blocks for b in of), key=lambda block: block.offset))
    if not runs:
        return ()
    held: list[Place] = []
    inside: list[Step] = []
    for island in topology.islands:
        if island.size == 1:
            held.append(lambda rank, block: region("send", block))
            continue
        window = Window(piece, island.ranks[0], runs)
        held.append(lambda rank, block, window=window: window(block))  # type: ignore[misc]
        for run in runs:
            src = (region("send", run),) * island.size
            inside.append(Step("reduce", island.ranks, "native", src, only(0, island.size, window(run)), 0))
    across = _between(topology, [merge(of) for of in blocks], held, shape)
    own = _own(shape)
    last = [_scatter(i, of, held[i.index], own) for i, of in zip(topology.islands, blocks, strict=True) if i.size > 1]
    return stages(inside, across, last)


def _between(topology: Topology, runs: list[list[Block]], held: list[Place], shape: Shape) -> list[Step]:
    """Leaders reduce each other's islands' runs, one run of each island at a time."""
    if topology.flat:
        return []
    leaders = tuple(island.ranks[0] for island in topology.islands)
    own = _own(shape)
    out = []
    for blocks in rounds(runs):
        src = tuple(tuple(place(rank, block) for block in blocks) for rank, place in zip(leaders, held, strict=True))
        dst = tuple(
            own(rank, blocks[i]) if island.size == 1 else src[i][i]
            for i, (rank, island) in enumerate(zip(leaders, topology.islands, strict=True))
        )
        out.append(Step("reduce_scatter", leaders, "bridge", src, dst))
    return out


def _scatter(island: Island, blocks: Sequence[Block], held: Place, own: Place) -> Step:
    src = tuple(held(island.ranks[0], block) for block in blocks)
    dst = tuple(own(rank, block) for rank, block in zip(island.ranks, blocks, strict=True))
    return Step("scatter", island.ranks, "native", only(0, island.size, src), dst, 0)


def _own(shape: Shape) -> Place:
    """Where each rank wants its own block."""
    return shifted("recv", lambda rank: shape.own(rank).offset)


@algorithm(_BOTH, "split_rail")
def split_rail(topology: Topology, call: Call, piece: Piece) -> Stages:
    """The blocks of each island are reduce-scattered in every island, then reduced over rails to their ranks.

    Stages: 2. Every island sends over the bridge what belongs to other islands, once, spread over all its ranks' links;
    between islands of equal size each rail is one reduce-scatter.
    """
    shape = Shape(call)
    shared = None if topology.flat else alike(topology, shape, piece)
    if shared is not None:
        return _alike(topology, shared, piece.cut(Block(0, call.counts[0])), piece)
    by_island = island_segments(topology, shape, piece)
    places = [_places(topology, piece, index, owned, shape) for index, owned in enumerate(by_island)]
    inside = [
        s
        for owned, place in zip(by_island, places, strict=True)
        for island in topology.islands
        for s in native_reduce_scatter(island, owned, place)
    ]
    across: list[Step] = []
    for owners, blocks in rails(by_island).items() if not topology.flat else ():
        src = [[_source(topology, places[i], rank, block) for rank in owners] for i, block in blocks]
        dst = [places[i](owners[i], block) for i, block in blocks]
        if one_each(owners, blocks):
            across.append(Step("reduce_scatter", owners, "bridge", tuple(zip(*src, strict=True)), tuple(dst)))
            continue
        for (i, _), contributions, to in zip(blocks, src, dst, strict=True):
            across.append(Step("reduce", owners, "bridge", tuple(contributions), only(i, len(owners), to), i))
    return stages(inside, across)


def _alike(topology: Topology, blocks: list[list[Block]], part: Block, piece: Piece) -> Stages:
    """Equal islands and blocks. Partial results lie side by side in scratch, in the order of the islands they are for,
    so that the rail's reduce-scatter takes them as they are.
    """
    islands, count = topology.islands, part.count
    m, s = len(islands), islands[0].size
    if not count:
        return ()
    at = piece.tmp_everywhere(m * count).offset if s > 1 else 0
    inside: list[Step] = []
    for home, of in enumerate(blocks) if s > 1 else ():
        src = (each("send", of),) * s
        dst = (Region("tmp", at + home * count, count),) * s
        inside += [Step("reduce_scatter", island.ranks, "native", src, dst) for island in islands]
    own = (region("recv", part),) * m
    across: list[Step] = []
    for p in range(s):
        partial: Operand = Blocks("tmp", at, count, count, m) if s > 1 else each("send", [of[p] for of in blocks])
        across.append(Step("reduce_scatter", tuple([i.ranks[p] for i in islands]), "bridge", (partial,) * m, own))
    return stages(inside, across)


def _places(topology: Topology, piece: Piece, home: int, owned: Owned, shape: Shape) -> Place:
    """Where the partial results of one island's blocks are kept: in ``recv`` of its ranks, in scratch elsewhere."""
    own = _own(shape)
    windows: dict[int, Window] = {}
    for island in topology.islands:
        if island.index != home and island.size > 1:
            for rank, blocks in zip(island.ranks, owned.shares(island), strict=True):
                windows[rank] = Window(piece, rank, blocks)

    def place(rank: int, block: Block) -> Region:
        return windows[rank](block) if rank in windows else own(rank, block)

    return place


def _source(topology: Topology, place: Place, rank: int, block: Block) -> Region:
    """A rank's contribution: what its island reduced, or in a one-rank island its own vector."""
    alone = topology.islands[topology.island_of[rank]].size == 1
    return region("send", block) if alone else place(rank, block)
