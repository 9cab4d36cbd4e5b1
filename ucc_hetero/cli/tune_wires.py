"""Measures, for ``tune``, how many network threads and how long slots carry calls between hosts fastest.

First the number, with usual slots, then the slots: each in a communicator of its own, with the settings in the
environment, where no other choice depends on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from .. import env
from ..api.comm import Communicator
from ..machine.discover import host_cores
from ..planner.rules import Wires
from ..transport.rings import SLOT
from ..transport.wires import wanted
from .finding import Finding
from .trial import Trial

_NUMBERS, _SLOTS = (1, 2, 4, 8, 16), (512 << 10, 1 << 20, 2 << 20, 4 << 20)
_ROUNDS, _SECONDS = 5, 2e-3


def measure_wires(comm: Communicator, nbytes: int, tell: Callable[[Finding], None]) -> Finding | None:
    """Measure wires at one size; collective, and the same on every rank. None where no call goes by them."""
    hosts = comm.topology.hosts
    if comm._run.members.channels is None or len(set(hosts)) < 2:
        return None
    here = Counter(hosts)[hosts[comm.rank]]
    with env.meanwhile({"UCCH_WIRES": "auto"}):
        told = comm.mpi.allgather((wanted(here), len(host_cores()) // here // 2))
    usual, most = (min(each) for each in zip(*told, strict=True))
    default = Wires(usual, SLOT)
    numbers = sorted({usual, *(number for number in _NUMBERS if number <= most)})
    times = {Wires(number, SLOT): _measured(comm, Wires(number, SLOT), nbytes) for number in numbers}
    best = Finding.of("wires", nbytes, default, times).best
    times |= {each: _measured(comm, each, nbytes) for slot in _SLOTS if (each := Wires(best.number, slot)) not in times}
    found = Finding.of("wires", nbytes, default, times)
    tell(found)
    return found


def _measured(comm: Communicator, wires: Wires, nbytes: int) -> list[float]:
    with (
        env.meanwhile({"UCCH_WIRES": str(wires.number), "UCCH_WIRE_SLOT": str(wires.slot)}),
        Communicator(comm.mpi) as one,
    ):
        trial = Trial(one, "allreduce", nbytes, _SECONDS)
        trial.warm()
        took = [trial.sample() for _ in range(_ROUNDS)]
        trial.close()
    return took


def describe_wires(one: Finding) -> str:
    """One line: the best, and what the others took."""
    return one.line("wires", lambda wires: f"{wires.number} of {wires.slot >> 10}K")
