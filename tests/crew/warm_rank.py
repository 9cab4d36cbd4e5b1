"""Started by mpirun in place of a rank that `warm.py` forks: it forwards signals, and ends as the rank ends.

``python -I -S warm_rank.py DOORS program argument ...``: ranks come from two processes in turn, which hash strings
differently, so that the order of a set differs between ranks.
"""

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def end_as(status):
    """End as another process did: with its status, or by signal n for -n."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def main():
    cores = sorted(os.sched_getaffinity(0))
    asked = {"words": sys.argv[2:], "env": dict(os.environ), "folder": os.getcwd(), "cores": cores}
    with socket.socket(socket.AF_UNIX) as talk:
        talk.connect(f"{sys.argv[1]}/{os.getpid() % 2}")
        socket.send_fds(talk, [b" "], [0, 1, 2])
        talk.sendall(json.dumps(asked).encode() + b"\n")
        with talk.makefile() as lines:
            pid = int(lines.readline())

            def pass_on(number, frame):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

            for each in PASSED_ON:
                signal.signal(each, pass_on)
            status = int(lines.readline())
    end_as(status)


if __name__ == "__main__":
    main()
