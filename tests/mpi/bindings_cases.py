"""The thin bindings, without the planner."""

import gc
import weakref

import numpy as np
import pytest
from mpi4py import MPI

from ucc_hetero import ucc, ucx
from ucc_hetero.bindings.oob import MPIExchange
from ucc_hetero.errors import CollectiveTimeout, LibraryError, TruncationError
from ucc_hetero.types import DTYPES


def calls():
    """What the page's example lacks: displacements, a dropped request, teams of some ranks, errors."""
    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    f32 = DTYPES["float32"]
    with ucc.Lib("UCC") as library, library.context(MPIExchange(world.Dup())) as context:
        assert "ALLREDUCE" in library.attributes()["collectives"]
        assert (context.rank, context.size) == (rank, size) and context.address_length() > 0
        with context.team(range(size)) as team:

            def ended(request):
                request.post()
                request.wait(300)

            # Counts and displacements in elements, with a gap between the blocks.
            counts = [r + 1 for r in range(size)]
            displs = [sum(counts[:r]) + r for r in range(size)]
            gathered = np.full(displs[-1] + counts[-1], -1, np.float32)
            block = np.full(counts[rank], rank, np.float32)
            where = {"dst_counts": counts, "dst_displs": displs}
            with team.collective(ucc.Coll.ALLGATHERV, src=block, dst=gathered, dtype=f32, **where) as request:
                ended(request)
            due = np.concatenate([[*[r] * n, -1] for r, n in enumerate(counts)])[:-1]
            assert (gathered == due).all(), "also between the blocks"
            # A request that is dropped goes on, and its memory is kept.
            data = np.ones(4, np.float32)
            alive = weakref.ref(data)
            if rank == 0:
                request = team.collective(ucc.Coll.BCAST, src=data, dtype=f32, root=1)
                request.post()
                assert request.status == ucc.Status.INPROGRESS
                del request, data
                gc.collect()
                assert alive() is not None
            world.Barrier()
            if rank:
                with team.collective(ucc.Coll.BCAST, src=data, dtype=f32, root=1) as request:
                    ended(request)
            done = world.Ibarrier()
            while not done.Test():
                context.progress()
        if rank != 1:  # any order of ranks, any subset
            others = [r for r in reversed(range(size)) if r != 1]
            with context.team(others) as team:
                assert team.rank == others.index(rank)
                data = np.full(4, rank, np.float32)
                with team.collective(ucc.Coll.BCAST, src=data, dtype=f32, root=0) as request:
                    ended(request)
                assert (data == others[0]).all()
        world.Barrier()
    with pytest.raises(LibraryError, match="UCC_ERR_INVALID_PARAM") as caught:
        ucc.check("ucc_something", -3)
    assert caught.value.status == -3


def number_of_teams():
    world, kept = MPI.COMM_WORLD, []
    with ucc.Lib("UCC") as library:
        context = library.context(MPIExchange(world.Dup()), {"TEAM_IDS_POOL_SIZE": "1"})
        with pytest.raises(LibraryError, match="NO_RESOURCE"):  # of 64 numbers libucc reserves the first
            while len(kept) < 65:
                kept.append(context.team(range(world.size)))
        assert len(kept) > 60
        while kept:
            kept.pop().close()
        context.team(range(world.size)).close()  # numbers are free again
        context.close()


def messages():
    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    with ucx.Context() as context:
        assert "host" in context.memory_types() and context.transports()
        worker = context.worker()
        addresses = world.allgather(worker.address)
        peer = worker.connect(addresses[(rank + 1) % size])
        rng = np.random.default_rng()
        for n in (0, 1, 1000, 3_000_000):
            data = rng.integers(0, 255, n, np.uint8)
            want = world.sendrecv(data, (rank + 1) % size, source=(rank - 1) % size)
            into = np.full(n, 7, np.uint8)
            incoming = worker.recv(into, tag=5)
            outgoing = worker.send(peer, data, tag=5)
            incoming.wait(), outgoing.wait()
            assert (into == want).all() and incoming.info == (5, n)
        # Matching by the bits of a mask, and probe.
        high = 1 << 50 | 0xA1  # all 64 bits are the user's
        sent = worker.send(peer, np.arange(10), tag=high)
        while (seen := worker.probe(0xA0, mask=0xF0)) is None:
            worker.progress()
        assert seen == (high, 80)
        small = np.zeros(3, np.int64)
        with pytest.raises(TruncationError):
            worker.recv(small, tag=0xA0, mask=0xF0).wait()
        sent.wait()
        with pytest.raises(CollectiveTimeout):
            worker.recv(small, tag=99, timeout=0.2).wait()

        world.Barrier()
        peer.close()
        worker.close()
