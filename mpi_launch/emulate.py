"""An emulated cluster: several hosts on one machine, with rate-shaped links, started by an unmodified ``mpirun``.

    python -m ucc_hetero.launch.emulate --hosts 2 --rate 4gbit -- mpirun -np 4 python train.py

runs the command on the first of two hosts, whose environment makes ``mpirun`` find the others. From Python::

    with Cluster(hosts=2, slots=2, rate="4gbit") as cluster:
        print(cluster.mpirun(["python", "train.py"], timeout=60).stdout, goodput(cluster))

A host is a set of namespaces (network, process ids, mounts, host name, System V IPC) with its own boot id,
``/dev/shm``, ``/sys`` and ``/etc/hosts``; the file system is shared, as on a cluster with a network file system. The
switch is one more network namespace. Nothing is visible from the machine's own namespaces and nothing routes out of the
cluster's. All of it lives exactly as long as a pipe to the process that made it, so that it also goes when that process
is killed.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ..stdio import ends_with_its_reader
from . import emulated_host, emulated_net
from .emulated_host import EmulatedHost

_GOODPUT = Path(__file__).with_name("emulated_goodput.py")
_PORT = 47000


@functools.cache
def unavailable() -> str | None:
    """Return why no cluster can be emulated on this machine, with the way out, or None where one can."""
    if not sys.platform.startswith("linux"):
        return f"emulated hosts are made of Linux namespaces; this is {sys.platform}"
    beyond = [folder for folder in ("/usr/sbin", "/sbin") if folder not in os.environ.get("PATH", "").split(os.pathsep)]
    # Where Debian has ip and tc, and a user's PATH does not lead.
    os.environ["PATH"] = os.pathsep.join([*filter(None, [os.environ.get("PATH")]), *beyond])
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc", "cat") if shutil.which(tool) is None]
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
        return f"the kernel or the container refuses what emulated hosts need ({needed}): {found.stderr.strip()}"
    return None


class Cluster:
    """Emulated hosts joined by rate-shaped links; a context manager.

    Args:
        hosts: how many.
        slots: MPI slots per host: one number, or one per host.
        rate: of the links in either direction, ``"4gbit"``; one per host as a list or with commas, one per link of
            a host joined by ``+``; ``"none"`` leaves links unlimited.
        links: network interfaces per host, each with a switch and subnet of its own.
        mtu: bytes.
        prefix: of the hosts' names.
        env: additional environment of every host, or one mapping per host.
        launch_agent: program that ``mpirun`` starts remote daemons with; the default enters the namespaces directly.
            Give ``"ssh"`` to use daemons that you started in the hosts.

    Raises:
        ValueError: an argument that does not fit.
        RuntimeError: this machine cannot emulate hosts; says why (see `unavailable`).
    """

    def __init__(
        self,
        hosts: int = 2,
        slots: int | Sequence[int] = 2,
        rate: str | float | Sequence[str | float] = "4gbit",
        links: int = 1,
        *,
        mtu: int = 1500,
        prefix: str = "node",
        env: Mapping[str, str] | Sequence[Mapping[str, str]] = (),
        launch_agent: str | None = None,
    ) -> None:
        self.layout = emulated_net.layout(hosts, slots, rate, links, prefix)
        self.mtu = mtu
        self.launch_agent = launch_agent
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

    @property
    def hostfile(self) -> Path:
        """The MPI hostfile; the hosts' environment already names it to ``mpirun``."""
        return self.directory / "hostfile"

    def start(self) -> Cluster:
        """Build the cluster; it is ready for commands on return. Leaves nothing behind if it fails."""
        if self.hosts:
            raise RuntimeError("this cluster is already running; close() it first, or make another")
        reason = unavailable()
        if reason is not None:
            raise RuntimeError(f"cannot emulate a cluster: {reason}")
        atexit.register(self.close)
        try:
            self.directory = emulated_host.new_directory(self.layout, self.launch_agent)
            # The switch is a namespace and nothing else; whatever ends this process also ends the pipe it reads.
            self._switch = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", 'echo; cat >/dev/null; rm -rf -- "$0"', str(self.directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            self.hosts = tuple(
                EmulatedHost(plan, self.directory, self.launch_agent, extra)
                for plan, extra in zip(self.layout, self._extra_env, strict=True)
            )
            assert self._switch.stdout is not None
            self._switch.stdout.readline()
            for host in self.hosts:
                host.wait_until_up()
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def _connect(self) -> None:
        assert self._switch is not None
        emulated_host.configure(self._switch.pid, *self._switch_batches())
        emulated_host.configure_all({host.pid: emulated_net.host_batches(host.layout) for host in self.hosts})

    def _switch_batches(self) -> tuple[str, str]:
        pids = [str(host.pid) for host in self.hosts] or [f"<process of {host.name}>" for host in self.layout]
        return emulated_net.switch_batches(self.layout, pids, self.mtu)

    def close(self) -> None:
        """End every process of every host and remove the cluster; harmless when repeated."""
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
        """Kill every process on every host; the hosts stay up."""
        for host in self.hosts:
            host.kill_all()

    def set_rate(self, host: int, rate: str | float, link: int = 0) -> None:
        """Give a link of a host another rate, in both directions.

        Args:
            host: number of the host.
            rate: such as ``"400mbit"``, or bits per second.
            link: number of the host's link.
        """
        bits = emulated_net.parse_rate(rate)
        old = self.layout[host].links[link]
        if bits == old.rate:
            return
        batch = emulated_net.reshape_batch(bits)
        emulated_host.configure(self.hosts[host].pid, "", batch.format(device=old.name))
        emulated_host.configure(self._switch_pid(), "", batch.format(device=old.port))
        plan = emulated_net.with_rate(self.layout[host], link, bits)
        self.layout = (*self.layout[:host], plan, *self.layout[host + 1 :])

    def set_link(self, host: int, up: bool, link: int = 0) -> None:
        """Pull a host's cable out of the switch, or put it back.

        Args:
            host: number of the host.
            up: True to put it back.
            link: number of the host's link.
        """
        port = self.layout[host].links[link].port
        emulated_host.configure(self._switch_pid(), f"link set dev {port} {'up' if up else 'down'}\n", "")

    def power_off(self, host: int) -> None:
        """End a host and all its processes, without notice to the others.

        Args:
            host: number of the host.
        """
        self.hosts[host].hang_up()
        self.hosts[host].wait_until_down()

    def _switch_pid(self) -> int:
        if self._switch is None:
            raise RuntimeError("this cluster is not running; use it in a with statement, or call start()")
        return self._switch.pid


