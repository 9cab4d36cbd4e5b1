"""Lifetimes in the engine beyond their Python owners; the bell for threads that sleep until an operation ends."""

import gc
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from processes import LONG, python, until

from ucc_hetero import ucx
from ucc_hetero.errors import LibraryError, LibraryNotFound
from ucc_hetero.machine.discover import host_cores
from ucc_hetero.native.libraries import ffi, lib, owned


@pytest.mark.parametrize("progress", ["", "lib.ucch_progress_thread(1)"], ids=["by a caller", "by the thread"])
def test_a_child_can_take_a_lock_that_was_held(progress):
    """A data loader's worker collects inherited requests while a thread of its parent makes progress."""
    python(f"""
import os, signal, threading
from ucc_hetero.native.libraries import lib
{progress}
held, done = threading.Event(), threading.Event()
def hold():
    lib.ucch_lock()
    held.set()
    done.wait()
    lib.ucch_unlock()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if not child:
    signal.alarm({int(LONG / 2)})
    lib.ucch_lock()
    lib.ucch_unlock()
    os._exit(0)
status = os.waitpid(child, 0)[1]
done.set()
holder.join()
lib.ucch_progress_thread(0)
assert status == 0, status
""")


FORKS = """
import ctypes, os, signal, sys
from ucc_hetero.native.libraries import ffi, lib
give = int(ffi.cast("uintptr_t", ffi.addressof(lib, "ucch_pool_give")))
assert ctypes.CDLL(sys.argv[1]).begin(ctypes.c_void_p(give)) == 0
for _ in range(30):
    if not (child := os.fork()):
        signal.alarm(int(sys.argv[2]))
        lib.ucch_pool_give(ffi.NULL)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_child_can_give_memory_back_while_a_thread_of_its_parent_does(compiled, tmp_path):
    options = "-Wall", "-Werror", "-shared", "-fPIC"
    busy = compiled(tmp_path / "busy.so", *options, Path(__file__).with_name("busy.c"), "-lpthread")
    python(FORKS, busy, int(LONG / 2))


def test_what_is_collected_under_the_lock_may_take_it():
    """Python holds the engine's lock during calls of libucc, and may collect garbage at any time."""
    python(f"""
import signal
from ucc_hetero.native.libraries import lib
signal.signal(signal.SIGALRM, signal.SIG_DFL)
signal.alarm({int(LONG / 2)})
class Held:
    def __del__(self):
        lib.ucch_message_held(message)
message, held = lib.ucch_message_new(), Held()
lib.ucch_lock()
del held
lib.ucch_unlock()
lib.ucch_message_free(message)
""")


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


BOUND = """
import os, sys, threading
core = int(sys.argv[1])
os.sched_setaffinity(0, {core})
first = threading.Thread(target=int)  # ThreadSanitizer begins its own thread with the first
first.start()
first.join()
before = set(os.listdir("/proc/self/task"))
from ucc_hetero.native.libraries import lib
assert lib.ucch_progress_thread(1) == 0
(made,) = set(os.listdir("/proc/self/task")) - before
while os.sched_getaffinity(int(made)) == {core}:
    os.sched_yield()
assert os.sched_getaffinity(0) == {core}
lib.ucch_progress_thread(0)
"""


@pytest.mark.skipif(len(host_cores()) < 2, reason="needs two cores")
def test_the_progress_thread_leaves_the_core_that_its_process_is_bound_to():
    python(BOUND, min(host_cores()), env={"OPENBLAS_NUM_THREADS": "1"})
