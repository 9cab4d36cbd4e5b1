"""Cases of test_rma_processes.py: a process and its child, which are connected, and have memory at the same address;
two workers of a process that lacks memory."""

import ctypes
import mmap
import os
import signal
import sys
import time
from types import SimpleNamespace


def serve(room, asked, told):
    import numpy as np

    from ucc_hetero import rma

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with its parent
    worker = rma.Worker()
    worker.connect(bytes.fromhex(os.read(asked, 1 << 16).decode()))
    region = worker.register(np.frombuffer(room, np.uint8))
    os.write(told, f"{worker.address.hex()} {region.descriptor.hex()}".encode())
    worker.wait_notification()
    os.write(told, b"got")
    time.sleep(1000)


def connected(size):
    """Fork the child, and put into its memory once."""
    room = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    down, up = os.pipe(), os.pipe()
    if not (child := os.fork()):
        serve(room, down[0], up[1])
    import numpy as np

    from ucc_hetero import rma

    worker = rma.Worker()
    os.write(down[1], worker.address.hex().encode())
    address, descriptor = map(bytes.fromhex, os.read(up[0], 1 << 16).decode().split())
    peer, ones = worker.connect(address), worker.register(np.ones(size, np.uint8))
    target = peer.open(descriptor)
    peer.put(ones, target).Wait()
    peer.notify().Wait()
    os.read(up[0], 3)
    return SimpleNamespace(child=child, room=room, down=down, worker=worker, peer=peer, ones=ones, target=target)


def reused():
    """The peer is killed, and another process gets its process id."""
    two = connected(4096)
    if not two.peer.native.by_kernel:
        sys.exit("skip: the kernel copies nothing here")
    os.kill(two.child, signal.SIGKILL)
    os.waitpid(two.child, 0)
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write(str(two.child - 1))
    if not (other := os.fork()):
        os.read(two.down[0], 1)
        os._exit(any(two.room[:]))
    assert other == two.child
    time.sleep(0.1)  # no number is used again as fast
    from ucc_hetero.errors import PeerError

    try:
        two.peer.put(two.ones, two.target).Wait()
        print("put")
    except PeerError:
        print("refused")
    os.write(two.down[1], b"x")
    print("clean" if os.waitpid(other, 0)[1] == 0 else "written to", flush=True)
    os._exit(0)


def many():
    """Many more than libucp and the peer accept: progress only looks as far as the first unfinished one."""
    two = connected(4096)
    os.kill(two.child, signal.SIGSTOP)
    begun = [two.peer.notify() for _ in range(4_000)]
    print(len(begun), flush=True)
    os.kill(two.child, signal.SIGKILL)
    os._exit(0)


def under_way():
    """Puts that take far longer than the closing worker waits for them."""
    two = connected(16 << 20)
    from ucc_hetero.rma import worker as workers

    workers._PATIENCE = workers._LEAVING = 0.01
    begun = [two.peer.put(two.ones, two.target) for _ in range(256)]
    two.worker.close()
    two.ones.close()
    print(len(begun), flush=True)
    os.kill(two.child, signal.SIGKILL)


def no_memory(library):
    """For a notification, short or long, here or in libucp, and for the message that withdraws a region."""
    import numpy as np
    import pytest
    from processes import until

    from ucc_hetero import rma
    from ucc_hetero.errors import CollectiveTimeout

    less = ctypes.CDLL(library)
    with rma.Worker() as one, rma.Worker() as other:
        there = one.connect(other.address)
        other.connect(one.address)

        # The sender's memory is for the message with its header, the receiver's for less, libucp's for more.
        for size, least, most in ((777, 0, 56), (65_000, 0, 56), (65_000, 57, 1000)):
            less.no_memory(ctypes.c_size_t(size + least), ctypes.c_size_t(size + most), 0)
            there.notify(bytes(size)).Wait()
            until(less.has_failed)
            there.notify(b"next").Wait()
            with pytest.raises(MemoryError, match="a notification of a peer is lost"):
                other.wait_notification(60)
            assert other.wait_notification(60).data == b"next"
        again, region = rma.Worker(), other.register(np.zeros(8))
        again.connect(other.address)
        other.connect(again.address)
        less.no_memory(ctypes.c_size_t(50), ctypes.c_size_t(64), 0)  # a message without data
        region.revoke()
        assert less.has_failed()
        with pytest.raises(CollectiveTimeout, match="still in use"):
            region.close(0.1)
    print("right", flush=True)
    os._exit(0)
