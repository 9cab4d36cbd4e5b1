"""Init process of an emulated host, and the client that starts commands on the host.

Run as a file by the interpreter alone (``python -I -S emulated_node.py MODE …``), with the standard library only: one
such process starts for every host and for every remote command, and must cost milliseconds:

``init SOCKET``
    process 1 of a host, with its login environment. It prints ``up`` and starts commands on request. When its standard
    input ends, because the cluster's owner closed it or died, it exits, and the kernel kills every process of
    the host.
``exec DIR HOST PROGRAM …``
    run a program on a host with this process's environment, directory and standard streams.
``ssh DIR [ssh's options] HOST COMMAND …``
    the same with ssh's arguments, as an MPI launcher calls its launch agent: a shell command, in the host's
    login environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

#: Seconds between SIGTERM and SIGKILL for a command whose client has gone.
GRACE = 2.0

#: Descriptors passed with a request: standard input, output and error, working directory, and the request.
FDS = 5

_SSH_FLAGS_WITH_VALUE = "BbcDEeFIiJLlmOopQRSWw"


def serve(address: str) -> None:
    """Run as process 1 of a host, with a child process for each client, until the owner ends it."""
    # Let the kernel reap children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(address)
        door.listen(64)
        os.write(1, b"up\n")
        while True:
            ready, _, _ = select.select([0, door.fileno()], [], [])
            if door.fileno() in ready:
                client, _ = door.accept()
                with client:
                    if os.fork() == 0:
                        door.close()
                        attend(client)
            # A byte on standard input: kill all other processes on this host. End of input: end the host.
            if 0 in ready and not os.read(0, 1):
                return
            if 0 in ready:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)


def attend(client: socket.socket) -> NoReturn:
    """Run a client's command, forward its signals (a byte each), report how it ended, and exit.

    If the client disappears, the command is ended, as when an ssh session ends. A client that sends an invalid request
    affects nothing else.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    client.settimeout(5.0)  # for the request only
    try:
        _, fds, _, _ = socket.recv_fds(client, 1, FDS)
        if len(fds) != FDS:
            raise ValueError("it was cut short")
        for fd in fds:
            os.set_inheritable(fd, False)
        with open(fds[-1], closefd=False) as body:
            request = json.load(body)
        client.settimeout(None)
        pid = os.fork()
        if pid == 0:
            become_command(request, fds)
        for fd in fds:
            os.close(fd)
        ended = os.pidfd_open(pid)
        while ended not in select.select([client.fileno(), ended], [], [])[0]:
            if number := client.recv(1):
                _kill_group(pid, number[0])
                continue
            _kill_group(pid, signal.SIGTERM)
            select.select([ended], [], [], GRACE)
            _kill_group(pid, signal.SIGKILL)
            break
        client.sendall(struct.pack("!i", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    except BrokenPipeError:
        pass
    except (OSError, ValueError) as error:
        print(f"emulated host: a request was refused: {error}", file=sys.stderr)
    finally:
        os._exit(0)


def become_command(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """In the child: take over the client's streams, directory and environment, then exec the program."""
    code = 126
    try:
        os.setsid()
        os.fchdir(fds[3])
        for stream in range(3):
            os.dup2(fds[stream], stream)
        for number in (signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if request["env"] is None:
            os.chdir(os.environ["HOME"])
        os.execvpe(request["argv"][0], request["argv"], os.environ if request["env"] is None else request["env"])
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        os.write(2, f"{request['argv'][0]}: {os.strerror(error.errno or 0)}\n".encode())
    finally:
        os._exit(code)


def _kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def run_on(directory: str, host: str, argv: list[str], env: dict[str, str] | None) -> int:
    """Run ``argv`` on ``host``. Returns its exit status, 128 + n for signal n, or 255 if there is no such host."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.connect(os.path.join(directory, host + ".sock"))
    except OSError:
        print(f"{host}: no such host, or it is down", file=sys.stderr)
        return 255
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda received, _: link.send(bytes([received])))
    here, body = os.open(".", os.O_RDONLY | os.O_DIRECTORY), os.memfd_create("request")
    os.pwrite(body, json.dumps({"argv": argv, "env": env}).encode(), 0)
    socket.send_fds(link, [b"r"], [0, 1, 2, here, body])
    reply = link.recv(4, socket.MSG_WAITALL)
    if len(reply) != 4:
        print(f"{host}: {argv[0]} was killed, or the host went down", file=sys.stderr)
        return 255
    (code,) = struct.unpack("!i", reply)
    return int(code) if code >= 0 else 128 - int(code)


def parse_ssh(argv: list[str]) -> tuple[str, str]:
    """(host, shell command) of an ssh command line. ssh's own options are skipped."""
    rest = list(argv)
    while rest and rest[0].startswith("-"):
        flag = rest.pop(0)
        if len(flag) == 2 and flag[1] in _SSH_FLAGS_WITH_VALUE and rest:
            rest.pop(0)
    if not rest:
        raise SystemExit("ssh (emulated): no host given")
    return rest[0].rpartition("@")[2], " ".join(rest[1:])


def main(argv: list[str]) -> int:
    mode, *rest = argv
    if mode == "init":
        serve(rest[0])
        return 0
    if mode == "exec":
        return run_on(rest[0], rest[1], rest[2:], dict(os.environ))
    host, command = parse_ssh(rest[1:])
    shell = ["/bin/sh", "-c", command] if command else ["/bin/sh", "-l"]
    return run_on(rest[0], host, shell, None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
