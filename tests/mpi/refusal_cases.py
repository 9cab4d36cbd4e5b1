"""Ranks that refuse collectives, for 2 or more ranks.

In random calls one rank passes wrong arguments, or all ranks do; in host memory, or with ``FAKEGPU_LAYOUT`` on fake
GPUs. If all ranks do, they go on. Otherwise the rank raises its error, and the communicator ends on all others,
wherever they are: that call and every later one names the rank and the mistake. New communicators work.
"""

import os
import secrets
import time
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import collective_call
import numpy as np
import pytest
from cases import ADD, seen
from collective_call import UNEVEN, Call, Case
from collective_cases import METHODS, Tester, draw, start
from collective_reference import FOREIGN
from mpi4py import MPI

from ucc_hetero import CollectiveError, Communicator, MismatchError, NotSupported, PersistentRequest, RefusedError
from ucc_hetero.api import comm as api_comm
from ucc_hetero.calls.state import State
from ucc_hetero.native.libraries import lib

WORLD = MPI.COMM_WORLD
STREAM = None
if "FAKEGPU_LAYOUT" in os.environ:
    import arrays  # before a communicator is made
#: Calls in which a rank may have completed its part before another one refuses.
LOOSE = {"bcast", "reduce", "gather", "gatherv", "scatter", "scatterv", "scan", "exscan"}


class Trial(NamedTuple):
    """A call, the mistake of some ranks in it, and the number of correct calls before it."""

    case: Case
    mistake: str
    culprits: tuple[int, ...]
    own_op: bool
    before: int


def draw_trial(rng):
    on_device, size = collective_call.device_memory is not None, WORLD.size
    case = replace(draw(rng, size, int(rng.integers(1 << 30)), tuple(METHODS)), spec="plain", gaps=False)
    if case.dtype in FOREIGN:
        case = replace(case, dtype="float64", op=case.op and "SUM")
    if on_device and case.form != "persistent" and rng.random() < 0.5:
        case = replace(case, form={"request": "queued", "blocking": "in stream"}[case.form])
    mistakes = (
        ["object"] + ["op"] * bool(case.op) + ["root"] * (case.root >= 0) + ["freed"] * (case.form == "persistent")
    )
    listed = case.name != "reduce_scatter" or len(set(case.counts)) > 1  # else all see that blocks do not fit
    # A rank with one side only cannot see these mistakes.
    if case.root < 0 and not case.in_place and min(case.counts):
        mistakes += ["short"] * listed + ["type"] * (case.name not in UNEVEN) + ["fixed"] * (not on_device)
    culprits = tuple(range(size)) if rng.random() < 0.3 else (int(rng.integers(size)),)
    own_op = case.op == "SUM" and case.dtype == "float64" and case.form in ("blocking", "request") and not on_device
    return Trial(case, str(rng.choice(mistakes)), culprits, own_op, int(rng.integers(4)))


def spoiled(call, mistake):
    args, case = call.args(), call.case
    side = 0 if case.name == "bcast" or call.recv is None else 1
    memory = collective_call.device_memory or np.empty
    if mistake == "object":
        args[side] = 5
    elif mistake in ("short", "type", "fixed"):
        whole, dtype = call.recv.view.size, call.dtype
        kind = dtype if mistake != "type" else "f4" if dtype.itemsize == 8 else "f8"
        wrong = memory(whole - (mistake == "short"), kind)
        if mistake == "fixed":
            wrong.flags.writeable = False
        args[side] = [wrong, *args[side][1:]] if isinstance(args[side], list) else wrong
    elif mistake in ("op", "root"):
        op = "BAND" if call.dtype.kind == "f" else "AVERAGE"  # one that no float has, or that nothing has
        args[-1 if mistake == "root" or case.root < 0 else -2] = WORLD.size if mistake == "root" else op
    return args


def make(comm, trial):
    call, wrong = Call(trial.case, comm), comm.rank in trial.culprits
    call.refill()
    args = spoiled(call, trial.mistake if wrong else "")
    if trial.own_op and trial.mistake != "op":
        args[-1 if trial.case.root < 0 else -2] = ADD
    call.args = lambda: args
    request = start(comm, call, STREAM)
    if isinstance(request, PersistentRequest) and trial.case.form == "persistent":
        if wrong and trial.mistake == "freed":
            request.Free()
        request.Start()
    if request is not None:
        request.Wait()
    if trial.case.form == "queued":
        for buffer in call.buffers():
            buffer.seen(STREAM)
    return call


