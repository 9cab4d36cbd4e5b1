"""Fabrics of hosts for vendors' libraries, from files and settings, and which ranks each fabric joins."""

import resource
from dataclasses import replace

import pytest
from hosts import rdma
from test_bootstrap import FACTS, HERE
from test_bootstrap import THERE as ELSEWHERE

from ucc_hetero.bootstrap.agreement import few_files, split
from ucc_hetero.machine.discover import replay
from ucc_hetero.machine.fabric import Fabric, fabric_of
from ucc_hetero.machine.facts import unpacked

MINE, THERE = (replace(FACTS, host=host, vendor="nvidia", device_memory="cuda") for host in (HERE, ELSEWHERE))
IB, EFA = Fabric("InfiniBand", "mlx5_0:1"), Fabric("EFA", "rdmap0:1")


def host(root, ports, node=True, verbs=True):
    """A host with active ports, such as ``mlx5_0:InfiniBand mlx5_1:RoCE rdmap0:EFA``."""
    found = {"etc/ld.so.cache": f"\0/usr/lib/{'libibverbs' if verbs else 'libc'}.so.1\0"}
    for number, port in enumerate(ports.split()):
        name, _, kind = port.partition(":")
        found |= rdma(name, kind.replace("RoCE", "Ethernet"))
        found |= {f"sys/class/infiniband_verbs/uverbs{number}/ibdev": name}
        found |= {f"dev/infiniband/uverbs{number}": ""} if node else {}
    return replay(found, root)


@pytest.mark.parametrize(("ports", "settings", "kind", "why"), [
    ("mlx5_0:InfiniBand", {}, "InfiniBand", "mlx5_0:1"),
    ("mlx5_0:RoCE mlx5_1:InfiniBand mlx5_2:InfiniBand", {}, "InfiniBand", "mlx5_1:1, mlx5_2:1"),
    ("mlx5_0:RoCE", {"UCX_TLS": "tcp"}, "RoCE", "mlx5_0:1"), ("", {}, "", "no active port"),
    ("mlx5_0:InfiniBand", {"NCCL_IB_DISABLE": "1"}, "", "NCCL_IB_DISABLE=1"),
    ("mlx5_0:InfiniBand", {"NCCL_IB_DISABLE": "0"}, "InfiniBand", "mlx5_0:1"),
    ("mlx5_0:InfiniBand", {"NCCL_NET": "Socket"}, "", "NCCL_NET=Socket"),
    ("mlx5_0:InfiniBand", {"NCCL_NET": "IB"}, "InfiniBand", "mlx5_0:1"),
    ("mlx5_0:InfiniBand", {"NCCL_NET": "UCX", "NCCL_IB_DISABLE": "1"}, "InfiniBand", "mlx5_0:1"),
    ("mlx5_0:InfiniBand", {"NCCL_IB_HCA": "^mlx5_0"}, "", "NCCL_IB_HCA=^mlx5_0"),
    ("mlx5_0:InfiniBand mlx5_1:RoCE", {"NCCL_IB_HCA": "=mlx5_1:1"}, "RoCE", "mlx5_1:1"),
    ("mlx5_0:InfiniBand", {"NCCL_IB_HCA": "mlx5"}, "InfiniBand", "mlx5_0:1"),
    ("mlx5_0:InfiniBand", {"NCCL_IB_HCA": "=mlx5"}, "", "NCCL_IB_HCA==mlx5"),
    ("mlx5_0:InfiniBand", {"NCCL_IB_HCA": "^=mlx5_1,mlx5_0:2"}, "InfiniBand", "mlx5_0:1"),
    ("rdmap0:EFA", {}, "", "no plugin for EFA (libnccl-net.so)"),
])  # fmt: skip
def test_fabric_of_a_host(tmp_path, ports, settings, kind, why):
    found = fabric_of("nvidia", "auto", settings, host(tmp_path, ports))
    assert found.kind == kind and why in found.why, found


@pytest.mark.parametrize("lacks, why", [("node", "no /dev/infiniband for mlx5_0"), ("verbs", "no libibverbs.so.1")])
def test_files_that_containers_lack(tmp_path, lacks, why):
    assert fabric_of("amd", "auto", {}, host(tmp_path, "mlx5_0:RoCE", **{lacks: False})).why == why


