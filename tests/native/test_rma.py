"""One-sided transfers between devices of any vendors; on fake GPUs."""

from collections.abc import Callable
from typing import Any

import pytest
import rma_scripts
from device_scripts import OWN_QUEUES

#: Of lists of thousands of pieces each is a copy of its own.
SOON = {"FAKEGPU_DELAY_US": "20"}


@pytest.mark.parametrize("layout", ["amd:2", "nvidia:1,host:1,amd:1"])
def test_pieces_go_to_their_places(fake_crew: Callable[..., Any], layout: str) -> None:
    job = fake_crew(rma_scripts.EVERY, layout, **SOON)
    assert job.said("right") == job.ranks


@pytest.mark.parametrize("env", [{}, {"FAKEGPU_NO_PEERS": "1"}], ids=["opened", "refused"])
def test_pieces_go_straight_where_devices_open_each_others_memory(
    fake_crew: Callable[..., Any], env: dict[str, str]
) -> None:
    assert fake_crew(rma_scripts.EVERY, "nvidia:2", **env).said("right") == 2


def test_opened_memory_is_given_back(fakes: Callable[..., Any]) -> None:
    assert fakes(rma_scripts.OPENED, "nvidia:3", **OWN_QUEUES).said("right") == 3


def test_transfers_go_on_while_the_driver_gives_memory_back(fakes: Callable[..., Any]) -> None:
    assert fakes(rma_scripts.CLOSING, "nvidia:2", **OWN_QUEUES).said("right") == 2


def test_slots_that_nobody_else_can_open(fake_crew: Callable[..., Any]) -> None:
    assert fake_crew(rma_scripts.APART, "nvidia:1,amd:2").said("right") == 3


def test_pieces_go_by_wires_to_another_host(fake_crew: Callable[..., Any]) -> None:
    assert fake_crew(rma_scripts.FAR, "nvidia:1,host:1,amd:1", **SOON).said("right") == 3


@pytest.mark.parametrize("layout", ["nvidia:1,amd:1", "nvidia:2"])
def test_streams_start_transfers_and_wait_for_them(fakes: Callable[..., Any], layout: str) -> None:
    assert fakes(rma_scripts.STREAMS, layout, **OWN_QUEUES).said("right") == 2


@pytest.mark.parametrize("layout", ["nvidia:1,amd:1", "nvidia:1,host:1"])
def test_memory_of_all_kinds_by_one_interface(fake_crew: Callable[..., Any], layout: str) -> None:
    assert fake_crew(rma_scripts.MEMORY, layout).said("right") == 2


def test_an_allreduce_at_the_same_time(fake_crew: Callable[..., Any]) -> None:
    assert fake_crew(rma_scripts.CROWD, "nvidia:2,amd:1").said("right") == 3


@pytest.mark.parametrize(
    ("layout", "by_wires"), [("nvidia:1,amd:2", False), ("nvidia:3", False), ("nvidia:1,amd:2", True), ("host:3", True)]
)
def test_a_dead_peer_fails_its_transfers_alone(fakes: Callable[..., Any], layout: str, by_wires: bool) -> None:
    script = rma_scripts.far(rma_scripts.DEATH) if by_wires else rma_scripts.DEATH
    done = fakes(script, layout, mpi={"check": False, "mpi_args": ("--continuous",)})
    assert done.said("right") == 2, done.output
