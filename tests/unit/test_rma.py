"""One-sided communication: its bytes and lists, workers, and what ends while it is used."""

import asyncio
import contextlib
import os
import random
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import Instead, in_threads, until

from ucc_hetero import device, rma
from ucc_hetero.errors import DeviceError, PeerError
from ucc_hetero.native.libraries import ffi, lib
from ucc_hetero.rma import endpoint as endpoints
from ucc_hetero.rma import region as regions
from ucc_hetero.rma import request as requests
from ucc_hetero.rma import worker as workers
from ucc_hetero.rma.endpoint import _lists
from ucc_hetero.rma.request import ENDED, _complete_at_end
from ucc_hetero.rma.wire_format import Address, Descriptor, FormatError
from ucc_hetero.rma.worker import _may_open


def sample():
    key = secrets.token_bytes(200)
    number = int.from_bytes(key[:8], "little")
    interfaces = tuple(key[24:31])
    return Address(number, key[8:24], 4711, interfaces, key), Descriptor(number, 5, 1 << 40, 1 << 33, "amd", key)


def test_processes_whose_memory_may_not_be_opened(monkeypatch):
    def refuse(path):
        raise PermissionError

    assert _may_open(os.getpid())
    monkeypatch.setattr(os, "readlink", refuse)
    assert not _may_open(os.getpid())


def test_what_was_packed_comes_back():
    for each in sample():
        assert type(each).unpack(each.pack()) == each
        assert type(each).unpack(memoryview(bytearray(each.pack()))) == each


@pytest.mark.parametrize("kind", [Address, Descriptor])
def test_other_bytes_are_refused(kind):
    address, descriptor = sample()
    mine, other = (address, descriptor) if kind is Address else (descriptor, address)
    data = mine.pack()
    with pytest.raises(TypeError, match="must be bytes, not str"):
        kind.unpack("text")
    for wrong in (b"", other.pack(), data[:20], data + bytes(64 << 10)):
        with pytest.raises(FormatError, match="are no"):
            kind.unpack(wrong)
    with pytest.raises(FormatError, match=r"has version 1, but this side has 2: both need one ucc_hetero"):
        kind.unpack(data[:4] + b"\1\0" + data[6:])


@settings(max_examples=300, deadline=None, database=None)
@given(st.data())
def test_damage_is_noticed(data):
    for each in sample():
        packed = bytearray(each.pack())
        for _ in range(data.draw(st.integers(1, 3))):
            packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
        with contextlib.suppress(FormatError):
            assert type(each).unpack(packed) == each, "one change has undone another"


def test_lists_are_of_one_length_and_inside():
    mine, theirs, lengths = _lists(100, 200, np.arange(3), 7, 5)
    assert (mine.tolist(), theirs.tolist(), lengths.tolist()) == ([0, 1, 2], [7] * 3, [5] * 3)
    assert _lists(100, 100, 0, 0, None)[2].tolist() == [100]
    same = np.arange(9, dtype=np.uint64)
    assert _lists(100, 100, same, same, same)[0] is same, "not copied"
    for wrong in ((101, 0, 0), (0, 201, 0), (96, 0, 5), (0, 196, 5), (0, 0, 101), ((1 << 64) - 1, 0, 5)):
        with pytest.raises(ValueError, match="do not fit into the region's"):
            _lists(100, 200, *(np.array([each], np.uint64) for each in wrong))
    with pytest.raises(ValueError, match="may have 1048576"):
        _lists(100, 100, np.zeros((1 << 20) + 1, np.uint64), 0, 0)
    for bad in ("x", 1.5, [[1]], [], None):
        with pytest.raises(TypeError, match="local_offsets"):
            _lists(100, 100, bad, 0, 0)


@pytest.mark.parametrize("function", ["ucch_region_new", "ucch_target_new", "ucch_transfer_new"])
def test_no_memory_for_what_the_engine_makes(monkeypatch, function):
    """It returns NULL, which its other functions would use."""

    with rma.Worker() as one, rma.Worker() as other:
        there, _ = one.connect(other.address), other.connect(one.address)
        room = other.register(bytearray(8)).descriptor
        for module in regions, endpoints, requests:
            monkeypatch.setattr(module, "lib", Instead(lib, **{function: lambda *_: ffi.NULL}))
        with pytest.raises(MemoryError):
            there.put(one.register(bytearray(8)), there.open(room))


