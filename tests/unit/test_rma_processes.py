"""One-sided communication of two processes, one of which is stopped or killed in the middle of it."""

import os
import subprocess
import sys

import pytest

#: A process and its child, `serve`, which are connected, and have memory at the same address.
TWO = """
import ctypes, mmap, os, signal, sys, time

BYTES = int(sys.argv[1])
room = mmap.mmap(-1, BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
down, up = os.pipe(), os.pipe()

def serve():
    import numpy as np
    from ucc_hetero import rma
    worker = rma.Worker()
    worker.connect(bytes.fromhex(os.read(down[0], 1 << 16).decode()))
    region = worker.register(np.frombuffer(room, np.uint8))
    os.write(up[1], f"{worker.address.hex()} {region.descriptor.hex()}".encode())
    worker.wait_notification()
    os.write(up[1], b"got")
    time.sleep(1000)

if not (pid := os.fork()):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with its parent
    serve()
import numpy as np
from ucc_hetero import errors, rma
from ucc_hetero.native.libraries import lib
from ucc_hetero.rma import worker as workers
worker = rma.Worker()
os.write(down[1], worker.address.hex().encode())
address, descriptor = map(bytes.fromhex, os.read(up[0], 1 << 16).decode().split())
peer = worker.connect(address)
target, ones = peer.open(descriptor), worker.register(np.ones(BYTES, np.uint8))
peer.put(ones, target).Wait()
peer.notify().Wait()
os.read(up[0], 3)
"""

#: The peer is killed, and another process gets its process id.
REUSED = TWO
REUSED += """
if not peer.native.by_kernel:
    sys.exit("skip: the kernel copies nothing here")
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
with open("/proc/sys/kernel/ns_last_pid", "w") as last:
    last.write(str(pid - 1))
if not (other := os.fork()):
    os.read(down[0], 1)
    os._exit(any(room[:]))
assert other == pid
time.sleep(0.1)  # no number is used again as fast
try:
    peer.put(ones, target).Wait()
    print("put")
except errors.PeerError:
    print("refused")
os.write(down[1], b"x")
print("clean" if os.waitpid(other, 0)[1] == 0 else "written to", flush=True)
os._exit(0)
"""

#: Many more than libucp and the peer accept: progress only looks as far as the first unfinished one.
MANY = TWO
MANY += """
os.kill(pid, signal.SIGSTOP)
begun = [peer.notify() for _ in range(4_000)]
print("begun", flush=True)
os.kill(pid, signal.SIGKILL)
os._exit(0)
"""

#: Puts that take far longer than the closing worker waits for them.
UNDER_WAY = TWO
UNDER_WAY += """
workers._PATIENCE = workers._LEAVING = 0.01
begun = [peer.put(ones, target) for _ in range(256)]
worker.close()
ones.close()
print("closed", flush=True)
os.kill(pid, signal.SIGKILL)
"""


def two(script, room, tmp_path, before=()):
    path = tmp_path / "job.py"
    path.write_text(script)
    words = [*before, sys.executable, str(path), str(room)]
    return subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(("script", "room", "said"), [(MANY, 4096, "begun"), (UNDER_WAY, 16 << 20, "closed")])
def test_much_is_under_way(tmp_path, script, room, said):
    """Transfers that wait for each other, and work of libucp when the worker is closed, used to end the process."""
    done = two(script, room, tmp_path)
    assert (done.returncode, done.stdout.split()) == (0, [said]), done


def test_a_number_that_another_process_has_now(tmp_path):
    """The peer's memory is now another process's, and nothing is written to it."""
    own = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    done = two(REUSED, 4096, tmp_path, (*own, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"))
    if "skip" in done.stderr or "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.split() == ["refused", "clean"], done
