"""Random messages between all ranks, on host memory, or with ``FAKEGPU_LAYOUT`` on fake GPUs.

Each vector is on the device or the host, there also with gaps. Messages are sent and received in every form, with tags
in any order, from any source, by probes, and completed in every way, beside messages in a stream and collectives.
`main`: all messages are in streams, several on each rank, and sent before or after their receives. ``DICE`` is the
seed.
"""

import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from cases import ADD, raises, seen
from mpi4py import MPI

from ucc_hetero import Communicator, PersistentRequest, Request

WORLD = MPI.COMM_WORLD
ON_DEVICES = "FAKEGPU_LAYOUT" in os.environ
if ON_DEVICES:
    from arrays import Array, Gate, runtime

#: Numbers of float32: the most for one slot, and several pieces.
SLOT, LONG = 16384, 300_000
#: An element and a gap of its length.
WITH_GAP = MPI.FLOAT.Create_resized(0, 8).Commit()
#: Lengths around the limits of UCX's protocols (nothing, inline, eager, rendezvous) and of slots.
LENGTHS = [0, 1, 3, 24, 26, 2047, 2050, SLOT - 1, SLOT, SLOT + 1, 70_000, LONG, 3 * LONG] * 2
LENGTHS += [6_000_000 if ON_DEVICES else 2_000_000]

INITS = ("Send_init", "Ssend_init", "Bsend_init", "Rsend_init")
SENDS = ("Isend", "Isend", "Issend", "Irsend", "Ibsend", "Bsend", *INITS)
RECEIVES = ("Irecv", "Irecv", "Recv_init", "Recv", "Probe", "Iprobe", "Mprobe", "Improbe")
#: Forms in which every rank sends to one rank and receives from one.
PAIRS = ("Sendrecv", "Isendrecv", "Sendrecv_replace", "Isendrecv_replace", "Send", "Ssend", "Rsend", *INITS)
ENDS = ("Wait", "Test", "Get_status", "Waitall", "Testall", "Waitany", "Testany", "Waitsome", "Testsome",
        "Get_status_all", "Get_status_any", "Get_status_some")  # fmt: skip
TAGS = (0, 1, 300, (1 << 31) - 1)
#: A tag that no message has, and the tag of messages to oneself.
NONE, OWN = 77, 78


class Sent(NamedTuple):
    """A message: length, tag, and offset of its data in the pool."""

    count: int
    tag: int
    first: int


class Begun(NamedTuple):
    """A request under way, and functions that check its status and data at the end."""

    request: Any
    judge: Callable[[MPI.Status], object]


def anything(status):
    """Check for requests without a status to compare."""


