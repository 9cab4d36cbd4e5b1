"""Jobs of several hosts through ucch-run, and its messages when hosts, keys, interfaces or libraries are wrong."""

import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from crews import alone
from processes import is_free, until

from ucc_hetero.launch.emulate import Cluster

yaml = pytest.importorskip("yaml", reason="needs yaml: pip install '.[launch]'")

Emulate, Run = Callable[..., Cluster], Callable[..., subprocess.CompletedProcess[str]]

NAMES = "import mpi4py.MPI as m, os; print(m.COMM_WORLD.rank, os.uname().nodename, os.environ['LOCAL_RANK'])"


@pytest.fixture
def ucch_run(tmp_path):
    """Call as ``ucch_run(cluster, document, *words)``: ucch-run with this cluster file, on the cluster's first host."""

    def run(cluster, document, *words, timeout=90, env=None):
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump(document))
        command = [sys.executable, "-m", "ucc_hetero.launch", "-c", str(path), *words]
        return cluster.run(command, timeout=timeout, env=env)

    return run


@pytest.mark.usefixtures("libraries")
def test_two_vendors_on_three_hosts(emulate, ucch_run):
    cluster = emulate(hosts=3, slots=[2, 1, 1], rate="4gbit")
    document = {
        "hosts": [
            {"name": "node0", "slots": 2, "vendor": "nvidia"},
            {"name": "node[1-2]", "slots": 1, "vendor": "amd"},
        ],
        "interfaces": ["eth0"],
        "env": {"UCCH_TIMEOUT": 300},
    }
    done = ucch_run(cluster, document, "--emulate", sys.executable, *alone("host_cases:placed", []))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[('node0', '0', 'node0'), ('node0', '1', 'node0'), ('node1', '0', 'node0'), ('node2', '0', 'node0')]" in (
        done.stdout
    )
    assert "nvidia 2 amd 1 amd 1\n" in done.stdout


def test_first_failure_over_hosts(cluster, ucch_run, flavour):
    script = "import os, sys, time; r = os.environ['RANK']; time.sleep(60 * (r != '3'))"
    script += "; print('it is me', file=sys.stderr); sys.exit(9)"
    document = {"hosts": ["node[0-1]"], "slots": 2, "interfaces": ["eth0"]}
    tags = {"openmpi": "--output tag" if flavour[1] >= 5 else "--tag-output", "hydra": "-prepend-rank"}[flavour[0]]
    done = ucch_run(cluster, document, f"--mpi-args={tags}", sys.executable, "-c", script)
    assert done.returncode == 9, done.stdout + done.stderr
    assert re.search(r"^\[.*3\].* ?it is me$", done.stderr, re.M), done.stderr
    *_, said, last, line = done.stderr.splitlines()
    assert (said, last, line) == (
        "ucch-run: rank 3 on node1 ended with status 9, the first to fail",
        "ucch-run: its last lines were:",
        "    it is me",
    )


@pytest.mark.parametrize("by", "03")
def test_a_launcher_is_killed(cluster, ucch_run, flavour, tmp_path, by):
    """No rank survives on any host."""
    locked, document = tmp_path / "locked", {"hosts": ["node[0-1]"], "slots": 2, "interfaces": ["eth0"]}
    done = ucch_run(cluster, document, sys.executable, *alone("host_cases:kills", [str(locked), by]))
    assert done.returncode != 0 and "ucch-run: " in done.stderr.splitlines()[-1], done.stderr
    with locked.open() as lock:
        until(lambda: is_free(lock), "ranks have stayed")


