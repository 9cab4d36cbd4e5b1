"""One collective call of a test: buffers with guard bands, arguments, and the expected result by numpy."""

import os
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from collective_reference import NUMPY_TYPES, differing, operands, reduced
from mpi4py import MPI

from ucc_hetero.planner.collectives import ROWS

GUARD = 64
#: Cases whose seeds differ by a multiple of this have the same gaps between blocks.
GAPS = 1000
#: (elements, dtype) -> device memory; None if ranks have host memory only.
device_memory = None
if "FAKEGPU_LAYOUT" in os.environ:
    from arrays import Array as device_memory
VECTOR = tuple(name for name, row in ROWS.items() if row.layout == "vector")
#: Calls in place whose send buffer may be the receive buffer itself, and not MPI.IN_PLACE.
ALIASED = ("allreduce", "reduce", "scan", "exscan", "alltoall")
UNEVEN = ("gatherv", "scatterv", "allgatherv", "reduce_scatter", "alltoallv")
WITH_DISPLACEMENTS = ("gatherv", "scatterv", "allgatherv", "alltoallv")
SENDS_BLOCKS = ("scatter", "scatterv", "alltoall", "alltoallv", "reduce_scatter_block")
RECEIVES_BLOCKS = ("gather", "gatherv", "allgather", "allgatherv", "alltoall", "alltoallv")


@dataclass(frozen=True)
class Case:
    """One call as all ranks know it. ``counts``: the table of ``collectives.Call``."""

    name: str
    dtype: str
    op: str | None
    form: str
    in_place: bool
    root: int
    counts: tuple[int, ...]
    gaps: bool
    spec: str
    seed: int


class Guarded:
    """Poisoned elements between guard bands of random bytes, in host or device memory (fakegpu/, gpu/)."""

    def __init__(self, rng, dtype, count):
        nbytes, self.dtype, self.rng = 2 * GUARD + count * dtype.itemsize, dtype, rng
        self.memory = device_memory(nbytes, np.uint8) if device_memory else np.empty(nbytes, np.uint8)
        self.poison()
        self.before = self.whole.copy()

    @property
    def view(self):
        return self.whole[GUARD : len(self.whole) - GUARD].view(self.dtype)

    @property
    def argument(self):
        if not hasattr(self.memory, "block"):
            return self.view
        from arrays import ndarray

        return ndarray(self.memory, GUARD, self.view.size, self.dtype)

    def poison(self):
        """Fill everything with random bytes; ``remember`` stores the contents later."""
        self.whole = getattr(self.memory, "peek", self.memory)
        self.whole[:] = np.frombuffer(self.rng.bytes(self.whole.size), np.uint8)

    def remember(self):
        self.before = self.whole.copy()

    def get(self):
        getattr(self.memory, "pull", bool)()

    def late(self, stream):
        """Let the contents arrive when the stream gets there; until then the memory has garbage."""
        self.source = device_memory(self.whole.size, np.uint8).set(self.whole)
        self.whole[:] = 0x55
        getattr(self.memory, "delay", bool)(stream)
        self.memory.runtime.copy(self.memory.block.handle, self.source.block.handle, self.whole.size, stream.handle)

    def seen(self, stream):
        """Read the contents in the stream from now on."""
        self.whole = self.memory.copied(stream)

    def expected(self):
        """A copy of the contents before the call, into which the caller writes the expected values."""
        return self.before[GUARD : len(self.before) - GUARD].copy().view(self.view.dtype)

    def bands_intact(self):
        one, two = (w[:GUARD].tobytes() + w[len(w) - GUARD :].tobytes() for w in (self.whole, self.before))
        return one == two