class Dice:
    """Random numbers that are equal on all ranks, and those of this rank."""

    def __init__(self, comm):
        seed = WORLD.bcast(int(os.environ.get("DICE") or secrets.randbelow(1 << 30)))
        print("seed", seed)
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.same, self.mine = np.random.default_rng(seed), np.random.default_rng([seed, comm.rank])
        self.pool = self.same.integers(-99, 99, 7_000_000).astype(np.float32)

    def plan(self, least, crowd=False):
        every = [(s, d) for s in range(self.size) for d in range(self.size) if s != d or not least]
        counts = {pair: int(self.same.integers(1, 200 if crowd else 9)) for pair in every}
        return {
            pair: [self.message(least, LENGTHS[:11] if crowd else LENGTHS) for _ in range(counts[pair])]
            for pair in every
        }

    def message(self, least=0, lengths=LENGTHS):
        count = max(least, int(self.same.choice(lengths)))
        return Sent(count, int(self.same.choice(TAGS)), int(self.same.integers(900_000)))

    def pick(self, among):
        return among[int(self.mine.integers(len(among)))]

    def rarely(self):
        return not self.mine.integers(4)

    def data(self, message):
        return self.pool[message.first :][: message.count]

    def memory(self, count, device=False):
        """Memory on the device or the host, also with gaps, at any address, or at the start of a longer array."""
        if ON_DEVICES and (device or not self.rarely()):
            return Array(count)
        if device or not self.rarely():
            return np.empty(count + 3, np.float32)[:count]
        if self.rarely():
            return np.empty(4 * count + 1, np.uint8)[1:].view(np.float32)
        return np.empty((count, 2), np.float32)[:, 0]

    def filled(self, message, device=False):
        made = self.memory(message.count, device)
        seen(made)[:] = self.data(message)
        return made

    def room(self, *messages, device=False):
        """Memory for any one of these messages, or for a longer one."""
        longest = max(message.count for message in messages)
        made = self.memory(longest + 7 * int(self.mine.integers(2)), device)
        seen(made)[:] = -1000
        return made

    def spelt(self, memory):
        """A random one of mpi4py's forms for this memory."""
        n = seen(memory).size
        forms = [memory, [memory, n], [memory, MPI.FLOAT], [memory, n, MPI.FLOAT]]
        if isinstance(memory, np.ndarray):
            if n > 1 and not memory.flags.c_contiguous:
                return self.pick([memory, [memory.base, n, WITH_GAP]])
            forms += [memoryview(memory), memory.view(np.int32), [memory.view("u1"), 4 * n, MPI.BYTE]]
            forms += [[memory.base, n], [memory.base, n, MPI.FLOAT]] if memory.flags.aligned else []
            forms += [memory.view("c8") for _ in range(n % 2 == 0)]
        return self.pick(forms)

    def place(self, source, tag):
        """Arguments for source and tag; wildcards are given explicitly, or left out."""
        said, wild = {"source": source, "tag": tag}, (MPI.ANY_SOURCE, MPI.ANY_TAG)
        return {name: each for name, each in said.items() if each not in wild or self.rarely()}

    def judge(self, received, message, source, status):
        found = status.Get_source(), status.Get_tag(), status.Get_count(MPI.FLOAT), status.Get_elements(MPI.BYTE)
        assert found == (source, message.tag, message.count, 4 * message.count), (found, source, message)
        assert not status.Is_cancelled()
        got = seen(received)
        assert (got[: message.count] == self.data(message)).all(), (source, message)
        assert (got[message.count :] == -1000).all(), (source, message)


class Inbox:
    """Messages of a plan that are still to be received. A receive matches the earliest message from its source with its
    tag that no earlier receive matches. Messages taken out by probes may be received late."""

    def __init__(self, dice, plan, any_tag):
        self.dice, self.comm, self.any_tag = dice, dice.comm, any_tag
        self.left = {s: list(messages) for (s, d), messages in plan.items() if d == dice.rank}
        self.taken_out = []

    def first(self, source, tag):
        return next((each for each in self.left[source] if tag in (each.tag, MPI.ANY_TAG)), None)

    def take(self, source, tag):
        message = self.first(source, tag)
        assert message is not None, f"there is no message with tag {tag} from rank {source}"
        self.left[source].remove(message)
        return message

    def receive(self):
        dice, comm, how, status = self.dice, self.comm, self.dice.pick(RECEIVES), MPI.Status()
        source = dice.pick([s for s, messages in self.left.items() if messages])
        tag = MPI.ANY_TAG if self.any_tag and dice.rarely() else dice.pick(self.left[source]).tag
        if how in ("Irecv", "Recv_init"):
            into = dice.room(message := self.take(source, tag))
            request = getattr(comm, how)(dice.spelt(into), **dice.place(source, tag))
            if how == "Recv_init":
                request.Start()
            return [Begun(request, lambda status: dice.judge(into, message, source, status))]
        asked, found = MPI.ANY_SOURCE if dice.rarely() else source, None
        if how == "Recv":
            into = dice.room(*filter(None, (self.first(s, tag) for s in self.left)))
            comm.Recv(dice.spelt(into), **dice.place(asked, tag), status=status)
            dice.judge(into, self.take(source := status.Get_source(), tag), source, status)
            return []
        while not (found := getattr(comm, how)(**dice.place(asked, tag), status=status)):
            time.sleep(1e-4)  # others need the core
        if how in ("Probe", "Iprobe") and dice.rarely():
            return []  # the next receive may match another one
        message = self.take(source := status.Get_source(), tag)
        assert (status.Get_tag(), status.Get_count(MPI.FLOAT)) == (message.tag, message.count), message
        if how in ("Probe", "Iprobe"):
            comm.Recv(into := dice.room(message), source, dice.pick([tag, message.tag]), status)
            dice.judge(into, message, source, status)
            return []
        self.taken_out.append((found, message, source))
        return [] if dice.rarely() else self.late()

    def late(self):
        """Receive the messages that probes have taken out."""
        begun, status, dice = [], MPI.Status(), self.dice
        for found, message, source in self.taken_out:
            judge = partial(dice.judge, into := dice.room(message), message, source)
            if dice.rarely():
                found.Recv(into, status)
                judge(status)
            else:
                begun.append(Begun(found.Irecv(into), judge))
        self.taken_out.clear()
        return begun


