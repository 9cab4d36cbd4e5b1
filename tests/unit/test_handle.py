"""Tables of native objects that threads share, and their lock."""

import os
import signal
import sys
import threading
from collections import deque

import pytest
from processes import python

import __main__
from ucc_hetero import ucx
from ucc_hetero.bindings.handle import Present, locked
from ucc_hetero.native.libraries import lib


class Thing:
    pass


def test_those_present_while_threads_add():
    """Referenced objects are all present, unreferenced ones are not."""
    present, over, held = Present[Thing](), threading.Event(), [Thing() for _ in range(50)]
    for each in held:
        present.add(each)

    def adds():
        some = deque(maxlen=30)
        while not over.is_set():
            some.append(Thing())
            present.add(some[-1])

    usual, threads = sys.getswitchinterval(), [threading.Thread(target=adds) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(3000):
            assert {*map(id, held)} <= {*map(id, present.all())}
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(usual)
    del held[10:], each
    assert {*map(id, present.all())} == {*map(id, held)}


def test_interrupted_while_it_waits_for_the_lock():
    """Ctrl-C is raised after the lock is taken, before the next line; otherwise the lock would never be released."""
    main, held, free = threading.get_ident(), threading.Event(), threading.Event()

    def holds():
        lib.ucch_lock()
        held.set()
        while sys._current_frames()[main].f_code is not locked.__code__:
            pass  # once it waits in C, it has this thread's processor
        os.kill(os.getpid(), signal.SIGINT)
        lib.ucch_unlock()

    def takes():
        lib.ucch_lock()
        lib.ucch_unlock()
        free.set()

    thread = threading.Thread(target=holds)
    thread.start()
    held.wait()
    with pytest.raises(KeyboardInterrupt):
        locked(int)
    thread.join()
    threading.Thread(target=takes, daemon=True).start()
    assert free.wait(20)


def ends_with_the_lock_held():
    """A daemon thread takes the lock repeatedly. Its frames do not keep the message alive."""
    held = threading.Event()

    def slow():
        held.set()
        lib.ucch_doorbell_wait(lib.ucch_doorbell_count(), 0.1)

    def has_it():
        while True:
            locked(slow)

    __main__.message = ucx.Context().worker().recv(bytearray(8), 5)
    threading.Thread(target=has_it, daemon=True).start()
    held.wait()


def test_the_lock_at_the_end_of_python():
    """A thread that holds the lock then, and ends on its way back to Python, never releases it: a message's end waits
    for it."""
    python("test_handle:ends_with_the_lock_held", timeout=60)
