"""Processes and hosts that are lost: all ranks that are left know within a moment, whom they have lost, and go on."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ucc_hetero.launch import emulated_host
from ucc_hetero.launch.emulate import Cluster

JOB = Path(__file__).with_name("fault_job.py")
PARTING = Path(__file__).with_name("parting_job.py")
REVOKED = Path(__file__).with_name("revoked_job.py")
#: The deadline of calls must have no part in it.
ENV = {"UCCH_TIMEOUT": "300"}


def hole(cluster: Cluster, host: int) -> None:
    """Frames of a host end in the switch, and it has no way of noticing."""
    batch = f"link set dev {cluster.layout[host].links[0].port} nomaster\n"
    emulated_host.configure(cluster._switch_pid(), batch, "")


OUTSIDE: dict[str, Callable[[Cluster, int], None]] = {
    "cut": lambda cluster, host: cluster.set_link(host, up=False),
    "hole": hole,
    "off": lambda cluster, host: cluster.power_off(host),
}


@pytest.fixture
def outputs(
    emulate: Callable[..., Cluster], launch: Any, appear: Any, tmp_path: Path, room: int
) -> Callable[..., list[str]]:
    """Call as ``outputs(slots, fault, lost)``: output of every rank, in good time of those that are not lost."""

    def run(slots: tuple[int, ...], fault: str, lost: list[int], job: Path = JOB) -> list[str]:
        cluster = emulate(hosts=len(slots), slots=slots, rate="none")
        size, hosts = sum(slots), [host for host, count in enumerate(slots) for _ in range(count)]
        more = [str(size), fault, ",".join(map(str, lost))]
        words = [[sys.executable, str(job), str(tmp_path), str(rank), *more] for rank in range(size)]
        ranks = [launch(cluster, host, each, env=ENV) for host, each in zip(hosts, words, strict=True)]
        if fault in OUTSIDE:
            appear([tmp_path / "ready"], ranks)
            (tmp_path / "fault").write_text(repr(time.monotonic()))
            OUTSIDE[fault](cluster, hosts[lost[0]])
        return ["" if rank in lost else ranks[rank].communicate(timeout=60 * room)[0] for rank in range(size)]

    return run


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("fault", ["kill", "stop", "exit", "outside"])
def test_survivors_know_and_go_on(outputs: Callable[..., list[str]], fault: str) -> None:
    """To them a host that is off, cut or behind a hole is one that says nothing more: one of these, drawn."""
    slots = (1, 2)
    if fault == "outside":
        fault, slots = random.choice([*OUTSIDE]), random.choice([(2, 2), (1, 1, 1)])
    lost = [2, 3] if slots == (2, 2) else [2]
    out = outputs(slots, fault, lost)
    for rank in range(min(lost)):
        assert "knows: " in out[rank] and "PeerError" in out[rank], (fault, slots, out)
        assert f"rank {rank} goes on" in out[rank], (fault, slots, out)


@pytest.mark.usefixtures("libraries")
def test_a_rank_that_holds_the_interpreter_is_alive(outputs: Callable[..., list[str]]) -> None:
    out = outputs((1, 1), "hold", [1])
    assert "rank 0 right" in out[0], out


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("hows", "where"), [("dead", (2,)), ("kill exit error", (1, 2))], ids=["one host", "two hosts"]
)
def test_a_rank_that_ends_while_teams_are_made(
    outputs: Callable[..., list[str]], where: tuple[int, ...], hows: str
) -> None:
    """The others of the first communicator, which has no older one beside it whose board would show that."""
    how = random.choice(hows.split())
    out = outputs(where, how, [sum(where) - 1], PARTING)
    for rank in range(sum(where) - 1):
        assert f"rank {rank} knows: PeerError" in out[rank], (how, out)


@pytest.mark.usefixtures("libraries")
def test_a_rank_that_dies_while_contexts_are_made(outputs: Callable[..., list[str]]) -> None:
    """The others know at once, and end: whoever looks a little later sees that the first of them has, too."""
    out = outputs((1, 2), "early", [2], PARTING)
    for rank in range(2):
        known = rf"rank {rank} knows: PeerError rank {rank}: rank\(s\) \[({1 - rank}, )?2\] of ucch/0"
        assert re.search(known, out[rank]), out


@pytest.mark.usefixtures("libraries")
def test_a_rank_that_stops_while_contexts_are_made(outputs: Callable[..., list[str]]) -> None:
    """The others give up after the seconds of the store's exchange, or as the first of them does, and end."""
    out = outputs((1, 2), "stop", [2], PARTING)
    for rank in range(2):
        assert f"rank {rank} knows: CollectiveTimeout" in out[rank] or "has given ucch/0" in out[rank], out


@pytest.mark.usefixtures("libraries")
def test_a_rank_that_gives_up_what_others_have_made(outputs: Callable[..., list[str]]) -> None:
    """The others hear of it at once, and do not wait for it at their end."""
    out = outputs((1, 2), "late", [], PARTING)
    for rank in range(2):
        assert f"rank {rank} knows: PeerError" in out[rank] and "has given ucch/0" in out[rank], out


@pytest.mark.usefixtures("libraries")
def test_a_rank_that_dies_once_all_is_abandoned(outputs: Callable[..., list[str]]) -> None:
    """The others see that it has ended, though it had left, and do not wait for it at their end."""
    out = outputs((1, 2), "after", [2], PARTING)
    assert out == [""] * 3, out


@pytest.mark.usefixtures("libraries")
def test_a_host_is_lost_once_all_is_freed(outputs: Callable[..., list[str]]) -> None:
    """Ranks without communicators do not wait for it at their end."""
    assert outputs((2, 1), "cut", [2], PARTING) == [""] * 3


@pytest.mark.usefixtures("libraries")
def test_a_host_loses_its_store_once_all_is_freed(outputs: Callable[..., list[str]]) -> None:
    """Its rank ends, by a farewell, and the others do not wait for a word of it that never comes."""
    assert outputs((2, 1), "storeless", [], PARTING) == [""] * 3


@pytest.mark.usefixtures("libraries")
def test_another_communicator_is_revoked(outputs: Callable[..., list[str]]) -> None:
    """Calls of this one go on: whoever waits between hosts looks for what concerns any communicator."""
    out = outputs((1, 2), "", [], REVOKED)
    assert [f"rank {rank} right" in text for rank, text in enumerate(out)] == [True] * 3, out


@pytest.mark.usefixtures("libraries")
def test_a_rank_that_is_interrupted_at_its_end(outputs: Callable[..., list[str]]) -> None:
    """The others do not wait for it."""
    out = outputs((1, 2), "interrupt", [], PARTING)
    assert "KeyboardInterrupt" in out[-1] and out[:2] == [""] * 2, out
