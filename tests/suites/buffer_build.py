"""A drawn case -> its arguments on one rank: memory with guards around it, MPI datatypes, mpi4py's forms of them."""

import array
import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from buffer_cases import BASES, Case, Spec, Type
from mpi4py import MPI

#: Bytes before and after what a buffer has, which nobody may touch.
GUARD = 64

#: Types of numpy and ctypes for the bases.
_NUMPY = {base: np.dtype({"y": "B", "c": "b"}.get(base, base)) for base in BASES}
_CTYPES = {"?": "bool", "b": "byte", "B": "ubyte", "y": "ubyte", "c": "byte", "h": "short", "H": "ushort",
           "i": "int", "I": "uint", "l": "long", "Q": "ulonglong", "f": "float", "d": "double"}  # fmt: skip


class _DLPack:
    """An array that speaks nothing but DLPack."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self._values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._values.__dlpack_device__()


class Arguments:
    """The arguments of a case on a rank. Two of the same case and rank have equal memory."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self._types: list[MPI.Datatype] = []
        #: Memory that the call may change, compared afterwards.
        self._memory: list[Any] = []
        fault = case.fault
        self._fault = fault.name if fault is not None and fault.rank in (-1, rank) else ""
        self._side = fault.side if fault is not None else ""
        self.send, self.recv = self._argument(case.send[rank], "send"), self._argument(case.recv[rank], "recv")

    def contents(self) -> bytes:
        """All memory, guards included."""
        return b"".join(each.tobytes() if hasattr(each, "tobytes") else bytes(each) for each in self._memory)

    def free(self) -> None:
        """Give datatypes back."""
        for made in self._types:
            if made != MPI.DATATYPE_NULL:
                made.Free()

    @property
    def root(self) -> Any:
        """The root, in one of the ways to write it."""
        root = MPI.PROC_NULL if self.case.root == -2 else self.case.root
        wrong = {"root beyond": 99, "root below": -7, "root of fraction": 0.5, "root of text": "0", "no root": None}
        if self._side == "root" and self._fault in wrong:
            return wrong[self._fault]
        return {"int": int, "numpy": np.int32, "0-d": np.array}[self.case.numbers](root)

    @property
    def recvcounts(self) -> Any:
        """The counts of a Reduce_scatter."""
        counts = self.case.recvcounts
        if self._side == "recvcounts" and self._fault:
            counts = counts or (0,) * len(self.case.send)
            wrong = {"short": counts[:-1], "wrong": [n + 1 for n in counts], "negative": [-1, *counts[1:]]}
            return wrong.get(self._fault.split()[-1], ["a"] * len(counts))
        if counts is None:
            return None
        return {"int": list, "numpy": np.array, "0-d": lambda n: tuple(map(np.int64, n))}[self.case.numbers](counts)

    def _argument(self, spec: Spec | str, side: str) -> Any:
        fault = self._fault if side == self._side else ""
        if isinstance(spec, str):
            return {"None": None, "IN_PLACE": MPI.IN_PLACE, "text": "nobody looks at this", "number": 3.5}.get(spec)
        spec = _altered(spec, fault)
        return self._formed(spec, self._held(spec, side), fault)

    def _formed(self, spec: Spec, memory: Any, fault: str) -> Any:
        """A form filled in, with the mistakes that can be made in it."""
        if fault in ("number", "text", "list of numbers", "None", "in place", "no items"):
            return {"number": 3, "text": "text", "None": None, "in place": MPI.IN_PLACE, "no items": []}.get(
                fault, [1.0, 2.0, 3.0]
            )
        counts, displs = self._numbers(spec, spec.counts, fault), self._numbers(spec, self._displs(spec), "")
        if fault == "negative displacement":
            displs = [-1] * len(spec.counts) if spec.kind in "vw" else -1
        datatype = self._datatype(spec, memory, fault)
        if spec.holder == "BOTTOM":
            memory, counts, datatype = MPI.BOTTOM, 1, self._absolute(spec, memory)
        if fault in ("one item", "five items"):
            return [memory] * (1 if fault == "one item" else 5)
        if fault == "None with a count":
            return [None, counts, self._made(Type(spec.types[0].base)) if spec.types else MPI.INT]
        words = {"x": memory, "n": counts, "d": displs, "t": datatype, "None": None}
        parts: list[Any] = []
        inside: list[Any] | None = None
        for word in spec.form.replace("(", "( ").replace(")", " )").replace("[", "[ ").replace("]", " ]").split():
            if word in "([":
                inside = []
            elif word in ")]":
                assert inside is not None
                parts.append(tuple(inside) if word == ")" else inside)
                inside = None
            else:
                (parts if inside is None else inside).append(words[word])
        if len(parts) == 1:
            # "list of strided" and faults in numbers have no place here.
            return parts[0]
        return tuple(parts) if spec.as_tuple else parts

    @staticmethod
    def _displs(spec: Spec) -> tuple[int, ...]:
        if spec.kind != "w":
            return spec.displs
        return tuple(displ * BASES[each.base].size for displ, each in zip(spec.displs, spec.types, strict=True))

    @staticmethod
    def _numbers(spec: Spec, numbers: Sequence[int], fault: str) -> Any:
        """Counts or displacements as they are written."""
        found: list[Any] = list(numbers)
        if fault in ("negative count", "count of text", "count of fraction"):
            wrong = {"negative count": -1, "count of text": "2", "count of fraction": 1.5}[fault]
            found[:1] = [wrong]
        elif fault in ("fewer counts", "more counts"):
            found = found[:-1] if fault == "fewer counts" else [*found, 0]
        one = found[0] if found else 0
        if spec.kind in ("one", "even"):
            return np.int64(one) if spec.numbers == "numpy" and isinstance(one, int) else one
        if spec.numbers == "one" and len(set(found)) == 1:
            return one
        if not all(isinstance(each, int) for each in found):
            return found
        return {"numpy": lambda: np.array(found, np.int32), "elements": lambda: [np.int16(n) for n in found]}.get(
            spec.numbers, lambda: found
        )()

    def _datatype(self, spec: Spec, memory: Any, fault: str) -> Any:
        if spec.kind == "w":
            made: Any = [self._made(each) for each in spec.types]
            if fault == "freed datatype" and made:
                made[-1] = MPI.DATATYPE_NULL
            return made[:-1] if fault == "array of types" else made
        wrong: dict[str, Any] = {"no datatype": "zz", "datatype of number": 3.5, "null datatype": MPI.DATATYPE_NULL}
        if fault in wrong:
            return wrong[fault]
        kind = spec.types[0] if spec.types else Type("i")
        if fault == "freed datatype":
            freed = MPI.INT.Dup()
            freed.Free()
            return freed
        if fault == "array of types":
            return [self._made(kind)] * 2
        return kind.base if spec.named == "code" else self._made(kind)

    def _made(self, kind: Type) -> MPI.Datatype:
        """The MPI datatype."""
        base = getattr(MPI, BASES[kind.base].name)
        if not kind.made:
            return base
        size, (name, *facts) = BASES[kind.base].size, kind.made
        made = _derived(base, name, facts, size, kind.extent).Commit()
        assert made.extent == kind.extent * size, (kind, made.extent)
        self._types.append(made)
        return made

    def _absolute(self, spec: Spec, memory: Any) -> MPI.Datatype:
        """The entries of a buffer by their addresses."""
        kind, address = spec.types[0], MPI.Get_address(memory)
        made = self._made(kind).Create_hindexed([spec.counts[0]], [address]).Commit()
        self._types.append(made)
        return made

    def _held(self, spec: Spec, side: str) -> Any:
        """Memory filled with data, as the object that the spec asks for."""
        base = spec.types[0].base if spec.types else "i"
        dtype = _NUMPY[base]
        values = self._values(spec.length, dtype, side)
        if spec.holder in ("bytes", "bytearray", "array"):
            kinds = {"bytes": bytes, "bytearray": bytearray}
            raw = values.tobytes()
            own = kinds[spec.holder](raw) if spec.holder in kinds else array.array(dtype.char, raw)
            self._memory.append(own)
            return own
        shift = 1 if spec.holder == "unaligned" else 0
        arena = np.full(values.nbytes + 2 * GUARD + shift, 0xA5, np.uint8)
        region = arena[GUARD + shift : GUARD + shift + values.nbytes]
        region[:] = values.view(np.uint8)
        self._memory.append(arena)
        return _presented(spec, region, dtype, base)

    def _values(self, length: int, dtype: np.dtype[Any], side: str) -> np.ndarray[Any, Any]:
        rng = np.random.default_rng([self.case.seed, self.rank, side == "send"])
        if dtype.kind == "b" or self.case.op:
            return rng.integers(0, 2 if dtype.kind == "b" else 3, length).astype(dtype)
        return np.frombuffer(rng.bytes(length * dtype.itemsize), dtype).copy()