class Call:
    """This rank's part of a case: buffers, arguments, and the check of the result."""

    def __init__(self, case, comm):
        self.case, self.comm, self.rank, self.size = case, comm, comm.rank, comm.size
        self.dtype = NUMPY_TYPES[case.dtype]
        self.rng = np.random.default_rng([case.seed, self.rank])
        self.turn = 0
        self.at_root = case.root in (-1, self.rank)
        sends, receives = self._lengths(self.rank)
        #: Offsets of the blocks in the buffers; equal for send and receive in place.
        self.send_at, self.recv_at = self._places(sends), self._places(receives)
        self.send = self.recv = None
        p = self.case.in_place
        if case.name == "bcast":
            self.recv = self._buffer(self.recv_at)
        elif case.name in ("scatter", "scatterv"):
            self.send = self._buffer(self.send_at) if self.at_root else None
            self.recv = None if p and self.at_root else self._buffer(self.recv_at)
        elif case.name in ("reduce", "gather", "gatherv"):
            self.send = None if p and self.at_root else self._buffer(self.send_at)
            self.recv = self._buffer(self.recv_at) if self.at_root else None
        elif p and case.name in ("reduce_scatter", "reduce_scatter_block"):
            self.recv = self._buffer(self.send_at)
        else:
            self.send = None if p else self._buffer(self.send_at)
            self.recv = self._buffer(self.recv_at)

    def _lengths(self, me):
        """Elements of each block that a rank sends and receives; one block for a whole vector."""
        case, p = self.case, self.size
        counts = case.counts
        if case.name in VECTOR:
            return [counts[0]], [counts[0]]
        if case.name == "alltoallv":
            return list(counts[me * p : (me + 1) * p]), list(counts[me::p])
        each = list(counts) if case.name in UNEVEN else [counts[0]] * p
        if case.name in ("scatter", "scatterv", "reduce_scatter", "reduce_scatter_block"):
            return each, [each[me]]
        if case.name == "alltoall":
            return each, each
        return [each[me]], each

    def _places(self, lengths):
        """Offsets of blocks: contiguous, or with gaps and out of order."""
        if not self.case.gaps or len(lengths) == 1:
            return list(zip(accumulate(lengths, initial=0), lengths, strict=False))
        rng = np.random.default_rng([self.case.seed % GAPS, 77])  # in place all ranks need the same displacements
        at, places = 0, {}
        for block in rng.permutation(len(lengths)):
            at += int(rng.integers(0, 9))
            places[int(block)] = at, lengths[block]
            at += lengths[block]
        return [places[i] for i in range(len(lengths))]

    def _buffer(self, places):
        tail = 5 if self.case.gaps and len(places) > 1 else 0
        return Guarded(self.rng, self.dtype, max((at + n for at, n in places), default=0) + tail)

    def refill(self):
        case = self.case
        for buffer in self.buffers():
            buffer.poison()
        self.turn += 1
        mine = self._input(self.rank)
        target, places = self.send, self.send_at
        if case.name == "bcast":
            target = self.recv if self.at_root else None
        elif target is None and self.recv is not None:
            target = self.recv
            if case.name in ("gather", "gatherv", "allgather", "allgatherv"):
                places = [self.recv_at[self.rank]]
            elif case.name == "alltoallv":
                places = self.recv_at
        if case.name in ("scatter", "scatterv") and not self.at_root:
            target = None
        if target is not None:
            scatter_into(target.view, places, mine)
        for buffer in self.buffers():
            buffer.remember()

    def _input(self, rank):
        rng = np.random.default_rng([self.case.seed, rank, self.turn])
        return operands(rng, self.case.dtype, sum(self._lengths(rank)[0]), self.case.op)

    def buffers(self):
        return [buffer for buffer in (self.send, self.recv) if buffer is not None]

    def args(self):
        """The arguments in mpi4py's order; roots may be any index type."""
        case = self.case
        root = {"count": np.int16, "both": np.array}.get(case.spec, int)(case.root)
        in_place = MPI.IN_PLACE
        send = in_place if self.send is None and case.in_place and self.at_root else None
        if self.send is not None:
            send = self._spec(self.send, self.send_at, many=case.name in SENDS_BLOCKS)
        recv = in_place if self.recv is None and case.in_place and self.at_root else None
        if self.recv is not None:
            recv = self._spec(self.recv, self.recv_at, many=case.name in RECEIVES_BLOCKS)
        if case.name == "bcast":
            return [recv, root]
        if send is in_place and case.name in ALIASED and case.seed % 2:
            send = recv
        out = [send, recv]
        if case.name == "reduce_scatter" and (case.in_place or len(set(case.counts)) > 1):
            out.append(list(case.counts))
        elif case.name == "reduce_scatter":
            out.append(None)  # equal blocks need no list
        if case.op:
            names = [case.op, case.op.lower(), case.op.capitalize(), getattr(MPI, case.op, case.op)]
            out.append(names[case.seed % len(names)])
        return [*out, root] if case.root >= 0 else out

    def _spec(self, buffer, places, *, many):
        """A random one of mpi4py's forms for this buffer."""
        case, view = self.case, buffer.argument
        dtype = case.dtype
        if case.name in WITH_DISPLACEMENTS and len(places) == self.size and many:
            counts, displs = [n for _, n in places], [at for at, _ in places]
            if case.gaps or case.spec == "both":
                return [view, (counts, displs), dtype] if case.spec != "count" else [view, (counts, displs)]
            return [view, counts] if case.spec == "count" else [view, counts, dtype]
        size = buffer.view.size
        count = size // self.size if many or (case.in_place and case.name == "reduce_scatter_block") else size
        forms = {"plain": view, "count": [view, count], "dtype": [view, dtype], "both": [view, count, dtype]}
        if case.spec == "at" and not (many or device_memory):  # in memory that begins before the data
            forms["at"] = [buffer.whole.view(self.dtype), (count, GUARD // self.dtype.itemsize), dtype]
        return forms.get(case.spec, view)

    def verify(self):
        """Describe errors in the buffers; empty if there are none. Every rank knows the inputs of the others."""
        for buffer in self.buffers():
            buffer.get()
        for name, buffer in (("sendbuf", self.send), ("recvbuf", self.recv)):
            if buffer is not None and not buffer.bands_intact():
                return f"{name}: wrote outside the buffer"
        if self.send is not None and not np.array_equal(self.send.whole, self.send.before):
            return "sendbuf was changed"
        if self.recv is None:
            return ""
        want, bound = self._due([self._input(rank) for rank in range(self.size)])
        return self._compare(want, bound)

    def _compare(self, want, bound):
        got, before = self.recv.view, self.recv.expected()
        if want is None:
            return "" if got.tobytes() == before.tobytes() else "recvbuf was changed"
        case = self.case
        sharing = case.in_place and case.name in ("reduce_scatter", "reduce_scatter_block")
        places = [(0, want.size)] if sharing else self.recv_at
        values = np.concatenate([got[at : at + n] for at, n in places]) if places else got
        bad = differing(values, want, bound)
        if bad.size:
            i = int(bad[0])
            return f"{bad.size} of {want.size} wrong, first at {i}: got {values[i]!r}, due {want[i]!r}"
        rest = np.ones(got.size, bool)
        for at, n in places:
            rest[at : at + n] = False
        # On GPUs the rest of an in-place reduce_scatter's buffer is scratch.
        if not (sharing and "CASES_HIP" in os.environ) and got[rest].tobytes() != before[rest].tobytes():
            return "recvbuf was changed between its blocks"
        return ""

    def _due(self, inputs):
        """(expected dense contents of recvbuf, tolerance)."""
        case, me, p = self.case, self.rank, self.size
        name = case.name
        if name == "bcast":
            return inputs[case.root], None
        if name in ("scatter", "scatterv"):
            return blocks(inputs[case.root], list(case.counts) if name in UNEVEN else [case.counts[0]] * p)[me], None
        if name in ("gather", "gatherv", "allgather", "allgatherv"):
            return np.concatenate(inputs), None
        if name == "alltoall":
            return np.concatenate([blocks(e, [case.counts[0]] * p)[me] for e in inputs]), None
        if name == "alltoallv":
            rows = [list(case.counts[r * p : (r + 1) * p]) for r in range(p)]
            return np.concatenate([blocks(e, row)[me] for e, row in zip(inputs, rows, strict=True)]), None
        members = {"scan": inputs[: me + 1], "exscan": inputs[:me]}.get(name, inputs)
        if not members:
            return None, None
        each = list(case.counts) if name in UNEVEN else [case.counts[0]] * p
        if name in ("reduce_scatter", "reduce_scatter_block"):
            members = [blocks(e, each)[me] for e in members]
        return reduced(case.op, case.dtype, members, len(members))


def scatter_into(view, places, dense):
    start = 0
    for at, n in places:
        view[at : at + n] = dense[start : start + n]
        start += n


def blocks(dense, lengths):
    ends = list(accumulate(lengths))
    return [dense[end - n : end] for end, n in zip(ends, lengths, strict=True)]
