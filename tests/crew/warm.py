"""Forks ranks from a process that has imported the package, which is most of a rank's start-up cost.

``warm.py FD module ...``: a listening socket, and further imports. Each connection is from `warm_rank.py`, which mpirun
starts as a rank: it sends its streams, arguments, variables, folder and cores, and receives the forked rank's process
id and how it ended. The rank lives as long as the connection and this process.
"""

import atexit
import ctypes
import gc
import importlib
import marshal
import os
import selectors
import signal
import socket
import struct
import sys
import types
from contextlib import suppress
from pathlib import Path

from warm_rank import end_as

LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None, use_errno=True), 1
#: Namespaces of emulated hosts; the user namespace comes first, as it gives the right to enter the others.
SPACES = "user", "mnt", "net", "ipc", "uts", "pid"
#: Import path of programs: without this file's folder, and without those of its own PYTHONPATH.
COMMON = sys.path[1 + len([*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]) :]

#: Modules that end with Python as in any program: those under test, those that hold objects of theirs, and all below.
ENDING = "__main__", "builtins", "sys", "ucc_hetero", "mpi4py", "torch.distributed.distributed_c10d"
KEPT = []


@atexit.register  # before any other function, so that it runs after them
def keep_imported():
    """Hide modules that were imported here from the end of Python. It would clear them, and so write to, and copy, most
    of the memory that a rank shares with this process: half of what a rank costs, or three quarters with torch."""
    sys.modules.update(dict.fromkeys(KEPT))


def end_with_parent():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def enter(pid):
    """Enter the namespaces of a process, perhaps on an emulated host; only a child gets a process id there."""
    spaces = [(f"/proc/self/ns/{kind}", f"/proc/{pid}/ns/{kind}") for kind in SPACES]
    files = [os.open(there, os.O_RDONLY) for here, there in spaces if os.readlink(here) != os.readlink(there)]
    for file in files:
        if LIBC.setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)
    if files and (child := os.fork()):
        end_as(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


class Nursery:
    """The ranks, by their connections."""

    def __init__(self, door):
        self.door, self.ranks, self.ready = door, {}, selectors.PollSelector()
        self.ready.register(door, selectors.EVENT_READ)

    def serve(self):
        """Fork ranks. Returns in each of them, with the description of its program."""
        while True:
            for key, _ in self.ready.select():
                if key.fileobj is not self.door:
                    self._ended(key.data)
                elif rank := self._fork():
                    return rank

    def _fork(self):
        """Fork a rank. In the rank, return its description. The process that asked may have been killed meanwhile."""
        talk, _ = self.door.accept()
        try:
            length, streams, _, _ = socket.recv_fds(talk, 8, 3)
            with talk.makefile("rb") as file:
                asked = marshal.loads(file.read(int.from_bytes(length, "little")))
        except (OSError, ValueError, EOFError):
            talk.close()
            return None
        pid = os.fork()
        if not pid:
            self._leave(talk, streams)
            return asked
        for stream in streams:
            os.close(stream)
        self.ranks[talk] = pid, os.pidfd_open(pid)
        for each in (talk, self.ranks[talk][1]):
            self.ready.register(each, selectors.EVENT_READ, talk)
        return None

    def _leave(self, talk, streams):
        """In a rank: use its own streams, and close everything of this process."""
        end_with_parent()
        os.setpgid(0, 0)
        for number, each in enumerate(streams):
            os.dup2(each, number)
            os.close(each)
        self.ready.close()
        for other, (_, end) in self.ranks.items():
            other.close()
            os.close(end)
        self.door.close()
        enter(struct.unpack("3i", talk.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
        talk.sendall(b"%d\n" % os.getpid())
        talk.close()

    def _ended(self, talk):
        """Handle the end of a rank, or of the process that asked for it: then the rank is killed."""
        if talk not in self.ranks:
            return
        pid, end = self.ranks.pop(talk)
        for kill in (os.kill, os.killpg):  # also its children; the process id is not reused yet
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):
            talk.sendall(b"%d\n" % status)
        for each in (talk, end):
            self.ready.unregister(each)
        talk.close()
        os.close(end)


def become(asked):
    """Make this process look as if started with these arguments. Returns its program's code and namespace."""
    end_with_parent()
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["folder"])
    os.sched_setaffinity(0, asked["cores"])
    sys.argv[:] = asked["words"]
    path = Path(sys.argv[0])
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [str(path.parent), *given, *COMMON]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = str(path)
    return compile(path.read_bytes(), path, "exec"), vars(main)


if __name__ == "__main__":
    end_with_parent()
    gc.disable()  # an eighth of torch's import time is garbage collection
    for name in ("ucc_hetero", *sys.argv[2:]):
        with suppress(ImportError):  # a test that needs the module will fail
            importlib.import_module(name)
    KEPT += [name for name in sys.modules if not any(f"{name}.".startswith(f"{ending}.") for ending in ENDING)]
    for name in KEPT:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules[name]))
    if "torch" in sys.modules:
        # Its destructors in C++ take longer than most ranks. Exit functions that a rank registers run before this one;
        # ranks that are new Pythons run all destructors.
        LIBC.on_exit(LIBC._exit, None)
    gc.freeze()
    gc.enable()
    exec(*become(Nursery(socket.socket(fileno=int(sys.argv[1]))).serve()))