def test_efa_needs_its_plugin(tmp_path):
    root = host(tmp_path, "rdmap0:EFA")
    replay({"opt/plugin/librccl-net.so": "", "opt/plugin/libnccl-net-ofi.so": ""}, root)
    path = {"LD_LIBRARY_PATH": "/nowhere:/opt/plugin"}
    assert fabric_of("amd", "auto", path, root) == Fabric("EFA", "rdmap0:1")
    assert not fabric_of("nvidia", "auto", path, root).kind
    assert fabric_of("nvidia", "auto", path | {"NCCL_NET_PLUGIN": "ofi"}, root).kind == "EFA"
    assert fabric_of("nvidia", "auto", {"NCCL_NET_PLUGIN": "/opt/plugin/libnccl-net-ofi.so"}, root).kind == "EFA"
    assert not fabric_of("amd", "auto", path | {"NCCL_NET_PLUGIN": "none"}, root).kind
    assert not fabric_of("amd", "auto", path | {"NCCL_NET": "IB"}, root).kind


def test_settings_in_files_of_the_library(tmp_path):
    root = replay({"etc/nccl.conf": "# NCCL_NET=IB\nNCCL_IB_DISABLE=1"}, host(tmp_path, "mlx5_0:RoCE"))
    assert fabric_of("nvidia", "auto", {}, root).why == "NCCL_IB_DISABLE=1"
    assert fabric_of("amd", "auto", {}, root).kind == "RoCE"
    assert fabric_of("nvidia", "auto", {"NCCL_IB_DISABLE": "0"}, root).kind == "RoCE"
    replay({"home/me/.nccl.conf": "NCCL_IB_DISABLE = 0"}, root)
    assert fabric_of("nvidia", "auto", {"HOME": "/home/me"}, root).kind == "RoCE"
    replay({"opt/own.conf": "NCCL_NET=Socket"}, root)
    assert fabric_of("nvidia", "auto", {"NCCL_CONF_FILE": "/opt/own.conf"}, root).why == "NCCL_NET=Socket"


def test_users_decide(tmp_path):
    root = host(tmp_path, "mlx5_0:InfiniBand")
    assert fabric_of("nvidia", "host", {}, root) == Fabric("", "UCCH_FABRIC=host", "host")
    assert fabric_of("amd", "all", {}, tmp_path / "none") == Fabric("all", "UCCH_FABRIC=all", "all")
    assert not fabric_of("host", "all", {}, root).kind


def test_network_threads_need_sockets(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1 << 20))
    assert not few_files(64) and few_files(504) == "8064 sockets for 504 ranks on other hosts, and ulimit -n is 1024"
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert not few_files(1 << 20)


def test_one_fabric_joins_ranks_of_one_vendor():
    def one_fabric(everyone):
        return len({facts.joined for facts in everyone}) == 1

    assert one_fabric([MINE]) and one_fabric([MINE, replace(MINE, process="2", device=1)])
    assert not one_fabric([MINE, THERE]) and not one_fabric([MINE, replace(MINE, vendor="amd")])
    assert one_fabric([replace(MINE, fabric=IB), replace(THERE, fabric=IB._replace(why="mlx5_1:1"))])
    assert not one_fabric([replace(MINE, fabric=IB), replace(THERE, fabric=EFA)])
    assert not one_fabric([replace(MINE, fabric=IB), THERE])
    assert not one_fabric([replace(MINE, fabric=IB), replace(THERE, fabric=IB, vendor="amd")])
    hosts = [replace(f, vendor="host", fabric=fabric_of("host", "all")) for f in (MINE, THERE)]
    assert not one_fabric(hosts) and one_fabric(hosts[:1] * 2)
    assert unpacked(replace(MINE, fabric=IB).packed()).fabric == IB


def test_islands_of_a_job():
    """By RDMA, unless UCCH_FABRIC says so."""

    def found(*everyone):
        return split(None, [replace(each, device_memory="") for each in everyone], None, bool)

    one = [replace(each, fabric=IB) for each in (MINE, THERE)]
    assert found(*one) == ((0, 0), "nvidia: all hosts (InfiniBand)")
    numbers, why = found(one[0], replace(THERE, fabric=Fabric("", "no ports")))
    assert numbers == (0, 1) and why == "nvidia: hosts apart (rank 0: InfiniBand; rank 1: no ports)"
    asked = Fabric("all", "UCCH_FABRIC=all", "all")
    assert found(*(replace(each, fabric=asked) for each in one)) == ((0, 0), "nvidia: all hosts (UCCH_FABRIC=all)")
