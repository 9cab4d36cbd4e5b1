"""Jobs of several emulated hosts: which rank uses which port, devices, and clocks."""

import json
import random
import re
import sys

import pytest
from crews import alone
from settings import OWN_QUEUES

from ucc_hetero.launch import emulated_host

from ..mpi import test_timeline

SUMS = [sys.executable, *alone("host_cases:sums", [])]


def _found(cluster, env):
    done = cluster.mpirun(SUMS, env={"UCCH_TIMEOUT": "200", **env}, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("found"))


def test_ranks_use_all_ports_of_a_host(emulate):
    cluster = emulate(hosts=2, slots=2, links=2, rate="1gbit")
    assert _found(cluster, {}) == f"found {[('eth0,eth1', 1)] * 4}"


#: An interface inside each host, for containers or management: with the same address on all hosts.
INSIDE = """link add inside0 type veth peer name inside1
link set inside1 up
address add 172.17.0.1/16 dev inside0
link set inside0 up
"""


@pytest.mark.parametrize(("links", "named", "other", "kept"), [
    (2, "all", "172.17.0.1", "lo,eth0,eth1"), (2, "all", "192.168.7.1", "eth0,eth1"),
    (1, "eth0,inside0", "172.17.0.1", "eth0"),
])  # fmt: skip
def test_networks_inside_hosts_are_left_out(emulate, links, named, other, kept):
    """libucp used such an interface between hosts, and all calls failed: with equal addresses, and with different
    ones."""
    cluster = emulate(hosts=2, slots=1, links=links, rate="none")
    for host, address in zip(cluster.hosts, ("172.17.0.1", other), strict=True):
        emulated_host.configure(host.pid, INSIDE.replace("172.17.0.1", address), "")
    assert _found(cluster, {"UCX_NET_DEVICES": named}) == f"found {[(kept, 1)] * 2}"


def test_ranks_that_are_not_connected_are_told_what_chooses_the_network(emulate):
    cluster = emulate(hosts=2, slots=1, rate="none")
    for host in cluster.hosts:
        emulated_host.configure(host.pid, INSIDE, "")
    done = cluster.mpirun(SUMS, env={"UCX_NET_DEVICES": "inside0"}, timeout=100)
    assert re.search(r"rank [01]: .* team of ranks \[0, 1\] .*could not connect.*UCX_NET_DEVICES=", done.stderr), (
        done.stderr
    )


APART, ANY_CALL = "nvidia:2,amd:2", "collective_cases:on_devices"


@pytest.mark.parametrize("case", ["few_rounds", "random"])
def test_communicators(host_crew, case):
    """Those that ranks of several hosts make from a communicator: an island for each host, or one island."""
    slots, vendors = random.choice([((2, 1), ""), ((1, 2), "nvidia:3")] if case == "random" else [((2, 1), "")])
    env = {"UCCH_TIMEOUT": "300", "UCCH_EMULATE": vendors, "UCCH_FABRIC": "all"}
    host_crew(f"communicator_cases:case_{case}", slots, **env)


@pytest.mark.parametrize("layout", [APART, "nvidia:1,amd:1,nvidia:1,amd:1"])
def test_communicators_of_devices(on_crew, layout):
    """Their ranks, too, begin calls in host memory on several communicators in different orders."""
    on_crew("communicator_cases:case_random", layout, 2, 2, UCCH_TIMEOUT="300")


def test_hosts_inside_vendors(host_crew):
    for env, height in (({"UCCH_FABRIC": "all"}, 2), ({}, 1)):
        done = host_crew("host_cases:sums", (2, 2, 2), UCCH_TIMEOUT="200", UCCH_EMULATE="nvidia:4,amd:2", **env)
        assert f"found {[('eth0', height)] * 6}" in done.stdout, done.output


@pytest.mark.parametrize("case, layout, env", [
    (ANY_CALL, APART, {"UCCH_WIRES": "0"}), (ANY_CALL, "nvidia:2,host:1,amd:1", {}),
    ("device_cases:streams", APART, OWN_QUEUES),
], ids=["calls without wires", "calls, one without", "streams"])  # fmt: skip
def test_devices_of_two_hosts(on_crew, case, layout, env):
    on_crew(case, layout, 2, 2, UCCH_TUNE="", FAKEGPU_DELAY_US="200", UCCH_TIMEOUT="200", **env)


def test_clocks_of_two_hosts(cluster, tmp_path):
    """One file of all ranks shows the phases of calls, and the late rank, by a common clock."""
    path = tmp_path / "new" / "t.json"
    env = test_timeline.FOUR | {"UCCH_TRACE": str(path)}
    options = ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
    words = [sys.executable, *alone("script_cases:recorded", [False])]
    done = cluster.mpirun(words, env=env, options=options, timeout=100)
    assert done.returncode == 0, done.stderr
    assert [each.name for each in path.parent.iterdir()] == ["t.json"]
    test_timeline.judge(test_timeline.spans(path))
    facts = json.loads(path.read_text())["otherData"]
    assert [facts["clock uncertainty us"][r] == 0 for r in "0123"] == [True, True, False, False]
    for rank in "23":
        assert abs(facts["clock offset us"][rank]) <= facts["clock uncertainty us"][rank] + 0.001