def send(dice, message, dest):
    how, data = dice.pick(SENDS), dice.filled(message)
    request = getattr(dice.comm, how)(dice.spelt(data), dest, message.tag)
    if how in INITS:
        request.Start()
    if "bsend" in how.lower():
        seen(data)[:] = -5  # the data was copied before
    return [Begun(request, anything)] if request is not None else []


def calls(dice):
    comm, r, p, a, b = dice.comm, dice.rank, dice.size, dice.memory(LONG, True), dice.memory(LONG, True)
    again, own = (np.full(5, -1.0) for _ in range(2))
    seen(a)[:] = r

    def due(memory, value):
        def judge(_):
            assert (seen(memory) == value).all(), (seen(memory)[:5], value)

        return judge

    made = [Begun(comm.Iallreduce(a, b), due(b, p * (p - 1) / 2)), Begun(comm.Ibarrier(), anything)]
    made.append(Begun(repeated := comm.Allreduce_init(np.full(5, 2.0), again), due(again, 2 * p)))
    repeated.Start()
    return [*made, Begun(comm.Iallreduce(np.full(5, 3.0), own, op=ADD), due(own, 3 * p))]


def decoys(dice):
    """Receives without a message, and halves of combined calls."""
    comm, into, own = dice.comm, np.full(3, -1.0), np.full(3, -1.0)

    def sent(status):
        assert (own == 5).all() and (status.source, status.tag) == (dice.rank, OWN)

    def nothing(status):
        assert (into == -1).all() and (status.Is_cancelled() or status.source == MPI.PROC_NULL)

    taken_back = comm.Irecv(into, dice.pick([MPI.ANY_SOURCE, *range(dice.size)]), NONE)
    assert not Request.Testall([taken_back]) and Request.Testsome([taken_back]) == []
    taken_back.Cancel()
    assert not comm.Iprobe(MPI.ANY_SOURCE, NONE) and comm.Improbe(tag=NONE) is None
    halves = [comm.Isendrecv(into, MPI.PROC_NULL, 0, own, dice.rank, OWN)]
    halves.append(comm.Isendrecv(np.full(3, 5.0), dice.rank, OWN, into, MPI.PROC_NULL))
    made = (taken_back, comm.Irecv(into, MPI.PROC_NULL), halves[1])
    return [*(Begun(each, nothing) for each in made), Begun(halves[0], sent)]


