"""Addresses, descriptors and lists of one-sided communication, and what becomes of bytes that are none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from ucc_hetero.native.libraries import ffi, lib
from ucc_hetero.rma.endpoint import _lists
from ucc_hetero.rma.request import _Watcher
from ucc_hetero.rma.wire_format import Address, Descriptor, FormatError
from ucc_hetero.rma.worker import _may_open

#: Inputs of each fuzzed reader.
INPUTS = 300


def sample() -> tuple[Address, Descriptor]:
    key = secrets.token_bytes(200)
    number = int.from_bytes(key[:8], "little")
    interfaces = tuple(key[24:31])
    return Address(number, key[8:24], 4711, interfaces, key), Descriptor(number, 5, 1 << 40, 1 << 33, "amd", key)


def test_processes_whose_memory_may_not_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> str:
        raise PermissionError

    assert _may_open(os.getpid())
    monkeypatch.setattr(os, "readlink", refuse)
    assert not _may_open(os.getpid())


def test_what_was_packed_comes_back() -> None:
    for each in sample():
        assert type(each).unpack(each.pack()) == each
        assert type(each).unpack(memoryview(bytearray(each.pack()))) == each


@pytest.mark.parametrize("kind", [Address, Descriptor])
def test_other_bytes_are_refused(kind: type) -> None:
    address, descriptor = sample()
    mine, other = (address, descriptor) if kind is Address else (descriptor, address)
    data = mine.pack()
    with pytest.raises(TypeError, match="must be bytes, not str"):
        kind.unpack("text")
    for wrong in (b"", other.pack(), data[:20], data + bytes(64 << 10)):
        with pytest.raises(FormatError, match="are no"):
            kind.unpack(wrong)
    with pytest.raises(FormatError, match=r"has version 1, and this is 2: both sides need one ucc_hetero"):
        kind.unpack(data[:4] + b"\1\0" + data[6:])


@hypothesis.settings(max_examples=INPUTS, deadline=None, database=None)
@hypothesis.given(strategies.data())
def test_damage_is_noticed(data: strategies.DataObject) -> None:
    for each in sample():
        packed = bytearray(each.pack())
        for _ in range(data.draw(strategies.integers(1, 3))):
            packed[data.draw(strategies.integers(0, len(packed) - 1))] ^= data.draw(strategies.integers(1, 255))
        with contextlib.suppress(FormatError):
            assert type(each).unpack(packed) == each, "one change has undone another"


def test_lists_are_of_one_length_and_inside() -> None:
    mine, theirs, lengths = _lists(100, 200, np.arange(3), 7, 5)
    assert (mine.tolist(), theirs.tolist(), lengths.tolist()) == ([0, 1, 2], [7] * 3, [5] * 3)
    assert _lists(100, 100, 0, 0, None)[2].tolist() == [100]
    same = np.arange(9, dtype=np.uint64)
    assert _lists(100, 100, same, same, same)[0] is same, "not copied"
    for wrong in ((101, 0, 0), (0, 201, 0), (96, 0, 5), (0, 196, 5), (0, 0, 101), ((1 << 64) - 1, 0, 5)):
        with pytest.raises(ValueError, match="do not fit into the region's"):
            _lists(100, 200, *(np.array([each], np.uint64) for each in wrong))
    with pytest.raises(ValueError, match="has 1048576 at most"):
        _lists(100, 100, np.zeros((1 << 20) + 1, np.uint64), 0, 0)
    for bad in ("x", 1.5, [[1]], [], None):
        with pytest.raises(TypeError, match="local_offsets"):
            _lists(100, 100, bad, 0, 0)


def test_a_loop_that_is_closed_meanwhile_keeps_nobody_elses_from_hearing() -> None:
    """The thread that tells them used to end with the first such one."""

    class Closing:
        """As an event loop between the question whether it is closed and the call."""

        def is_closed(self) -> bool:
            return False

        def call_soon_threadsafe(self, *_: Any) -> None:
            raise RuntimeError("Event loop is closed")

    watcher, ended = _Watcher(), ffi.gc(lib.ucch_message_new(), lib.ucch_message_free)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        gone, ours = loop.create_future(), loop.create_future()
        watcher.add(lib.ucch_message_op(ended), Closing(), gone)  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        watcher.add(lib.ucch_message_op(ended), loop, ours)
        await asyncio.wait_for(ours, 600)

    asyncio.run(main())