def goodput(
    cluster: Cluster,
    source: int = 0,
    sink: int = 1,
    *,
    link: int | None = 0,
    both: bool = False,
) -> float:
    """Measure what plain TCP sockets carry between two hosts, one connection per link.

    Args:
        cluster: a cluster that is up.
        source: number of the host that sends.
        sink: number of the host that receives.
        link: number of the link; None for all links at once, and the sum.
        both: send in both directions at once and return the lesser.

    Returns:
        bytes per second.

    Raises:
        RuntimeError: the sockets did not connect, or one ended early.
    """
    directions = [(source, sink), (sink, source)] if both else [(source, sink)]
    links = range(len(cluster.layout[source].links)) if link is None else [link]
    runs: list[list[subprocess.Popen[str]]] = []
    senders = []
    for turn, (start, end) in enumerate(directions):
        runs.append([])
        for number in links:
            ends = cluster.layout[start].links[number], cluster.layout[end].links[number]
            rate = min((one.rate for one in ends if one.rate), default=16 * 10**9)
            timed = max(1 << 22, rate // 32)  # a quarter of a second
            warm = min(timed, max(1 << 20, rate // 160))
            port, total = str(_PORT + 10 * turn + number), str(timed + warm)
            probe = [sys.executable, "-I", "-S", str(_GOODPUT)]
            receiver = cluster.hosts[end].popen(
                [*probe, "receive", port, total, str(warm)], stdout=subprocess.PIPE, text=True
            )
            runs[-1].append(receiver)
            senders.append(cluster.hosts[start].popen([*probe, "send", ends[1].address, port, total]))
    outputs = [[receiver.communicate()[0] for receiver in run] for run in runs]
    failed = [sender.args for sender in senders if sender.wait()]
    if failed or not all(text for run in outputs for text in run):
        names = [cluster.layout[i].name for i in (source, sink)]
        raise RuntimeError(f"goodput from {names[0]} to {names[1]}: no measurement, see the messages above")
    return min(sum(map(float, run)) for run in outputs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ucc_hetero.launch.emulate",
        description="Run a command, such as mpirun, on the first host of an emulated cluster.",
        epilog="Needs root, or `unshare --user --map-root-user` before the line. Example: "
        "--hosts 3 --rate 4gbit,4gbit,1gbit -- mpirun -np 6 python train.py",
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many (default 2)")
    parser.add_argument("--slots", default="2", help="MPI slots per host: one number, or one per host with commas")
    parser.add_argument(
        "--rate", default="4gbit", help="of the links: one, or one per host with commas; per link joined by +; none"
    )
    parser.add_argument("--links", type=int, default=1, help="network interfaces per host (default 1)")
    parser.add_argument("--mtu", type=int, default=1500, help="bytes (default 1500)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be configured, and stop")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --; without one, a shell on the first host")
    return parser


def _describe(cluster: Cluster) -> str:
    """Return the configuration of a cluster that has not been started, as the batches that would run."""
    parts = [
        ("hostfile", emulated_net.hostfile(cluster.layout)),
        ("/etc/hosts", emulated_net.hosts_file(cluster.layout)),
    ]
    ip, tc = cluster._switch_batches()
    parts += [("switch: ip -batch", ip), ("switch: tc -batch", tc)]
    for host in cluster.layout:
        ip, tc = emulated_net.host_batches(host)
        parts += [(f"{host.name}: ip -batch", ip), (f"{host.name}: tc -batch", tc)]
    return "\n".join(f"# {title}\n{text}" for title, text in parts)


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
        slots: Any = [int(word) for word in args.slots.split(",")]
        cluster = Cluster(args.hosts, slots if len(slots) > 1 else slots[0], args.rate, args.links, mtu=args.mtu)
        if args.dry_run:
            print(_describe(cluster), end="")
            return 0
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        with cluster:
            return _attend(cluster, args.command)
    except (ValueError, RuntimeError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
