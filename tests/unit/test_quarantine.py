"""Memory that MPI may still write to lives on, however the wait for it ends."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from ucc_hetero.bindings import quarantine
from ucc_hetero.bootstrap import exit as end
from ucc_hetero.bootstrap import faults
from ucc_hetero.calls import runner


class Failing:
    """An exchange of MPI's that fails when it is asked for, as one does in which a rank has died."""

    def __init__(self) -> None:
        self.memory: list[weakref.ref[Any]] = []

    def Iallreduce(self, mine: Any, worst: Any, op: Any) -> "Failing":
        self.memory += [weakref.ref(mine), weakref.ref(worst)]
        return self

    def Test(self) -> bool:
        raise OSError("a process has failed")


def test_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi: Any = Failing()
    monkeypatch.setattr(faults, "lacking", lambda comm: True)
    job: Any = type("Job", (), {"comm": mpi, "index": 0})
    assert end._together(job) == end._LOST
    assert len(mpi.memory) == 2 and all(each() is not None for each in mpi.memory)


def test_a_rank_leaves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first Free was ended by Ctrl-C: the other ranks have come to one exchange, and will not to another."""
    asked: list[Any] = []

    class Interrupted:
        def Iallreduce(self, *arrays: Any, op: Any) -> "Interrupted":
            asked.append(arrays)
            return self

        def Test(self) -> bool:
            if looks.pop():
                raise KeyboardInterrupt
            return True

    looks = [False, True]
    monkeypatch.setattr(runner, "lib", SimpleNamespace(ucch_board_revoked=lambda board: False))
    ours: Any = SimpleNamespace(
        mpi=Interrupted(), board=SimpleNamespace(native=None), rank=0, _leaving=(), _hopeless=bool
    )
    with pytest.raises(KeyboardInterrupt):
        runner.Runner.meet(ours, 5.0)
    assert runner.Runner.meet(ours, 5.0) and len(asked) == 1


def test_of_a_wait_that_is_given_up() -> None:
    class Memory:
        pass

    memory = Memory()
    found = weakref.ref(memory)
    with pytest.raises(KeyboardInterrupt), quarantine.unless_over((memory,)):
        raise KeyboardInterrupt
    del memory
    assert found() is not None
