"""Init process of an emulated host, and the client through which commands are started on the host.

Run as a file by the interpreter alone (``python -I -S emulated_node.py MODE …``), with nothing but the standard
library, because one such process starts for every host and for every remote command, and must cost milliseconds:

``init CONFIG``
    process 1 of a host. It finishes the host's private mounts, then starts commands on request. When its standard
    input ends, which is when the cluster's owner closes it or dies in any way, it exits and the kernel kills
    every process of the host with it.
``exec DIR HOST PROGRAM …``
    run a program on a host with this process's environment, directory and standard streams.
``ssh DIR [ssh's options] HOST COMMAND …``
    the same in ssh's manner, which is what an MPI launcher expects of its launch agent: a shell command, in the
    host's own login environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from typing import Any

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_MOVE, MS_REC = 2, 4, 8, 4096, 8192, 16384
MNT_DETACH = 2

#: Between asking a command whose client has gone to end, and killing it; seconds.
GRACE = 2.0

#: Files handed over with a request: standard input, output and error, the working directory, and the request itself.
FDS = 5

_SSH_FLAGS_WITH_VALUE = "BbcDEeFIiJLlmOopQRSWw"


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, fstype: str = "", flags: int = 0, data: str = "") -> None:
    """Call mount(2). Raises ``OSError`` naming the target."""
    if _libc().mount(source.encode(), target.encode(), fstype.encode() or None, flags, data.encode() or None):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot mount {fstype or source}: {os.strerror(code)}", target)


def _private_sys(scratch: str) -> None:
    """Show the interfaces of this network namespace in /sys, and keep the control groups that were mounted there."""
    groups = "/sys/fs/cgroup"
    kept = os.path.ismount(groups)
    if kept:
        mount(groups, scratch, flags=MS_BIND | MS_REC)
    _libc().umount2(b"/sys", MNT_DETACH)
    mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if kept:
        mount(scratch, groups, flags=MS_MOVE)


def _write(path: str, value: str) -> None:
    with open(path, "w") as file:
        file.write(value)


def become_host(config: dict[str, Any]) -> None:
    """Give this process's namespaces the host's identity: name, boot id, /etc/hosts, /dev/shm, /sys."""
    socket.sethostname(config["name"])
    for source, target in config["files"].items():
        mount(source, target, flags=MS_BIND)
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    os.makedirs(config["scratch"], exist_ok=True)
    _private_sys(config["scratch"])
    for name, value in config["sysctl"].items():
        path = "/proc/sys/" + name
        if os.path.exists(path):
            _write(path, value)


class Init:
    """Process 1 of a host: starts commands, reaps every orphan, ends when its owner does."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.login_env: dict[str, str] = config["env"]
        self.clients: dict[int, socket.socket] = {}
        self.dying: list[tuple[float, int]] = []
        self.events = selectors.DefaultSelector()
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.door.bind(config["socket"])
        self.door.listen(64)
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.events.register(0, selectors.EVENT_READ, self.owner_spoke)
        self.events.register(self.door, selectors.EVENT_READ, self.admit)
        self.events.register(read_end, selectors.EVENT_READ, lambda: self.reap(read_end))

    def serve(self) -> None:
        while True:
            for key, _ in self.events.select(0.1 if self.dying else None):
                key.data()
            now = time.monotonic()
            for _, pid in [entry for entry in self.dying if entry[0] <= now]:
                _kill_group(pid, signal.SIGKILL)
            self.dying = [entry for entry in self.dying if entry[0] > now]

    def owner_spoke(self) -> None:
        """A byte on standard input asks to kill everything else on this host; its end, to end the host."""
        if not os.read(0, 1):
            os._exit(0)
        os.kill(-1, signal.SIGKILL)

    def admit(self) -> None:
        """Start the command that a client asks for; a client that breaks off or asks nonsense costs only itself."""
        client, _ = self.door.accept()
        client.settimeout(5.0)  # until its request is here
        fds: list[int] = []
        try:
            request, fds = _receive_request(client)
            client.settimeout(None)
            pid = os.fork()
            if pid == 0:
                self.become_command(request, fds)
        except (OSError, ValueError) as error:
            print(f"emulated host: a request was refused: {error}", file=sys.stderr)
            client.close()
            return
        finally:
            for fd in fds:
                os.close(fd)
        self.clients[pid] = client
        self.events.register(client, selectors.EVENT_READ, lambda: self.client_spoke(pid))

    def become_command(self, request: dict[str, Any], fds: list[int]) -> None:
        """In the child: take the client's streams, directory and environment, and become the program."""
        code = 126
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            os.fchdir(fds[3])
            for stream in range(3):
                os.dup2(fds[stream], stream)
            for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            env = self.login_env if request["env"] is None else request["env"]
            if request["env"] is None:
                os.chdir(env["HOME"])
            os.execvpe(request["argv"][0], request["argv"], env)
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            os.write(2, f"{request['argv'][0]}: {os.strerror(error.errno or 0)}\n".encode())
        finally:
            os._exit(code)

    def client_spoke(self, pid: int) -> None:
        """Pass on a signal (one byte); a client that has gone takes its command with it, as an ended session does."""
        client = self.clients[pid]
        try:
            data = client.recv(1)
        except OSError:
            data = b""
        if data:
            _kill_group(pid, data[0])
        else:
            self.events.unregister(client)
            _kill_group(pid, signal.SIGTERM)
            self.dying.append((time.monotonic() + GRACE, pid))

    def reap(self, wakeup: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            client = self.clients.pop(pid, None)
            if client is not None:
                self.finish(client, os.waitstatus_to_exitcode(status))

    def finish(self, client: socket.socket, code: int) -> None:
        with contextlib.suppress(KeyError):
            self.events.unregister(client)
        with contextlib.suppress(OSError):
            client.sendall(struct.pack("!i", code))
        client.close()


def _kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _receive_request(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    _, fds, _, _ = socket.recv_fds(client, 1, FDS)
    try:
        for fd in fds:
            os.set_inheritable(fd, False)
        if len(fds) != FDS:
            raise ValueError("it was cut short")
        with open(fds[-1], closefd=False) as body:
            return json.load(body), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def run_init(config_path: str) -> None:
    """Become process 1 of the host that the JSON file describes; prints ``up`` when commands may be sent."""
    with open(config_path) as file:
        config = json.load(file)
    become_host(config)
    init = Init(config)
    os.write(1, b"up\n")
    init.serve()


def run_on(directory: str, host: str, argv: list[str], env: dict[str, str] | None) -> int:
    """Run ``argv`` on ``host`` and return its exit status, 128 + n where signal n ended it, 255 without a host."""
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
        print(f"{host}: went down while running {argv[0]}", file=sys.stderr)
        return 255
    (code,) = struct.unpack("!i", reply)
    return int(code) if code >= 0 else 128 - int(code)


def parse_ssh(argv: list[str]) -> tuple[str, str]:
    """Split ssh's command line into host and shell command; ssh's own options have no meaning here and are skipped."""
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
        run_init(rest[0])
        return 0
    if mode == "exec":
        return run_on(rest[0], rest[1], rest[2:], dict(os.environ))
    host, command = parse_ssh(rest[1:])
    shell = ["/bin/sh", "-c", command] if command else ["/bin/sh", "-l"]
    return run_on(rest[0], host, shell, None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
