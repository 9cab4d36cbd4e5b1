"""Requests of collectives and messages that are cancelled, dropped, freed or repeated. For two or more ranks."""

import gc
import random
import time
import weakref
from contextlib import suppress
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from cases import ADD, neighbours
from collective_call import GAPS, UNEVEN, Call, Case
from collective_cases import SPECS, start
from mpi4py import MPI
from processes import interrupted_at

from ucc_hetero import PersistentRequest, Request, TruncationError
from ucc_hetero.bindings.handle import locked
from ucc_hetero.calls import request as request_module
from ucc_hetero.calls.request import under_way
from ucc_hetero.native.libraries import lib


def case_long_before_persistent(comm):
    """Teams number collectives at creation: those that a long call still has to create come first on all ranks."""
    count, sums = 1 << 20, [np.full(1 << 20, -1.0, np.float32) for _ in range(3)]
    requests = [comm.Iallreduce(np.full(count, float(i), np.float32), into) for i, into in enumerate(sums)]
    kept, again = [], [np.full(5, -1.0), np.full(count, -1.0, np.float32)]
    for into in again:
        kept.append(comm.Allreduce_init(np.full(into.size, 2.0, into.dtype), into))
        if comm.rank % 2:  # others are further by then
            requests[0].Wait()
    PersistentRequest.Startall(kept)
    scattered = np.full(count // 4, -1.0, np.float32)
    scatter = comm.Ireduce_scatter_block(np.ones(scattered.size * comm.size, np.float32), scattered)
    assert Request.Waitall([scatter, *requests, *kept])
    assert all((into == i * comm.size).all() for i, into in enumerate(sums))
    assert all((into == 2 * comm.size).all() for into in again) and (scattered == comm.size).all()


def case_mpi_moves_while_a_rank_tests(comm):
    """A rank that tests a request also lets MPI make progress for another rank's message."""
    data, total = np.random.default_rng(5).random(1 << 19), np.full(3, np.nan)
    into = np.full(data.size, np.nan)
    if comm.rank == 0:
        receive = comm.mpi.Irecv(into, 1, 31)
        request = comm.Iallreduce(np.ones(3), total)
        while not request.Test():
            time.sleep(1e-4)  # others need the core
        receive.Wait()
        assert (into == data).all()
    else:
        if comm.rank == 1:
            comm.mpi.Ssend(data, 0, 31)
        comm.Allreduce(np.ones(3), total)
    assert (total == comm.size).all()


def case_nothing_moves(comm):
    """While a call awaits a rank, and all its other messages have ended, nothing moves: a waiter then gives its core to
    others."""
    ones, into = [1] * comm.size, np.full(comm.size, np.nan)
    late = comm.size - 1
    if comm.rank == late:
        comm.mpi.recv(source=0, tag=32)
    request = comm.Ialltoallv([np.arange(comm.size) + 10.0 * comm.rank, ones], [into, ones])
    if comm.rank == 0:
        for counted in (False, True):
            moved = locked(lambda: sum(lib.ucch_progress_once() > 0 for _ in range(1000)))
            assert not counted or moved < 100, moved
            time.sleep(0.01)  # others send
        comm.mpi.send(None, late, 32)
    request.Wait()
    assert (into == np.arange(comm.size) * 10 + comm.rank).all()


def case_strangers(comm):
    """mpi4py's own requests raise, by name."""
    ours = comm.Isend(np.zeros(1), comm.rank, 3)
    theirs = comm.isend("x", comm.rank, 3)
    for method in (Request.Waitall, Request.Waitany, Request.Waitsome, Request.Testall, Request.Testany):
        with pytest.raises(TypeError, match=r"requests\[1\].*MPI\.Request"):
            method([ours, theirs])
    comm.Recv(np.zeros(1), comm.rank, 3)
    assert comm.recv(source=comm.rank, tag=3) == "x"
    ours.Wait()
    theirs.wait()


def case_free(comm):
    """A freed request goes on; so does one that is dropped, at any moment, in any number."""
    right, left = neighbours(comm)
    for turn in range(30):
        big = np.full(30_000, float(turn))
        request = comm.Isend(big, right, 40)
        if turn % 2:
            request.Free()
            assert request.finished
        del request, big
        comm.Iallreduce(np.ones(2000), np.zeros(2000))
        if turn % 7 == 0:
            gc.collect()
    for turn in range(30):
        comm.Recv(into := np.zeros(30_000), left, 40)
        assert (into == turn).all()
    total = np.zeros(2000)
    comm.Allreduce(np.ones(2000), total)
    assert (total == comm.size).all()


def case_interrupted_as_its_end_is_taken(comm):
    """Wherever a signal's exception comes in the wait for a call that has ended, the next wait completes it, and
    programs of other calls are not affected."""
    apart = MPI.DOUBLE.Create_resized(0, 16).Commit()
    for at, kind in product(range(50), (KeyboardInterrupt, TimeoutError)):
        (data, wide), others = np.full((2, 3000, 2), [[[at]], [[-1.0]]]), [np.full(3000, -1.0) for _ in range(3)]
        into = wide[:, 0]  # copied there at the end
        request = comm.Iallreduce([data, 3000, apart], [wide, 3000, apart])
        while not request.Get_status():
            pass
        interrupted = interrupted_at(at, request.Wait, kind)
        request.Wait()
        Request.Waitall([comm.Iallreduce(np.full(3000, float(i)), other) for i, other in enumerate(others)])
        for i, each in enumerate([*others, into]):
            assert (each == comm.size * (at if each is into else i)).all(), (at, i, each)
    assert not interrupted
    apart.Free()


def case_interrupted_by_a_handler(comm):
    """An error that the handler of a signal raises is not the messages' own: the next wait completes them."""
    right, left = neighbours(comm)
    data, both, parts = np.arange(4.0), np.full(4, -1.0), np.full(4, -1.0)
    pair = comm.Isendrecv(data, right, 6, both, left, 7)
    ready, again = comm.Psend_init(data, 2, right, 5), comm.Precv_init(parts, 2, left, 5)
    PersistentRequest.Startall([ready, again])
    for request in (pair, again):
        assert interrupted_at(20, request.Wait, TimeoutError) and request
    comm.Barrier()
    comm.Send(data, right, 7)
    ready.Pready_range(0, 1)
    Request.Waitall([pair, again, ready])
    assert (both == data).all() and (parts == data).all()
    comm.Recv(both, left, 6)
    again.Free()
    ready.Free()


def case_interrupted_as_some_are_completed(comm):
    """Wherever a signal's exception comes, the next call tells what was completed, with its status, and what failed."""
    right, left = neighbours(comm)
    for at, fails in product(range(0, 90, 2), (False, True)):
        into, taken = [np.full(2, -1.0) for _ in range(3)], []
        requests = [comm.Irecv(into[tag][: 2 - fails * tag % 2], left, tag) for tag in range(3)]
        for tag in range(3):
            comm.Send(np.full(2, float(tag)), right, tag)
        take = Request.Waitall if fails else random.choice([Request.Waitsome, Request.Testsome])

        def some(take=take, requests=requests, taken=taken):
            try:
                taken.append((take(requests, statuses := []) or [], statuses))
            except TruncationError:
                taken.append((range(3), [SimpleNamespace(tag=tag) for tag in range(3)]))

        def told(taken=taken):
            return sorted((i, statuses[k].tag) for ready, statuses in taken for k, i in enumerate(ready))

        interrupted_at(at, some, TimeoutError)
        while len(told()) < 3:
            some()
        assert told() == [(0, 0), (1, 1), (2, 2)] and not any(requests), (at, fails, told())
        assert all((into[tag] == tag).all() for tag in (0, 2))


def case_interrupted_as_a_partition_is_marked(comm):
    """Wherever a signal's exception comes, the partition is sent once: at a second try it is sent, or was."""
    right, left = neighbours(comm)
    data, parts = np.zeros(6), np.full(6, -1.0)
    ready, again = comm.Psend_init(data, 3, right, 5), comm.Precv_init(parts, 3, left, 5)
    for at in range(80):
        data[:] = np.arange(6) + 10 * at
        PersistentRequest.Startall([ready, again])
        interrupted = interrupted_at(at, partial(ready.Pready, 1), TimeoutError)
        for i in range(3):
            with suppress(ValueError):  # it has been marked
                ready.Pready(i)
        Request.Waitall([ready, again])
        assert (parts == data).all(), (at, parts)
    assert not interrupted
    again.Free()
    ready.Free()


def case_persistent_that_is_dropped(comm):
    """It is released as by Free, with its memory."""
    data, into = np.ones(1000), np.zeros(1000)
    kept, again = weakref.ref(data), comm.Allreduce_init(data, into)
    again.Start()
    again.Wait()
    del data, again
    gc.collect()
    assert kept() is None and (into == comm.size).all()


def case_persistent_that_is_dropped_under_way(comm):
    """It is released when its call ends, not with the communicator."""
    data, into = np.ones(1000), np.zeros(1000)
    kept, again, others = weakref.ref(data), comm.Allreduce_init(data, into), {*under_way}
    last = comm.rank == comm.size - 1
    if not last:
        again.Start()
        del again
    comm.mpi.Barrier()
    if last:
        again.Start()
        del again
    del data
    while under_way - others:
        comm.Iprobe(tag=45)
    gc.collect()
    assert (into == comm.size).all() and kept() is None


def case_dropped_in_cycles(comm):
    """A cycle of objects is collected in any order: a call under way in one must not lose its memory before its end."""
    (right, left), others = neighbours(comm), {*under_way}
    big, total = np.full(60_000, float(comm.rank)), np.full(50_000, -1.0)
    gone = weakref.ref(alone := big.copy())
    requests = [
        comm.Issend(alone, right, 41),
        comm.Irecv(early := np.full(60_000, -1.0), left, 42),
        comm.Iallreduce(np.ones(50_000), total),
        comm.Send_init(big, right, 43),
        comm.Allreduce_init(np.ones(50_000), again := np.full(50_000, -1.0)),
    ]
    PersistentRequest.Startall(requests[3:])
    for request in requests:
        request.itself = request
    del request, requests, alone
    gc.collect()
    filler = [np.full(60_000, -7.0) for _ in range(8)]
    comm.Send(big, right, 42)
    for tag in (41, 43):
        comm.Recv(into := np.zeros(60_000), left, tag)
        assert (into == left).all()
    comm.Barrier()
    del filler
    while under_way - others:  # later calls collect the rest
        comm.Iprobe(left, 44)
    assert (early == left).all() and (total == comm.size).all() and (again == comm.size).all()
    gc.collect()
    assert gone() is None, "the memory of a dropped send is never released"


def case_freed_with_dropped_requests(comm):
    """Free completes dropped collectives and sends, and cancels dropped receives."""
    other = comm.Dup()
    right, left = neighbours(comm)
    other.Irecv(np.zeros(4), left, 1)
    other.Irecv(received := np.zeros(50_000), left, 2)
    time.sleep(0.2 * (comm.rank == 0))  # its message comes when the receive was most likely cancelled
    other.Isend(np.ones(50_000), right, 2)
    other.Iallreduce(np.ones(9000), total := np.zeros(9000))
    other.Iallreduce(np.ones(9000), own := np.zeros(9000), op=ADD)
    gc.collect()
    other.Free()
    assert (total == comm.size).all() and (own == comm.size).all()
    del received


def case_free_as_a_dropped_call_ends(comm):
    """A dropped call that ends between two checks is not counted as an active request."""
    other, looks = comm.Dup(), []
    peek, until_free = request_module._peek, True

    def late(op):
        looks.append(op)
        return 0 if until_free or len(looks) == 1 else peek(op)

    request_module._peek = late
    try:
        other.Iallreduce(np.ones(90_000), total := np.zeros(90_000))
        gc.collect()
        while not (total == comm.size).all():
            other.Iprobe(0, 1)
        looks.clear()
        until_free = False
        other.Free()
    finally:
        request_module._peek = peek
    assert looks


def case_free_while_a_long_message_comes(comm):
    """Nothing else is under way at its receiver, which only waits in Free."""
    other = comm.Dup()
    if comm.rank == 0:
        time.sleep(0.2)  # its receiver is most likely in Free by then; either case is correct
        other.Isend(np.ones(50_000), 1, 2)
        gc.collect()
    elif comm.rank == 1:
        other.Irecv(np.zeros(50_000), 0, 2)
        gc.collect()
    other.Free()


def case_freed_with_dropped_partitions(comm):
    """They are released when dropped, not by a garbage collection."""
    other, right, left = comm.Dup(), *neighbours(comm)
    gc.disable()
    try:
        outgoing, incoming = other.Psend_init(np.ones(8), 4, right, 1), other.Precv_init(np.empty(8), 2, left, 1)
        PersistentRequest.Startall([outgoing, incoming])
        outgoing.Pready_range(0, 3)
        while not incoming.Parrived(1):
            time.sleep(0)
        del outgoing, incoming
        other.Free()
    finally:
        gc.enable()


def case_free_is_refused(comm):
    """Free raises while an active request is held; calls that were dropped go on unaffected."""
    other, right, left = comm.Dup(), *neighbours(comm)
    held = other.Irecv(into := np.zeros(50_000), left, 1)
    other.Irecv(late := np.zeros(50_000), left, 2)
    gc.collect()
    with pytest.raises(ValueError, match="still active"):
        other.Free()
    other.Send(np.ones(50_000), right, 1)
    other.Isend(np.full(50_000, 2.0), right, 2)
    held.Wait()
    assert (into == 1).all()
    while not (late == 2).all():  # for ever if the failed Free has cancelled the receive
        other.Iprobe(left, 3)
    other.Free()


def completed(requests, how, dice):
    """Complete all requests by one of the methods for several; counts those of each index."""
    found = np.zeros(len(requests), int)
    if how in ("Waitall", "Testall"):
        while not getattr(Request, how)(requests):
            pass
        return found + 1
    while not found.all():
        ready = getattr(Request, how)(requests)
        if how == "Testany":
            ready = ready[0] if ready[1] else MPI.UNDEFINED
        many = ready if isinstance(ready, list) else [] if ready in (None, MPI.UNDEFINED) else [ready]
        found[many] += 1
        if dice.integers(2):
            requests[dice.integers(len(requests))].Get_status()
    return found


def case_mixed(comm):
    """Messages, collectives and persistent calls under way together, again and again, completed by any method; some are
    dropped, and Free is refused meanwhile."""
    right, left = neighbours(comm)
    other = comm.Dup()
    p, r, dice = other.size, other.rank, np.random.default_rng()
    same = np.random.default_rng(comm.bcast(random.getrandbits(30)))
    lasting = other.Allreduce_init(np.full(3, float(r)), total := np.empty(3))
    ways = ["Waitall", "Testall", "Waitany", "Testany", "Waitsome", "Testsome"]
    for turn in range(60):
        n, kinds, root = int(same.choice([1, 2, 5000])), same.integers(0, 6, 9), int(same.integers(p))
        requests, wanted = [], []
        for tag, kind in enumerate(kinds.tolist()):
            mine, into, every = np.full(n, turn + r + 0.5), np.full(n, np.nan), np.full((p, n), np.nan)
            if kind == 0:
                requests += [other.Irecv(into, left, tag), other.Isend(mine, right, tag)]
                wanted.append((into, turn + left + 0.5))
            elif kind == 1:
                requests.append(other.Iallreduce(mine, into))
                wanted.append((into, p * (turn + 0.5) + p * (p - 1) / 2))
            elif kind == 2:
                requests.append(other.Ibcast(into if r != root else mine, root))
                wanted.append((into if r != root else mine, turn + root + 0.5))
            elif kind == 3:
                requests.append(other.Iallgather(mine, every))
                wanted.append((every, np.arange(p)[:, None] + turn + 0.5))
            elif kind == 4:
                requests.append(other.Igather(mine, every if r == root else None, root))
                wanted.append((every, np.arange(p)[:, None] + turn + 0.5 if r == root else np.nan))
            else:
                other.Iallreduce(mine, into)  # dropped
                requests.append(other.Ibarrier())
        total[:] = np.nan
        lasting.Start()
        requests.append(lasting)
        if turn % 20 == 0:
            with pytest.raises(ValueError, match="still active"):
                other.Free()
        order = dice.permutation(len(requests)).tolist()
        how = dice.choice(ways)
        assert (completed([requests[i] for i in order], how, dice) == 1).all(), how
        assert all(each.finished for each in requests)
        for found, want in [*wanted, (total, p * (p - 1) / 2)]:
            np.testing.assert_array_equal(found, np.broadcast_to(want, found.shape), f"{how} {turn}")
    lasting.Free()
    other.Free()


def case_alike_but_for(comm):
    """Calls that differ from an earlier one in the kind of a list, in an object's value or in the addresses alone; long
    and short ones that are dropped under way."""
    with comm.Split(comm.rank // 2) as two:
        p, r = two.size, two.rank
        room, counts = np.empty(9), [3, 4][:p]
        for _ in range(3):  # a list has counts, a tuple the count and the distance of all blocks
            for told, starts, n in ((counts, (0, 3), counts[r]), ((3, 4), (0, 4), 3)):
                room[:], mine = -1, np.full(n, r + 1.0)
                two.Allgatherv(mine, [room, told])
                lengths = told if told is counts else [3] * p
                want = np.full(9, -1.0)
                for rank, (at, length) in enumerate(zip(starts, lengths, strict=False)):
                    want[at : at + length] = rank + 1
                assert (room == want).all(), (told, room)
        root, mine = np.array(0), np.empty(5)
        for turn in range(8):
            root[...] = turn // 2 % p
            mine[:] = 10 * turn + r
            two.Bcast(mine, root)
            assert (mine == 10 * turn + root).all(), (turn, mine)
        for n, form in product((4, 4000), ("", "I")):
            memory = np.zeros(4 * n)
            comm.Iallreduce(np.ones(n), np.empty(n))  # dropped, with its arrays
            every = memory[: p * n]

            def run(name, send, recv, form=form):
                request = getattr(two, form + (name.lower() if form else name))(send, recv)
                if form:
                    request.Wait()

            run("Allreduce", np.ones(n), memory[:n])
            run("Allreduce", memory[:n], memory[n : 2 * n])
            fixed = np.zeros(n)
            fixed.flags.writeable = False
            for misfit in (fixed, np.zeros(2 * n)[::2]):
                with pytest.raises((ValueError, BufferError)):
                    run("Allreduce", np.ones(n), misfit)
            assert (memory[n : 2 * n] == p * p).all()
            for send, recv in ((memory[:n], memory[1 : n + 1]), (memory[n - 1 : 2 * n - 1], memory[:n])):
                with pytest.raises(ValueError, match="overlap"):
                    run("Allreduce", send, recv)
            both = np.full(p * n + n, float(r))  # what is sent lies behind the blocks
            two.Allgatherv(both[p * n :], [both, [n] * p])
            assert (both[: p * n] == np.repeat(np.arange(p), n)).all()
            for own in (True, False, True):
                every[:] = -1
                mine = every[r * n : (r + 1) * n] if own else np.empty(n)
                mine[:] = r
                run("Allgather", mine, every)
                assert (every == np.repeat(np.arange(p), n)).all(), own


def case_counts_change(comm):
    """Uneven calls made again and again, in both forms, with other counts, of all ranks, or that only some know; arrays
    of counts are the same objects with other numbers."""
    dice, kept = random.Random(comm.bcast(random.random())), {}
    for name in UNEVEN:
        op, root = "SUM" if name == "reduce_scatter" else None, dice.randrange(comm.size) if name[0] in "gs" else -1
        first = [*dice.sample(range(5), 2), *dice.choices(range(5), k=comm.size ** (1 + (name == "alltoallv")) - 2)]
        tables, seed, form = (first, [first[1], first[0], *first[2:]]), dice.randrange(1 << 30), dice.choice(SPECS)
        for turn in range(16):
            counts = tuple(dice.choice(tables))
            way = dice.choice(("blocking", "request"))
            call = Call(Case(name, "float64", op, way, False, root, counts, False, form, seed + GAPS * turn), comm)
            call.refill()
            args = call.args()
            for side, spec in enumerate(args[:2]):
                if type(spec) is list and len(spec) > 1 and isinstance(spec[1], np.ndarray):
                    numbers = kept.setdefault((name, side, spec[1].dtype), spec[1])
                    numbers[:] = spec[1]
                    spec[1] = numbers
            call.args = lambda args=args: args
            if (request := start(comm, call)) is not None:
                request.Wait()
            assert not (wrong := call.verify()), (turn, wrong, call.case)


def case_datatypes_change(comm):
    """Alltoallw made again and again, in both forms, with other counts, places and datatypes; with both buffers in one
    memory, or blocks with gaps."""
    p, r = comm.size, comm.rank
    dice = np.random.default_rng(comm.bcast(random.getrandbits(30)))
    matrices, apart = dice.integers(0, 3, (2, p, p)), MPI.DOUBLE.Create_resized(0, 16).Commit()
    for turn in range(48):
        if turn % 4 == 0:
            step, first = dice.choice([2, 3], 2)
        matrix, form = matrices[turn // 8 % 2], turn // 4 % 4
        kind = apart if form == 3 else MPI.DOUBLE if form == 2 else MPI.INT64_T
        kinds, wide = (
            [kind if rank % 2 else MPI.DOUBLE for rank in range(p)],
            [1 + (form == 3 and q % 2) for q in range(p)],
        )
        memory = np.full((2, first + 4 * step * p), -1.0)
        takes, sends = memory
        if form == 1:  # blocks of both in turns
            takes, sends = memory.ravel(), memory.ravel()[2:]
        specs, want = [], takes.copy()
        for array, counts, values in ((sends, matrix[r], r + 0.01 * turn), (takes, matrix[:, r], None)):
            places = first * (form > 1) + np.arange(p) * (4 if form == 1 else step * max(wide))
            for rank, (count, place) in enumerate(zip(counts, places, strict=True)):
                at = place + wide[rank] * np.arange(count)
                if values is None:
                    want[at] = rank + 0.01 * turn + 10 * r
                else:
                    array[at] = values + 10 * rank
            specs.append([array, (counts.tolist(), (8 * places).tolist()), kinds])
        if form == 1:
            want[2 : 2 + sends.size] = np.where(sends != -1, sends, want[2 : 2 + sends.size])
        if dice.integers(2):
            comm.Alltoallw(*specs)
        else:
            comm.Ialltoallw(*specs).Wait()
        np.testing.assert_array_equal(takes, want, f"{turn}")
    apart.Free()
