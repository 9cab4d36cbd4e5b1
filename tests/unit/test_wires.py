"""Network threads between hosts: how many, and which of UCX's transports their contexts may use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ucc_hetero.errors import LibraryError
from ucc_hetero.machine.ucx_transports import without_devices
from ucc_hetero.machine.vendors import VENDORS
from ucc_hetero.native.libraries import lib
from ucc_hetero.transport import wires
from ucc_hetero.transport.channels import SLOT, usual_slot

DEVICES = {name for row in VENDORS.values() for name in row.transports}


@pytest.mark.parametrize("users", ["", "all", "^", "^ib", "^sysv,tcp"])
def test_transports_of_devices_are_shut_out(users: str) -> None:
    made = without_devices(users)
    assert made.startswith("^") and set(made[1:].split(",")) >= DEVICES
    assert set(users.removeprefix("^").split(",")) - {"", "all"} <= set(made[1:].split(","))


@pytest.mark.parametrize("users, expected", [
    ("tcp,self,cuda_copy", "tcp,self"), ("rc,cuda,sm", "rc"), ("sm,self,rocm", "tcp,self"), ("self", "tcp,self"),
    ("rc_mlx5,tcp,posix,cma", "rc_mlx5,tcp"),
])  # fmt: skip
def test_a_list_of_the_users_keeps_its_networks(users: str, expected: str) -> None:
    assert without_devices(users) == expected


@pytest.mark.parametrize("carrier, cores, ranks, expected", [
    ("tcp", 64, 8, 4), ("tcp", 64, 16, 2), ("tcp", 64, 1000, 1), ("tcp", 2, 1, 1), ("tcp", 192, 8, 4),
    ("tcp", 32, 1, 8), ("tcp", 96, 1, 12), ("tcp", 20, 1, 5), ("tcp", 12, 1, 4), ("tcp", 64, 2, 4),
    ("limited", 192, 8, 8), ("limited", 64, 8, 4), ("rdma", 192, 8, 2), ("rdma", 2, 2, 1),
])  # fmt: skip
def test_as_many_as_there_are_cores_for(carrier: str, cores: int, ranks: int, expected: int) -> None:
    assert wires.count(carrier, cores, ranks) == expected


def test_a_wire_that_could_not_be_made_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of wires tell their sides: one that sends would be taken for one that receives."""
    contexts: list[object] = []

    def opened(devices: str, cores: set[int]) -> int:
        if len(contexts) == 3 and not failed:
            failed.append(devices)
            raise LibraryError("ucp_worker_create", -4, "UCS_ERR_NO_MEMORY")
        contexts.append(devices)
        return len(contexts) - 1

    failed: list[str] = []
    for name, value in (("_contexts", contexts), ("_addresses", []), ("_pid", os.getpid()), ("_open", opened)):
        monkeypatch.setattr(wires, name, value)
    monkeypatch.setattr(wires, "_address", lambda wire: b"%d" % wire)
    assert [wires.addresses(count) for count in (3, 3)] == [((b"0", b"1"),)] * 2 and len(contexts) == 3


def test_ranks_share_the_cores_of_a_host_in_every_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    monkeypatch.setattr(wires, "count", lambda _carrier, _cores, ranks: counted.append(ranks) or 1)
    monkeypatch.setattr(wires, "_sharing", 1)
    for ranks in (1, 8, 2):
        wires.share(ranks)
        wires.wanted()
    assert counted == [1, 8, 8]


@pytest.mark.parametrize("number", range(1, 17))
def test_all_wires_carry_as_much_of_a_slot(number: int) -> None:
    slot = usual_slot(number)
    ranges = [min(lib.UCCH_WIRE_RANGE, slot - at) for at in range(0, slot, lib.UCCH_WIRE_RANGE)]
    assert len({sum(ranges[wire::number]) for wire in range(number)}) == 1
    assert usual_slot(0) == SLOT <= slot <= 16 << 20


SCRIPT = """
import os
from pathlib import Path
from ucc_hetero.machine import nics
from ucc_hetero.transport import wires

cores = os.sched_getaffinity(0)
beside = set() if len(cores) < 2 else set(sorted(cores)[1:])
nics.cores_for = lambda threads, ranks, near: beside or cores
assert len(wires.addresses(2)) == 2
tasks = []
while len(tasks) < 4:  # they give themselves their name, once they run where they should
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "ucch-wire\\n"]
for task in tasks:
    assert os.sched_getaffinity(int(task.name)) == (beside or cores)
assert os.sched_getaffinity(0) == cores
wires.stop()
"""


def test_threads_run_where_they_should() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240, check=False)
    if "LibraryNotFound" in done.stderr:
        pytest.skip("no UCX")
    assert done.returncode == 0, done.stderr
