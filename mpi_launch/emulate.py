"""An emulated cluster: several hosts on one machine, with rate-shaped links, started by an unmodified ``mpirun``.

    python -m ucc_hetero.launch.emulate --hosts 2 --rate 4gbit -- mpirun -np 4 python train.py

runs the command on the first of two hosts, whose environment makes ``mpirun`` find the others. From Python::

    with Cluster(hosts=2, slots=2, rate="4gbit") as cluster:
        print(cluster.mpirun(["python", "train.py"], timeout=60).stdout, goodput(cluster))

A host is a set of namespaces (network, process ids, mounts, host name, System V IPC) with its own boot id,
``/dev/shm``, ``/sys`` and ``/etc/hosts``; the file system is shared, as on a cluster with a network file system. The
switch is one more network namespace. Nothing is visible from the machine's own namespaces and nothing routes out of the
cluster's. All of it lives as long as a pipe to the process that made it, so it also disappears when that process is
killed.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from ..closed_pipe import ends_with_its_reader
from . import emulated_host, emulated_net
from .emulated_host import EmulatedHost

#: Bytes per socket call; seconds after which sockets that do not connect or transfer have failed.
_CHUNK, _PATIENCE = 1 << 20, 10.0


@functools.cache
def unavailable() -> str | None:
    """Return why this machine cannot emulate a cluster, and the way out; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"emulated hosts are made of Linux namespaces; this is {sys.platform}"
    beyond = [folder for folder in ("/usr/sbin", "/sbin") if folder not in os.environ.get("PATH", "").split(os.pathsep)]
    # Debian has ip and tc in folders that are not on a user's PATH.
    os.environ["PATH"] = os.pathsep.join([*filter(None, [os.environ.get("PATH")]), *beyond])
    tools = ("unshare", "nsenter", "mount", "mountpoint", "ip", "tc", "cat")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux"
    if os.geteuid() != 0:
        way_out = "use sudo, or `unshare --user --map-root-user COMMAND` where the kernel lets users do that"
        return f"emulated hosts need root for their namespaces: {way_out}"
    trial = (
        "mount -t sysfs sysfs /sys && ip link add name trial0 type bridge && "
        "ip link add name trial1 type veth peer name trial2 && "
        "tc qdisc add dev trial1 root tbf rate 1gbit burst 200kb limit 200kb"
    )
    found = subprocess.run([*emulated_host.UNSHARE, "sh", "-c", trial], capture_output=True, text=True, check=False)
    if found.returncode:
        needed = "CAP_SYS_ADMIN, CAP_NET_ADMIN and the modules veth, bridge and sch_tbf"
        return f"the kernel or the container refuses a requirement of emulated hosts ({needed}): {found.stderr.strip()}"
    return None