def _derived(base: MPI.Datatype, name: str, facts: Sequence[Any], size: int, extent: int) -> MPI.Datatype:
    if name == "dup":
        return base.Dup()
    if name == "contiguous":
        return base.Create_contiguous(*facts)
    if name == "vector":
        return base.Create_vector(*facts)
    if name == "subarray":
        *where, fortran = facts
        return base.Create_subarray(*where, MPI.ORDER_F if fortran else MPI.ORDER_C)
    lengths, starts = facts
    nbytes = [start * size for start in starts]
    if name == "indexed":
        return base.Create_indexed(lengths, starts)
    if name == "hindexed":
        return base.Create_hindexed(lengths, nbytes)
    if name == "indexed_block":
        return base.Create_indexed_block(lengths[0], starts)
    if name == "hindexed_block":
        return base.Create_hindexed_block(lengths[0], nbytes)
    if name == "struct":
        return MPI.Datatype.Create_struct(lengths, nbytes, [base] * len(lengths))
    inner = base.Create_indexed(lengths, starts)
    try:
        return inner.Create_resized(0, extent * size)
    finally:
        inner.Free()


def _presented(spec: Spec, region: np.ndarray[Any, Any], dtype: np.dtype[Any], base: str) -> Any:
    """Memory as an object of a kind."""
    values = region.view(dtype)
    halves = (2, -1) if len(values) and not len(values) % 2 else (1, len(values))
    constant = values[:]
    constant.flags.writeable = False
    kinds = {
        "None": lambda: None,
        "rows": lambda: values.reshape(halves),
        "fortran": lambda: values.reshape(halves, order="F"),
        "scalar": lambda: values.reshape(()),
        "memoryview": lambda: memoryview(values),
        "memory": lambda: MPI.memory.frombuffer(region) if len(region) else MPI.memory(),
        "dlpack": lambda: _DLPack(values),
        "ctypes": lambda: (getattr(ctypes, f"c_{_CTYPES[base]}") * len(values)).from_buffer(region),
        "readonly": lambda: constant,
        "readonly memoryview": lambda: memoryview(constant),
        "strided": lambda: values[::2],
        "reversed": lambda: values[::-1],
        "big endian": lambda: values.view(dtype.newbyteorder(">")),
        "structure": lambda: region.view([("a", "u1"), ("b", "u1")]) if not len(region) % 2 else region.view("V1"),
        "long double": lambda: np.zeros(len(values), np.longdouble),
        "objects": lambda: np.array([None] * len(values), object),
        "masked": lambda: np.ma.MaskedArray(values, mask=False),
    }
    return kinds.get(spec.holder, lambda: values)()


def _altered(spec: Spec, fault: str) -> Spec:
    """The spec with the mistakes that are made in memory, counts and displacements."""
    if fault in ("readonly", "strided", "reversed", "big endian", "structure", "long double", "objects", "masked"):
        # Of strided memory as many elements are left.
        return spec._replace(holder=fault, length=2 * spec.length if fault == "strided" else spec.length)
    if fault == "list of strided":
        return spec._replace(holder="strided", length=2 * spec.length, form="x t" if spec.kind != "w" else spec.form)
    if fault == "more bytes" and spec.types:
        return spec._replace(length=spec.length + 1, holder="numpy")
    if fault == "too short":
        return spec._replace(length=max(spec.length // 2, 0), holder="numpy")
    if fault == "other base":
        other = "f" if spec.types and spec.types[0].base != "f" else "i"
        return spec._replace(types=tuple(Type(other) for _ in spec.types), holder="numpy")
    if fault == "overlapping blocks":
        return spec._replace(displs=(0,) * len(spec.displs), form="x (n d) t")
    if fault == "displacement beyond":
        return spec._replace(displs=tuple(displ + 1000 for displ in spec.displs), form="x (n d) t")
    return spec