def computes(comm, seed):
    tester, rng = Tester(comm, f"after a mistake, {seed}", STREAM), np.random.default_rng(seed)
    for _ in range(2):
        case = draw(rng, comm.size, int(rng.integers(1 << 30)), tuple(METHODS))
        tester.one(case if case.dtype not in FOREIGN else replace(case, dtype="float32", op=case.op and "SUM"))


def attempt(trial, comm):
    case, culprits = trial.case, trial.culprits
    for number in range(trial.before):
        computes(comm, case.seed + number)
    try:
        call = make(comm, trial)
    except RefusedError as error:
        assert comm.rank not in culprits and named(error, culprits), error
    except (TypeError, ValueError, BufferError, NotSupported) as error:
        assert comm.rank in culprits, error
    else:
        assert comm.rank not in culprits and (case.name in LOOSE or not min(case.counts)), "it passed"
        assert not call.verify()
    if len(culprits) == comm.size:
        computes(comm, case.seed)
    else:
        ended(comm, culprits)


def named(error, culprits):
    """True if an error names one of these ranks as the one that refused, the reason, and the way out."""
    text = str(error)
    who = any(f"rank {culprit} refused " in text for culprit in culprits)
    return who and ("Error: " in text or "NotSupported: " in text) and "make a new one" in text


def ended(comm, culprits):
    """All ranks get the error, wherever they are, and every later call of any kind raises it at once."""
    a, out = np.ones(2), np.zeros(2)
    with pytest.raises(CollectiveError) as caught:
        while True:  # a rank that has completed its part may not know yet; others have ended
            comm.Barrier()
    assert named(caught.value, culprits), caught.value
    later = [
        lambda: comm.Allreduce(a, out), lambda: comm.Iallreduce(a, out), lambda: comm.Bcast(a, comm.size),
        lambda: comm.Allreduce_init(a, out), lambda: comm.Isend(a, 0), lambda: comm.Recv(out),
        lambda: comm.Allreduce(a, out, ADD), lambda: comm.bcast(1), lambda: comm.gather(1), comm.Dup, comm.Split,
    ]  # fmt: skip
    for call in later:
        with pytest.raises(CollectiveError, match="refused") as caught:
            call()
        assert named(caught.value, culprits), caught.value


def several_under_way(comm):
    """Calls started before a refused one succeed, those after it do not."""
    p, last, count = comm.size, comm.size - 1, 1 << 15
    sums = [np.full(count, -1.0) for _ in range(5)]
    requests = [comm.Iallreduce(np.ones(count), into) for into in sums[:2]]
    if comm.rank != last:
        requests += [comm.Iallreduce(np.ones(count), into) for into in sums[2:]]
    WORLD.Barrier()
    if comm.rank == last:
        with pytest.raises(ValueError):
            comm.Iallreduce(np.ones(count), sums[2][:-1])
    for request in requests[:2]:
        request.Wait()
    assert all((into == p).all() for into in sums[:2])
    for request in requests[2:]:
        with pytest.raises(RefusedError, match=f"rank {last} refused"):
            request.Wait()
    while comm.rank != last and comm._runner.board.fate(last) != lib.UCCH_LEFT:
        time.sleep(0.001)  # else a receive from it would wait until its deadline
    WORLD.Barrier()
    ended(comm, [last])


def before_others_come(comm):
    """A rank refuses calls and makes others, long before the others reach the first one."""
    last, freed, out = comm.size - 1, comm.Barrier_init(), np.zeros(1)
    freed.Free()
    if comm.rank == last:
        for _ in range(3):
            with pytest.raises(ValueError, match="freed"):
                freed.Start()
        requests = [comm.Iallreduce(np.ones(1), out) for _ in range(10)]
        WORLD.Barrier()
        for request in requests:
            with pytest.raises(RefusedError, match=f"rank {last} refused"):
                request.Wait()
    else:
        WORLD.Barrier()
        with pytest.raises(RefusedError, match=f"rank {last} refused"):
            comm.Barrier()
    ended(comm, [last])


