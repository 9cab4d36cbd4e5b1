"""Memory that MPI may still write to lives on, however the wait for it ends."""

import weakref
from typing import Any

import pytest

from ucc_hetero.bindings import quarantine
from ucc_hetero.bootstrap import exit as end
from ucc_hetero.bootstrap import faults


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


def test_of_a_wait_that_is_given_up() -> None:
    class Memory:
        pass

    memory = Memory()
    found = weakref.ref(memory)
    with pytest.raises(KeyboardInterrupt), quarantine.unless_over((memory,)):
        raise KeyboardInterrupt
    del memory
    assert found() is not None
