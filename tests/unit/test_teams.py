"""When ranks come together before a call: libucc makes NCCL's communicator in the first one on CUDA memory."""

from __future__ import annotations

from typing import Any

import pytest

from ucc_hetero.plan import Step
from ucc_hetero.teams import Teams
from ucc_hetero.ucc_enums import MemType


def step(link: str, ranks: tuple[int, ...], kind: str = "allreduce") -> Any:
    found = object.__new__(Step)
    for name, value in (("link", link), ("ranks", ranks), ("kind", kind)):
        object.__setattr__(found, name, value)
    return found


@pytest.fixture
def teams(monkeypatch: pytest.MonkeyPatch) -> tuple[Teams, list[Any]]:
    notes: list[Any] = []
    found = Teams(None, [10, 11, 12, 13], 0, 1, 5.0)  # type: ignore[arg-type]
    monkeypatch.setattr(found, "get", lambda ranks, link: notes.append(("get", ranks, link)))
    monkeypatch.setattr(found, "_all_ready", lambda places, ready: notes.append(("met", places, ready)))
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


@pytest.mark.parametrize("memory", [None, int(MemType.HOST), int(MemType.ROCM)])
def test_others_need_not(teams: tuple[Teams, list[Any]], memory: int | None) -> None:
    """Calls on several communicators may then be made in an order of each rank's own."""
    made, notes = teams
    made.prepare([step("native", (0, 1, 2, 3))], memory)
    assert [note[0] for note in notes] == ["get"]
