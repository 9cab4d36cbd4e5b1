"""Calls with buffers in mpi4py's forms, drawn as plain data: what ``buffer_build`` makes arguments of on each rank.

The blocks that ranks exchange are drawn first, and the buffers so that they describe just those; then, in some cases,
one mistake (``Fault``) is made on one rank.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from hypothesis import strategies as st


class Base(NamedTuple):
    """An element type: the name that mpi4py's ``MPI`` has for it, its size, and the operations that MPI has on it."""

    name: str
    size: int
    ops: tuple[str, ...]


_COMPARED = ("MAX", "MIN")
_NUMBERS = ("SUM", "PROD")
_BITS = ("BAND", "BOR", "BXOR")
_LOGIC = ("LAND", "LOR", "LXOR")

#: Type characters of numpy and mpi4py, ``y`` for MPI.BYTE and ``c`` for MPI.CHAR.
BASES = {
    "?": Base("C_BOOL", 1, _LOGIC), "b": Base("SIGNED_CHAR", 1, _COMPARED + _NUMBERS + _BITS + _LOGIC),
    "B": Base("UNSIGNED_CHAR", 1, _COMPARED + _NUMBERS + _BITS + _LOGIC), "y": Base("BYTE", 1, _BITS),
    "c": Base("CHAR", 1, ()), "h": Base("SHORT", 2, _COMPARED + _NUMBERS + _BITS),
    "H": Base("UNSIGNED_SHORT", 2, _COMPARED + _NUMBERS), "i": Base("INT", 4, _COMPARED + _NUMBERS + _BITS + _LOGIC),
    "I": Base("UNSIGNED", 4, _COMPARED + _NUMBERS), "l": Base("LONG", 8, _COMPARED + _NUMBERS + _BITS + _LOGIC),
    "Q": Base("UNSIGNED_LONG_LONG", 8, _COMPARED + _NUMBERS), "f": Base("FLOAT", 4, _COMPARED + _NUMBERS),
    "d": Base("DOUBLE", 8, _COMPARED + _NUMBERS), "F": Base("C_FLOAT_COMPLEX", 8, _NUMBERS),
    "D": Base("C_DOUBLE_COMPLEX", 16, _NUMBERS),
}  # fmt: skip


class Kind(NamedTuple):
    """How a call's arguments look: ``one`` buffer, ``even`` blocks, uneven ones (``v``), or a datatype each (``w``)."""

    send: str
    recv: str
    rooted: str = ""
    reduces: bool = False
    #: Which buffer ``MPI.IN_PLACE`` can stand in for.
    in_place: str = ""


#: Calls by mpi4py's names; ``Ring`` is messages to the next rank and from the one before.
CALLS = {
    "Bcast": Kind("one", "", "send"), "Gather": Kind("one", "even", "recv", in_place="send"),
    "Gatherv": Kind("one", "v", "recv", in_place="send"), "Scatter": Kind("even", "one", "send", in_place="recv"),
    "Scatterv": Kind("v", "one", "send", in_place="recv"), "Allgather": Kind("one", "even", in_place="send"),
    "Allgatherv": Kind("one", "v", in_place="send"), "Alltoall": Kind("even", "even", in_place="send"),
    "Alltoallv": Kind("v", "v", in_place="send"), "Alltoallw": Kind("w", "w", in_place="send"),
    "Reduce": Kind("one", "one", "recv", True, "send"), "Allreduce": Kind("one", "one", "", True, "send"),
    "Reduce_scatter_block": Kind("even", "one", "", True, "send"),
    "Reduce_scatter": Kind("one", "one", "", True, "send"), "Scan": Kind("one", "one", "", True, "send"),
    "Exscan": Kind("one", "one", "", True, "send"), "Ring": Kind("one", "one"),
    "Neighbor_allgather": Kind("one", "even"), "Neighbor_allgatherv": Kind("one", "v"),
    "Neighbor_alltoall": Kind("even", "even"), "Neighbor_alltoallv": Kind("v", "v"),
    "Neighbor_alltoallw": Kind("w", "w"),
}  # fmt: skip


class Type(NamedTuple):
    """A datatype: elements of ``base`` at the positions ``at`` of an entry, which is ``extent`` elements long.

    ``made``: the constructor and its arguments; empty for a predefined datatype.
    """

    base: str
    at: tuple[int, ...] = (0,)
    extent: int = 1
    made: tuple[Any, ...] = ()


