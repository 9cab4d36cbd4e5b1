"""Cases that need a process of their own: locks across a fork, a thread's core, the engine's device."""

import ctypes
import os
import signal
import subprocess
import threading
from pathlib import Path

from processes import in_child

from ucc_hetero import device
from ucc_hetero.machine.vendors import Vendor
from ucc_hetero.native.libraries import ffi, lib, load


def held_lock(limit, by_thread):
    """A child takes the engine's lock, which a thread of its parent has at the fork."""
    lib.ucch_progress_thread(by_thread)
    held, done = threading.Event(), threading.Event()

    def hold():
        lib.ucch_lock()
        held.set()
        done.wait()
        lib.ucch_unlock()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    if not (child := os.fork()):
        signal.alarm(limit)
        lib.ucch_lock()
        lib.ucch_unlock()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    done.set()
    holder.join()
    lib.ucch_progress_thread(0)
    assert status == 0, status


def given_back(limit, busy):
    """Children give memory back while a thread of their parent does."""
    give = int(ffi.cast("uintptr_t", ffi.addressof(lib, "ucch_pool_give")))
    assert ctypes.CDLL(busy).begin(ctypes.c_void_p(give)) == 0
    for _ in range(30):
        in_child(lambda: lib.ucch_pool_give(ffi.NULL), limit)


class Held:
    def __init__(self, message):
        self.message = message

    def __del__(self):
        lib.ucch_message_held(self.message)


def collected_under_the_lock(limit):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(limit)
    message = lib.ucch_message_new()
    held = Held(message)
    lib.ucch_lock()
    del held
    lib.ucch_unlock()
    lib.ucch_message_free(message)


def bound(core):
    """The progress thread of a process that was started on one core."""
    first = threading.Thread(target=int)  # ThreadSanitizer begins its own thread with the first
    first.start()
    first.join()
    before = set(os.listdir("/proc/self/task"))
    assert lib.ucch_progress_thread(1) == 0
    (made,) = set(os.listdir("/proc/self/task")) - before
    while os.sched_getaffinity(int(made)) == {core}:
        os.sched_yield()
    assert os.sched_getaffinity(0) == {core}
    lib.ucch_progress_thread(0)


def reused_number():
    """In a PID namespace, where the next process id can be chosen."""

    def child():
        return subprocess.Popen(["sleep", "300"])

    for _ in range(520):  # more than are remembered
        if not (ended := os.fork()):
            os._exit(0)
        lib.ucch_process_meet(ended)
        os.waitpid(ended, 0)
    assert len(os.listdir("/proc/self/fd")) < 200, "descriptors of ended processes are kept"
    first = child()
    lib.ucch_process_meet(first.pid)
    assert not lib.ucch_process_ended(first.pid)
    first.kill()
    first.wait()
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(first.pid - 1))
    second = child()
    assert second.pid == first.pid, "another process came between"
    assert lib.ucch_process_ended(first.pid), "the one that was met has ended"
    lib.ucch_process_meet(second.pid)
    assert not lib.ucch_process_ended(second.pid)
    second.kill()
    second.wait()
    assert lib.ucch_process_ended(second.pid)


def guard(path, is_set):
    """A plugin gives up a request that is none; libucp reports an endpoint's error."""
    load()
    plugin = ctypes.CDLL(path)
    if is_set:
        assert lib.ucch_guard_cancel() == 0 == lib.ucch_guard_cancel()
    assert lib.ucch_endpoint_errors() == 0
    plugin.give_up()
    assert lib.ucch_endpoint_errors() == 1


def pool(path):
    """Progress gives memory back, and does not wait for another thread's allocation."""
    device.register(Vendor(name="sim", adapter="sim", setting="SIM_LIB"))
    runtime = device.runtime_of("sim")
    assert runtime is not None, device.report("sim")
    runtime.use(0)
    assert not lib.ucch_device_bind(runtime.code, 0, True)
    library, made, again = ctypes.CDLL(path), [], []
    first = lib.ucch_pool_take(0, 4096, ffi.NULL, 1)
    library.gate(1)

    def allocate():
        runtime.use(0)
        made.append(lib.ucch_pool_take(0, 1 << 20, ffi.NULL, 1))

    def go_on():
        lib.ucch_pool_give(first)
        again.append(lib.ucch_pool_take(0, 4096, ffi.NULL, 0))

    slow, other = threading.Thread(target=allocate), threading.Thread(target=go_on)
    slow.start()
    while not library.at_gate():
        pass
    other.start()
    other.join(20)
    waits = other.is_alive()
    library.gate(0)
    slow.join()
    other.join()
    assert not waits
    assert again == [first] and made[0] != ffi.NULL
    lib.ucch_pool_give(made[0])
    assert lib.ucch_pool_take(0, 1 << 20, ffi.NULL, 0) == made[0]
