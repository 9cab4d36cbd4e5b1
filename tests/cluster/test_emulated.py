"""The emulated cluster: hosts are isolated, links have their rate, mpirun works, and nothing is left behind."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from crews import alone
from processes import python, until

from ucc_hetero.launch import emulate as emulate_module
from ucc_hetero.launch.emulate import EmulatedHost, goodput

KINDS = ("net", "ipc", "uts", "pid", "mnt")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

ALLREDUCE = [sys.executable, *alone("host_cases:hostnames", [])]


def read(cluster, host, *argv):
    return cluster.run(argv, host=host, check=True).stdout.strip()


def namespaces(cluster, host):
    return read(cluster, host, "readlink", *(f"/proc/self/ns/{kind}" for kind in KINDS)).split()


def inhabitants(wanted):
    found, wanted = [], set(wanted)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted & {os.readlink(process / "ns" / kind) for kind in KINDS}:
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it ended meanwhile
    return found


def running(cluster, host):
    return len(read(cluster, host, "sh", "-c", "echo /proc/[0-9]*").split()) - 3


def test_hosts_are_apart(cluster):
    own = [os.readlink(f"/proc/self/ns/{kind}") for kind in KINDS]
    all_of_them = [*own, *namespaces(cluster, 0), *namespaces(cluster, 1)]
    assert len(set(all_of_them)) == 3 * len(KINDS)
    boot_ids = [read(cluster, host, "cat", str(BOOT_ID)) for host in (0, 1)]
    assert boot_ids == [host.boot_id for host in cluster.hosts]
    assert len({*boot_ids, BOOT_ID.read_text().strip()}) == 3
    assert [read(cluster, host, "hostname") for host in (0, 1)] == ["node0", "node1"]
    assert read(cluster, 1, "ls", "/sys/class/net").split() == ["eth0", "lo"]
    read(cluster, 0, "touch", "/dev/shm/mark")
    assert read(cluster, 1, "ls", "/dev/shm") == ""
    assert not Path("/dev/shm/mark").exists()
    assert read(cluster, 0, "getent", "ahostsv4", "node1").split()[0] == cluster.hosts[1].address
    assert read(cluster, 0, "ip", "-4", "route").split()[:3] == ["10.10.0.0/16", "dev", "eth0"]
    assert "default" not in read(cluster, 0, "ip", "route")


def rates(cluster, host, link=0):
    """Return the bits per second that the kernel allows at both ends of a link, the host's and the switch's; inf if
    unlimited.

    The actual speed depends on the load of the machine: ``goodput`` measures it.
    """
    ends = cluster.layout[host].links[link]
    found = []
    for pid, device in ((cluster.hosts[host].pid, ends.name), (cluster._switch_pid(), ends.port)):
        words = ["nsenter", "--target", str(pid), "--net", "tc", "-json", "qdisc", "show", "dev", device]
        told = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        found.append(next((8.0 * each["options"]["rate"] for each in told if each["kind"] == "tbf"), math.inf))
    return found


def test_links_have_their_rate(emulate):
    cluster = emulate(hosts=2, links=2, rate="400mbit+200mbit,1gbit+300mbit")
    assert read(cluster, 0, "ls", "/sys/class/net").split() == ["eth0", "eth1", "lo"]
    for host, each in enumerate(((4e8, 2e8), (1e9, 3e8))):
        assert [rates(cluster, host, link) for link in (0, 1)] == [[rate] * 2 for rate in each]
    for text, rate in (("100mbit", 1e8), ("none", math.inf), ("1gbit", 1e9)):
        cluster.set_rate(1, text)
        assert (rates(cluster, 0), rates(cluster, 1)) == ([4e8] * 2, [rate] * 2)
    assert goodput(cluster, 1, 0) > 0
    reach = [sys.executable, "-c", "import socket; socket.create_connection(('node1', 9), 0.5)"]
    for up in (True, False, True):
        cluster.set_link(1, up)
        assert ("ConnectionRefusedError" in cluster.run(reach).stderr) == up


def test_uneven_hosts(emulate, flavour):
    """Each host has its own folder for the files of mpirun's daemon."""
    cluster = emulate(hosts=3, slots=[2, 1, 1], links=2, rate="1gbit")
    assert cluster.mpirun(ALLREDUCE, check=True).stdout.split() == ["node0", "node0", "node1", "node2"]
    interleaved = cluster.mpirun(ALLREDUCE, options=["--map-by", "node"], check=True)
    assert interleaved.stdout.split() == ["node0", "node1", "node2", "node0"]
    if flavour[0] == "openmpi" and flavour[1] >= 5:
        kept = cluster.mpirun(["sh", "-c", "ls -d $TMPDIR/prted.* || true"], check=True).stdout.split()
        assert sorted(Path(each).parent.name for each in kept) == ["node1", "node2"], kept


