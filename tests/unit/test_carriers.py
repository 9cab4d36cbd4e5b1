"""Carriers between hosts: idle RDMA ports, a second libucp for network threads, and what all ranks agree on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hosts import write

from ucc_hetero import log
from ucc_hetero.errors import LibraryNotFound
from ucc_hetero.machine import rdma
from ucc_hetero.machine.discover import HostIdentity
from ucc_hetero.machine.facts import Facts
from ucc_hetero.machine.rdma import Port
from ucc_hetero.native import wire_ucx
from ucc_hetero.native.libraries import load
from ucc_hetero.transport import carriers, wires
from ucc_hetero.transport.wires import Offer

IB, ROCE, EFA = Port("mlx5_0:1", "InfiniBand"), Port("mlx5_1:1", "RoCE"), Port("rdmap0:1", "EFA")


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
    write(tmp_path, files | port("irdma0", "Ethernet", node="4: RNIC") | port("rdmap0", "Unspecified"))
    write(tmp_path, port("usnic_0", "Unspecified"))
    (tmp_path / "sys/class/infiniband/rdmap0/device").mkdir()
    (tmp_path / "sys/class/infiniband/rdmap0/device/driver").symlink_to("/sys/bus/pci/drivers/efa")
    assert rdma.active(tmp_path) == (IB, ROCE, EFA)


@pytest.mark.parametrize("settings, left", [
    ({}, (IB, ROCE)), ({"UCX_TLS": "all"}, (IB, ROCE)), ({"UCX_TLS": "^sysv"}, (IB, ROCE)),
    ({"UCX_TLS": "tcp,sm,self"}, ()), ({"UCX_TLS": "rc_x,cuda"}, (IB, ROCE)), ({"UCX_NET_DEVICES": "eth0"}, ()),
    ({"UCX_NET_DEVICES": "mlx5_1:1,eth0"}, (ROCE,)), ({"UCX_NET_DEVICES": "mlx5_0"}, (IB,)),
])  # fmt: skip
def test_ports_that_users_leave(settings: dict[str, str], left: tuple[Port, ...]) -> None:
    assert rdma.meant((IB, ROCE), settings) == left


def test_where_a_second_libucp_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HPCX_UCX_DIR", "/opt/hpcx/ucx")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/site/lib:")
    monkeypatch.setattr(wire_ucx, "package_dirs", lambda name: [tmp_path / name])
    found = [path for _, path in wire_ucx.folders()]
    assert found[:2] == [Path("/opt/hpcx/ucx/lib"), Path("/opt/site/lib")] and found[-1] == tmp_path / "nixl_cu12.libs"
    monkeypatch.setenv("UCCH_WIRE_UCX_DIR", "/opt/mine")
    assert wire_ucx.folders() == [("UCCH_WIRE_UCX_DIR", Path("/opt/mine/lib"))]


def test_reasons_against_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ucx: Path) -> None:
    def reason(kinds: set[str]) -> str:
        own, notes = wire_ucx.find(kinds, lambda: "")
        assert own is None
        return "\n".join(notes)

    monkeypatch.setenv("UCCH_WIRE_UCX_DIR", str(tmp_path))
    assert "has no libucp" in reason(set())
    (tmp_path / "libucp-0a1b.so.0.0.0").write_text("no library")
    assert "ucx has no libuct_ib" in reason({"RoCE"})
    write(tmp_path, {"ucx/libuct_ib.so.0.0.0": ""})
    assert "ucx has no libuct_ib_efa" in reason({"EFA"})
    assert "libucp-0a1b.so.0.0.0" in reason({"InfiniBand"})  # the loader's own words
    monkeypatch.setenv("UCCH_WIRE_UCX_DIR", str(ucx))
    assert "is libucc's" in reason(set())


SECOND = """
import os
from pathlib import Path
from ucc_hetero.bindings.ucx import Context
from ucc_hetero.native.libraries import lib, load, mapped
from ucc_hetero.transport import carriers

load()
quiet = dict(os.environ)
with Context() as first:
    common = first.transports()
    found = carriers.look(())
    assert dict(os.environ) == quiet
    assert found.own and found.own.version == load().ucx_version and found.own.origin == "UCCH_WIRE_UCX_DIR", found
    assert "tcp" in found.transports and not {"cma", "posix", "sysv"} & set(found.transports)
    assert "network threads" in found.describe(common) and found.own.path in str(found.describe(common))
    lib.ucch_wire_use(1)
    worker = first.worker()
    with Context(wires=True) as other:
        assert other.transports().keys() >= {"tcp", "self"}
        endpoint = worker.connect(worker.address)
        got = bytearray(3)
        message = worker.recv(got, 7)
        worker.send(endpoint, b"abc", 7).wait()
        message.wait()
        assert got == b"abc"
    endpoint.close()
    worker.close()
print("both")
"""


def test_a_second_libucp_of_the_same_names_beside_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ucx: Path
) -> None:
    """A copy of libucc's own, by another path: what a site's is."""
    (tmp_path / "lib").mkdir()
    for name in ("libucm.so.0", "libucs.so.0", "libuct.so.0", "libucp.so.0"):
        shutil.copy(ucx / name, tmp_path / "lib" / name)
    monkeypatch.setenv("UCCH_WIRE_UCX_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", SECOND], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "both\n" and done.returncode == 0, done.stdout + done.stderr


BEST, USUAL = Offer(("1.23", "1.22"), True, ()), Offer(("1.22",), False, ("none found",))


@pytest.mark.parametrize("offers, version", [
    ([BEST, BEST], "1.23"), ([BEST, USUAL], "1.22"), ([USUAL, BEST], "1.22"), ([USUAL, USUAL], "1.22"),
    ([BEST, Offer(("1.23",), True, ())], "1.23"), ([USUAL, Offer(("1.23",), True, ())], ""),
    ([Offer(("1.17", "1.22"), True, ()), BEST], "1.22"), ([USUAL, Offer((), False, ())], ""),
])  # fmt: skip
def test_all_ranks_use_what_all_can(monkeypatch: pytest.MonkeyPatch, offers: list[Offer], version: str) -> None:
    monkeypatch.setattr(carriers, "look", lambda idle: carriers.Carriers((), (), None, {}, ()))
    assert wires.agree(offers, ()) == version


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
    for rank, everyone, idle in (
        (0, [FACTS, FACTS], {0: "", 1: ""}), (1, [FACTS, FAR], {0: "", 1: ""}), (0, [FACTS, FAR], {}),
        (0, [replace(f, idle_ports=()) for f in (FACTS, FAR)], {0: "", 1: ""}),
    ):  # fmt: skip
        carriers.warn_idle(rank, everyone, idle)
    assert not caplog.records and said == [False]
    for _ in range(2):
        carriers.warn_idle(0, [FACTS, FAR], {1: "no libuct_ib"})
    (record,) = caplog.records
    text = record.getMessage()
    assert "two: mlx5_0:1 (InfiniBand) (no libuct_ib)" in text and "one:" not in text
    assert "[rdma]" in text and "UCCH_WIRE_UCX_DIR" in text


def test_connections_of_tcp_are_made_beside_everything_else_unless_the_user_says_how() -> None:
    assert carriers.connections({}) == {"UCX_TCP_CONN_NB": "y"}
    assert carriers.connections({"UCX_TCP_CONN_NB": "n"}) == {"UCX_TCP_CONN_NB": "n"}
