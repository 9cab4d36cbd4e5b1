"""Which port each rank of a host uses, where there are several."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ucc_hetero.machine.discover import replay
from ucc_hetero.machine.nics import Port, assign, ports, rails, use

A, B = Port("eth0", 10 << 32, 1000), Port("eth1", 11 << 32, 1000)


def test_ranks_of_a_host_take_turns() -> None:
    assert assign("xxyy", [(A, B)] * 4) == ["eth0", "eth1"] * 2
    assert assign("xyxyxy", [(A, B)] * 6) == ["eth0", "eth0", "eth1", "eth1", "eth0", "eth0"]
    # The same networks under other names, and another speed of the whole host.
    other = (A._replace(name="ens1", speed=10), B._replace(name="ens2", speed=10))
    assert assign("xxyy", [(A, B)] * 2 + [other] * 2) == ["eth0", "eth1", "ens1", "ens2"]


@pytest.mark.parametrize(
    "hosts, offers",
    [
        ("xxxx", [(A, B)] * 4),  # nothing leaves the host
        ("xyy", [(A, B)] * 3),  # a rank needs both
        ("xxyy", [(A, B)] * 2 + [()] * 2),  # ports in the same networks on every host, or not at all
        ("xxyy", [(A, B)] * 2 + [(A, B._replace(network=12 << 32))] * 2),
        ("xxyy", [(A, B._replace(speed=10))] * 4),
        ("xxyy", [(A, B._replace(network=A.network))] * 4),
    ],
)
def test_ucx_decides_where_turns_would_not_do(hosts: str, offers: list[tuple[Port, ...]]) -> None:
    assert assign(hosts, offers) == [""] * len(hosts)


@pytest.mark.parametrize(
    "hosts, offers, expected",
    [
        ("xxyy", [(A, B)] * 4, 2),
        ("xy", [(A, B)] * 2, 2),  # a rank can use both
        ("xxxx", [(A, B)] * 4, 1),  # nothing leaves the host
        ("xxyy", [(A, B)] * 2 + [()] * 2, 1),
        ("xy", [(A, B), (A, B._replace(speed=10))], 1),
    ],
)
def test_transfers_are_spread_over_equal_ports(hosts: str, offers: list[tuple[Port, ...]], expected: int) -> None:
    assert rails(hosts, offers) == expected


def test_what_libucx_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_NET_DEVICES", "UCX_MAX_EAGER_RAILS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    use("", 1)
    assert "UCX_MAX_EAGER_RAILS" not in os.environ
    use("eth1", 2)
    assert os.environ["UCX_NET_DEVICES"] == "eth1" and "UCX_MAX_EAGER_RAILS" not in os.environ
    use("", 2)
    use("", 3)  # the user's own, or what was set before
    assert os.environ["UCX_MAX_EAGER_RAILS"] == "2"


def test_ports_of_this_machine() -> None:
    found = ports("")
    assert len(found) != 1 and all(port.network for port in found)
    assert list(found) == sorted(found, key=lambda port: port.network)
    assert ports("no-such-port") == ()


def test_infiniband_is_left_to_ucx(tmp_path: Path) -> None:
    card = {f"sys/class/infiniband/mlx5_{i}/ports/1/state": "4: ACTIVE" for i in range(2)}
    assert ports("", replay(card, tmp_path)) == ()