class Cluster:
    """Emulated hosts joined by rate-shaped links; a context manager.

    Args:
        hosts: how many.
        slots: MPI slots per host: one number, or one per host.
        rate: of the links in either direction, ``"4gbit"``; one per host with commas, one per link of a host joined
            by ``+``; ``"none"`` leaves links unlimited.
        links: network interfaces per host, each with a switch and subnet of its own.
        mtu: bytes.
        env: additional environment of every host, or one mapping per host.

    Raises:
        ValueError: an argument that does not fit.
        RuntimeError: this machine cannot emulate hosts; says why (see `unavailable`).
    """

    def __init__(
        self,
        hosts: int = 2,
        slots: int | Sequence[int] = 2,
        rate: str = "4gbit",
        links: int = 1,
        *,
        mtu: int = 1500,
        env: Mapping[str, str] | Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.layout = emulated_net.layout(hosts, slots, rate, links)
        self.mtu = mtu
        extra = [env] * hosts if isinstance(env, Mapping) else list(env) or [{}] * hosts
        if len(extra) != hosts:
            raise ValueError(f"env: {len(extra)} mappings for {hosts} hosts; give one, or one per host")
        self._extra_env = extra
        self._owner = os.getpid()
        self._switch: subprocess.Popen[bytes] | None = None
        self.directory = Path()
        self.hosts: tuple[EmulatedHost, ...] = ()

    @property
    def slots(self) -> int:
        """MPI slots of all hosts together."""
        return sum(host.slots for host in self.layout)

    def start(self) -> Cluster:
        """Build the cluster; on return it accepts commands. Removes everything if that fails."""
        if self.hosts:
            raise RuntimeError("this cluster is already running; close() it first, or make another")
        reason = unavailable()
        if reason is not None:
            raise RuntimeError(f"cannot emulate a cluster: {reason}")
        atexit.register(self.close)
        try:
            self.directory = emulated_host.new_directory(self.layout)
            # The switch is a namespace and nothing else; whatever ends this process also ends the pipe it reads.
            self._switch = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", 'echo; cat >/dev/null; rm -rf -- "$0"', str(self.directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            self.hosts = tuple(
                EmulatedHost(plan, self.directory, extra)
                for plan, extra in zip(self.layout, self._extra_env, strict=True)
            )
            assert self._switch.stdout is not None
            self._switch.stdout.readline()
            for host in self.hosts:
                host.wait_until_up()
            switch = emulated_net.switch_batches(self.layout, [host.pid for host in self.hosts], self.mtu)
            emulated_host.configure(self._switch.pid, *switch)
            emulated_host.configure_all({host.pid: emulated_net.host_batches(host.layout) for host in self.hosts})
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End all processes of all hosts, and remove the cluster. May be called again."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        for host in self.hosts:
            host.hang_up()
        for host in self.hosts:
            host.wait_until_down()
        self.hosts = ()
        if self._switch is not None:
            self._switch.communicate()
            self._switch = None
        if self.directory != Path():
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory = Path()

    def __enter__(self) -> Cluster:
        return self if self.hosts else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def mpirun(
        self,
        argv: Sequence[str],
        *,
        np: int | None = None,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        timeout: float = 60.0,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` as an MPI job over all hosts, started on the first, and return its status and output as text.

        Args:
            np: ranks; by default one per slot. Slots of a host are filled before those of the next.
            env: variables for every rank.
            options: of ``mpirun``, such as ``["--map-by", "node"]`` to interleave ranks over the hosts.
            timeout: seconds, after which every process on the hosts is killed.
            check: raise for a status other than 0.

        Raises:
            subprocess.TimeoutExpired, subprocess.CalledProcessError: with the output so far.
        """
        exports = [word for name in env or () for word in ("-x", name)]
        command = ["mpirun", "-np", str(np or self.slots), *exports, *options, *argv]
        return self.run(command, env=env, timeout=timeout, check=check)

    def run(
        self,
        argv: Sequence[str],
        *,
        host: int = 0,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on one host and wait for it.

        Args:
            argv: the command, its words one by one.
            host: number of the host.
            env: variables for the command.
            timeout: seconds, after which every process on the hosts is killed.
            check: raise for a status other than 0.

        Returns:
            its status and its output as text.

        Raises:
            subprocess.TimeoutExpired, subprocess.CalledProcessError: with the output so far.
        """
        process = self.hosts[host].popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:
            self.kill_all()
            out, err = process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise subprocess.TimeoutExpired(list(argv), timeout, out, err) from None
            raise
        if check and process.returncode:
            print(err, file=sys.stderr)
            raise subprocess.CalledProcessError(process.returncode, list(argv), out, err)
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def kill_all(self) -> None:
        """Kill all processes on all hosts; the hosts stay up."""
        for host in self.hosts:
            host.kill_all()

    def set_rate(self, host: int, rate: str, link: int = 0) -> None:
        """Change the rate of a host's link, in both directions.

        Args:
            host: number of the host.
            rate: such as ``"400mbit"``.
            link: number of the host's link.
        """
        bits = emulated_net.parse_rate(rate)
        old = self.layout[host].links[link]
        ends = ((self.hosts[host].pid, old.name), (self._switch_pid(), old.port))
        emulated_host.configure_all({pid: ("", emulated_net.shape(end, bits, old.rate)) for pid, end in ends})
        plan = emulated_net.with_rate(self.layout[host], link, bits)
        self.layout = (*self.layout[:host], plan, *self.layout[host + 1 :])

    def set_link(self, host: int, up: bool, link: int = 0) -> None:
        """Disconnect a host's link from the switch, or connect it again.

        Args:
            host: number of the host.
            up: True to connect.
            link: number of the host's link.
        """
        port = self.layout[host].links[link].port
        emulated_host.configure(self._switch_pid(), f"link set dev {port} {'up' if up else 'down'}\n", "")

    def power_off(self, host: int) -> None:
        """Kill a host and all its processes, without notice to other hosts.

        Args:
            host: number of the host.
        """
        self.hosts[host].hang_up()
        self.hosts[host].wait_until_down()

    def _switch_pid(self) -> int:
        if self._switch is None:
            raise RuntimeError("this cluster is not running; use it in a with statement, or call start()")
        return self._switch.pid


def goodput(cluster: Cluster, one: int = 0, other: int = 1) -> float:
    """Measure what plain TCP sockets carry between two hosts, both ways at once, one connection per link and direction.

    Args:
        cluster: a cluster that is up.
        one: number of a host.
        other: number of another one.

    Returns:
        bytes per second of the slower direction, over all links.

    Raises:
        OSError: the sockets did not connect, or one ended early.
    """
    links = len(cluster.layout[one].links)
    found: list[list[Future[float]]] = []
    with ThreadPoolExecutor(4 * links) as pool:  # a thread each, which stays in its host's network
        for start, end in ((one, other), (other, one)):
            found.append([])
            for ends in zip(cluster.layout[start].links, cluster.layout[end].links, strict=True):
                rate = min((link.rate for link in ends if link.rate), default=16 * 10**9)
                timed = max(1 << 22, rate // 32)  # a quarter of a second
                warm = min(timed, max(1 << 20, rate // 160))
                door: Future[Any] = Future()
                into, out = cluster.hosts[end], cluster.hosts[start]
                found[-1].append(pool.submit(_receive, into, ends[1], door, timed + warm, warm))
                pool.submit(_send, out, door, timed + warm)
        return min(sum(rate.result() for rate in way) for way in found)


def _enter_network(host: EmulatedHost) -> None:
    """Move this thread to a host's network; its sockets stay where they are made."""
    with open(f"/proc/{host.pid}/ns/net") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), space.name)


def _send(host: EmulatedHost, door: Future[Any], nbytes: int) -> None:
    _enter_network(host)
    data = memoryview(bytes(_CHUNK))
    with socket.create_connection(door.result(_PATIENCE), _PATIENCE) as peer:
        for start in range(0, nbytes, _CHUNK):
            peer.sendall(data[: min(_CHUNK, nbytes - start)])


def _receive(host: EmulatedHost, link: emulated_net.Link, door: Future[Any], nbytes: int, warm: int) -> float:
    """Bytes per second of the data after the first ``warm``, which empty the bucket and let TCP find its window.
    ``door`` gets the address for the sender."""
    _enter_network(host)
    with socket.create_server((link.address, 0)) as listener:
        listener.settimeout(_PATIENCE)
        door.set_result(listener.getsockname())
        peer, _ = listener.accept()
    buffer = bytearray(_CHUNK)
    got, mark, began = 0, 0, 0.0
    with peer:
        peer.settimeout(_PATIENCE)
        while got < nbytes:
            part = peer.recv_into(buffer)
            if not part:
                raise ConnectionError(f"the sender ended after {got} of {nbytes} bytes")
            got += part
            if not mark and got >= warm:
                mark, began = got, time.monotonic()
    return (got - mark) / (time.monotonic() - began)


def _slots(text: str) -> int | list[int]:
    if not all(word.strip().isdecimal() for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: one number, or one per host with commas, is needed")
    numbers = [int(word) for word in text.split(",")]
    return numbers if len(numbers) > 1 else numbers[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ucc_hetero.launch.emulate",
        description="Run a command, such as mpirun, on the first host of an emulated cluster.",
        epilog="Needs root, or `unshare --user --map-root-user` before the line. Example: "
        "--hosts 3 --rate 4gbit,4gbit,1gbit -- mpirun -np 6 python train.py",
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many (default 2)")
    parser.add_argument(
        "--slots", type=_slots, default="2", help="MPI slots per host: one number, or one per host with commas"
    )
    parser.add_argument(
        "--rate", default="4gbit", help="of the links: one, or one per host with commas; per link joined by +; none"
    )
    parser.add_argument("--links", type=int, default=1, help="network interfaces per host (default 1)")
    parser.add_argument("--mtu", type=int, default=1500, help="bytes (default 1500)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --; without one, a shell on the first host")
    return parser


def _attend(cluster: Cluster, words: Sequence[str]) -> int:
    """Run a command on the first host, or a shell; returns its exit status."""
    command = list(words[1:] if words[:1] == ["--"] else words)
    process = cluster.hosts[0].popen(command or [os.environ.get("SHELL", "/bin/sh")])
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return int(process.wait())


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the command's exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        cluster = Cluster(args.hosts, args.slots, args.rate, args.links, mtu=args.mtu)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        with cluster:
            return _attend(cluster, args.command)
    except (ValueError, RuntimeError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
