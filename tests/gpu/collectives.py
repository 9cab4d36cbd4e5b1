"""A job: collectives on device memory. Arguments: ranks whose GPU is HIP's over CUDA, and that library."""

import sys
from typing import Any

from torch_job import begin  # tools/

torch = begin(sys.argv[1], sys.argv[2], 140)
from ucc_hetero import Communicator  # noqa: E402

torch.zeros(1, device="cuda")
comm = Communicator()
p, r = comm.size, comm.rank


def new(n: int, value: float = -7) -> Any:
    return torch.full((n,), float(value), device="cuda", dtype=torch.float32)


def expect(what: str, got: Any, want: Any) -> None:
    assert bool((got == want).all()), (what, r, got.flatten()[:4].tolist())


def blocking(n: int) -> None:
    """Every collective on integers in float32."""
    total, ranks = p * (p + 1) // 2, torch.arange(p, device="cuda", dtype=torch.float32)
    x, y, g, h = new(n, r + 1), new(n), new(n * p), new(n * p)
    torch.cuda.synchronize()
    comm.Allreduce(x, y)
    expect(f"allreduce {n}", y, total)
    comm.Allreduce(None, y)
    expect(f"allreduce in place {n}", y, total * p)
    comm.Allgather(x, g)
    expect(f"allgather {n}", g.view(p, n), ranks[:, None] + 1)
    comm.Reduce_scatter_block(g, y)
    expect(f"reduce_scatter {n}", y, (r + 1) * p)
    comm.Alltoall(g, h)
    expect(f"alltoall {n}", h, r + 1)
    comm.Bcast(x, 1 % p)
    expect(f"bcast {n}", x, 1 % p + 1)
    comm.Reduce(x, y, root=p - 1)
    if r == p - 1:
        expect(f"reduce {n}", y, (1 % p + 1) * p)
    x.fill_(r)
    torch.cuda.synchronize()
    comm.Sendrecv(x, (r + 1) % p, 0, y, (r - 1) % p)
    expect(f"sendrecv {n}", y, (r - 1) % p)


def in_stream(n: int, stream: Any) -> None:
    """Calls between kernels of one stream, without any synchronisation in between."""
    with torch.cuda.stream(stream):
        x, y = torch.zeros(n, device="cuda"), torch.empty(n, device="cuda")
        for k in range(20):
            x.fill_(r + k)
            comm.Iallreduce(x, y, stream=stream)
            z = y * 2
        stream.synchronize()
        expect(f"allreduce {n} in {stream}", z, 2.0 * (p * (p - 1) // 2 + p * 19))


for count in (1, 1000, 65536, 1 << 20, 5_000_001):
    blocking(count)
for each in (torch.cuda.Stream(), torch.cuda.default_stream()):
    for count in (1000, 1 << 20, 1 << 24):
        in_stream(count, each)
comm.Free()
print("all right", flush=True)