def behind(comm):
    """Rank 0 makes calls late, when a refusal of a later call is known: they succeed on all ranks."""
    p, last, board, how = comm.size, comm.size - 1, comm._runner.board, {"stream": STREAM} if STREAM else {}
    memory = collective_call.device_memory or np.empty
    counts = [1, 3000, 1 << 17] * 5
    sent = [np.random.default_rng().integers(-9, 9, count).astype(np.float32) for count in counts]
    calls = [(memory(count, np.float32), memory(count, np.float32)) for count in counts]
    for (x, y), data in zip(calls, sent, strict=True):
        seen(x)[:] = data
        if STREAM:  # from now on such calls wait for no other rank
            comm.Allreduce(x, y, stream=STREAM)
        seen(y)[:] = np.nan
    requests = [comm.Iallreduce(*both, **how) for both in calls] if comm.rank else []
    x, y = memory(4, np.float32), memory(3 + (comm.rank != last), np.float32)
    if comm.rank == last:
        with pytest.raises(ValueError):
            comm.Iallreduce(x, y, **how)
    elif comm.rank:
        with pytest.raises(RefusedError, match=f"rank {last} refused its part"):
            comm.Iallreduce(x, y, **how).Wait()
    while p > 2 and board.refusal() is None:  # with two ranks only rank 0 makes it
        time.sleep(0.001)
    requests += [comm.Iallreduce(*both, **how) for both in calls] if comm.rank == 0 else []
    for request in requests:
        request.Wait()
    for mine, (_, found) in zip(sent, calls, strict=True):
        got = found.copied(STREAM) if STREAM else found
        assert (got == sum(WORLD.allgather(mine))).all()
    ended(comm, [last])


def many_by_all(comm):
    """All ranks refuse many calls, each at its own time."""
    freed = comm.Barrier_init()
    freed.Free()
    for turn in range(500):
        with pytest.raises(ValueError, match="freed"):
            freed.Start()
        if turn % 50 == 0:
            comm.Barrier()
    computes(comm, 1)


def answered_late(comm):
    """A rank that has said that it is ready to make a team waits for the answer, though its call is refused meanwhile:
    the one that gives it makes the team, would be alone there, and spoil the context for all communicators."""
    teams, ends = comm._runner.members.teams, (0, comm.size - 1)

    told = []

    def refused():
        if not told:
            WORLD.Send(np.zeros(1), 0, 7)
        told.append(True)
        raise RefusedError("by a third one")

    if comm.rank == 0:
        WORLD.Recv(np.zeros(1), ends[1], 7)
    elif comm.rank == ends[1]:
        teams.poll_hook = refused
    with mock.patch.object(teams, "by_itself", return_value=False):  # as the first one of these ranks
        if comm.rank in ends:
            teams._create(ends, "native" if comm.topology.flat else "bridge").close(20)
    teams.poll_hook = None


def refused_own_operation(comm):
    """Nothing of the call is left that could meet what the ranks do next."""
    last, data = comm.size - 1, np.full(5000, 1.0)
    with pytest.raises(ValueError if comm.rank == last else RefusedError):
        comm.Allreduce(data, np.zeros(5000 - (comm.rank == last)), op=ADD)
    ended(comm, [last])


def refused_objects(comm):
    """A collective of Python objects that one rank alone makes wrongly, once all others have come to it."""
    last, unpicklable = comm.size - 1, (i for i in ())
    mistakes = [
        lambda: comm.scatter([1] * (comm.size + 1), root=last), lambda: comm.alltoall([1]),
        lambda: comm.allgather(unpicklable), lambda: comm.allreduce(1, "product"), lambda: comm.bcast(1, "no rank"),
    ]  # fmt: skip
    rights = [
        lambda: comm.scatter(None, root=last), lambda: comm.alltoall([1] * comm.size), lambda: comm.allgather(1),
        lambda: comm.allreduce(1), lambda: comm.bcast(1, last),
    ]  # fmt: skip
    which = WORLD.bcast(secrets.randbelow(len(rights)))
    with pytest.raises((ValueError, TypeError) if comm.rank == last else RefusedError):
        (mistakes if comm.rank == last else rights)[which]()
    ended(comm, [last])


def alone(comm):
    """A call of one rank while all others give the communicator back."""
    if comm.rank == comm.size - 1:
        with pytest.raises(MismatchError, match="rank [0-9] called Free instead"):
            comm.Allreduce(np.ones(5000), np.zeros(5000), op=ADD)
    comm.Free()


