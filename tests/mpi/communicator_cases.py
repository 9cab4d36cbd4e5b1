"""Communicators. Cases for three or more ranks, each collective over all of them."""

import copy
import itertools
import math
import os
import pickle
import random
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import product
from unittest import mock

import collective_call
import numpy as np
import pytest
from cases import neighbours
from collective_call import Call
from collective_cases import METHODS, Tester, draw, repeated, start
from mpi4py import MPI
from processes import in_threads
from world import caught

from ucc_hetero import SUM, Communicator, Request
from ucc_hetero.api import comm as api_comm
from ucc_hetero.bindings import ucc
from ucc_hetero.bootstrap import board, meeting, pages
from ucc_hetero.bootstrap.membership import Membership
from ucc_hetero.bootstrap.process import Process
from ucc_hetero.bootstrap.teams import Teams
from ucc_hetero.bootstrap.timely import Timely
from ucc_hetero.calls.preparation import Preparation
from ucc_hetero.calls.runner import Runner
from ucc_hetero.errors import CollectiveError, MismatchError, RefusedError
from ucc_hetero.planner.algorithms import registry
from ucc_hetero.planner.algorithms.builders import only, region, stages, without
from ucc_hetero.planner.plan import Step
from ucc_hetero.planner.rules import Rule
from ucc_hetero.planner.select import Tuning


def check(comm, members):
    assert comm.size == len(members) == comm.Get_size() and members[comm.rank] == MPI.COMM_WORLD.rank
    got = np.full(len(members), -1)
    comm.Allgather(np.array([MPI.COMM_WORLD.rank]), got)
    assert got.tolist() == members, (got, members)
    total = np.zeros(5000)
    comm.Allreduce(np.full(5000, float(MPI.COMM_WORLD.rank)), total)
    assert (total == sum(members)).all()
    right, left = neighbours(comm)
    comm.Sendrecv(np.full(3000, comm.rank), right, 5, into := np.zeros(3000, int), left, 5)
    assert (into == left).all()


def everyone(comm):
    return list(range(comm.size))


MANY, TURNS, FIRST = 4, 16, 6


def order(comm):
    return comm.allgather(MPI.COMM_WORLD.rank)


