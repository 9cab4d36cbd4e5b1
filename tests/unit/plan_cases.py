"""Random topologies and calls, mutations of plans, and a numeric simulator that is independent of the validator."""

import random
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ucc_hetero.planner.collectives import ROWS, Call, Shape, lengths
from ucc_hetero.planner.plan import Fragment, Region, regions
from ucc_hetero.planner.topology import Topology

Vector = NDArray[np.int64]


@st.composite
def topologies(draw, most_ranks=9):
    """Any placement: islands of any size in any rank order, several hosts, sometimes unequal links."""
    n = draw(st.integers(1, most_ranks))
    vendors = draw(st.lists(st.sampled_from(("nvidia", "amd", "host")), min_size=n, max_size=n))
    hosts = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    weights = draw(st.one_of(st.just([]), st.lists(st.integers(1, 9), min_size=n, max_size=n)))
    level = st.lists(st.integers(0, 3), min_size=n, max_size=n)
    levels = draw(st.one_of(st.just([]), st.just([hosts]), st.lists(level, min_size=1, max_size=3)))
    # A vendor's fabric joins its ranks on all hosts, on no two hosts, or on some hosts.
    joined = [host if vendor == "host" else 8 + host // 2 for vendor, host in zip(vendors, hosts, strict=True)]
    fabrics = draw(st.sampled_from(([], hosts, joined)))
    return Topology.group(vendors, hosts, weights, levels, fabrics)


@st.composite
def deep_topologies(draw):
    """Trees of three to five levels: sites of racks of hosts of devices, of any size, ranks in order or shuffled."""
    shape = [()]
    for _ in range(draw(st.integers(2, 4))):
        shape = [(*path, i) for path in shape for i in range(draw(st.integers(1, 3)))]
        shape = shape[:20]
    shape = draw(st.permutations(shape)) if draw(st.booleans()) else shape
    depth = len(shape[0])
    numbers = [{path: i for i, path in enumerate(sorted({p[: k + 1] for p in shape}))} for k in range(depth)]
    levels = [[numbers[k][path[: k + 1]] for path in shape] for k in range(depth - 1)]
    vendor = draw(st.sampled_from(("host", "nvidia", "vendors")))
    vendors = [("nvidia", "amd")[path[0] % 2] if vendor == "vendors" else vendor for path in shape]
    return Topology.group(vendors, levels[draw(st.integers(0, depth - 2))], (), levels)


@st.composite
def many_islands(draw):
    """Up to 32 islands of up to 3 ranks: host ranks of one node each, shuffled."""
    islands = draw(st.integers(2, 32))
    hosts = [host for host in range(islands) for _ in range(draw(st.integers(1, 3)))]
    hosts = draw(st.permutations(hosts))
    return Topology.group(["host"] * len(hosts), hosts)


@st.composite
def equal_islands(draw):
    """Islands of equal size, in order, interleaved, or shuffled: a separate code path plans for them."""
    islands, size = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    hosts = [host for host in range(islands) for _ in range(size)]
    hosts = draw(st.sampled_from((hosts, [i % islands for i in range(len(hosts))], draw(st.permutations(hosts)))))
    return Topology.group(["host"] * len(hosts), hosts)


@st.composite
def calls(draw, topology, collectives=tuple(ROWS), most=40):
    """A call of any collective on a topology, often with few or no elements."""
    row = ROWS[draw(st.sampled_from(collectives))]
    n = topology.size
    size = {"none": 0, "vector": 1, "equal": 1, "ranks": n, "matrix": n * n}[row.layout]
    rng = random.Random(draw(st.integers(0, 1 << 32)))  # lists of integers are slow to draw
    most = draw(st.sampled_from((1, 5, most)))
    counts = tuple(rng.randrange(most + 1) for _ in range(size))
    return Call(row.name, n, counts, draw(st.integers(0, n - 1)) if row.rooted else -1)


def steps(plan):
    for f, fragment in enumerate(plan.fragments):
        for s, stage in enumerate(fragment.stages):
            for i, step in enumerate(stage):
                yield f, s, i, step


def edit(plan, f, s, change):
    """The plan with one stage changed."""
    stages = list(plan.fragments[f].stages)
    stages[s] = change(stages[s])
    fragments = list(plan.fragments)
    fragments[f] = Fragment(tuple(stages))
    return replace(plan, fragments=tuple(fragments))


def drop(plan, f, s, i):
    return edit(plan, f, s, lambda stage: stage[:i] + stage[i + 1 :])


def substitute(plan, f, s, i, step):
    return edit(plan, f, s, lambda stage: (*stage[:i], step, *stage[i + 1 :]))


def _alter(operand, rng):
    """One region of an operand moved or resized by a little."""
    parts = list(regions(operand))
    at = rng.randrange(len(parts))
    old = parts[at]
    how = rng.randrange(3)
    if how == 0:
        parts[at] = replace(old, offset=max(0, old.offset + rng.choice((-2, -1, 1, 2))))
    elif how == 1:
        parts[at] = replace(old, count=max(0, old.count + rng.choice((-1, 1))))
    else:
        parts[at] = replace(old, buffer=rng.choice(("send", "recv", "tmp")))
    return parts[0] if isinstance(operand, Region) else tuple(parts)


def mutate(plan, rng):
    """Return a plan with one small mistake, which may by chance change nothing."""
    f, s, i, step = rng.choice(list(steps(plan)))
    n = len(step.ranks)
    how = rng.choice(("drop", "again", "merge", "swap", "alter", "alter", "alter", "root", "member"))
    if how == "drop":
        return drop(plan, f, s, i)
    if how == "again":
        fragment = plan.fragments[f]
        stages = (*fragment.stages[: s + 1], (step,), *fragment.stages[s + 1 :])
        return replace(plan, fragments=(*plan.fragments[:f], Fragment(stages), *plan.fragments[f + 1 :]))
    if how == "merge" and s:  # a step no longer waits for the previous stage
        return edit(drop(plan, f, s, i), f, s - 1, lambda stage: (*stage, step))
    if how == "root" and step.root >= 0:
        return substitute(plan, f, s, i, replace(step, root=(step.root + 1) % n))
    if how == "member":
        order = rng.sample(range(n), n)
        return substitute(plan, f, s, i, replace(step, src=tuple(step.src[j] for j in order)))
    side = rng.choice(("src", "dst"))
    operands = list(getattr(step, side))
    present = [j for j, operand in enumerate(operands) if regions(operand)]
    if not present:
        return drop(plan, f, s, i)
    a, b = rng.choice(present), rng.choice(present)
    if how == "swap":
        operands[a], operands[b] = operands[b], operands[a]
    else:
        operands[a] = _alter(operands[a], rng)
    return substitute(plan, f, s, i, replace(step, **{side: tuple(operands)}))


class Simulation:
    """Every rank's memory as numbers; steps run in a random order among those that the plan allows."""

    def __init__(self, plan, call, in_place, seed):
        self.plan, self.call = plan, call
        self.rng = np.random.default_rng(seed)
        self.data = [self._garbage(send) for send, _ in lengths(call)]
        self.memory = {}
        shape, row = Shape(call), ROWS[call.collective]
        for rank, (send, recv, tmp) in enumerate(plan.sizes):
            alias = row.in_place(shape, rank) if in_place else None
            buffers = {"send": self._garbage(send), "recv": self._garbage(recv), "tmp": self._garbage(tmp)}
            if alias is not None:
                size = len(buffers[alias.inner])
                buffers[alias.inner] = buffers[alias.outer][alias.offset : alias.offset + size]
            buffers["send"][:] = self.data[rank]
            for name, buffer in buffers.items():
                self.memory[rank, name] = buffer

    def _garbage(self, count):
        return self.rng.integers(-(1 << 40), 1 << 40, count)

    def at(self, rank, region):
        return self.memory[rank, region.buffer][region.offset : region.offset + region.count]

    def run(self):
        queues = [list(fragment.stages) for fragment in self.plan.fragments]
        waiting = [(f, s, step) for f, stages in enumerate(queues) for s, stage in enumerate(stages) for step in stage]
        while waiting:
            left = {}  # (fragment, rank) -> earliest stage not yet done
            for f, s, step in waiting:
                for rank in step.ranks:
                    left[f, rank] = min(s, left.get((f, rank), s))
            ready = [w for w in waiting if all(left[w[0], rank] == w[1] for rank in w[2].ranks)]
            chosen = ready[self.rng.integers(len(ready))]
            waiting.remove(chosen)
            self._step(chosen[2])

    def _step(self, step):
        n = len(step.ranks)
        src = [[self.at(rank, r).copy() for r in regions(o)] for rank, o in zip(step.ranks, step.src, strict=True)]
        dst = [[self.at(rank, r) for r in regions(o)] for rank, o in zip(step.ranks, step.dst, strict=True)]
        if step.kind in ("bcast", "copy", "message"):
            value = src[max(step.root, 0)][0]
            for member in dst:
                for to in member:
                    to[:] = value
        elif step.kind in ("allreduce", "reduce"):
            for member in dst:
                for to in member:
                    to[:] = self.add([own[0] for own in src])
        elif step.kind == "reduce_scatter":
            for i in range(n):
                own = regions(step.dst[i])[0]
                if own.count and own == regions(step.src[i])[i]:
                    for r in regions(step.src[i]):
                        self.at(step.ranks[i], r)[:] = self._garbage(r.count)
            for i in range(n):
                dst[i][0][:] = self.add([other[i] for other in src])
        elif step.kind in ("allgather", "gather"):
            for member in dst:
                for to, own in zip(member, src, strict=bool(member)):
                    to[:] = own[0]
        elif step.kind == "scatter":
            for i in range(n):
                dst[i][0][:] = src[step.root][i]
        elif step.kind == "alltoall":
            for i in range(n):
                for j in range(n):
                    dst[j][i][:] = src[i][j]
        elif step.kind == "combine":
            dst[0][0][:] = self.add([dst[0][0], src[0][0]])

    def add(self, values):
        return np.add.reduce(values)

    def right(self):
        wanted = reference(self.call, self.data)
        return all(w is None or np.array_equal(self.memory[rank, "recv"][: len(w)], w) for rank, w in enumerate(wanted))


def reference(call, data):
    """Expected contents of each rank's dense receive buffer, or None; straight from MPI's definitions."""
    p, c, name = call.ranks, call.counts, call.collective
    if name == "barrier":
        return [None] * p
    if name == "bcast":
        return [None if rank == call.root else data[call.root] for rank in range(p)]
    if name in ("allreduce", "reduce"):
        return [sum(data) if name == "allreduce" or rank == call.root else None for rank in range(p)]
    if ROWS[name].prefix:
        ends = [rank + (name == "scan") for rank in range(p)]
        return [sum(data[1:end], data[0]) if end else None for end in ends]
    if name == "alltoallv":
        cut = [np.split(data[s], np.cumsum(c[s * p : s * p + p])[:-1]) for s in range(p)]
        return [np.concatenate([cut[s][r] for s in range(p)]) for r in range(p)]
    per_rank = c if len(c) == p and ROWS[name].layout == "ranks" else c * p
    ends = np.cumsum(per_rank)[:-1]
    if name.startswith("reduce_scatter"):
        return list(np.split(sum(data), ends))
    if name.startswith("scatter"):
        return list(np.split(data[call.root], ends))
    if name == "alltoall":
        return [np.concatenate([np.split(data[s], ends)[r] for s in range(p)]) for r in range(p)]
    whole = np.concatenate(data)
    return [whole if name.startswith("allgather") or rank == call.root else None for rank in range(p)]
