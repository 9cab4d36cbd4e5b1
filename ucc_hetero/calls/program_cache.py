"""Programs of calls that were made before, found by one key for all calls that look alike.

What the general way does before a call (binding, choosing, labels) takes longer than a short call itself. Where ranks
must exchange counts they do, by the same program as the general way, so that it does not matter which ranks remember
the call. If the counts are those of last time, so is the program.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..buffers.fast_path import glance
from ..engine.lowering import Program
from ..native.libraries import ffi
from ..types import Op, op_of

if TYPE_CHECKING:
    from .prepare import Exchange, Prepared

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

#: Kinds that a table remembers before it forgets the oldest.
KINDS = 1024

_NULL = ffi.NULL
_cast = ffi.cast
_from_buffer = ffi.from_buffer
_ndarray = np.ndarray

#: Result of a look-up for a call that takes a proper look.
_UNKNOWN = None, None, _NULL, _NULL


class Kinds(dict[_K, _V]):
    """A table of bounded size: the oldest entry makes room for a new one."""

    def keep(self, key: _K, value: _V) -> _V:
        """Remember a value, and return it."""
        if len(self) >= KINDS and key not in self:
            self.pop(next(iter(self)), None)
        self[key] = value
        return value


class Kind:
    """Idle programs of one kind of call, and its label on the arrival board.

    ``exchange`` is how its ranks exchange counts before it, and ``counts`` what that then brought.
    """

    __slots__ = ("counts", "exchange", "idle", "label")

    def __init__(self, label: str, idle: list[Program], exchange: Exchange | None = None, counts: bytes = b"") -> None:
        self.label, self.idle, self.exchange, self.counts = label, idle, exchange, counts

    def take(self) -> Program | None:
        """A program for this caller alone until it is given back; None if all are in use."""
        try:
            return self.idle.pop()
        except IndexError:
            return None

    def give_back(self, program: Program) -> None:
        """Let the next such call have a program."""
        if len(self.idle) < program.spare:
            self.idle.append(program)


def pointer(address: Any) -> Any:
    """The address of an array as the native engine takes it."""
    return _cast("void *", address) if type(address) is int else address


class ProgramCache:
    """Programs of one communicator, by what they were lowered from and by the signatures of calls."""

    def __init__(self, in_place: Any) -> None:
        self._in_place = in_place
        self._kinds: Kinds[Hashable, Kind] = Kinds()

    def lowered(self, key: Hashable, label: str) -> Kind:
        """Kind of the programs that are lowered from ``key``."""
        return self._kinds.get(key) or self._kinds.keep(key, Kind(label, []))

    def look(
        self, name: str, send: Any, recv: Any, op: Any, root: Any, counts: Any
    ) -> tuple[Hashable, Kind | None, Any, Any]:
        """Signature of a call (all of its arguments but addresses), its kind if it is known, and its two addresses.

        No signature for what is read-only, strided or exotic, and needs a proper look. Addresses of plain arrays are
        pointers that keep the memory where it is as long as they live, those of torch and CuPy are numbers.
        """
        sent: Any = None
        received: Any = None
        outof: Any = _NULL
        into: Any = _NULL
        try:
            if op is not None and type(op) is not Op:
                op = op_of(op)  # MPI's own cannot be hashed
                if op is None:
                    return _UNKNOWN
            if type(root) is not int:
                root = index(root)
            if type(send) is _ndarray:
                sent, outof = (send.dtype, send.size), _from_buffer(send)
            elif send is not None and send is not self._in_place:
                sent, outof = glance(send) or _described(send, writable=False)
            if type(recv) is _ndarray:
                received, into = (recv.dtype, recv.size), _from_buffer(recv, require_writable=True)
            elif recv is not None and recv is not self._in_place:
                received, into = glance(recv) or _described(recv, writable=True)
            key = name, sent, received, op, root, counts if counts is None else _numbers(counts)
            return key, self._kinds.get(key), outof, into
        except (BufferError, TypeError, ValueError):
            return _UNKNOWN

    def keep(self, key: Hashable, prepared: Prepared, outof: Any, into: Any) -> None:
        """Let the next call of this signature use the programs of this one, if only addresses change between them."""
        if key is None or not prepared.repeatable:
            return
        # Not what begins at a displacement, or lies elsewhere; a rank may have memory that its part of the call has no
        # use for.
        places = (prepared.send, pointer(outof)), (prepared.recv, pointer(into))
        if any(used and used != seen for used, seen in places):
            return
        kind, asked = prepared.kind, prepared.exchange
        if prepared.counted:
            known = self._kinds.get(key)
            exchange = known.exchange if known is not None and known.exchange else asked
            if exchange is None:
                return
            if exchange is asked:
                prepared.exchange = None  # its program is not given back
            kind = Kind(kind.label, kind.idle, exchange, (asked or exchange).rows.tobytes())
        self._kinds.keep(key, kind)

    def clear(self) -> None:
        """Forget everything: other programs will be chosen."""
        self._kinds.clear()


def _described(spec: Any, *, writable: bool) -> tuple[Any, Any]:
    """Description but for the address of an array with counts, and its address; ``TypeError`` if it is not simple."""
    if type(spec) not in (list, tuple) or not spec:
        raise TypeError("not an array with counts")
    array, words = spec[0], map(_word, spec[1:])
    if type(array) is _ndarray:
        return (array.dtype, array.size, *words), _from_buffer(array, require_writable=writable)
    seen = glance(array)
    if seen is None:
        raise TypeError("not an array that is told at a glance")
    return (seen[0], *words), seen[1]


def _word(word: Any) -> Any:
    """One part of a buffer's description in a form that can be looked up."""
    if word is None or type(word) in (int, str):
        return word
    if type(word) in (list, tuple, _ndarray):
        return _numbers(word)
    if isinstance(word, np.dtype):
        return word
    if getattr(word, "is_predefined", False):  # MPI's: their names last
        return "MPI", word.handle
    raise TypeError("not a simple description")


def _numbers(values: Any) -> tuple[Any, ...]:
    """Counts, or counts and displacements."""
    if type(values) is _ndarray:
        return tuple(values.tolist())
    return tuple(_numbers(v) if type(v) in (list, tuple, _ndarray) else v for v in values)
