"""Bounds of a hierarchical allreduce among the GPUs of one host: its phases, one by one and beside each other.

    mpirun -np 4 python tools/gpu_phases.py        # NVIDIA GPUs that open each other's memory

Ranks 2i and 2i + 1 are an island. NCCL, through torch, does the islands' reduce-scatter and allgather; what crosses is
copied out of the memory of the partner in the other island, which CUDA IPC opens: no library between the device and the
link. If the phases take as long beside each other as one after the other, no plan of them is faster than their sum.
Microseconds of single calls, medians of 5, of the slowest rank.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

MIB = 1 << 20
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


class Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``."""

    _fields_ = [("bytes", ctypes.c_char * 64)]


def runtime(torch: Any) -> ctypes.CDLL:
    """The CUDA runtime that torch brought, or the toolkit's."""
    wheels = Path(torch.__file__).parent.parent / "nvidia"
    found = [*wheels.glob("*/lib/libcudart.so*"), *Path("/usr/local/cuda/lib64").glob("libcudart.so.*")]
    return ctypes.CDLL(str(found[0])) if found else sys.exit("needs libcudart")


def check(status: int) -> None:
    """Stop at a failure of the runtime's."""
    if status:
        sys.exit(f"rank {RANK}: CUDA error {status}")


class Partner:
    """Memory of the partner's device, opened here."""

    def __init__(self, torch: Any, nbytes: int) -> None:
        self.cuda, self.stream = runtime(torch), torch.cuda.Stream()
        self.mine, self.there, handle = ctypes.c_void_p(), ctypes.c_void_p(), Handle()
        check(self.cuda.cudaMalloc(ctypes.byref(self.mine), ctypes.c_size_t(nbytes)))
        check(self.cuda.cudaIpcGetMemHandle(ctypes.byref(handle), self.mine))
        theirs = Handle.from_buffer_copy(WORLD.allgather(bytes(handle))[(RANK + SIZE // 2) % SIZE])
        check(self.cuda.cudaIpcOpenMemHandle(ctypes.byref(self.there), theirs, ctypes.c_uint(1)))
        self.into = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def pull(self, nbytes: int, piece: int) -> None:
        """Copy from there, a piece at a time."""
        at, stream = self.into.data_ptr(), ctypes.c_void_p(self.stream.cuda_stream)
        for start in range(0, nbytes, piece):
            to, of = ctypes.c_void_p(at + start), ctypes.c_void_p((self.there.value or 0) + start)
            check(self.cuda.cudaMemcpyAsync(to, of, ctypes.c_size_t(min(piece, nbytes - start)), 4, stream))


def measure(torch: Any, *calls: Callable[[], Any]) -> float:
    """Microseconds until calls that are issued one after the other are all done, on all ranks at a time."""
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        WORLD.Barrier()
        start = time.perf_counter()
        for call in calls:
            call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(1e6 * max(WORLD.allgather(statistics.median(times[1:]))))


def say(*words: object) -> None:
    """Print on one rank."""
    if RANK == 0:
        print(*words, flush=True)


def phases(torch: Any, partner: Partner, island: Any, nbytes: int) -> None:
    """The phases of an allreduce of so many bytes, by themselves and at a time, beside NCCL's on all ranks."""
    dist = torch.distributed
    whole, half = (torch.empty(n // 4, device="cuda") for n in (nbytes, nbytes // 2))

    scatter = partial(dist.reduce_scatter_tensor, half, whole, group=island)
    gather = partial(dist.all_gather_into_tensor, whole, half, group=island)
    cross = partial(partner.pull, nbytes // 2, 8 * MIB)
    steps: dict[str, tuple[Callable[[], Any], ...]] = {
        "all ranks' allreduce": (partial(dist.all_reduce, whole),),
        "reduce_scatter": (scatter,),
        "allgather": (gather,),
        "both": (scatter, gather),
        "crossing": (cross,),
        "crossing beside both": (cross, scatter, gather),
    }
    took = {name: measure(torch, *calls) for name, calls in steps.items()}
    say(f"{nbytes // MIB:4d} MiB:", ", ".join(f"{name} {value:.0f}" for name, value in took.items()))
    best = took["all ranks' allreduce"] / took["crossing beside both"]
    say(f"          NCCL on all ranks takes {best:.2f} of what the phases do, without a sum of what crosses")


def main() -> None:
    """Measure and print."""
    import torch
    from torch import distributed as dist

    torch.cuda.set_device(RANK)
    partner = Partner(torch, 256 * MIB)
    for piece in (MIB, 2 * MIB, 4 * MIB, 8 * MIB, 128 * MIB):
        took = measure(torch, partial(partner.pull, 128 * MIB, piece))
        say(f"{128 * MIB / took / 1e3:6.0f} GB/s from the partner, all ranks at a time, {piece // MIB} MiB at a time")
    store = dist.TCPStore("127.0.0.1", 29555, SIZE, RANK == 0)
    dist.init_process_group("nccl", store=store, rank=RANK, world_size=SIZE, device_id=torch.device("cuda", RANK))
    islands = [dist.new_group([2 * i, 2 * i + 1]) for i in range(SIZE // 2)]
    for nbytes in (32 * MIB, 64 * MIB, 256 * MIB):
        phases(torch, partner, islands[RANK // 2], nbytes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
