"""Random messages between all ranks: ``mpirun -np N python random_messages.py [streams]``.

On host memory, or with ``FAKEGPU_LAYOUT`` on fake GPUs, each vector on the device or the host. They are received
in any order of tags, and by probes; beside them go messages in a stream, and collectives. ``streams``: all are parts of
streams, several of each rank, and sent before their receives or behind them.
"""

import os
import secrets
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ucc_hetero import Communicator

WORLD = MPI.COMM_WORLD
ON_DEVICES = "FAKEGPU_LAYOUT" in os.environ
if ON_DEVICES:
    from arrays import Array, runtime

#: float32: what one slot holds at most, and several pieces.
SLOT, LONG = 16384, 300_000
LENGTHS = [0, 1, 3, SLOT - 1, SLOT, SLOT + 1, 70_000, LONG, 3 * LONG] * 2 + [6_000_000 if ON_DEVICES else 2_000_000]


class Sent(NamedTuple):
    """A message: its length, its tag, and where in the pool its data begins."""

    count: int
    tag: int
    first: int


class Dice:
    """Numbers that all ranks draw alike, and those of this rank."""

    def __init__(self, comm: Communicator) -> None:
        seed = WORLD.bcast(int(os.environ.get("DICE") or secrets.randbelow(1 << 30)))
        print("seed", seed)
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.same, self.mine = np.random.default_rng(seed), np.random.default_rng([seed, comm.rank])
        self.pool = self.same.integers(-99, 99, 7_000_000).astype(np.float32)

    def plan(self, least: int) -> dict[tuple[int, int], list[Sent]]:
        """What every rank sends to every other one, in order."""
        every = [(s, d) for s in range(self.size) for d in range(self.size) if s != d or not least]
        return {pair: [self._message(least) for _ in range(int(self.same.integers(1, 9)))] for pair in every}

    def _message(self, least: int) -> Sent:
        count = max(least, int(self.same.choice(LENGTHS)))
        return Sent(count, int(self.same.integers(4)), int(self.same.integers(900_000)))

    def data(self, message: Sent) -> np.ndarray[Any, Any]:
        return self.pool[message.first :][: message.count]

    def memory(self, count: int, device: bool = False) -> Any:
        """Memory on the device, or wherever."""
        made = np.empty(count, np.float32)
        return Array(count) if ON_DEVICES and (device or self.mine.integers(4)) else made

    def filled(self, message: Sent, device: bool = False) -> Any:
        made = self.memory(message.count, device)
        seen(made)[:] = self.data(message)
        return made

    def judge(self, received: Any, message: Sent, source: int, status: MPI.Status) -> None:
        found = status.Get_source(), status.Get_tag(), status.Get_count(MPI.FLOAT)
        assert found == (source, message.tag, message.count), (found, source, message)
        got = seen(received)
        assert (got[: message.count] == self.data(message)).all(), (source, message)
        assert (got[message.count :] == -1000).all(), (source, message)


def seen(memory: Any) -> np.ndarray[Any, Any]:
    """Its contents, where the test can look at them."""
    found: np.ndarray[Any, Any] = getattr(memory, "peek", memory)
    return found


def room(dice: Dice, message: Sent, device: bool = False) -> Any:
    """Memory for a message, or for a longer one."""
    made = dice.memory(message.count + 7 * int(dice.mine.integers(2)), device)
    seen(made)[:] = -1000
    return made


