"""The bell, for those who sleep until something ends (cffi_build/base/op.c)."""

import os
import subprocess
import sys
import threading

import pytest

from ucc_hetero.machine.discover import host_cores
from ucc_hetero.native.libraries import lib

LONG = 600.0


def test_whoever_sleeps_is_woken() -> None:
    known = lib.ucch_rings()
    woken = threading.Event()

    def sleep() -> None:
        lib.ucch_await_ring(known, LONG)
        woken.set()

    sleeper = threading.Thread(target=sleep, daemon=True)
    sleeper.start()
    lib.ucch_ring()
    assert woken.wait(LONG / 2)
    assert lib.ucch_rings() == known + 1


def test_a_ring_before_the_sleep_is_not_missed() -> None:
    known = lib.ucch_rings()
    lib.ucch_ring()
    lib.ucch_await_ring(known, LONG)  # the test's own limit is shorter


def test_nobody_sleeps_longer_than_asked() -> None:
    lib.ucch_await_ring(lib.ucch_rings(), 1e-3)


def test_listening_to_what_has_ended_rings_nothing() -> None:
    message = lib.ucch_message_new()
    known = lib.ucch_rings()
    lib.ucch_listen(lib.ucch_message_op(message))
    assert lib.ucch_rings() == known and lib.ucch_peek(lib.ucch_message_op(message)) == 1
    lib.ucch_message_free(message)


BOUND = """
import os, sys
core = int(sys.argv[1])
os.sched_setaffinity(0, {core})
before = set(os.listdir("/proc/self/task"))
from ucc_hetero.native.libraries import lib
assert lib.ucch_progress_thread(1) == 0
(made,) = set(os.listdir("/proc/self/task")) - before
while os.sched_getaffinity(int(made)) == {core}:
    os.sched_yield()
assert os.sched_getaffinity(0) == {core}
lib.ucch_progress_thread(0)
"""


@pytest.mark.skipif(len(host_cores()) < 2, reason="a host of one core")
def test_the_progress_thread_leaves_the_core_that_its_process_is_bound_to() -> None:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", BOUND, str(min(host_cores()))], check=True, timeout=60, env=environment)
