"""Lifetimes in the engine beyond their Python owners; the bell for threads that sleep until an operation ends."""

import gc
import os
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from processes import LONG, python, until

from ucc_hetero import ucx
from ucc_hetero.errors import LibraryError, LibraryNotFound
from ucc_hetero.machine.discover import host_cores
from ucc_hetero.native.libraries import ffi, lib, owned

#: Seconds after which a process of a case ends itself.
LIMIT = int(LONG / 2)


@pytest.mark.parametrize("by_thread", [0, 1], ids=["by a caller", "by the thread"])
def test_a_child_can_take_a_lock_that_was_held(by_thread):
    """A data loader's worker collects inherited requests while a thread of its parent makes progress."""
    python("lone_cases:held_lock", LIMIT, by_thread)


def test_a_child_can_give_memory_back_while_a_thread_of_its_parent_does(compiled, tmp_path):
    options = "-Wall", "-Werror", "-shared", "-fPIC"
    busy = compiled(tmp_path / "busy.so", *options, Path(__file__).with_name("busy.c"), "-lpthread")
    python("lone_cases:given_back", LIMIT, str(busy))


def test_what_is_collected_under_the_lock_may_take_it():
    """Python holds the engine's lock during calls of libucc, and may collect garbage at any time."""
    python("lone_cases:collected_under_the_lock", LIMIT)


def context_of_ucx():
    try:
        return ucx.Context()
    except LibraryNotFound as error:
        pytest.skip(str(error))


@pytest.fixture
def loop():
    """A UCX worker, and a connection to itself."""
    with context_of_ucx() as context:
        worker = context.worker()
        connection = worker.connect(worker.address)
        yield worker, connection
        connection.close()
        worker.close()


def test_a_dropped_receive_keeps_its_memory(loop):
    worker, connection = loop
    rng = np.random.default_rng()
    into, data = np.full(100_000, 7, np.uint8), rng.integers(0, 255, 100_000, np.uint8)
    alive = weakref.ref(into)
    message = worker.recv(into, tag=3)
    del into, message
    gc.collect()
    assert alive() is not None, "libucp still writes there"
    sent = worker.send(connection, data, tag=3)
    sent.wait()
    until(lambda: worker.progress() == 0 and (alive()[-100:] == data[-100:]).all())
    worker.send(connection, b"", tag=4).wait()  # the next operation releases ended ones
    gc.collect()
    assert alive() is None


def test_a_dropped_send_arrives(loop):
    worker, connection = loop
    data = np.random.default_rng().integers(0, 255, 3_000_000, np.uint8)
    want = data.copy()
    worker.send(connection, data, tag=5)
    del data
    gc.collect()
    into = np.full(want.size, 7, np.uint8)
    worker.recv(into, tag=5).wait()
    assert (into == want).all()


def test_a_receive_ends_with_its_worker():
    """It must not be cancelled at its deadline in a worker that no longer exists."""
    with context_of_ucx() as context:
        worker = context.worker()
        message = worker.recv(np.zeros(100), tag=6, timeout=0.05)
        worker.close()
        time.sleep(0.1)
        with pytest.raises(LibraryError, match="message"):
            until(message.test)


def test_a_native_object_is_freed_behind_what_asks_for_it():
    """In a cycle Python calls finalizers in any order, usually an older object's first."""
    order = []

    class Asks:
        def __init__(self, native):
            self.native, self.itself = native, self

        def __del__(self):
            order.append("asked")

    native = owned(ffi.new("int *"), lambda _: order.append("freed"))
    gc.collect()
    Asks(native)
    del native
    gc.collect()
    assert order == ["asked", "freed"]


def test_whoever_sleeps_is_woken():
    """Also if the bell rings before the sleep; no thread sleeps longer than asked, and ended operations do not ring."""
    known, woken = lib.ucch_doorbell_count(), threading.Event()

    def sleep():
        lib.ucch_doorbell_wait(known, LONG)
        woken.set()

    threading.Thread(target=sleep, daemon=True).start()
    lib.ucch_doorbell_ring()
    assert woken.wait(LONG / 2)
    lib.ucch_doorbell_wait(known, LONG)  # the test's own limit is shorter
    lib.ucch_doorbell_wait(known + 1, 1e-3)
    message = lib.ucch_message_new()
    lib.ucch_listen(lib.ucch_message_op(message))
    assert lib.ucch_doorbell_count() == known + 1 and lib.ucch_peek(lib.ucch_message_op(message)) == 1
    lib.ucch_message_free(message)


@pytest.mark.skipif(len(host_cores()) < 2, reason="needs two cores")
def test_the_progress_thread_leaves_the_core_that_its_process_is_bound_to():
    core = min(host_cores())
    on_it = partial(os.sched_setaffinity, 0, {core})
    python("lone_cases:bound", core, env={"OPENBLAS_NUM_THREADS": "1"}, preexec_fn=on_it)