class Spec(NamedTuple):
    """One buffer argument: memory, and a form that says which entries of which datatype in it are meant."""

    kind: str
    #: One per block.
    types: tuple[Type, ...]
    #: Entries of each block, where each begins (in entries, of a datatype each in elements), and elements of memory.
    counts: tuple[int, ...]
    displs: tuple[int, ...]
    length: int
    form: str
    holder: str = ""
    #: How numbers are written.
    numbers: str = "list"
    #: How the datatype is written: ``mpi`` or ``code``.
    named: str = "mpi"
    as_tuple: bool = False


class Fault(NamedTuple):
    """A mistake on a rank (all, if -1), in an argument."""

    rank: int
    side: str
    name: str


class Case(NamedTuple):
    """A call. ``send`` and ``recv`` hold an argument of each rank: a Spec, or the name of a constant."""

    call: str
    way: str
    base: str
    op: str
    root: int
    send: tuple[Spec | str, ...]
    recv: tuple[Spec | str, ...]
    recvcounts: tuple[int, ...] | None
    numbers: str
    seed: int
    fault: Fault | None


def division(total: int, blocks: int) -> tuple[int, ...]:
    """How mpi4py divides entries where no counts are given."""
    return tuple(total // blocks + (total % blocks > i) for i in range(blocks))


def elements(types: Sequence[Type], counts: Sequence[int], starts: Sequence[int]) -> list[int]:
    """The positions in memory of all elements of all blocks, which begin at these positions."""
    return [
        start + i * kind.extent + at
        for kind, count, start in zip(types, counts, starts, strict=True)
        for i in range(count)
        for at in kind.at
    ]


def _type(draw: Any, base: str, per: int, overlaps: bool) -> Type:
    """A datatype of ``per`` elements; those that ``overlaps`` allows may share elements."""
    one = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    kinds = ["contiguous", "vector", "resized", "indexed", "hindexed", "indexed_block", "hindexed_block", "subarray"]
    kind = draw(st.sampled_from((["basic"] * 6 + ["dup"] if per == 1 else []) + [*kinds, "struct"]))
    if kind == "basic":
        return Type(base)
    if kind == "dup":
        return Type(base, made=("dup",))
    if kind == "contiguous":
        return Type(base, tuple(range(per)), per, ("contiguous", per))
    block = draw(st.sampled_from([n for n in range(1, per + 1) if per % n == 0]))
    if kind == "vector":
        stride = block + one(-1 if overlaps and block > 1 else 0, 2)
        at = tuple(i * stride + j for i in range(per // block) for j in range(block))
        return Type(base, at, max(at) + 1, ("vector", per // block, block, stride))
    if kind == "subarray":
        rows, columns = per // block, block
        top, left, more, wide = (one(0, 1) for _ in range(4))
        sizes, subsizes, starts = (rows + top + more, columns + left + wide), (rows, columns), (top, left)
        fortran = draw(st.booleans())
        steps = (1, sizes[0]) if fortran else (sizes[1], 1)
        inner, outer = ((rows, top, steps[0]), (columns, left, steps[1]))[:: 1 if fortran else -1]
        at = tuple(
            (outer[1] + i) * outer[2] + (inner[1] + j) * inner[2] for i in range(outer[0]) for j in range(inner[0])
        )
        return Type(base, at, prod(sizes), ("subarray", sizes, subsizes, starts, fortran))
    single = kind in ("indexed_block", "hindexed_block")
    lengths = [block] * (per // block) if single else [block, per - block] if block < per else [per]
    gaps = [one(0, 2) for _ in lengths]
    starts = [gap + before for gap, before in zip(accumulate(gaps), accumulate(lengths, initial=0), strict=False)]
    order = draw(st.permutations(range(len(lengths)))) if draw(st.booleans()) else range(len(lengths))
    lengths, starts = [lengths[i] for i in order], [starts[i] for i in order]
    at = tuple(start + j for start, length in zip(starts, lengths, strict=True) for j in range(length))
    extent = max(at) + 1 - min(at)
    if kind == "resized":
        extent = one(1, extent + 2)
    return Type(base, at, extent, (kind, tuple(lengths), tuple(starts)))


#: Forms by what they say: ``x`` the memory, ``n`` counts, ``d`` displacements, ``t`` the datatype.
_ONE = ("x", "x t", "x n", "x (n d)", "x [n d]", "x n t", "x (n d) t", "x (n None) t", "x (None d) t", "x None t",
        "x n None", "x n d t", "x None d t", "x n None t")  # fmt: skip
_V = ("x", "x t", "x n", "x (n d)", "x n t", "x (n d) t", "x n d t", "x (n None) t", "x (n None)", "x None t",
      "x n None t", "x (n d) None")  # fmt: skip
_W = ("x t", "x (n d) t", "x n d t")
_FORMS = {"one": _ONE, "even": _ONE, "v": _V, "w": _W}

#: Python types of buffers: with an element type of their own, without one, and read-only ones, which are sent only.
_TYPED = ("numpy", "numpy", "numpy", "rows", "fortran", "memoryview", "array", "ctypes", "unaligned", "dlpack")
_BYTES = ("bytearray", "memory")
_CONSTANT = ("readonly", "readonly memoryview")


def _words(form: str) -> set[str]:
    return set(form.translate(str.maketrans("()[]", "    ")).split())


def _spread(draw: Any, types: Sequence[Type], counts: Sequence[int], unit: Sequence[int], send: bool) -> list[int]:
    """Displacements (in units) of blocks in any order, with gaps; of what is sent they may overlap."""
    n = len(counts)

    def overlap(displs: Sequence[int]) -> bool:
        places = elements(types, counts, [displ * step for displ, step in zip(displs, unit, strict=True)])
        return len(set(places)) < len(places)

    found = [draw(st.integers(0, 4)) for _ in range(n)]
    if not overlap(found) or (send and draw(st.booleans())):
        return found
    end = 0
    for i in draw(st.permutations(range(n))):
        found[i] = -(-end // unit[i])
        end = max([end, *(at + 1 for at in elements([types[i]], [counts[i]], [found[i] * unit[i]]))])
    return found


def _apart(kind: Type) -> Type:
    """The datatype with an extent at which entries in a row do not overlap."""
    if kind.extent > max(kind.at) or not kind.made:
        return kind
    return kind._replace(extent=max(kind.at) + 1, made=("resized", (1,) * len(kind.at), kind.at))


def _spec(draw: Any, base: str, blocks: Sequence[int], unit: int, kind: str, send: bool, plain: bool = False) -> Spec:
    """A buffer of these blocks (elements each, multiples of ``unit``); ``plain``: of a predefined datatype."""
    n = len(blocks)
    divisors = [1] if plain else [i for i in range(1, unit + 1) if unit % i == 0]
    types = [
        Type(base) if plain else _type(draw, base, draw(st.sampled_from(divisors)), send)
        for _ in range(n if kind == "w" else 1)
    ]
    types = [each if send else _apart(each) for each in types]
    types = types if kind == "w" else types * n
    counts = [block // len(each.at) for block, each in zip(blocks, types, strict=True)]
    extent, total = (types[0].extent if n else 1), sum(counts)
    displs = list(accumulate(counts, initial=0))[:-1]
    fits = max(elements(types, counts, [displ * extent for displ in displs]), default=-1) < total * extent
    forms = [form for form in _FORMS[kind] if _possible(form, kind, types, counts, fits, send)]
    form = draw(st.sampled_from(forms))
    words = _words(form)
    if kind == "w":
        units = [1] * n
        displs = _spread(draw, types, counts, units, send) if "d" in words else [0] * n
    else:
        units = [extent] * n
        if "d" in words and kind == "v":
            displs = _spread(draw, types, counts, units, send)
        elif "d" in words:
            shift = draw(st.integers(0, 2))
            displs = [displ + shift for displ in displs]
    if "n" in words or kind == "w":
        places = elements(types, counts, [displ * step for displ, step in zip(displs, units, strict=True)])
        length = max(places, default=-1) + 1 + draw(st.integers(0, 3))
        if kind in ("one", "even") and n:
            length = max(length, displs[0] * extent)  # mpi4py looks at that even where the count is 0
    else:
        length = (total + (displs[0] if displs else 0)) * extent
    spec = Spec(kind, tuple(types), tuple(counts), tuple(displs), length, form)
    return _presented(draw, spec, base, send)


def _possible(form: str, kind: str, types: Sequence[Type], counts: Sequence[int], fits: bool, send: bool) -> bool:
    """Whether a form can say what is meant: without a datatype, and without counts."""
    words = _words(form)
    if "t" not in words and (any(each.made for each in types) or not types or types[0].base in "Bc"):
        return False
    if "n" in words:
        return True
    if kind == "w":
        return set(counts) <= {1} and (send or len(counts) < 2)
    return fits and (kind != "v" or tuple(counts) == division(sum(counts), len(counts)))


def _presented(draw: Any, spec: Spec, base: str, send: bool) -> Spec:
    """The same buffer with the looks that do not change what it means."""
    words, total = _words(spec.form), sum(spec.counts)
    typed = "t" not in words
    holders = [*_TYPED, *(_CONSTANT if send else ())]
    if not typed or base == "y":
        holders += [*_BYTES, *(("bytes",) if send else ())]
    if spec.length == 1:
        holders.append("scalar")
    if not total and "t" in words and "d" not in words and spec.kind != "w":
        holders += ["None"] * 4
    if spec.kind == "one" and spec.form == "x n t" and total:
        holders.append("BOTTOM")
    if base in "FD":
        holders = [each for each in holders if each not in ("array", "ctypes")]
    if base in "?":
        holders = [each for each in holders if each != "array"]
    numbers = ["list", "list", "numpy", "elements"]
    if spec.kind == "v" and len(set(spec.counts)) == 1 and "d" not in words:
        numbers.append("one")
    named = ["mpi"] if base in "yc" or any(each.made for each in spec.types) else ["mpi", "code"]
    return spec._replace(
        holder=draw(st.sampled_from(holders)),
        numbers=draw(st.sampled_from(numbers)),
        named=draw(st.sampled_from(named)),
        as_tuple=draw(st.booleans()),
    )


#: Mistakes in a buffer argument; the others are in arguments of their own.
FAULTS = (
    "readonly", "strided", "reversed", "list of strided", "more bytes", "negative count", "negative displacement",
    "count of text", "count of fraction", "no datatype", "datatype of number", "null datatype", "one item", "no items",
    "five items", "None", "None with a count", "in place", "number", "text", "list of numbers", "too short",
    "other base", "fewer counts", "more counts", "overlapping blocks", "displacement beyond", "big endian",
    "structure", "long double", "objects", "masked", "freed datatype", "array of types",
)  # fmt: skip

#: Arguments beside buffers: wrong roots and counts of a Reduce_scatter.
_ROOTS = ("root beyond", "root below", "root of fraction", "root of text", "no root")
_RECVCOUNTS = ("recvcounts short", "recvcounts wrong", "recvcounts negative", "recvcounts of text")


#: Mistake -> the part of a buffer specification that it needs: counts (n), displacements (d), a datatype (t).
_ABOUT = {
    "negative count": "n", "count of text": "n", "count of fraction": "n", "None with a count": "n",
    "negative displacement": "d", "no datatype": "t", "datatype of number": "t", "null datatype": "t",
    "freed datatype": "t", "array of types": "t", "fewer counts": "n", "more counts": "n",
}  # fmt: skip
#: Of what kinds of arguments a mistake can be made.
_WITHIN = {"fewer counts": "vw", "more counts": "vw", "overlapping blocks": "vw", "displacement beyond": "one v w"}
#: Mistakes that are none where a datatype is named: then any memory is bytes.
_OF_OBJECTS = ("big endian", "structure", "long double")


def _applies(name: str, spec: Spec) -> bool:
    words = _words(spec.form)
    if name in _ABOUT and _ABOUT[name] not in words:
        return False
    if name in _WITHIN and spec.kind not in _WITHIN[name]:
        return False
    if name == "array of types" and spec.kind == "w":
        return len(spec.types) > 1
    return bool(spec.counts) and not (name in _OF_OBJECTS and "t" in words)


def _fault(draw: Any, call: str, send: Sequence[Spec | str], recv: Sequence[Spec | str]) -> Fault | None:
    if draw(st.integers(0, 3)):
        return None
    rank = draw(st.integers(-1, len(send) - 1))
    made = [
        (side, name)
        for side, spec in (("send", send[rank]), ("recv", recv[rank]))
        if isinstance(spec, Spec)
        for name in FAULTS
        if _applies(name, spec)
    ]
    made += [("root", name) for name in _ROOTS if CALLS[call].rooted]
    made += [("recvcounts", name) for name in _RECVCOUNTS if call == "Reduce_scatter"]
    return Fault(rank, *draw(st.sampled_from(made))) if made else None


#: Arguments in the place of buffers that do not matter.
_NOBODY = ("None", "text", "number")


def _blocks(draw: Any, call: str, ranks: int, unit: int, symmetric: bool) -> tuple[list[list[int]], list[list[int]]]:
    """The elements of each block that each rank sends, and of each that it receives."""
    n = range(ranks)
    some = lambda: draw(st.integers(0, 3)) * unit  # noqa: E731
    kind = CALLS[call]
    if call == "Ring":
        sent = [some() for _ in n]
        return [[each] for each in sent], [[sent[r - 1] + draw(st.sampled_from([0, 0, unit]))] for r in n]
    if call.startswith("Neighbor"):
        return _edges(kind, [[some(), some()] for _ in n], some(), ranks)
    if kind.send == kind.recv and kind.send in "vw":
        matrix = [[some() for _ in n] for _ in n]
        if symmetric:
            matrix = [[matrix[min(r, s)][max(r, s)] for s in n] for r in n]
        return matrix, [[matrix[s][r] for s in n] for r in n]
    each = some()
    if "v" in (kind.send, kind.recv) or call == "Reduce_scatter":
        uneven = [some() for _ in n] if draw(st.booleans()) else [each] * ranks
    else:
        uneven = [each] * ranks
    if call == "Reduce_scatter":
        return [[sum(uneven)]] * ranks, [[sum(uneven)]] * ranks if symmetric else [[own] for own in uneven]
    if call == "Reduce_scatter_block" and symmetric:
        return [uneven] * ranks, [uneven] * ranks
    divided = {"one": lambda r: [uneven[r]], "even": lambda r: uneven, "v": lambda r: uneven, "": lambda r: []}
    return [divided[kind.send](r) for r in n], [divided[kind.recv](r) for r in n]


def _edges(kind: Kind, out: list[list[int]], each: int, ranks: int) -> tuple[list[list[int]], list[list[int]]]:
    """Blocks to and from both neighbours on a circle: what goes down comes from above."""
    if kind.recv == "even":
        out = [[each] * 2 for _ in out]
    elif kind.send == "one":
        out = [[first] * 2 for first, _ in out]
    into = [[out[r - 1][1], out[(r + 1) % ranks][0]] for r in range(ranks)]
    return [blocks[:1] if kind.send == "one" else blocks for blocks in out], into


@st.composite
def cases(draw: Any, ranks: int) -> Case:
    """A call on this many ranks."""
    # On a circle of two each is the other's neighbour on both sides, and Open MPI mixes these up.
    call = draw(st.sampled_from([name for name in CALLS if ranks > 2 or not name.startswith("Neighbor")]))
    kind = CALLS[call]
    base = draw(st.sampled_from(list(BASES)))
    op = draw(st.sampled_from(BASES[base].ops or ("SUM",))) if kind.reduces else ""
    if kind.reduces and draw(st.integers(0, 9)) == 0:
        op = draw(st.sampled_from(["SUM", "MAX", "BAND", "LAND"]))
    root = draw(st.integers(0, ranks - 1)) if kind.rooted else -1
    place = bool(kind.in_place) and draw(st.integers(0, 3)) == 0
    plain = kind.reduces and draw(st.integers(0, 5)) > 0
    unit = draw(st.sampled_from([1, 2, 3, 4, 6]))
    blocks = dict(zip(("send", "recv"), _blocks(draw, call, ranks, unit, place), strict=True))
    nobody = draw(st.integers(0, 11)) == 0 and call == "Ring"
    sides = []
    for side in ("send", "recv"):
        shape = getattr(kind, side)
        if call == "Reduce_scatter_block" and place and side == "recv":
            shape = "even"
        specs: list[Spec | str] = []
        for rank in range(ranks):
            if nobody or not shape or (kind.rooted == side and call != "Bcast" and rank != root):
                specs.append(draw(st.sampled_from(_NOBODY)) if shape else "")
            elif place and kind.in_place == side and (not kind.rooted or rank == root):
                specs.append(draw(st.sampled_from(["IN_PLACE", "IN_PLACE", "None"])))
            else:
                sends = side == "send" and (call != "Bcast" or rank == root)
                spec = _spec(draw, base, blocks[side][rank], unit, shape, sends, plain)
                # Absolute addresses make one entry of it all, which counts of reductions are not about.
                specs.append(spec._replace(holder="numpy") if kind.reduces and spec.holder == "BOTTOM" else spec)
        sides.append(tuple(specs))
    if nobody:
        root = -2  # MPI.PROC_NULL
    counts = None
    if call == "Reduce_scatter" and (place or draw(st.booleans())):
        counts = tuple(own[0] for own in blocks["recv"]) if not place else _parted(draw, blocks["recv"][0][0], ranks)
    return Case(
        call, draw(st.sampled_from(["", "I", "init"])), base, op, root, sides[0], sides[1], counts,
        draw(st.sampled_from(["int", "numpy", "0-d"])), draw(st.integers(0, 1 << 20)), _fault(draw, call, *sides),
    )  # fmt: skip


def _parted(draw: Any, total: int, ranks: int) -> tuple[int, ...]:
    """A total in parts."""
    cuts = sorted(draw(st.integers(0, total)) for _ in range(ranks - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
