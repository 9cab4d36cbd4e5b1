"""One collective call of a test: buffers with guard bands, arguments, and the expected result by numpy."""

import os
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
from collective_reference import FOREIGN, NUMPY_TYPES, differing, operands, reduced
from mpi4py import MPI

from ucc_hetero.planner.collectives import ROWS

GUARD = 64
#: Cases whose seeds differ by a multiple of this have the same gaps between blocks, and arguments of the same form.
GAPS = 1000
#: (elements, dtype) -> device memory; None if ranks have host memory only.
device_memory = None
if "FAKEGPU_LAYOUT" in os.environ:
    from arrays import Array as device_memory
VECTOR = tuple(name for name, row in ROWS.items() if row.layout == "vector")
#: Calls in place whose send buffer may be the receive buffer itself, and not MPI.IN_PLACE.
ALIASED = ("allreduce", "reduce", "scan", "exscan", "alltoall")
#: Calls in place in which a rank may pass the address of its own block in the other buffer, and not MPI.IN_PLACE.
OWN_BLOCK = ("gather", "gatherv", "allgather", "allgatherv", "scatter", "scatterv")
UNEVEN = ("gatherv", "scatterv", "allgatherv", "reduce_scatter", "alltoallv")
WITH_DISPLACEMENTS = ("gatherv", "scatterv", "allgatherv", "alltoallv")
#: Distance of elements with gaps between them, in elements; (dtype, distance) -> the MPI datatype.
STEP = 3
_datatypes = {}
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


