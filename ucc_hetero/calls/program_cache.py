"""Calls that look like an earlier one: what tells them apart, non-blocking ones, and calls of uneven blocks made again.

What the general way does before a call (binding, choosing, labels) takes longer than a short call itself. Where ranks
must exchange counts they do, by the same program as the general way, so that it does not matter which ranks remember
the call. If the counts are those of last time, so is the program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..engine.lowering import Program
from ..native.libraries import ffi
from ..types import Op
from .ops import op_of
from .prepare import KINDS, Exchange, Prepared
from .request import Request
from .stream_launch import key_of

__all__ = ["UNEVEN", "Idle", "Known", "Repeats", "Uneven", "addresses", "key_of_arrays", "only_addresses"]

#: Calls whose blocks may differ in length.
UNEVEN = frozenset({"gatherv", "scatterv", "allgatherv", "alltoallv", "reduce_scatter"})

_NULL = ffi.NULL
_cast = ffi.cast
_from_buffer = ffi.from_buffer
_ndarray = np.ndarray


def key_of_arrays(name: str, send: Any, recv: Any, op: Any, root: int, in_place: Any) -> tuple[Any, ...] | None:
    """Key of calls with plain arrays; None for anything else. In place counts as no send buffer."""
    if op is not None and type(op) is not Op:
        op = op_of(op)  # MPI's own cannot be hashed
        if op is None:
            return None
    if type(send) is _ndarray:
        outof = send.dtype, send.size
    elif send is None or send is in_place:
        outof = None
    else:
        return None
    if type(recv) is _ndarray:
        return name, outof, recv.dtype, recv.size, op, root
    return (name, outof, op, root) if recv is None else None


def only_addresses(prepared: Prepared, send: Any, recv: Any, in_place: Any) -> bool:
    """Whether addresses are all that changes from one such call to the next."""
    bound = prepared.bound
    return (
        (send is None or send is in_place) == (bound.send is None)
        and (recv is None or recv is in_place) == (bound.recv is None)
        and (bound.recv is None or bound.recv.count > 0)
    )


def addresses(send: Any, recv: Any) -> tuple[Any, Any] | None:
    """Plain arrays as the native engine takes them; None for what is read-only, strided or exotic.

    They keep the arrays' memory where it is for as long as they live.
    """
    try:
        into = _NULL if recv is None else _from_buffer(recv, require_writable=True)
        return _from_buffer(send) if type(send) is _ndarray else _NULL, into
    except (BufferError, ValueError, TypeError):
        return None


class Idle(NamedTuple):
    """Programs of one kind of call that are not under way, and what the board shows of it."""

    label: str
    programs: list[Program]


class Repeats:
    """Non-blocking calls with arrays of numpy, torch or CuPy, made again: idle programs by what tells them apart.

    ``begin`` starts a program with the addresses of its buffers and what has to stay alive, and returns its request,
    which gives the program back in the end; None where it cannot be started like this.
    """

    def __init__(self, begin: Callable[[Program, Any, Any, object, Idle], Request | None], in_place: Any) -> None:
        self._begin, self._in_place = begin, in_place
        self._idle: dict[tuple[Any, ...], Idle] = {}

    def again(
        self, name: str, send: Any, recv: Any, op: Any, root: int
    ) -> tuple[tuple[Any, ...] | None, Request | None]:
        """Key of the call, None where that takes a proper look; and its request if it could be started."""
        key, both = key_of_arrays(name, send, recv, op, root, self._in_place), None
        if key is None:
            known = key_of(name, None if send is self._in_place else send, recv, op, root)
            if known is not None:
                key, both = known[0], (_cast("void *", known[1]), _cast("void *", known[2]))
        idle = self._idle.get(key) if key is not None else None
        if idle is None or not idle.programs:
            return key, None
        both = both or addresses(send, recv)
        try:
            program = idle.programs.pop() if both is not None else None
        except IndexError:  # another thread took it
            program = None
        if program is None or both is None:
            return key, None
        return key, self._begin(program, *both, (send, recv, both), idle)

    def keep(self, key: tuple[Any, ...] | None, prepared: Prepared, send: Any, recv: Any) -> None:
        """Let the program of a call that is about to start serve the next one that looks like it."""
        if key is not None and prepared.repeatable and only_addresses(prepared, send, recv, self._in_place):
            if len(self._idle) >= KINDS:
                self._idle.clear()
            prepared.pool = self._idle.setdefault(key, Idle(prepared.label, [])).programs

    def clear(self) -> None:
        """Forget what is known: other programs will be chosen."""
        self._idle.clear()


class _Entry(NamedTuple):
    """A call as it was made before. ``counts`` is what the exchange then brought."""

    program: Program
    pool: list[Program]
    label: str
    exchange: Exchange | None
    counts: bytes


class Known(NamedTuple):
    """Result of a look-up: key of the call, and what was exchanged already, if the call did not run."""

    key: tuple[Any, ...] | None
    rows: Any = None
    done: bool = False


class Uneven:
    """The calls of one communicator. ``run`` runs a program with its two addresses; False when it cannot start so."""

    def __init__(self, run: Callable[[Program, Any, Any, object, str], bool], in_place: Any) -> None:
        self._run, self._in_place = run, in_place
        self._entries: dict[tuple[Any, ...], _Entry] = {}

    def again(self, name: str, send: Any, recv: Any, op: Any, root: int, recvcounts: Any) -> Known:
        """Run a call that looks like an earlier one, or say what is known of it."""
        try:
            key, outof, into = self._key(name, send, recv, op, root, recvcounts)
            entry = self._entries.get(key)
            if entry is None:
                return Known(key)
            # Before anything is sent: what is read-only, strided or exotic is for the general way.
            at_recv = _NULL if into is None else _from_buffer(into, require_writable=True)
            at_send = _NULL if outof is None else _from_buffer(outof)
        except (BufferError, TypeError, ValueError):
            return Known(None)
        exchange = entry.exchange
        if exchange is not None:
            exchange.again()
            if exchange.rows.tobytes() != entry.counts:
                return Known(key, exchange.rows)
        if self._run(entry.program, at_send, at_recv, (send, recv), entry.label):
            return Known(key, None, True)
        return Known(None, exchange.rows if exchange is not None else None)

    def keep(self, known: Known, prepared: Prepared, send: Any, recv: Any) -> None:
        """Remember a call that has run, if it can be run again by its addresses alone."""
        simple = prepared.steady and only_addresses(prepared, send, recv, self._in_place)
        if known.key is None or not simple or not self._from_start(prepared, send, recv):
            prepared.give_back()
            return
        old, exchange = self._entries.pop(known.key, None), prepared.exchange
        if old is not None:
            exchange = exchange or old.exchange
            if len(old.pool) < old.program.spare:
                old.pool.append(old.program)
        elif len(self._entries) >= KINDS:
            self.clear()
        counts = b"" if exchange is None else exchange.rows.tobytes()
        self._entries[known.key] = _Entry(prepared.program, prepared.pool, prepared.label, exchange, counts)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def _from_start(self, prepared: Prepared, send: Any, recv: Any) -> bool:
        """Whether what is moved begins where the arrays do, and not at a displacement (``[array, (count, displ)]``)."""
        sides = (prepared.bound.send, send), (prepared.bound.recv, recv)
        arrays = [(buffer, self._spec(spec)[1]) for buffer, spec in sides if buffer is not None]
        return all(array is None or buffer.ptr == array.ctypes.data for buffer, array in arrays)

    def _key(
        self, name: str, send: Any, recv: Any, op: Any, root: int, recvcounts: Any
    ) -> tuple[tuple[Any, ...], Any, Any]:
        """Key of calls, and the arrays of both sides."""
        if op is not None and type(op) is not Op:
            op = op_of(op)  # MPI's own cannot be hashed
            if op is None:
                raise TypeError("an operation of the user's own")
        sent, outof = self._spec(send)
        received, into = self._spec(recv)
        counts = recvcounts if recvcounts is None else _numbers(recvcounts)
        return (name, sent, received, op, root, counts), outof, into

    def _spec(self, spec: Any) -> tuple[Any, Any]:
        """A buffer's description but for the address, and its array; ``TypeError`` if it is not simple."""
        if type(spec) is _ndarray:
            return (spec.dtype, spec.size), spec
        if spec is None or spec is self._in_place:
            return None, None
        if type(spec) not in (list, tuple) or not spec or type(spec[0]) is not _ndarray:
            raise TypeError("not a numpy array with counts")
        array = spec[0]
        return (array.dtype, array.size, *map(_word, spec[1:])), array


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
