"""Ranks of several hosts that call different things on host memory: all are told, and none has another call's data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ucc_hetero.launch.emulate import Cluster

JOB = Path(__file__).with_name("unlike_calls.py")
#: Slots of the hosts, vendors, and how ranks call.
CASES = [
    ((1, 1), "", "started"), ((1, 1), "", "torch"), ((2, 2), "nvidia:1,amd:2,nvidia:1", "persistent"),
    ((2, 2), "nvidia:4", "blocking"), ((1, 1, 1), "nvidia:3", "started"),
]  # fmt: skip


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("slots", "vendors", "form"), CASES)
def test_unlike_calls(
    request: pytest.FixtureRequest, emulate: Callable[..., Cluster], slots: tuple[int, ...], vendors: str, form: str
) -> None:
    if form == "torch":
        request.getfixturevalue("with_torch")
    cluster = emulate(hosts=len(slots), slots=slots, rate="none")
    # As on hosts with RDMA: calls of one island over several hosts are compared, too.
    env = {"UCCH_TIMEOUT": "300", "UCCH_EMULATE": vendors, "UCCH_FABRIC": "all"}
    done = cluster.mpirun([sys.executable, str(JOB), form], env=env, timeout=120)
    print(done.stdout)
    assert done.stdout.count("all kinds refused") == sum(slots), done.stdout + done.stderr
