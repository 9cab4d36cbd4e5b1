"""Where data lies and how it crosses a bridge: judged from the facts of all ranks, alike on each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_agreement import FACTS, HERE, THERE

from ucc_hetero.errors import AgreementError
from ucc_hetero.machine.discover import HostIdentity
from ucc_hetero.machine.facts import Facts
from ucc_hetero.planner.topology import Topology
from ucc_hetero.transport.paths import crowded_hosts, path_of, paths_of


def rank(memory: str, host: HostIdentity = HERE, moves: tuple[str, ...] = ("host", "cuda")) -> Facts:
    return replace(
        FACTS, host=host, device_memory=memory, memory_types=moves, vendor={"rocm": "amd"}.get(memory, "nvidia")
    )


CUDA, ROCM = rank("cuda"), rank("rocm", moves=("host", "rocm"))
FAR = rank("rocm", THERE, ("host", "rocm"))
BOTH = ("host", "cuda", "rocm")


@pytest.mark.parametrize(
    "ranks, wanted, path",
    [
        ([CUDA, CUDA], "auto", "direct"),
        ([CUDA, FAR], "auto", "direct"),  # each host has devices of one kind: the network reads both
        ([CUDA, ROCM], "auto", "staged"),
        ([CUDA, FAR, rank("cuda", THERE)], "auto", "staged"),
        ([CUDA, rank("")], "auto", "direct"),
        ([CUDA, rank("", moves=("host",))], "auto", "staged"),  # it could not receive from the other's device
        ([CUDA, rank("", THERE, ("host",))], "auto", "direct"),
        ([CUDA, rank("cuda", moves=("host",))], "auto", "staged"),
        ([CUDA, ROCM], "direct", "direct"),
        ([CUDA, CUDA], "staged", "staged"),
    ],
)
def test_path(ranks: list[Facts], wanted: str, path: str) -> None:
    assert path_of(ranks, wanted) == path


@pytest.mark.parametrize(
    "ranks, wanted, paths",
    [
        ([rank("cuda", moves=BOTH), rank("rocm", moves=BOTH)], "auto", ("direct", "staged")),
        ([CUDA, FAR], "auto", ("direct", "staged")),
        ([CUDA, ROCM], "auto", ("staged",)),
        ([CUDA, rank("", moves=("host",))], "auto", ("staged",)),
        ([CUDA, rank("")], "auto", ("direct", "staged")),
        ([CUDA, ROCM], "direct", ("direct",)),
        ([CUDA, CUDA], "staged", ("staged",)),
        ([CUDA, rank("cuda", moves=("host",))], "auto", ("staged",)),
        ([rank(""), rank("")], "auto", ("direct",)),
    ],
)
def test_paths_to_be_measured(ranks: list[Facts], wanted: str, paths: tuple[str, ...]) -> None:
    assert paths_of(ranks, wanted) == paths


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(AgreementError, match=r"rank\(s\) \[1\] cannot move"):
        path_of([CUDA, rank("cuda", moves=("host",))], "direct")


def test_crowded_hosts() -> None:
    two = Topology.group(["nvidia", "amd"], [0, 0])
    assert crowded_hosts(two, [CUDA, ROCM]) == {HERE.memory}
    assert not crowded_hosts(two, [CUDA, FAR])
    assert not crowded_hosts(Topology.group(["nvidia", "nvidia"], [0, 0]), [CUDA, CUDA])
