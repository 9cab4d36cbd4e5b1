"""Network threads between hosts: how many, and which of UCX's transports their contexts may use."""

from __future__ import annotations

import pytest

from ucc_hetero.machine.vendors import VENDORS
from ucc_hetero.native.libraries import lib
from ucc_hetero.transport import wires

DEVICES = {name for row in VENDORS.values() for name in row.transports}


@pytest.mark.parametrize("users", ["", "all", "^", "^ib", "^sysv,tcp"])
def test_transports_of_devices_are_shut_out(users: str) -> None:
    made = wires.transports(users)
    assert made.startswith("^") and set(made[1:].split(",")) >= DEVICES
    assert set(users.removeprefix("^").split(",")) - {"", "all"} <= set(made[1:].split(","))


@pytest.mark.parametrize("users, expected", [
    ("tcp,self,cuda_copy", "tcp,self"), ("rc,cuda,sm", "rc"), ("sm,self,rocm", "tcp,self"), ("self", "tcp,self"),
    ("rc_mlx5,tcp,posix,cma", "rc_mlx5,tcp"),
])  # fmt: skip
def test_a_list_of_the_users_keeps_its_networks(users: str, expected: str) -> None:
    assert wires.transports(users) == expected


@pytest.mark.parametrize("ranks", [1, 2, 1000])
def test_as_many_as_there_are_cores_for(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.delenv("UCCH_WIRES", raising=False)
    cores = int(lib.ucch_wire_cores())
    assert wires.wanted(ranks) == max(1, min(4, cores // ranks // 2))
    monkeypatch.setenv("UCCH_WIRES", "7")
    assert wires.wanted(ranks) == 7
    monkeypatch.setenv("UCCH_WIRES", "0")
    assert wires.wanted(ranks) == 0