def end(dice, under_way):
    """Wait for all requests in one of all ways, and check each."""
    way, requests = dice.pick(ENDS), [each.request for each in under_way]
    method, found = getattr(Request, way), {}
    while len(found) < len(requests):
        several = way.endswith(("all", "some"))
        statuses = [MPI.Status() for _ in range(dice.pick([0, 1, len(requests) + 2]) if several else 0)]
        if way in ("Waitall", "Testall", "Get_status_all"):
            ended = [*range(len(requests))] if method(requests, statuses) else []
        elif way in ("Waitsome", "Testsome", "Get_status_some"):
            ended = method(requests, statuses)
            assert ended or way != "Waitsome"
        else:
            statuses.append(MPI.Status())
            if way in ("Waitany", "Testany", "Get_status_any"):
                told = method(requests, statuses[0])
                index, flag = (told, True) if way == "Waitany" else told
                assert flag == (index != MPI.UNDEFINED), told
            else:
                index = next(k for k in range(len(requests)) if k not in found)
                flag = getattr(requests[index], way)(statuses[0])
            ended = [index] if flag else []
        if way.startswith("Get_status"):
            assert not any(requests[k].finished for k in ended) and all(requests[k].Wait() for k in ended)
        assert not {*ended} & {*found}, "a request has ended twice"
        found |= zip(ended, statuses, strict=False)
        if not way.startswith("Wait"):
            time.sleep(1e-4)  # others need the core
    assert all(request.finished for request in requests)
    nothing = MPI.Status()
    nothing.source = 0
    assert Request.Waitany(requests, nothing) == MPI.UNDEFINED and nothing.source == MPI.ANY_SOURCE
    assert Request.Waitsome(requests) is None and Request.Testall(requests)
    for index, status in found.items():
        under_way[index].judge(status)
        if isinstance(requests[index], PersistentRequest):
            requests[index].Free()


def one_turn(dice, stream, crowd):
    """Messages of one tag in order of sending, others in any; a few, or hundreds that are under way at once."""
    comm, status, r, p, plan = dice.comm, MPI.Status(), dice.rank, dice.size, dice.plan(0, crowd)
    sends = [begun for (s, d), messages in plan.items() if s == r for each in messages for begun in send(dice, each, d)]
    others = [d for d in range(p) if d != r] if stream else []
    ahead = {pair: messages[0]._replace(count=LONG, tag=9) for pair, messages in plan.items()}
    sends += [Begun(comm.Isend(dice.filled(ahead[r, d], True), d, 9, stream=stream), anything) for d in others]
    sends += calls(dice)
    inbox, comes = Inbox(dice, plan, any_tag=not others), decoys(dice)  # none from streams
    while any(inbox.left.values()):
        comes += inbox.receive()
        if dice.rarely() and not crowd:  # hundreds are under way at a time
            end(dice, [*comes, *inbox.late()])
            comes = []
    comes += inbox.late()
    for s in others:
        message = ahead[s, r]
        comm.Irecv(into := dice.room(message, device=True), s, 9, stream=stream).Wait(status)
        dice.judge(into, message, s, status)
    every = [*sends, *comes]
    end(dice, [every[k] for k in dice.mine.permutation(len(every))])


def in_pairs(dice):
    """Every rank sends to one rank and receives from one, perhaps itself, in one call; persistent ones several
    times."""
    comm, r, p, status, how = dice.comm, dice.rank, dice.size, MPI.Status(), str(dice.same.choice(PAIRS))
    shift, messages = int(dice.same.integers(p)), [dice.message() for _ in range(p)]
    if "replace" in how:
        messages = [each._replace(count=messages[0].count) for each in messages]
    to, of = (r + shift) % p, (r - shift) % p
    mine, theirs = messages[r], messages[of]
    data, into = dice.filled(mine), dice.room(theirs)
    if how in INITS:
        several_times(dice, how, (data, to, mine), (into, of, theirs))
        return
    if "replace" in how:
        into, made = data, getattr(comm, how)(data, to, mine.tag, of, theirs.tag, *[status] * (how[0] == "S"))
    elif "sendrecv" in how.lower():
        sides = dice.spelt(data), to, mine.tag, dice.spelt(into), of
        tag = () if dice.rarely() else (theirs.tag,)
        made = getattr(comm, how)(*sides, *tag, **({"status": status} if how == "Sendrecv" else {}))
    else:  # one rank receives first
        made = (comm.Irecv if r or not shift else comm.Recv)(into, of, theirs.tag, *[status] * (r == 0 < shift))
        getattr(comm, how)(data, to, mine.tag)
    if made is not None:
        end(dice, [Begun(made, lambda status: dice.judge(into, theirs, of, status)), *decoys(dice)])
    else:
        dice.judge(into, theirs, of, status)