def test_a_loop_that_is_closed_meanwhile_keeps_nobody_elses_from_hearing():
    """The thread that wakes event loops used to end at the first closed one."""

    class Closing:
        """An event loop that is closed between the check and the call."""

        def is_closed(self):
            return False

        def call_soon_threadsafe(self, *_):
            raise RuntimeError("Event loop is closed")

    ended = ffi.gc(lib.ucch_message_new(), lib.ucch_message_free)

    async def main():
        loop = asyncio.get_running_loop()
        gone, ours = loop.create_future(), loop.create_future()
        _complete_at_end(lib.ucch_message_op(ended), ended, Closing(), gone)
        await asyncio.sleep(0.05)
        _complete_at_end(lib.ucch_message_op(ended), ended, loop, ours)
        await asyncio.wait_for(ours, 600)

    asyncio.run(main())


def test_threads_that_connect_at_the_same_time_have_one_endpoint():
    """Each pair has one endpoint, and each thread a counter."""
    with contextlib.ExitStack() as ended:
        worker, *peers = (ended.enter_context(rma.Worker()) for _ in range(5))
        together, found = threading.Barrier(6), []

        def connect():
            together.wait()
            found.append(([worker.connect(peer.address) for peer in peers], worker.counter().number))

        in_threads(*[connect] * 6)
        assert [[worker.peers[peer.uid] for peer in peers]] * 6 == [endpoints for endpoints, _ in found]
        assert sorted(number for _, number in found) == [*range(6)]
        room, given = np.zeros(1000, np.uint8), np.frombuffer(secrets.token_bytes(1000), np.uint8).copy()
        (endpoint, *_), _ = random.choice(found)
        [peer.connect(worker.address) for peer in peers]
        target = endpoint.open(peers[0].register(room).descriptor)
        endpoint.put(worker.register(given), target).Wait()
        assert (room == given).all()


@pytest.fixture
def joined():
    with rma.Worker() as worker, rma.Worker() as other:
        other.connect(worker.address)
        yield worker, other, worker.connect(other.address)


def test_what_a_peer_sends_before_this_side_connects_waits_for_it():
    """Either side may be first: its notifications and its question for a region are handled afterwards, in order."""
    room = np.zeros(1000)
    with rma.Worker() as first, rma.Worker() as second, ThreadPoolExecutor() as pool:
        region, mine = second.register(room), first.register(np.arange(1000.0))
        peer, counter = first.connect(second.address), second.counter()
        for word in (b"one", b"two"):
            peer.notify(word, counter=counter.number).Wait()
        opened = pool.submit(peer.open, region.descriptor)
        for _ in range(1000):  # they arrive, as a rule
            lib.ucch_progress_once()
        assert not second.notifications()
        back = second.connect(first.address)
        found = [second.wait_notification() for _ in range(2)]
        assert [(each.data, each.peer) for each in found] == [(b"one", back), (b"two", back)] and counter.value == 2
        peer.put(mine, opened.result()).Wait()
        assert (room == np.arange(1000.0)).all()


def test_more_than_is_kept_before_this_side_connects_is_an_error():
    with rma.Worker() as first, rma.Worker() as second:
        peer = first.connect(second.address)
        for i in range(257):  # one too many
            peer.notify(b"%d" % i).Wait()
        with pytest.raises(MemoryError, match="notification"):
            while not second.notifications():
                lib.ucch_progress_once()
        second.connect(first.address)
        assert second.wait_notification().data == b"0"


def test_mistakes_of_transfers_are_named(joined):
    worker, other, endpoint = joined
    array = np.zeros(8)
    region, target = worker.register(array), endpoint.open(other.register(np.zeros(8)).descriptor)
    for more in ({}, {"notify": b"x"}):
        with pytest.raises(TypeError, match=r"local: must be a Region, which Worker.register returns, not ndarray"):
            endpoint.put(array, target, **more)
        with pytest.raises(TypeError, match=r"target: must be a Target, which Endpoint.open returns, not bytes"):
            endpoint.get(region, b"descriptor", **more)
    with pytest.raises(TypeError, match="notify: must be bytes, not str"):
        endpoint.put(region, target, notify="text")
    with worker.counter() as counter, pytest.raises(ValueError, match="least: -1; a counter begins at 0"):
        counter.wait(-1)
    if not device.available():
        with pytest.raises(DeviceError, match="put: stream: this process has no device"):
            endpoint.put(region, target, stream=0)
    array.flags.writeable = False
    with pytest.raises(BufferError, match="^memory: ndarray is read-only"):  # of no rank
        worker.register(array)


