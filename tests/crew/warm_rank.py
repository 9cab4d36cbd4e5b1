"""Started by mpirun in place of a rank that `warm.py` forks: it forwards signals, and ends as the rank ends.

``python -I -S warm_rank.py DOORS program argument ...``: ranks come from two processes in turn, which hash strings
differently, so that the order of a set differs between ranks.
"""

# Modules in C: those in Python, and json, would make this program take twice as long.
import _signal as signal
import _socket as socket
import marshal
import os
import resource
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STREAMS = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))


def end_as(status):
    """End as another process did: with its status, or by signal n for -n."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def main():
    cores = sorted(os.sched_getaffinity(0))
    asked = {"words": sys.argv[2:], "env": dict(os.environ), "folder": os.getcwd(), "cores": cores}
    asked = marshal.dumps(asked)
    talk = socket.socket(socket.AF_UNIX)
    talk.connect(f"{sys.argv[1]}/{os.getpid() % 2}")
    talk.sendmsg([len(asked).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, STREAMS)])
    talk.sendall(asked)
    with open(talk.fileno(), closefd=False) as lines:
        pid = int(lines.readline())

        def pass_on(number, frame):
            try:  # noqa: SIM105
                os.kill(pid, number)
            except ProcessLookupError:
                pass

        for each in PASSED_ON:
            signal.signal(each, pass_on)
        status = int(lines.readline())
    talk.close()
    end_as(status)


if __name__ == "__main__":
    main()