def several_times(dice, how, outgoing, incoming):
    """Restart with the current content of the memory."""
    comm, (data, to, mine), (into, of, theirs) = dice.comm, outgoing, incoming
    requests = [comm.Recv_init(into, of, theirs.tag), getattr(comm, how)(data, to, mine.tag)]
    for turn in range(3):
        again = [each._replace(first=each.first + turn) for each in (mine, theirs)]
        seen(data)[:], seen(into)[:] = dice.data(again[0]), -1000
        PersistentRequest.Startall(requests)
        with raises(ValueError, "still active"):
            requests[turn % 2].Start()
        Request.Waitall(requests, statuses := [])
        dice.judge(into, again[1], of, statuses[0])
        assert requests[0].Wait(statuses[0]) and statuses[0].source == MPI.ANY_SOURCE
    for request in requests:
        request.Free()
        with raises(ValueError, "freed"):
            request.Start()


def own_queues():
    """True if streams may be held, as each has a hardware queue of its own."""
    return os.environ.get("FAKEGPU_CONNECTIONS") == "0"


def in_streams(dice, streams, sends_first):
    """Messages in streams, in the same order on both sides, with the tag or any. The stream writes the data before its
    send and overwrites it after, as the receiver's does before. Some streams are held until all messages were
    posted."""
    comm, status, r, kept = dice.comm, MPI.Status(), dice.rank, []
    plan = dice.plan(1)
    gates = [Gate(stream) for stream in streams if own_queues() and dice.mine.integers(2)]
    by_hosts = os.environ.get("UCCH_CHANNELS") == "n"
    ways = [*streams, *[None] * by_hosts]  # these match messages without a stream too
    sends, receives = [], []

    def send():
        for (_, d), messages in (each for each in plan.items() if each[0][0] == r):
            for message in messages:
                form, stream = comm.Issend if dice.rarely() else comm.Isend, dice.pick(ways)
                source, data = dice.filled(message, True), Array(message.count).set(-5)
                kept.append((source, data))
                if stream is None:
                    sends.append(form(source, d, message.tag))
                    continue
                runtime().copy(data.block.handle, source.block.handle, 4 * message.count, stream.handle)
                sends.append(form(data, d, message.tag, stream=stream))
                data.fill(stream, -7.0)

    def receive():
        for (s, _), messages in (each for each in plan.items() if each[0][1] == r):
            for message in messages:
                wanted = None if dice.mine.integers(3) == 0 else message.tag
                into, stream = dice.room(message, device=True), dice.pick(ways)
                if stream is not None:
                    into.fill(stream, -1000.0)
                receives.append((comm.Irecv(into, s, wanted, stream=stream), into, s, message))

    steps = [send, receive] if sends_first else [receive, send]
    for step in steps:
        step()
    for gate in gates:
        gate.open()
    for request, into, source, message in receives:
        request.Wait(status)
        dice.judge(into, message, source, status)
    for request in sends:
        request.Wait()


def blocking_in_streams(dice, streams):
    """With collectives between messages, and a message by MPI's rules."""
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


def on_device(comm):
    """Make streams on this rank's device, which it uses from now on; none on a rank without one."""
    if not ON_DEVICES:
        return []
    runtime().use(comm._runner.members.place.device)
    return [runtime().stream() for _ in range(4)]


def by_rules_of_mpi(parent):
    with parent.Dup() as comm:
        dice, streams = Dice(comm), on_device(comm)
        for turn in range(3):
            one_turn(dice, streams[0] if streams and turn == 1 else None, crowd=turn == 2)
            for _ in range(5):
                in_pairs(dice)
        if streams and own_queues():  # otherwise a stream may wait behind another in a queue
            in_streams(dice, streams, bool(dice.same.integers(2)))
            blocking_in_streams(dice, streams)
        comm.Isend(dice.memory(LONG), (comm.rank + 1) % comm.size, 8).Free()


def main():
    with Communicator() as comm:
        dice, streams = Dice(comm), on_device(comm)
        for sends_first in (False, True):
            in_streams(dice, streams, sends_first)
        blocking_in_streams(dice, streams)
    print("right", flush=True)