def test_memory_is_filled_from_any_array():
    """The source is only read."""
    memory, data = rma.Memory.allocate(64, on="host"), os.urandom(64)
    memory.copy(data)
    assert bytes(memory.array) == data
    other = rma.Memory.allocate(64, on="host")
    other.copy(memory)
    assert bytes(other.array) == data
    for wrong, what in ((data[:8], "source: 8 bytes, but this memory has 64"), (b"", "source: the array must be")):
        with pytest.raises((ValueError, BufferError), match=what):
            memory.copy(wrong)


def test_a_closed_worker_says_so():
    worker = rma.Worker()
    worker.close()
    for call in (worker.info, partial(worker.counter().wait, 1), worker.notifications):
        with pytest.raises(ValueError, match="this Worker is closed"):
            call()


def test_an_endpoint_that_is_closed_while_it_opens_a_region(joined):
    """As by the thread that learns of the peer's end."""
    _, other, endpoint = joined
    start = endpoint._start

    def closes(*args):
        start(*args).Wait()
        endpoint.close()
        return ENDED

    endpoint._start = closes
    with pytest.raises(PeerError):
        endpoint.open(other.register(np.zeros(8)).descriptor)


def test_an_endpoint_that_is_closed_while_it_is_asked(joined, monkeypatch):
    """By the thread that reads an agent's messages: it would end, and the agent count as connected for ever."""
    *_, peer = joined
    native = rma.Endpoint.native

    def closes(self):
        self.engine, engine = 0, self.engine
        try:
            return native.fget(self)
        finally:
            self.engine = engine

    monkeypatch.setattr(rma.Endpoint, "native", property(closes))
    assert peer.alive


def test_what_is_awaited_lives_until_it_is_looked_at_no_more(joined, monkeypatch):
    """A task may be cancelled, and its request end, while the thread that watches the request looks at it."""
    worker, *_ = joined
    freed, looked, looks, goes_on = [], [], threading.Event(), threading.Event()

    def free(native):
        freed.append(lib.ucch_transfer_op(native))
        lib.ucch_transfer_free(native)

    def peek(op):
        looks.set()
        goes_on.wait(60)
        looked.append(op in freed)
        return int(lib.ucch_peek(op)) if op not in freed else 1

    monkeypatch.setattr(requests, "lib", Instead(lib, ucch_transfer_free=free, ucch_peek=peek))

    async def waits(counter):
        with contextlib.suppress(asyncio.CancelledError):
            await counter.wait(1)

    async def main():
        task = asyncio.ensure_future(waits(counter := worker.counter()))
        await asyncio.sleep(0)
        assert looks.wait(60)
        task.cancel()
        await task
        counter.close()
        lib.ucch_progress_once()
        worker.counter().wait(0)  # memory kept for transfers in progress is released
        goes_on.set()

    asyncio.run(main())
    until(lambda: looked)
    assert looked == [False]


def test_a_peer_that_does_not_let_go_is_waited_for_once(joined, monkeypatch):
    """When a worker is closed: one wait for all of its regions."""
    worker, *_ = joined
    kept, waited = [worker.register(np.zeros(8)) for _ in range(50)], []

    def does_not(done, seconds):
        waited.append(max(seconds, 0.0))
        time.sleep(waited[-1])
        return False

    monkeypatch.setattr(regions, "progress_until", does_not)
    monkeypatch.setattr(workers, "_PATIENCE", 0.1)
    worker.close()
    assert len(waited) == len(kept) and sum(waited) < 0.2


def test_peers_that_do_not_answer_are_waited_for_once(monkeypatch):
    """When a worker is closed: one wait for the ends of all connections."""
    waited = []

    def does_not(done, seconds):
        waited.append([endpoint.engine for endpoint in endpoints])
        return False

    monkeypatch.setattr(workers, "progress_until", does_not)
    with rma.Worker() as worker, rma.Worker() as one, rma.Worker() as two:
        endpoints = [worker.connect(other.address) for other in (one, two)]
        worker.close()
        assert waited == [[0, 0]]
