"""Calls in which a bit flips on its way to rank 0 (flip.c), and the errors of every rank."""

import os
import time

import collective_cases
import numpy as np
import pytest

import ucc_hetero as u
from ucc_hetero import log
from ucc_hetero.calls import verification

N = 50_000


class Sent:
    """Data of the ranks: rank 1's has eight bytes that no other data has, in which a bit flips."""

    def __init__(self, comm):
        self.comm, self.rank, self.ranks = comm, comm.rank, comm.size
        self.magic = int(os.environ["FLIP"], 16)
        self.x = np.arange(N) * (comm.rank + 1)
        if comm.rank == 1:
            self.x[12_345] = self.magic

    def all(self):
        return np.empty((self.ranks, N), np.int64)


def persistent(s):
    request = s.comm.Allgather_init(s.x, s.all())
    request.Start()
    request.Wait()
    request.Free()


def first_used_by_one_rank():
    """Sending a message is not collective: the first use of a communicator by one rank does not wait for the others."""
    comm = u.Communicator()
    comm.Dup().Free()
    with comm.Dup() as made:
        into = np.zeros(N)
        sent = [made.Isend(np.ones(N), 1) for _ in range(comm.rank == 0)]
        comm.mpi.Barrier()
        if comm.rank == 1:
            made.Recv(into, 0)
        u.Request.Waitall(sent)
        assert comm.rank != 1 or (into == 1).all()
    comm.Free()


def unseen(s):
    s.comm.Allgather(s.x, y := s.all())
    if s.rank == 0:
        print("flipped" if y[1, 12_345] != s.magic else "right")


FORMS = {
    "allreduce": lambda s: s.comm.Allreduce(s.x, np.empty_like(s.x)),
    "in place": lambda s: s.comm.Allreduce(u.IN_PLACE, s.x.copy()), "bcast": lambda s: s.comm.Bcast(s.x.copy(), 1),
    "allgather": lambda s: s.comm.Allgather(s.x, s.all()),
    "alltoall": lambda s: s.comm.Alltoall(np.tile(s.x, s.ranks), s.all()),
    "gatherv": lambda s: s.comm.Gatherv(s.x, [s.all().ravel(), [N] * s.ranks] if s.rank == 0 else None, 0),
    "started": lambda s: s.comm.Iallgather(s.x, s.all()).Wait(),
    "dropped": lambda s: s.comm.Iallgather(s.x, s.all()).Free(), "persistent": persistent, "unseen": unseen,
}  # fmt: skip


def until_told(rank, call, end):
    """Repeat a call until it raises, at the latest at the end, and print the error."""
    said = ""
    try:
        for _ in range(3):
            call()
        end()
    except Exception as error:
        said = str(error)
    print(f"rank {rank} says: {said}", flush=True)


def flipped(form):
    sent = Sent(comm := u.Communicator())
    until_told(sent.rank, lambda: FORMS[form](sent), comm.Free)


def ahead(form, rank=2):
    """As `flipped`, but one rank waits in a later call, or in Free, before the others check."""
    finish = verification._Sample.finish

    def late(*given):
        time.sleep(0.3)
        finish(*given)

    with pytest.MonkeyPatch.context() as patch:
        if int(os.environ["OMPI_COMM_WORLD_RANK"]) == rank:
            patch.setattr(verification, "_MOMENT", 1e-9)
        else:
            patch.setattr(verification._Sample, "finish", late)
        flipped(form)


def torch_group(asynchronous):
    import torch
    import torch.distributed as dist

    import ucc_hetero.torch  # noqa: F401

    dist.init_process_group("ucch")
    rank = dist.get_rank()
    sent = torch.arange(30_000) * (rank + 1)
    if rank == 1:
        sent[777] = int(os.environ["FLIP"], 16)

    def call():
        work = dist.all_gather_into_tensor(torch.empty(60_000, dtype=torch.int64), sent, async_op=asynchronous)
        if work is not None:
            work.wait()

    until_told(rank, call, dist.destroy_process_group)


def on_devices(streamed):
    from arrays import Array, runtime

    comm, n, gpu = u.Communicator(), 30_000, runtime()
    gpu.use(comm._runner.members.place.device)
    stream = gpu.stream() if streamed else None
    x, y = Array(n, np.int64).set(np.arange(n) * (comm.rank + 1)), Array(comm.size * n, np.int64)
    if comm.rank == 1:
        x.peek[4321] = int(os.environ["FLIP"], 16)
    until_told(comm.rank, lambda: comm.Allgather(x, y.set(-1), stream=stream), comm.Free)


def right(seed):
    """Random calls; the log tells how many were verified."""
    log.configure()  # with this case's variables
    collective_cases.main(seed, "7")
    for name in ("UCCH_LOG_LEVEL", "UCCH_LOG_SUBSYS"):
        del os.environ[name]
    log.configure()
