"""RDMA ports of a host: which UCX can use, which it does not reach, and what is said of those."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ucc_hetero import log
from ucc_hetero.errors import LibraryNotFound
from ucc_hetero.machine import rdma
from ucc_hetero.machine.discover import HostIdentity, replay
from ucc_hetero.machine.facts import Facts
from ucc_hetero.machine.rdma import RdmaPort
from ucc_hetero.native.libraries import load
from ucc_hetero.transport import carriers

IB, ROCE, EFA = RdmaPort("mlx5_0:1", "InfiniBand"), RdmaPort("mlx5_1:1", "RoCE"), RdmaPort("rdmap0:1", "EFA")


@pytest.fixture
def ucx() -> Path:
    """The folder of libucc's UCX."""
    try:
        return Path(load().ucx_path).resolve().parent
    except LibraryNotFound as error:
        pytest.skip(str(error).splitlines()[0])


def port(name: str, layer: str, state: str = "4: ACTIVE", node: str = "1: CA") -> dict[str, str]:
    at = f"sys/class/infiniband/{name}"
    return {f"{at}/node_type": node, f"{at}/ports/1/state": state, f"{at}/ports/1/link_layer": layer}


def test_active_ports_that_ucx_can_use(tmp_path: Path) -> None:
    files = port("mlx5_0", "InfiniBand") | port("mlx5_1", "Ethernet") | port("mlx5_2", "InfiniBand", "1: DOWN")
    files |= port("irdma0", "Ethernet", node="4: RNIC") | port("usnic_0", "Unspecified")
    files |= port("rdmap0", "Unspecified") | {
        "sys/class/infiniband/rdmap0/device/driver": "-> ../../../../bus/pci/drivers/efa"
    }
    assert rdma.active(replay(files, tmp_path)) == (IB, ROCE, EFA)


@pytest.mark.parametrize("settings, left", [
    ({}, (IB, ROCE)), ({"UCX_TLS": "all"}, (IB, ROCE)), ({"UCX_TLS": "^sysv"}, (IB, ROCE)),
    ({"UCX_TLS": "tcp,sm,self"}, ()), ({"UCX_TLS": "rc_x,cuda"}, (IB, ROCE)), ({"UCX_NET_DEVICES": "eth0"}, ()),
    ({"UCX_NET_DEVICES": "mlx5_1:1,eth0"}, (ROCE,)), ({"UCX_NET_DEVICES": "mlx5_0"}, (IB,)),
])  # fmt: skip
def test_ports_that_users_leave(settings: dict[str, str], left: tuple[RdmaPort, ...]) -> None:
    assert rdma.meant((IB, ROCE), settings) == left


def test_ports_that_ucx_does_not_reach(monkeypatch: pytest.MonkeyPatch, ucx: Path) -> None:
    monkeypatch.setattr(carriers, "active", lambda: (IB, ROCE))
    monkeypatch.delenv("UCX_TLS", raising=False)
    found = {"tcp": ["eth0"], "rc_mlx5": ["mlx5_0:1"], "self": ["memory"], "sysv": ["memory"]}
    assert carriers.idle_ports(found) == (ROCE,)
    text = carriers.describe(found)
    assert "rc_mlx5 (mlx5_0:1)" in text["between hosts"] and str(ucx) in text["between hosts"]
    assert text["this host"] == "sysv" and text["why"].endswith("UCX does not reach mlx5_1:1 (RoCE)")
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert not carriers.idle_ports(found) and "does not reach" not in carriers.describe(found)["why"]


def test_a_ucx_of_the_site_with_modules_for_the_ports(tmp_path: Path) -> None:
    assert not rdma.site_ucx({"RoCE"}, {}, tmp_path)
    replay({"usr/lib64/libucp.so.0": "", "usr/lib64/ucx/libuct_ib.so.0": "", "opt/a/ucx/libuct_ib.so.0": ""}, tmp_path)
    assert rdma.site_ucx({"RoCE", "InfiniBand"}, {"LD_LIBRARY_PATH": "/opt/a:"}, tmp_path) == "/usr/lib64"
    assert not rdma.site_ucx({"EFA"}, {}, tmp_path)
    replay({"opt/a/libucp.so.0": "", "opt/h/lib/libucp.so.0": "", "opt/h/lib/ucx/libuct_ib.so.0.0.0": ""}, tmp_path)
    assert rdma.site_ucx({"RoCE"}, {"LD_LIBRARY_PATH": "/opt/a:"}, tmp_path) == "/opt/a"
    assert rdma.site_ucx({"RoCE"}, {"HPCX_UCX_DIR": "/opt/h", "LD_LIBRARY_PATH": "/opt/a"}, tmp_path) == "/opt/h/lib"


HERE = HostIdentity("one", "boot-1", "ipc:1", "pid:1")
FACTS = Facts(
    process="p", package="0.1.0", ucc="1.4.0", ucx="1.22.0", memory_types=("host",), settings=(), byteorder="little",
    host=HERE, vendor="host", device=0, address=b"", idle_ports=(IB,),
)  # fmt: skip
FAR = replace(FACTS, host=replace(HERE, hostname="two", boot_id="boot-2"))


def test_idle_ports_are_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ucx: Path) -> None:
    said = [False]
    monkeypatch.setattr(carriers, "_warned", said)
    monkeypatch.setattr(log.log("net").parent, "propagate", True)
    for rank, everyone in (
        (0, [FACTS, FACTS]), (1, [FACTS, FAR]), (0, [replace(f, idle_ports=()) for f in (FACTS, FAR)]),
    ):  # fmt: skip
        carriers.warn_idle(rank, everyone)
    assert not caplog.records and said == [False]
    for _ in range(2):
        carriers.warn_idle(0, [replace(FACTS, idle_ports=()), FAR])
    (record,) = caplog.records
    text = record.getMessage()
    assert "two: mlx5_0:1 (InfiniBand)" in text and "one:" not in text and "UCCH_UCX_DIR" in text
