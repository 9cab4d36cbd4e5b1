"""When ranks come together before a call: libucc makes NCCL's communicator in the first one on CUDA memory."""

from __future__ import annotations

from typing import Any

import pytest

from ucc_hetero.bindings.ucc_enums import MemType
from ucc_hetero.bootstrap.teams import Teams
from ucc_hetero.errors import DeviceError
from ucc_hetero.planner.plan import Step


def step(link: str, ranks: tuple[int, ...], kind: str = "allreduce") -> Any:
    found = object.__new__(Step)
    for name, value in (("link", link), ("ranks", ranks), ("kind", kind)):
        object.__setattr__(found, name, value)
    return found


@pytest.fixture
def room() -> list[int]:
    """Free bytes of the device."""
    return [2 << 30]


@pytest.fixture
def teams(room: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[Teams, list[Any]]:
    notes: list[Any] = []
    found = Teams(None, [10, 11, 12, 13], 0, 1, 5.0)  # type: ignore[arg-type]
    monkeypatch.setattr(found, "get", lambda ranks, link: notes.append(("get", ranks, link)))
    monkeypatch.setattr(found, "_all_ready", lambda places, ready: notes.append(("met", places, ready)) or ready)
    monkeypatch.setattr("ucc_hetero.bootstrap.teams.free_memory", lambda: room[0])
    return found, notes


def test_ranks_meet_once_before_nccl_does(teams: tuple[Teams, list[Any]]) -> None:
    made, notes = teams
    steps = [step("native", (0, 1)), step("bridge", (0, 2)), step("native", (0, 1)), step("local", (0,))]
    made.prepare(steps, int(MemType.CUDA))
    assert notes == [
        ("get", (0, 1), "native"), ("met", [10, 11], True), ("get", (0, 2), "bridge"), ("get", (0, 1), "native"),
    ]  # fmt: skip
    notes.clear()
    made.prepare(steps, int(MemType.CUDA))
    assert not [note for note in notes if note[0] == "met"]


def test_nobody_begins_where_a_rank_has_no_memory(
    teams: tuple[Teams, list[Any]], room: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL fails on that rank, and the others wait for it for ever."""
    made, notes = teams
    room[0] = 5 << 20
    with pytest.raises(DeviceError, match=r"rank 0: .*ranks \[0, 1\], and 5 MiB are free"):
        made.prepare([step("native", (0, 1))], int(MemType.CUDA))
    assert notes[-1] == ("met", [10, 11], False)
    room[0] = 2 << 30
    monkeypatch.setattr(made, "_all_ready", lambda places, ready: False)
    with pytest.raises(DeviceError, match="another rank has less"):
        made.prepare([step("native", (0, 1))], int(MemType.CUDA))
    monkeypatch.setattr(made, "_all_ready", lambda places, ready: True)
    made.prepare([step("native", (0, 1))], int(MemType.CUDA))


@pytest.mark.parametrize("memory", [None, int(MemType.HOST), int(MemType.ROCM)])
def test_others_need_not(teams: tuple[Teams, list[Any]], memory: int | None) -> None:
    """Calls on several communicators may then be made in an order of each rank's own."""
    made, notes = teams
    made.prepare([step("native", (0, 1, 2, 3))], memory)
    assert [note[0] for note in notes] == ["get"]