def freed_first(comm):
    """A rank that has freed a communicator goes on; the others still get data that it sent before."""
    made, last = comm.Dup(), comm.size - 1
    how, memory = {"stream": STREAM} if STREAM else {}, collective_call.device_memory or np.empty
    x, y, message = memory(70_000, np.float32), memory(70_000, np.float32), np.zeros(3)
    seen(x)[:] = comm.rank
    request = made.Iallreduce(x, y, **how)
    if comm.rank == 0:
        request.Wait()
        made.Send(np.arange(3.0), last)
        with mock.patch.object(api_comm, "_LATE_S", 0.01):
            made.Free()
        assert not made
    comm.Barrier()
    if comm.rank == last:
        made.Recv(message, 0)
        assert (message == np.arange(3)).all()
    if made:
        request.Wait()
    assert ((y.copied(STREAM) if STREAM else seen(y)) == sum(range(comm.size))).all()
    made.Free()
    while comm.allreduce(len(api_comm._late)):  # this frees what was left
        comm.Dup().Free()


def freed_before_it_is_known(comm):
    """A rank refuses a call that others have begun in their streams, and all free the communicator: it waits for no
    data of that call, although news of its end come last from another host."""
    last, asked = comm.size - 1, []
    if max(comm._runner.board.hosts) == 0:
        return
    x, y = (collective_call.device_memory(70_000, np.float32) for _ in range(2))
    comm.Allreduce(x, y, stream=STREAM)
    request = None if comm.rank == last else comm.Iallreduce(x, y, stream=STREAM)
    WORLD.Barrier()
    if request is not None:
        with pytest.raises(RefusedError, match=f"rank {last} refused"):
            request.Wait()
            comm.Barrier()
        comm.Free()
        return

    def late(state, seq=0, stock=State.ended_by_refusal):
        asked.append(runner.closes)
        return asked.count(True) > 2 and stock(state, seq)

    runner = comm._runner
    with mock.patch.object(State, "ended_by_refusal", late):
        with pytest.raises(ValueError):
            comm.Allreduce(x, collective_call.device_memory(3, np.float32), stream=STREAM)
        comm.Free()
    assert runner.broken


def refused_by_others(comm):
    """A call that one rank has begun before all others refuse it."""
    data = np.zeros(2)
    begun = comm.Ibcast(data) if comm.rank == 0 else None
    WORLD.Barrier()
    if begun is None:
        with pytest.raises((ValueError, RefusedError)):  # the latter where another one was first
            comm.Ibcast(data, root=comm.size)
    else:
        with suppress(RefusedError):  # its own part may have been done before
            begun.Wait()
    ended(comm, range(1, comm.size))


def on_its_own(check):
    """Run a case on a communicator of its own."""
    comm = Communicator(WORLD)
    check(comm)
    WORLD.Barrier()
    comm.Free()


def main(trials):
    global STREAM
    seed = WORLD.bcast(int(os.environ.get("UCCH_TEST_SEED") or secrets.randbelow(1 << 30)))
    rng = np.random.default_rng(seed)
    with Communicator(WORLD) as kept:
        if collective_call.device_memory and all(WORLD.allgather(bool(arrays.device.available()))):
            arrays.runtime().use(kept._runner.members.place.device)
            STREAM = arrays.runtime().stream()
        for number in range(trials):
            trial = draw_trial(rng)
            try:
                if len(trial.culprits) == WORLD.size:
                    attempt(trial, kept)
                else:
                    on_its_own(lambda comm, trial=trial: attempt(trial, comm))
                computes(kept, trial.case.seed)
            except BaseException:
                print(f"rank {WORLD.rank}: seed {seed}, number {number}: {trial}", flush=True)
                raise
        checks = [several_under_way, before_others_come, behind, refused_by_others, answered_late]
        checks += [refused_own_operation, refused_objects, alone] * 3
        checks += [freed_first] * (kept._runner.members.runtime is None)  # elsewhere Free waits
        for check in checks if STREAM is None else (behind, answered_late, freed_before_it_is_known):
            on_its_own(check)
        many_by_all(kept)
    if WORLD.rank == 0:
        print(f"{trials} mistakes told", flush=True)
