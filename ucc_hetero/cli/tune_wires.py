"""Measures, for ``tune``, how many network threads and how long slots carry calls between hosts fastest.

First the number, with usual slots, then the slots: each in a communicator of its own, with the settings in the
environment, where no other choice depends on them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from ..api.comm import Communicator
from ..machine.discover import host_cores
from ..planner.rules import Wires, best_of
from ..transport.rings import SLOT
from ..transport.wires import wanted
from .trial import Trial
from .tune_pairs import described

__all__ = ["WireFinding", "describe_wires", "measure_wires"]

_NUMBERS, _SLOTS = (1, 2, 4, 8, 16), (512 << 10, 1 << 20, 2 << 20, 4 << 20)
_ROUNDS, _SECONDS = 5, 2e-3


@dataclass(frozen=True, slots=True)
class WireFinding:
    """Seconds of an allreduce with each number of wires and length of slots; ``default`` are those without a table."""

    nbytes: int
    default: Wires
    seconds: dict[Wires, float]

    @property
    def best(self) -> Wires:
        """The fastest, or the default where nothing is clearly faster."""
        return best_of(self.seconds, self.default)


def measure_wires(comm: Communicator, nbytes: int, tell: Callable[[WireFinding], None]) -> WireFinding | None:
    """Measure wires at one size; collective, and the same on every rank. None where no call goes by them."""
    hosts = comm.topology.hosts
    if comm._run.members.channels is None or len(set(hosts)) < 2:
        return None
    here = Counter(hosts)[hosts[comm.rank]]
    with _environment({"UCCH_WIRES": "auto"}):
        told = comm.mpi.allgather((wanted(here), len(host_cores()) // here // 2))
    usual, most = (min(each) for each in zip(*told, strict=True))
    default = Wires(usual, SLOT)
    numbers = sorted({usual, *(number for number in _NUMBERS if number <= most)})
    seconds = {Wires(number, SLOT): _measured(comm, Wires(number, SLOT), nbytes) for number in numbers}
    best = best_of(seconds, default)
    seconds |= {
        each: _measured(comm, each, nbytes) for slot in _SLOTS if (each := Wires(best.number, slot)) not in seconds
    }
    found = WireFinding(nbytes, default, seconds)
    tell(found)
    return found


def _measured(comm: Communicator, wires: Wires, nbytes: int) -> float:
    with (
        _environment({"UCCH_WIRES": str(wires.number), "UCCH_WIRE_SLOT": str(wires.slot)}),
        Communicator(comm.mpi) as one,
    ):
        trial = Trial(one, "allreduce", nbytes, _SECONDS)
        trial.warm()
        took = median(trial.sample() for _ in range(_ROUNDS))
        trial.close()
    return took


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({name: value} if value is not None else {})


def describe_wires(one: WireFinding) -> str:
    """One line: the best, and what the others took."""
    return described("wires", one, lambda wires: f"{wires.number} of {wires.slot >> 10}K")