def ways(dice, size):
    """Ways to make a communicator from one of this size, of this package's or of MPI's."""
    colours = [dice.choice([0, 0, 1, MPI.UNDEFINED]) for _ in range(size)]
    keys, some = [dice.randrange(-3, 3) for _ in range(size)], dice.sample(range(size), dice.randint(1, size))
    periods = [dice.random() < 0.5 for _ in range(2)]
    grid = dice.choice([[size // 2, 2], [2, size // 2]] if size > 1 else [[1, 1]])

    def of_group(comm, tag):
        group = comm.Get_group().Incl(some)
        made = comm.Create(group) if tag < 0 else comm.Create_group(group, tag)
        group.Free()
        return made

    return {
        "Dup": lambda comm: comm.Dup(), "Clone": lambda comm: comm.Clone(),
        "Split": lambda comm: comm.Split(colours[comm.rank], keys[comm.rank]),
        "Split_type": lambda comm: comm.Split_type(MPI.COMM_TYPE_SHARED, keys[comm.rank]),
        "Create": lambda comm: of_group(comm, -1),
        "Create_group": lambda comm: of_group(comm, 5) if comm.rank in some else MPI.COMM_NULL,
        "a line": lambda comm: comm.Create_cart([size], periods[:1]),
        "a grid": lambda comm: comm.Create_cart(grid, periods),
    }  # fmt: skip


def children(comm, dice, names):
    """Communicators made in some ways; their ranks and order are those of the same calls of MPI."""
    for number, name in enumerate(names):
        make = ways(dice, comm.size)[name]
        theirs = make(comm.mpi)
        if name in ("Dup", "Split") and dice.random() < 0.3:  # of MPI's, which may be freed at once
            parent = make(comm.mpi)
            made = Communicator(parent) if parent != MPI.COMM_NULL else parent
            if parent != MPI.COMM_NULL:
                parent.Free()
        else:
            made = make(comm)
        assert bool(made) == (made != MPI.COMM_NULL) == (theirs != MPI.COMM_NULL), name
        if not made:
            continue
        assert isinstance(made, Communicator)
        if name in ("a line", "a grid"):
            on_a_grid(made, theirs)
        yield number, (made, order(theirs))
        theirs.Free()


def on_a_grid(made, theirs):
    """Coordinates, neighbours, messages to them, and rows are those of MPI's grid."""
    assert (made.dim, made.Get_coords(made.rank)) == (theirs.dim, theirs.Get_coords(theirs.rank))
    for direction in range(made.dim):
        source, dest = made.Shift(direction, 1)
        assert (source, dest) == theirs.Shift(direction, 1)
        made.Sendrecv(np.array([made.rank]), dest, 0, into := np.full(1, -1), source, 0)
        assert into[0] == (source if source != MPI.PROC_NULL else -1)
    keep = [False] * (made.dim - 1) + [True]
    with made.Sub(keep) as row:
        check(row, order(rows := theirs.Sub(keep)))
        rows.Free()


@mock.patch.object(collective_call, "device_memory", None)  # device memory needs one order
def first_calls(seed, comms):
    """Calls of random kinds on each communicator, the first ones there, begun with its communicators in this order."""
    calls = []
    for turn in range(FIRST):
        for comm in comms:
            case = draw(np.random.default_rng([seed, turn]), comm.size, seed + turn, tuple(METHODS))
            # A reduce_scatter that is not given all counts waits for those of other ranks, as mpi4py's does.
            case = replace(case, form="request", in_place=case.in_place or case.name == "reduce_scatter")
            calls.append(Call(case, comm))
            calls[-1].refill()
    Request.Waitall([start(call.comm, call) for call in calls])
    for call in calls:
        assert not (wrong := call.verify()), (wrong, call.case)


def case_random(comm):
    """Communicators made from communicators in every way, used at once, by each rank in another order."""
    whole = comm.topology.island_of

    def grow(parent, names, depth):
        dice, own = random.Random(parent.bcast(random.random())), random.Random(random.random())
        numbers, made = range(MANY), dict(children(parent, dice, names))
        totals = {number: np.full(3000, -1.0) for number in made}
        requests = [
            made[number][0].Iallreduce(np.full(3000, float(comm.rank)), totals[number])
            for number in own.sample([*made], len(made))
        ]
        requests += [made[number][0].Ibarrier() for number in own.sample([*made], len(made))]
        Request.Waitall(requests)
        first_calls(dice.randrange(1 << 30), [made[number][0] for number in own.sample([*made], len(made))])
        for number, (each, members) in made.items():
            assert (totals[number] == sum(members)).all(), members
            islands = each.topology.island_of
            for a, b in itertools.combinations(range(each.size), 2):
                assert (islands[a] == islands[b]) == (whole[members[a]] == whole[members[b]])
        one, following = dice.choice(numbers), dice.sample(every, MANY)
        if depth and one in made:
            grow(made[one][0], following, depth - 1)
        for each, members in (made[number] for number in dice.sample(numbers, MANY) if number in made):
            check(each, members)
            each.Free()
            each.Free()

    every, dice = [*ways(random.Random(0), 1)], random.Random(comm.bcast(random.random()))
    dice.shuffle(every)
    for first in range(0, len(every), MANY):
        grow(comm, every[first:][:MANY], 2)
    check(comm, everyone(comm))


def case_first_calls_of_an_own_algorithm(comm):
    """Its steps may be among some ranks of an island, which have no team; ranks begin two communicators in different
    orders."""

    def by_the_first_two(topology, call, piece):
        at, n = piece.vector(call), call.ranks
        send, recv, two = region("send", at), region("recv", at), (0, 1)
        reduced = Step("reduce", two, (send,) * 2, only(0, 2, recv), 0)
        summed = Step("allreduce", (0, *range(2, n)), (recv, *[send] * (n - 2)), (recv,) * (n - 1))
        told = Step("bcast", two, only(0, 2, recv), without(0, 2, recv), 0)
        return stages([reduced], [summed], [told])

    with mock.patch.dict(registry._TABLE), comm.Dup() as one, comm.Dup() as other:
        registry.algorithm("allreduce", "by_the_first_two")(by_the_first_two)
        for each in (one, other):
            each.Barrier()
            api_comm.runner_of(each).retune(Tuning((Rule("allreduce", 0, math.inf, "by_the_first_two"),)))
        mine, turn = np.random.default_rng().random(3000), comm.rank % 2
        totals = [np.full(3000, np.nan) for _ in range(2)]
        Request.Waitall([each.Iallreduce(mine, totals[each is other]) for each in ((one, other), (other, one))[turn]])
        want = np.sum(comm.allgather(mine), axis=0)
        for each, total in zip((one, other), totals, strict=True):
            np.testing.assert_allclose(total, want)
            assert "by_the_first_two" in each.plan_summary()


def case_few_rounds(comm):
    """Ranks that know each other need no call beside MPI's to make a communicator, and make a team only when a call
    needs one. On several hosts, or of several islands, they make teams unless an earlier communicator has left some."""
    comm.Barrier()
    comm._runner.members.job.drop_spare(comm._runner.timeout)  # teams of earlier cases
    if any(facts.device_memory for facts in comm._runner.members.facts):
        return
    if not comm.topology.flat:
        for each in [comm.Dup() for _ in range(3)]:
            check(each, everyone(comm))
            each.Disconnect()
    with (
        mock.patch.object(Timely, "allgather", autospec=True, side_effect=Timely.allgather) as rounds,
        mock.patch.object(ucc.Team, "collective") as tries,
    ):
        made = [comm.Dup() if i % 2 else comm.Split(0, comm.rank) for i in range(3)]
        assert not rounds.called and not tries.called, rounds.call_args_list
    for each in made[::2]:
        check(each, everyone(comm))
        assert not comm.topology.flat or len(each._runner.members.teams) == 1
    for each in made:
        each.Free()


def case_calls_of_the_last_one(comm):
    """A duplicate's first calls, which an earlier communicator has made, need no preparation; results are correct."""
    dice, shown = np.random.default_rng(), set()
    alike = random.Random(comm.bcast(random.random()))
    n = alike.randrange(2, 60)
    for turn in range(3):
        with (
            comm.Dup() as made,
            mock.patch.object(Preparation, "prepare", autospec=True, side_effect=Preparation.prepare) as prepared,
        ):
            mine = dice.random(n)
            every = np.array(MPI.COMM_WORLD.allgather(mine))
            total, got, root, later = np.full(n, np.nan), np.full(every.shape, np.nan), mine.copy(), np.full(n, np.nan)
            calls = [
                lambda made=made, mine=mine, total=total: made.Allreduce(mine, total),
                lambda made=made, mine=mine, got=got: made.Allgather(mine, got),
                lambda made=made, root=root: made.Bcast(root, made.size - 1),
                lambda made=made, mine=mine, later=later: made.Iallreduce(mine, later, "MAX").Wait(),
                made.Barrier,
            ]
            for call in alike.sample(calls, len(calls)):
                call()
            assert made.bcast(n + turn, 1) == n + turn
            np.testing.assert_allclose(total, every.sum(0))
            assert (got == every).all() and (root == every[-1]).all() and (later == every.max(0)).all()
            assert not (turn and made.topology.flat and prepared.called), prepared.call_args_list
            found = made.stats()
            shown.add((*sorted(made.plan_summary().splitlines()), found["calls"], found["bytes"]))
    assert len(shown) == 1, shown
    with (
        mock.patch.object(pages, "_anonymous", lambda: -1),  # ranks of a host see nothing of each other
        mock.patch.object(comm._runner.members.job, "stale", True),  # others are made
        comm.Dup() as made,
    ):
        total[:] = np.nan
        made.Allreduce(mine, total)
        assert not made._runner.board.shared
        made._runner.members.job.stale = True
    np.testing.assert_allclose(total, every.sum(0))
    made = comm.Dup()
    with pytest.raises(MismatchError):
        made.Allreduce(dice.random(n), total) if comm.rank else made.Allgather(dice.random(n), got)
    with pytest.raises(CollectiveError, match="no longer be used"):
        made.Allreduce(dice.random(n), total)
    made.Free()


def case_without_a_call(comm):
    """A rank makes nothing of a communicator that it makes no call in, nor waits at its end; the others do as ever."""
    if not (comm.topology.flat and comm._runner.board.shows_all):
        return
    makes = (comm.Dup, lambda: comm.Split(0, -comm.rank))
    for make in makes:
        make().Free()  # the first communicator of these ranks may check its team
    comm.Barrier()
    comm._runner.members.job.drop_spare(comm._runner.timeout)  # so that the next one must allocate
    used = bytes(meeting._ids)
    with mock.patch.object(Runner, "__init__", autospec=True, side_effect=Runner.__init__) as begun:
        for make in makes:
            made = make()
            assert made.size == comm.size == made.Get_group().Get_size() and not begun.called
            if comm.rank == 0:
                made.Free()
            comm.Barrier()
            made.Free()
            assert not made
        for _ in range(TURNS):  # of all ranks, some, or none in turn
            made = comm.Dup()
            if comm.rank < 2:
                made.Sendrecv(np.array([comm.rank]), 1 - comm.rank, 1, into := np.zeros(1, int), 1 - comm.rank, 1)
                assert into[0] == 1 - comm.rank
            made.Free()
            comm.Dup().Free()
    assert begun.call_count == TURNS * (comm.rank < 2) and meeting._ids == used
    made = comm.Dup()
    if comm.rank == 1:
        caught(MismatchError, made.Barrier, "called Free instead")
    made.Free()
    with comm.Dup() as made:
        check(made, everyone(comm))


def case_free_needs_no_other_rank(comm):
    """A rank that has freed a communicator goes on to what other ranks of its host wait for before they free theirs."""
    with mock.patch.object(api_comm, "_LATE_S", 1e6):  # on a busy machine others come after more than a second
        _free_needs_no_other_rank(comm)


def _free_needs_no_other_rank(comm):
    comm.Barrier()
    comm.Dup().Free()  # frees what earlier cases have left
    used = bytes(meeting._ids)
    for by_message in (False, True):
        made = comm.Dup()
        check(made, everyone(comm))
        if comm.rank == 0:
            with mock.patch.object(api_comm, "_LATE_S", 0.01 if by_message else 1e6):
                made.Free()
            assert not made
        if not by_message:
            comm.Barrier()
        elif comm.rank:
            comm.Recv(np.zeros(1), 0, 5)
        else:
            for peer in range(1, comm.size):
                comm.Send(np.ones(1), peer, 5)
        made.Free()
    comm.Barrier()
    taken = []

    def close(members, stock=Membership.close, **how):
        """Teams are destroyed in this thread's turn; a thread that has its turn may be about to take the lock."""
        in_threads(take)
        stock(members, **how)

    def take():
        if free := api_comm._first_call.acquire(blocking=False):
            api_comm._first_call.release()
        taken.append(free)

    with mock.patch.object(Membership, "close", close):
        comm.Dup().Free()  # frees what was left
    assert meeting._ids == used and all(taken) and (taken or comm.rank), taken


def case_looked_at_while_it_is_freed(comm):
    """A thread looks at other communicators when it waits, and another thread may free them meanwhile."""
    one, other = comm.Dup(), comm.Dup()
    check(one, everyone(comm))
    check(other, everyone(comm))
    seen, free = other._runner.board, []

    def fate(each, peer, stock=board.Board.fate):
        if each is seen:
            in_threads(take)
        return stock(each, peer)

    def take():
        free.append(seen._looked_at.acquire(blocking=False))

    with mock.patch.object(board.Board, "fate", fate):
        one._runner.board.elsewhere(neighbours(comm)[0])
    assert free == [False]
    one.Free()
    other.Free()


def case_turns_of_two_threads(comm):
    """A thread that waits for a rank keeps no turn, which that rank's other creations may need first."""
    pair, alone = comm.Split(0 if comm.rank < 2 else MPI.UNDEFINED), comm.Split(comm.rank)
    if comm.rank < 2:
        both, has_come = [pair.Dup(), pair.Dup()], threading.Event()
        first, second = both if comm.rank == 0 else both[::-1]
        turn = first._split_meeting.turn
        everyone = turn._everyone

        def come(ready):
            has_come.set()
            return everyone(ready)

        turn._everyone = come

        def meanwhile():
            has_come.wait()
            alone.Dup().Free()
            second.Dup().Free()

        in_threads(lambda: first.Dup().Free(), meanwhile)
        for each in (*both, pair):
            each.Free()
    alone.Free()


def case_colors_that_one_rank_mistakes(comm):
    """The others get an error at once, where MPI would let them wait for ever."""
    for color, key, word in ((-2, 0, "color -2"), (1 << 31, 0, "color 2147483648"), (0, 1 << 31, "key 2147483648")):
        other, mine = comm.Dup(), comm.rank == comm.size - 1
        kind = ValueError if mine else RefusedError
        caught(kind, lambda: other.Split(*((color, key) if mine else (0, 0))), word)  # noqa: B023
        other.Free()


def case_settings_of_the_parent(comm):
    """A setting that one rank has changed since does not make it choose another algorithm."""
    rule = {"UCCH_TUNE": "allreduce:@ring", "UCCH_STAGING": "staged"} if comm.rank == 0 else {}
    with mock.patch.dict(os.environ, rule), comm.Dup() as same:
        check(same, everyone(comm))
        for name in ("tuning", "topology", "bare"):
            ours, parents = (repr(getattr(each._runner.members, name)) for each in (same, comm))
            assert ours == parents


def case_parents(comm):
    """Intercommunicators and the like raise; a communicator of this package may be the parent too."""
    world = MPI.COMM_WORLD
    with Communicator(MPI.COMM_SELF) as alone, Communicator(comm) as same:
        check(alone, [world.rank])
        check(same, everyone(comm))
    caught(TypeError, lambda: Communicator(5), "int")
    caught(ValueError, lambda: Communicator(MPI.COMM_NULL), "COMM_NULL")
    side = world.Split(min(world.rank, 1))
    bridge = side.Create_intercomm(0, world, 1 if world.rank == 0 else 0, 9)
    caught(TypeError, lambda: Communicator(bridge), "Merge")
    bridge.Free()


def case_identity(comm):
    """Comparison, hash, name, attributes."""
    world = MPI.COMM_WORLD
    with comm.Dup() as same, comm.Split(0, -comm.rank) as turned:
        assert comm == comm and comm != same and len({comm, same, comm}) == 2
        assert Communicator.Compare(comm, comm) == MPI.IDENT
        assert Communicator.Compare(comm, same) == MPI.CONGRUENT
        assert Communicator.Compare(comm, world) == MPI.CONGRUENT
        assert Communicator.Compare(comm, turned) == MPI.SIMILAR
        assert MPI.Group.Compare(comm.Get_group(), world.Get_group()) == MPI.IDENT
        comm.Set_name("ours")
        assert comm.Get_name() == "ours" == comm.name and comm.mpi.Get_name() == "ours"
        same.name = "other"
        assert same.Get_name() == "other"
        key = comm.Create_keyval()
        comm.Set_attr(key, {"any": "thing"})
        assert comm.Get_attr(key) == {"any": "thing"} and same.Get_attr(key) is None
        comm.Delete_attr(key)
        assert comm.Get_attr(MPI.TAG_UB) >= 32767
        assert (
            comm.Is_intra() and not comm.Is_inter() and repr(same) == f"<Communicator rank {comm.rank} of {comm.size}>"
        )
        caught(AttributeError, lambda: comm.Create_intercomm, "comm.mpi.Create_intercomm")
        caught(AttributeError, lambda: comm.all_reduce, "did you mean Allreduce?")
        caught(AttributeError, lambda: comm.AllGather, "did you mean Allgather?")


def _merged(a, b):
    a.update(b)
    return a


def case_no_copies(comm):
    """A copy would be another name of the communicator in its own process, and useless in others."""
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="its processes make another one together"):
            copied(comm)


def case_objects(comm):
    """Methods in lower case, short and long objects, while other calls are under way."""
    p, me = comm.size, comm.rank
    request = comm.Iallreduce(np.full(1000, me), total := np.zeros(1000, int))
    for length in (1, 700, 10**6, comm.bcast(random.randrange(4000))):
        text, root = "x" * length if me == p - 1 else "x", length % p
        assert comm.bcast([me, text], p - 1) == [p - 1, "x" * length]
        assert comm.allgather(text) == ["x"] * (p - 1) + ["x" * length]
        assert comm.gather(text, root) == (["x"] * (p - 1) + ["x" * length] if me == root else None)
        assert comm.scatter([text] * p if me == p - 1 else None, p - 1) == "x" * length
        assert comm.alltoall([text * (r == 0) for r in range(p)]) == [
            "" if me else "x" * (length if r == p - 1 else 1) for r in range(p)
        ]
        assert comm.reduce(text, root=root) == ("x" * (p - 1 + length) if me == root else None)
        assert comm.scan(text) == "x" * (me + (length if me == p - 1 else 1))
    assert comm.bcast({"from": me}, root=p - 1) == {"from": p - 1}
    assert comm.allgather([me, "x"]) == [[r, "x"] for r in range(p)]
    assert comm.gather(me, root=0) == (list(range(p)) if me == 0 else None)
    assert comm.scatter([str(r) for r in range(p)] if me == 0 else me, root=0) == str(me)  # the root's counts
    assert comm.alltoall([(me, r) for r in range(p)]) == [(r, me) for r in range(p)]
    assert comm.allreduce(me) == sum(range(p)) and comm.reduce(me, root=0) == (sum(range(p)) if me == 0 else None)
    assert comm.scan(1) == me + 1 and comm.exscan(1) == (me if me else None)
    assert comm.allreduce(me, SUM) == comm.allreduce(me, op="sum") == sum(range(p))  # also this package's operations
    mine = {me: "x"}
    assert comm.allreduce(mine, op=_merged) == dict.fromkeys(range(p), "x")
    assert comm.reduce(me, max, p - 1) == (p - 1 if me == p - 1 else None)
    assert comm.scan(mine, _merged) == dict.fromkeys(range(me + 1), "x") and mine == {me: "x"}
    for_arrays = f"allreduce on rank {me}: op AVG is for arrays: Allreduce"
    caught(ValueError, lambda: comm.allreduce(me, op="avg"), for_arrays)
    caught(ValueError, lambda: comm.scan(me, "product"), "did you mean PROD?")
    right, left = (me + 1) % p, (me - 1) % p
    sent = comm.isend({"round": me}, dest=right, tag=11)
    assert comm.recv(source=left, tag=11) == {"round": left}
    sent.wait()
    assert comm.sendrecv(me, dest=right, source=left) == left
    comm.barrier()
    request.Wait()
    assert (total == sum(range(p))).all()
    with comm.Create_cart([p], periods=[False]) as row, comm.Create_cart([p, 1], periods=[True, True]) as ring:
        for grid, thing in product((row, ring), ("x", "x" * 700)):
            assert grid.neighbor_allgather([me, thing]) == grid.mpi.neighbor_allgather([me, thing])
            sent = [(me, i, thing) for i in range(2 * grid.dim)]
            assert grid.neighbor_alltoall(sent) == grid.mpi.neighbor_alltoall(sent)


def case_after_free(comm):
    """Every use of a freed communicator is an error; freeing it again is not. Active requests forbid it."""
    gone = comm.Dup()
    one = np.ones(1)
    persistent = gone.Allreduce_init(one, one.copy())
    persistent.Start()
    for call in (persistent.Start, persistent.Free, gone.Free):
        caught(ValueError, call, "still active")
    persistent.Wait()
    gone.Free()
    gone.Free()
    calls = (
        gone.Barrier, lambda: gone.Allreduce(one, one.copy()), lambda: gone.Iallreduce(one, one.copy()),
        lambda: gone.Send(one, 0), lambda: gone.Recv(one), lambda: gone.Probe(), lambda: gone.send("x", 0),
        lambda: gone.Dup(), lambda: gone.Split(0), lambda: gone.Get_name(), lambda: gone.mpi,
        lambda: Communicator(gone), persistent.Start,
    )  # fmt: skip
    for call in calls:
        caught(ValueError, call, "has been freed")
    persistent.Free()
    try:
        with comm.Dup() as kept:
            raise KeyError("x")
    except KeyError:
        assert kept, "an exception must not make a rank wait for the others"
    kept.Free()


def case_unreceived_messages(comm):
    """Messages that were never received end with their communicator, and reach no later one."""
    for _ in range(3):
        other = comm.Dup()
        other.Send(np.ones(10), other.rank, 1)
        other.Send(np.ones(10), (other.rank + 1) % other.size, 1)
        other.Barrier()
        other.Free()
        with comm.Dup() as fresh:
            assert not fresh.Iprobe()
            fresh.Barrier()
            assert not fresh.Iprobe()


def case_a_number_that_comes_again(comm):
    """Messages for a number's previous communicator are discarded before any rank can send for the new one."""
    notes = []

    def noted(of, name):
        call = getattr(of, name)
        return mock.patch.object(of, name, lambda *args, **more: notes.append(name) or call(*args, **more))

    start, comes = meeting._last[0], itertools.count(2 * meeting.MOST_COMMS - 2, meeting.MOST_COMMS)
    with noted(Process, "discard"), noted(Timely, "allgather"), noted(Timely, "at_once"):
        first = Communicator(comm)
        assert "discard" not in notes
        first.Free()
        for make in (lambda: Communicator(comm), comm.Dup):
            meeting._last[0] = next(comes)
            notes.clear()
            made = make()
            after = notes[notes.index("discard") + 1]
            assert after == ("at_once" if make == comm.Dup else "allgather"), notes
            check(made, everyone(comm))
            made.Free()
    assert start < meeting.MOST_COMMS


def threads_with_communicators(comm):
    """Threads make, use and free communicators of their own at the same time, with all kinds of calls and messages."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return
    parents = [comm.mpi.Dup() for _ in range(3)]
    seed = comm.bcast(random.getrandbits(30))

    def work(parent, number):
        rng = np.random.default_rng([seed, number])  # equal on all ranks
        for _ in range(3):
            with Communicator(parent) as mine:
                tester = Tester(mine, f"in a thread, seed {seed}")
                tester.mpi = parent
                for _ in range(2):
                    case = draw(rng, mine.size, int(rng.integers(1 << 30)), tuple(METHODS))
                    for again in repeated(case, mine.size):
                        tester.one(again)
                        check(mine, everyone(comm))

    calls = [partial(work, parent, number) for number, parent in enumerate(parents)]
    in_threads(*calls if comm.rank % 2 else calls[::-1])
    for parent in parents:
        parent.Free()


def case_groups_beside_duplicates(comm):
    """A thread makes communicators of some ranks while another one duplicates: MPI alone may hang there."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return
    dice, whole = random.Random(comm.bcast(random.random())), everyone(comm)
    drawn = [dice.sample(whole, dice.randint(1, comm.size)) for _ in range(60)]

    def of_some(parent):
        for ranks in drawn:
            made = parent.Create_group(parent.Get_group().Incl(ranks))
            assert (made == MPI.COMM_NULL) == (comm.rank not in ranks)
            if comm.rank in ranks:
                check(made, ranks)
                made.Free()

    def of_all(parent):
        for _ in drawn:
            with parent.Dup() as same:
                check(same, whole)

    with comm.Dup() as one, comm.Dup() as other:
        in_threads(partial(of_some, one), partial(of_all, other))


def case_threads_that_free_late(comm):
    """Threads free communicators while ranks of others have not reached Free, and others go on."""
    close = Teams.close

    def late(teams, *args, **more):
        time.sleep(random.uniform(0, 0.03))
        close(teams, *args, **more)

    with mock.patch.object(Teams, "close", late):
        for _ in range(4):
            threads_with_communicators(comm)