def by_rules_of_mpi(dice: Dice, stream: Any) -> None:
    """Of one tag in the order of sending, else in any; some by a probe."""
    comm, status, r, p = dice.comm, MPI.Status(), dice.rank, dice.size
    plan = dice.plan(0)
    sends = [
        (comm.Issend if dice.mine.integers(4) == 0 else comm.Isend)(dice.filled(message), d, message.tag)
        for (s, d), messages in plan.items() if s == r for message in messages
    ]  # fmt: skip
    ahead = [message._replace(count=LONG, tag=9) for (message, *_) in (plan[r, d] for d in range(p) if d != r)]
    others = [d for d in range(p) if d != r] if stream else []
    sends += [comm.Isend(dice.filled(m, True), d, 9, stream=stream) for d, m in zip(others, ahead, strict=False)]
    a, b = dice.memory(LONG, True), dice.memory(LONG, True)
    seen(a)[:] = r
    call = comm.Iallreduce(a, b)
    left = [(s, k) for (s, d), messages in plan.items() if d == r for k in range(len(messages))]
    under_way: list[tuple[Any, Any, int, Sent]] = []
    while left:
        s, k = left[int(dice.mine.integers(len(left)))]
        k = min(other for source, other in left if source == s and plan[s, r][other].tag == plan[s, r][k].tag)
        left.remove((s, k))
        message, how = plan[s, r][k], int(dice.mine.integers(3))
        into = room(dice, message)
        if how == 0 and not under_way:
            found = comm.Mprobe(s, message.tag, status)
            assert status.Get_count(MPI.FLOAT) == message.count
            under_way.append((found.Irecv(into), into, s, message))
        elif how == 1 and not under_way:
            comm.Recv(into, s, message.tag, status)
            dice.judge(into, message, s, status)
        else:
            under_way.append((comm.Irecv(into, s, message.tag), into, s, message))
        if dice.mine.integers(3) == 0 or not left:
            for request, got, source, sent in under_way:
                request.Wait(status)
                dice.judge(got, sent, source, status)
            under_way = []
    for s in others:
        message = plan[s, r][0]._replace(count=LONG, tag=9)
        comm.Irecv(into := room(dice, message, True), s, 9, stream=stream).Wait(status)
        dice.judge(into, message, s, status)
    for request in (*sends, call):
        request.Wait()
    assert (seen(b) == p * (p - 1) / 2).all()


def in_streams(dice: Dice, streams: list[Any], sends_first: bool) -> None:
    """In the order in which both sides begin them, with the tag or any."""
    comm, status, r = dice.comm, MPI.Status(), dice.rank
    plan = dice.plan(1)
    sends, receives = list[Any](), list[tuple[Any, Any, int, Sent]]()

    def send() -> None:
        for (_, d), messages in (each for each in plan.items() if each[0][0] == r):
            for message in messages:
                form = comm.Issend if dice.mine.integers(4) == 0 else comm.Isend
                stream = streams[int(dice.mine.integers(4))]
                sends.append(form(dice.filled(message, True), d, message.tag, stream=stream))

    def receive() -> None:
        for (s, _), messages in (each for each in plan.items() if each[0][1] == r):
            for message in messages:
                wanted = None if dice.mine.integers(3) == 0 else message.tag
                into, stream = room(dice, message, True), streams[int(dice.mine.integers(4))]
                receives.append((comm.Irecv(into, s, wanted, stream=stream), into, s, message))

    steps: list[Callable[[], None]] = [send, receive] if sends_first else [receive, send]
    for step in steps:
        step()
    for request, into, source, message in receives:
        request.Wait(status)
        dice.judge(into, message, source, status)
    for request in sends:
        request.Wait()


def blocking_in_streams(dice: Dice, streams: list[Any]) -> None:
    """With calls between messages, and a message by MPI's rules."""
    comm, r, p, status = dice.comm, dice.rank, dice.size, MPI.Status()
    right, left = (r + 1) % p, (r - 1) % p
    for n in (7, LONG):
        x, y, z = Array(n), Array(n).set(-1), Array(n)
        x.fill(streams[0], 3.0 + r)
        comm.Sendrecv(x, right, 1, y, left, 1, stream=streams[0])
        assert (y.peek == 3 + left).all()
        comm.Allreduce(x, y)
        assert (y.peek == 3 * p + p * (p - 1) / 2).all()
        comm.Isendrecv(x, right, 2, y, left, 2, stream=streams[1].handle).Wait(status)
        assert (y.peek == 3 + left).all() and status.Get_source() == left
        comm.Sendrecv(x, right, 3, z, left, 3)
        assert (z.peek == 3 + left).all()


def main(*words: str) -> None:
    with Communicator() as comm:
        dice, streams = Dice(comm), list[Any]()
        if ON_DEVICES:
            runtime().use(comm._run.members.place.device)
            streams = [runtime().stream() for _ in range(4)]
        for turn in range(4):
            if words:
                in_streams(dice, streams, turn % 2 == 1)
            else:
                by_rules_of_mpi(dice, streams[0] if streams else None)
        if words:
            blocking_in_streams(dice, streams)
        else:
            comm.Isend(dice.memory(LONG), (comm.rank + 1) % comm.size, 8).Free()  # which is never received
    print("right", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