@dataclass
class Exported:
    """An array of which only DLPack is known."""

    array: np.ndarray

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def held(rng, array):
    """Contiguous elements in an object of some kind and shape."""
    n = array.size
    kinds = [array, array.reshape(1, n, 1), array.reshape(n, 1).T]
    kinds += [array.reshape(2, n // 2).T] if n % 2 == 0 else [array.reshape(())] if n == 1 else []
    if array.dtype.name not in FOREIGN:
        kinds += [memoryview(array), *[Exported(array)] * array.flags.writeable]
    return kinds[rng.integers(len(kinds))]


def has_datatype(dtype):
    """True if MPI has a datatype for it, and may be asked: ranks that met over torch's store have not begun MPI."""
    return dtype.name not in FOREIGN and MPI.Is_initialized()


class Guarded:
    """Poisoned elements between guard bands of random bytes, in host or device memory (fakegpu/, gpu/).

    On the host they begin at any byte and, with ``apart``, may have gaps between them if MPI has a datatype for that.
    """

    def __init__(self, rng, dtype, count, apart):
        self.dtype, self.rng, self.count, self.lead, self.step = dtype, rng, count, GUARD, 1
        nbytes = 2 * GUARD + 16 + count * dtype.itemsize * (STEP if device_memory is None else 1)
        self.memory = device_memory(nbytes, np.uint8) if device_memory else np.empty(nbytes, np.uint8)
        self.on_device = hasattr(self.memory, "block")
        if device_memory is None:
            self.lead += int(rng.integers(1, 16)) * (rng.random() < 0.3)
            self.step = STEP if apart and has_datatype(dtype) and rng.random() < 0.3 else 1
        self.poison()
        self.before = self.whole.copy()

    @property
    def view(self):
        return self.seen_in(self.whole)

    def seen_in(self, whole):
        """The elements in the memory, or in a copy of it."""
        length = self.count * self.step * self.dtype.itemsize
        return whole[self.lead : self.lead + length].view(self.dtype)[:: self.step]

    @property
    def datatype(self):
        """The MPI datatype of an element with the gap behind it."""
        key = self.dtype, self.step
        if key not in _datatypes:
            size = self.step * self.dtype.itemsize
            _datatypes[key] = MPI.Datatype.fromcode(self.dtype.char).Create_resized(0, size).Commit()
        return _datatypes[key]

    def part(self, at, count):
        """``count`` elements from number ``at`` on, as an argument."""
        if self.on_device:
            from arrays import ndarray

            return ndarray(self.memory, self.lead + at * self.dtype.itemsize, count, self.dtype)
        if self.step == 1:
            return self.view[at : at + count]
        size = self.step * self.dtype.itemsize
        return [self.whole[self.lead + at * size :][: count * size], count, self.datatype]

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

    def same_but(self, places):
        """True if nothing has changed but the elements at these places."""
        due = self.before.copy()
        for at, n in places:
            self.seen_in(due)[at : at + n] = self.view[at : at + n]
        return np.array_equal(due, self.whole)

    def bands_intact(self):
        end = self.lead + self.count * self.step * self.dtype.itemsize
        one, two = (w[: self.lead].tobytes() + w[end:].tobytes() for w in (self.whole, self.before))
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
        length = max((at + n for at, n in places), default=0) + tail
        return Guarded(self.rng, self.dtype, length, apart=self.case.spec != "plain")

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
        if case.in_place and case.seed % 2:
            send, recv = self._same_memory(send, recv)
        out = [send, recv]
        if case.name == "reduce_scatter" and (case.in_place or len(set(case.counts)) > 1):
            out.append(list(case.counts))
        elif case.name == "reduce_scatter":
            out.append(None)  # equal blocks need no list
        if case.op:
            names = [case.op, case.op.lower(), case.op.capitalize(), getattr(MPI, case.op, case.op)]
            out.append(names[case.seed % len(names)])
        return [*out, root] if case.root >= 0 else out

    def _same_memory(self, send, recv):
        """The arguments with the address of the input, or of a rank's own block, in place of MPI.IN_PLACE."""
        name = self.case.name
        if send is MPI.IN_PLACE and name in ALIASED:
            return recv, recv
        if send is MPI.IN_PLACE and name in OWN_BLOCK:
            return self.recv.part(*self.recv_at[self.rank]), recv
        if recv is MPI.IN_PLACE and name in OWN_BLOCK:
            return send, self.send.part(*self.send_at[self.rank])
        return send, recv

    def _spec(self, buffer, places, *, many):
        """A random one of mpi4py's forms for this buffer."""
        case, rng = self.case, np.random.default_rng([self.case.seed % GAPS, self.rank, len(places)])
        size = buffer.count
        by_rank = case.name in WITH_DISPLACEMENTS and len(places) == self.size and many
        words = [case.dtype, self.dtype]
        words += [MPI.Datatype.fromcode(self.dtype.char)] if has_datatype(self.dtype) else []
        dtype, memory = words[rng.integers(len(words))], buffer.part(0, size)
        form = case.spec
        if buffer.step > 1:
            memory, _, dtype = memory
            form = "both"
        elif not buffer.on_device:
            only_read = buffer is self.send or (case.name == "bcast" and self.at_root)
            if only_read and rng.random() < 0.2:
                memory = memory[:]
                memory.flags.writeable = False
            memory = held(rng, memory)
        if by_rank:
            return self._spec_by_rank(rng, memory, places, dtype, form)
        count = size // self.size if many or (case.in_place and case.name == "reduce_scatter_block") else size
        forms = {"plain": [memory], "dtype": [[memory, dtype], [memory, None, dtype]]}
        forms["count"] = [[memory, count], (memory, (count, 0)), [memory, [count, 0]]]
        forms["both"] = [[memory, count, dtype], (memory, count, 0, dtype), [memory, (count, None), dtype]]
        if (
            case.spec == "at" and not (many or buffer.on_device) and buffer.step == 1
        ):  # memory that begins before the data
            earlier = buffer.whole[buffer.lead - GUARD :][: GUARD + buffer.view.nbytes].view(self.dtype)
            forms["at"] = [[earlier, (count, GUARD // self.dtype.itemsize), dtype]]
        some = forms.get(form, forms["plain"])
        return some[rng.integers(len(some))]

    def _spec_by_rank(self, rng, memory, places, dtype, form):
        """A random form of a buffer with a count per rank."""
        counts, displs = [n for _, n in places], [at for at, _ in places]
        as_kind = (list, np.array, tuple, partial(np.array, dtype=np.int32))[rng.integers(4)]
        forms = [[memory, (as_kind(counts), as_kind(displs))]]
        forms += [] if form == "plain" else [[memory, as_kind(counts), displs, dtype]]
        step = displs[1] if self.size > 1 else 0
        if len(set(counts)) == 1 and displs == [step * rank for rank in range(self.size)]:
            forms.append([memory, (counts[0], step)])
        if not self.case.gaps:
            forms += [[memory, [*counts]], [memory, np.array(counts)]]
        some = forms[rng.integers(len(forms))]
        return some if len(some) == 4 or form not in ("both", "dtype") else [*some, dtype]

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
        if want is None:
            return "" if np.array_equal(self.recv.whole, self.recv.before) else "recvbuf was changed"
        case, got = self.case, self.recv.view
        sharing = case.in_place and case.name in ("reduce_scatter", "reduce_scatter_block")
        places = [(0, want.size)] if sharing else self.recv_at
        values = np.concatenate([got[at : at + n] for at, n in places]) if places else got
        bad = differing(values, want, bound)
        if bad.size:
            i = int(bad[0])
            return f"{bad.size} of {want.size} wrong, first at {i}: got {values[i]!r}, due {want[i]!r}"
        # On GPUs the rest of an in-place reduce_scatter's buffer is scratch.
        if not (sharing and "CASES_HIP" in os.environ) and not self.recv.same_but(places):
            return "recvbuf was changed between its blocks or elements"
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