def test_environment(emulate, monkeypatch):
    monkeypatch.setenv("ONLY_HERE", "x")
    cluster = emulate(hosts=2, slots=1, env=[{"VENDOR": "a"}, {"VENDOR": "b"}])
    script = "import mpi4py.MPI, os; print(*(os.environ.get(k) for k in ('VENDOR', 'GIVEN', 'ONLY_HERE')))"
    lines = cluster.mpirun([sys.executable, "-c", script], env={"GIVEN": "y"}, check=True).stdout.splitlines()
    # As over ssh: a remote host has its own variables and the exported ones, not those of mpirun's caller.
    assert sorted(lines) == ["a y x", "b y None"]


def test_commands(cluster):
    failed = cluster.run(["sh", "-c", "echo out; echo err >&2; exit 7"], host=1)
    assert (failed.returncode, failed.stdout, failed.stderr) == (7, "out\n", "err\n")
    assert cluster.run(["sh", "-c", "kill -9 $$"]).returncode == 128 + 9
    assert cluster.run(["/no/such/program"]).returncode == 127
    script = "import mpi4py.MPI as m, sys; sys.exit(5 * (m.COMM_WORLD.rank == 3))"
    assert cluster.mpirun([sys.executable, "-c", script]).returncode == 5
    with pytest.raises(subprocess.CalledProcessError):
        cluster.run(["false"], check=True)
    ready = "trap 'echo caught; exit 3' INT; echo ready; while :; do sleep 0.05; done"
    with cluster.hosts[1].popen(["sh", "-c", ready], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(400) == 3
        assert process.stdout.read() == "caught\n"
    with cluster.hosts[1].popen(["sh", "-c", "echo ready; sleep 600"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
    until(lambda: running(cluster, 1) == 0, "the command has ended")
    cluster.power_off(1)
    result = cluster.mpirun(ALLREDUCE, timeout=20)
    assert result.returncode != 0 and "node1" in result.stdout + result.stderr
    assert [cluster.run(["true"], host=host).returncode for host in (0, 1)] == [0, 255]


def test_timeout_ends_the_job(cluster):
    script = "from mpi4py import MPI; print(MPI.COMM_WORLD.rank, flush=True); import time; time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.mpirun([sys.executable, "-c", script], timeout=1)
    for host in (0, 1):
        until(lambda host=host: running(cluster, host) == 0, "the ranks have ended")
    assert cluster.mpirun(ALLREDUCE).returncode == 0


def links_of_this_machine():
    return sorted(os.listdir("/sys/class/net"))


def test_nothing_remains(emulate):
    before = links_of_this_machine()
    cluster = emulate(hosts=3, links=2)
    assert links_of_this_machine() == before, "the cluster's interfaces are its own"
    switch = os.readlink(f"/proc/{cluster._switch_pid()}/ns/net")
    spaces = [switch, *(space for host in range(3) for space in namespaces(cluster, host))]
    directory = cluster.directory
    left_running = cluster.hosts[2].popen(["sh", "-c", "setsid sleep 600 & sleep 600"])
    until(lambda: running(cluster, 2) >= 3, "something runs")
    assert inhabitants(spaces)
    cluster.close()
    assert left_running.wait() == 255
    assert inhabitants(spaces) == []
    assert not directory.exists()
    assert links_of_this_machine() == before
    cluster.close()


@pytest.mark.parametrize("end", ["kill", "raise", "forget"])
def test_nothing_remains_when_the_owner_dies(emulate, end):
    owner = python("host_cases:owner", end, check=False)
    directory, *spaces = owner.stdout.split()
    assert owner.returncode == {"kill": -signal.SIGKILL, "raise": 1, "forget": 0}[end]
    until(lambda: not inhabitants(spaces) and not Path(directory).exists(), "the cluster has gone")


def test_failed_start_leaves_nothing(emulate, monkeypatch):
    monkeypatch.setattr(emulate_module.emulated_net, "host_batches", lambda host: ("link set dev nowhere up\n", ""))
    pids = []
    come_up = EmulatedHost.wait_until_up
    monkeypatch.setattr(EmulatedHost, "wait_until_up", lambda self: (come_up(self), pids.append(self.pid)))
    with pytest.raises(RuntimeError, match="nowhere"):
        emulate(hosts=2)
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_command_line(emulate):
    tool = [sys.executable, "-m", "ucc_hetero.launch.emulate", "--hosts", "2", "--slots", "1,1"]
    words = [*tool, "--", "mpirun", "-np", "2", *ALLREDUCE]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "node0 node1\n"), done.stderr
    done = subprocess.run([*tool, "--", "sh", "-c", "exit 9"], capture_output=True, timeout=240, check=False)
    assert done.returncode == 9
