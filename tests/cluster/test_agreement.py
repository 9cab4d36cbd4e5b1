"""Ranks of several hosts that call different things on host memory: all are told, and none has another call's data."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    request: pytest.FixtureRequest, host_crew: Callable[..., Any], slots: tuple[int, ...], vendors: str, form: str
) -> None:
    if form == "torch":
        request.getfixturevalue("with_torch")
    # As on hosts with RDMA: calls of one island over several hosts are compared, too.
    done = host_crew(JOB, slots, [form], UCCH_TIMEOUT="300", UCCH_EMULATE=vendors, UCCH_FABRIC="all")
    print(done.stdout)
    assert done.stdout.count("all kinds refused") == sum(slots), done.output


ORDER = """
import numpy as np, ucc_hetero as u
from mpi4py import MPI
world = MPI.COMM_WORLD
first, second, x, y = u.Communicator(world), u.Communicator(world), np.ones(4), np.empty(4)
for comm in (second, first) if world.rank == 0 else (first, second):
    try:
        comm.Allreduce(x, y)
    except u.UCCHError as error:
        print(f"{type(error).__name__} {error}", flush=True)
        break
world.Barrier()  # who leaves at its deadline is what the others name
"""


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("slots", "vendors"), [((1, 1), ""), ((2, 2), "nvidia:2,amd:2")])
def test_communicators_in_another_order(emulate: Callable[..., Cluster], slots: tuple[int, ...], vendors: str) -> None:
    """Who waits for a rank of another host says in which other communicator that waits, as on one host."""
    cluster = emulate(hosts=len(slots), slots=slots, rate="none")
    env = {"UCCH_TIMEOUT": "6", "UCCH_EMULATE": vendors}
    done = cluster.mpirun([sys.executable, "-c", ORDER], env=env, timeout=120)
    print(done.stdout)
    for one, own, other, odd in (("0", 1, 0, slots[0]), ("[1-3]", 0, 1, 0)):
        said = (
            rf"CollectiveTimeout rank {one}: .*call 1 of .* have not called it \(communicator {own}\): "
            rf".*rank {odd} is in call 1 of communicator {other} \(allreduce .*\) since [.\d]+ s.*; "
            "use communicators in one order on all ranks"
        )
        assert re.search(said, done.stdout), done.stdout + done.stderr