def test_real_ssh(ssh_cluster, ucch_run):
    agent = ssh_cluster.hosts[0].env["PRTE_MCA_plm_ssh_agent"]
    document = {"hosts": ["node[0-1]"], "slots": 2, "interfaces": ["eth0"], "ssh": agent, "env": {"MARK": "a b"}}
    script = NAMES + "; assert os.environ['MARK'] == 'a b'"
    done = ucch_run(ssh_cluster, document, sys.executable, "-c", script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 node0 0", "1 node0 1", "2 node1 0", "3 node1 1"]


def test_a_wrong_key(ssh_cluster, ucch_run, tmp_path):
    other = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    config = (tmp_path / "keys" / "ssh_config").read_text()
    (tmp_path / "wrong").write_text(config.replace(str(tmp_path / "keys" / "user"), str(other)))
    document = {"hosts": ["node[0-1]"], "slots": 2, "interfaces": ["eth0"], "ssh": f"ssh -F {tmp_path / 'wrong'}"}
    done = ucch_run(ssh_cluster, document, sys.executable, "-c", NAMES)
    assert done.returncode not in (0, 124)
    assert "Permission denied" in done.stderr
    assert "none or too few on node0, node1" in done.stderr or "none or too few on node1" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert f"try: ssh -F {tmp_path / 'wrong'} node1 hostname; it must work without a password" in last


def test_a_host_that_is_down(cluster, ucch_run):
    cluster.power_off(1)
    document = {"hosts": ["node[0-1]"], "slots": 2, "interfaces": ["eth0"]}
    done = ucch_run(cluster, document, "--start-timeout", "20", sys.executable, "-c", NAMES)
    assert done.returncode != 0
    assert "ucch-run: not every rank started" in done.stderr
    assert "node1" in done.stderr.splitlines()[-1] or "node0" in done.stderr.splitlines()[-1]


def test_an_interface_that_does_not_reach(emulate, ucch_run):
    cluster = emulate(hosts=2, slots=1, links=2)
    cluster.set_link(1, False, link=1)
    document = {"hosts": ["node[0-1]"], "interfaces": ["eth1"]}
    done = ucch_run(cluster, document, "--start-timeout", "15", sys.executable, "-c", NAMES)
    assert done.returncode != 0
    assert "ucch-run: not every rank started" in done.stderr, done.stderr
    assert "interfaces: in the cluster file" in done.stderr.splitlines()[-1]
    done = ucch_run(cluster, document | {"interfaces": ["eth7"]}, sys.executable, "-c", NAMES)
    assert done.returncode == 2 and "interfaces: this host has none of eth7; it has eth0, eth1" in done.stderr


def check(cluster, ucch_run, document, *words):
    done = ucch_run(cluster, document, "--emulate", "--check", "--", "--json", "--seconds", "20", *words)
    assert done.stdout.startswith("{") and done.stdout.endswith("}\n"), done.stdout + done.stderr
    return done.returncode, {each["code"]: each for each in json.loads(done.stdout)["findings"]}


@pytest.mark.usefixtures("libraries")
def test_doctor_finds_a_slow_link(emulate, ucch_run):
    cluster = emulate(hosts=4, slots=1, rate="2gbit,2gbit,2gbit,200mbit")
    hosts = [{"name": "node[0-1]", "vendor": "nvidia"}, {"name": "node[2-3]", "vendor": "amd"}]
    status, found = check(cluster, ucch_run, {"hosts": hosts, "interfaces": ["eth0"]})
    assert status == 0, found
    assert found["job"]["text"].startswith("4 ranks agree") and found["collectives"]["level"] == "ok"
    assert found["islands"]["text"].startswith("nvidia: each host by itself")
    assert all(f"{rank}-3 (" in found["pair-slow"]["text"] for rank in range(3)), found["pair-slow"]
    assert "1-2 (" not in found["pair-slow"]["text"]


@pytest.mark.usefixtures("libraries")
def test_doctor_finds_ranks_that_differ(emulate, ucch_run):
    """A variable that affects libucc differs: the message has each rank's value, and the cure."""
    hosts = [{"name": "node0", "vendor": "nvidia"}, {"name": "node1", "vendor": "amd"}]
    document = {"hosts": hosts, "interfaces": ["eth0"], "vendors": {"amd": {"env": {"UCC_TLS": "ucp"}}}}
    status, found = check(emulate(hosts=2, slots=1), ucch_run, document)
    said = [line.strip() for line in found["job-disagrees"]["text"].splitlines()]
    cure = "export the same values on every rank (mpirun or ucch-run: -x NAME=value), or unset them"
    assert status == 1 and {"UCC_TLS:", "rank 0  (unset)", "rank 1  ucp"} <= {*said} and cure in said[-1], said
