"""A job for test_bridge_memory.py: plain UCC calls of a team whose even ranks have device memory, the odd ones host's.

    mpirun -n 4 python bridge_memory.py SETTINGS CALL...

SETTINGS: ``default`` leaves libucc alone but for the components of our bridges (``ucp,self``), ``ours`` are those of a
bridge. CALL: ``allreduce:in:4096``, collective, place (``in`` or ``out``) and bytes of the longer buffer. Every rank
prints ``right`` if every call was. A call that does not end within ``--limit`` seconds ends the job with status 1.

With ``--maps`` libucc says what it would choose for which memory. With ``--blind`` the ranks of host memory see no GPU
at all, as on a host of another vendor.
"""

import argparse
import faulthandler
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
#: Elements after which a rank's data repeats itself: prime, so that no shift by a block looks right.
PERIOD = 4099


def block(rank: int, seed: int) -> Floats:
    """Small integers, whose sums are exact in any order."""
    return np.random.default_rng([seed, rank]).integers(-8, 9, PERIOD).astype(np.float32)


@dataclass
class Call:
    """Arguments of one rank of a collective, and their contents afterwards.

    ``want`` are the expected elements of the destination (of the source for bcast) from element ``at`` on.
    """

    src: Floats | None = None
    dst: Floats | None = None
    want: Floats | None = None
    at: int = 0
    more: dict[str, Any] = field(default_factory=dict)


class Job:
    """The shape of one call: ``n`` elements of the longer buffer, of which ``m`` belong to each rank."""

    def __init__(self, size: int, rank: int, nbytes: int, inside: bool, root: int, seed: int) -> None:
        self.p, self.r, self.inside, self.root = size, rank, inside, root
        self.m = max(1, nbytes // 4 // size)
        self.n = max(1, nbytes // 4)
        self.blocks = [block(q, seed) for q in range(size)]
        self.uneven = [self.m + q % 3 for q in range(size)]

    def data(self, rank: int, n: int, begin: int = 0) -> Floats:
        """``n`` elements of a rank's data from ``begin`` on."""
        return np.resize(np.roll(self.blocks[rank], -begin), n)

    def sums(self, n: int, begin: int = 0) -> Floats:
        """The same of the sum of all ranks' data."""
        return np.resize(np.roll(np.sum(self.blocks, axis=0, dtype=np.float32), -begin), n)

    def poison(self, n: int) -> Floats:
        return np.full(n, np.nan, np.float32)

    def joined(self, counts: list[int]) -> Floats:
        return np.concatenate([self.data(q, count) for q, count in enumerate(counts)])

    def own_part(self) -> Floats:
        """A buffer for every rank's part in which only this rank's is there."""
        out = self.poison(self.m * self.p)
        out[self.r * self.m :][: self.m] = self.data(self.r, self.m)
        return out


def allreduce(job: Job) -> Call:
    mine, want = job.data(job.r, job.n), job.sums(job.n)
    return Call(None, mine, want) if job.inside else Call(mine, job.poison(job.n), want)


def reduce(job: Job) -> Call:
    mine, rooted = job.data(job.r, job.n), job.r == job.root
    if not rooted:
        return Call(mine)
    return Call(None if job.inside else mine, mine if job.inside else job.poison(job.n), job.sums(job.n))


def bcast(job: Job) -> Call:
    want = job.data(job.root, job.n)
    return Call(want if job.r == job.root else job.poison(job.n), None, want)


def allgather(job: Job) -> Call:
    want = job.joined([job.m] * job.p)
    if job.inside:
        return Call(None, job.own_part(), want)
    return Call(job.data(job.r, job.m), job.poison(want.size), want)


def allgatherv(job: Job) -> Call:
    want = job.joined(job.uneven)
    mine = job.data(job.r, job.uneven[job.r])
    return Call(mine, job.poison(want.size), want, more={"dst_counts": job.uneven})


def gather(job: Job) -> Call:
    if job.r != job.root:
        return Call(job.data(job.r, job.m))
    call = allgather(job)
    return call


def gatherv(job: Job) -> Call:
    call = allgatherv(job)
    return call if job.r == job.root else Call(call.src)


def scatterv(job: Job) -> Call:
    begin = sum(job.uneven[: job.r])
    want = job.data(job.root, job.uneven[job.r], begin)
    rooted = job.r == job.root
    src = job.data(job.root, sum(job.uneven)) if rooted else None
    return Call(src, job.poison(want.size), want, more={"src_counts": job.uneven} if rooted else {})


def alltoall(job: Job) -> Call:
    want = np.concatenate([job.data(q, job.m, job.r * job.m) for q in range(job.p)])
    return Call(job.data(job.r, job.m * job.p), job.poison(want.size), want)


def alltoallv(job: Job) -> Call:
    counts = [[job.m + (q + s) % 3 for s in range(job.p)] for q in range(job.p)]
    parts = [job.data(q, counts[q][job.r], sum(counts[q][: job.r])) for q in range(job.p)]
    want = np.concatenate(parts)
    more = {"src_counts": counts[job.r], "dst_counts": [counts[q][job.r] for q in range(job.p)]}
    return Call(job.data(job.r, sum(counts[job.r])), job.poison(want.size), want, more=more)


def reduce_scatter(job: Job) -> Call:
    begin, whole = job.r * job.m, job.data(job.r, job.m * job.p)
    want = job.sums(job.m, begin)
    return Call(None, whole, want, at=begin) if job.inside else Call(whole, job.poison(job.m), want)


def reduce_scatterv(job: Job) -> Call:
    want = job.sums(job.uneven[job.r], sum(job.uneven[: job.r]))
    return Call(job.data(job.r, sum(job.uneven)), job.poison(want.size), want, more={"dst_counts": job.uneven})


def nothing(job: Job) -> Call:
    return Call()


CALLS: dict[str, Callable[[Job], Call]] = {
    "allreduce": allreduce, "reduce": reduce, "bcast": bcast, "allgather": allgather, "allgatherv": allgatherv,
    "gather": gather, "gatherv": gatherv, "scatterv": scatterv, "alltoall": alltoall, "alltoallv": alltoallv,
    "reduce_scatter": reduce_scatter, "reduce_scatterv": reduce_scatterv, "barrier": nothing, "fanin": nothing,
    "fanout": nothing,
}  # fmt: skip
REDUCING = ("allreduce", "reduce", "reduce_scatter", "reduce_scatterv")
ROOTED = ("reduce", "bcast", "gather", "gatherv", "scatterv", "fanin", "fanout")


class HostMemory:
    """numpy arrays."""

    kind = 0

    def take(self, values: Floats) -> tuple[int, int]:
        self.kept = [*getattr(self, "kept", []), values]
        return values.ctypes.data, values.nbytes

    def look(self, at: tuple[int, int]) -> Floats:
        return next(each for each in self.kept if each.ctypes.data == at[0])

    def drop(self) -> None:
        self.kept = []


class DeviceMemory:
    """Memory of the first GPU, filled and read by copies in a stream."""

    def __init__(self) -> None:
        from ucc_hetero import device

        (self.gpu,) = device.available()
        self.gpu.use(RANK // 2 % self.gpu.count())
        self.stream, self.kind, self.blocks = self.gpu.stream(), self.gpu.memory_type, []

    def take(self, values: Floats) -> tuple[int, int]:
        self.blocks.append(self.gpu.alloc(values.nbytes))
        at = self.blocks[-1].handle
        self.gpu.copy(at, values.ctypes.data, values.nbytes, self.stream.handle)
        self.stream.synchronize()
        return at, values.nbytes

    def look(self, at: tuple[int, int]) -> Floats:
        out = np.empty(at[1] // 4, np.float32)
        self.gpu.copy(out.ctypes.data, at[0], at[1], self.stream.handle)
        self.stream.synchronize()
        return out

    def drop(self) -> None:
        while self.blocks:
            self.blocks.pop().close()


def run(team: Any, memory: Any, name: str, job: Job, limit: float) -> str:
    """Make one call; what was wrong with its result, or nothing."""
    from ucc_hetero.bindings.ucc import Coll, CollFlag
    from ucc_hetero.types import DTYPES, OPS

    call = CALLS[name](job)
    sides = {k: memory.take(v) for k, v in (("src", call.src), ("dst", call.dst)) if v is not None}
    flags = CollFlag.IN_PLACE if job.inside and call.src is None and call.dst is not None else 0
    more = {"op": OPS["SUM"], **call.more} if name in REDUCING else call.more
    dtype, root = DTYPES["float32"], job.root
    with team.collective(
        Coll[name.upper()], **sides, dtype=dtype, root=root, flags=flags, mem_type=memory.kind, **more
    ) as request:
        request.post()
        request.wait(limit)
    wrong = ""
    if call.want is not None:
        got = memory.look(sides["dst" if "dst" in sides else "src"])[call.at :][: call.want.size]
        if not np.array_equal(got, call.want):
            first = int(np.flatnonzero(got != call.want)[0])
            wrong = f"{int((got != call.want).sum())} of {got.size}, the first at {first}: {got[first]}"
    memory.drop()
    return wrong


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", choices=("default", "ours"))
    parser.add_argument("calls", nargs="*")
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--maps", action="store_true")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds a call may take")
    return parser.parse_args()


def settings(options: argparse.Namespace, version: str) -> str:
    """Write the team's settings to the environment; the prefix under which libucc reads them."""
    from ucc_hetero.bootstrap import agreement

    ours = options.settings == "ours"
    prefix = agreement.BRIDGE_PREFIX if ours else "UCC"
    if ours:
        agreement.apply_settings(version)
    else:
        os.environ |= {"UCC_CLS": "basic", "UCC_TLS": "ucp,self", "UCC_CL_BASIC_TLS": "ucp,self"}
    if options.maps:
        os.environ["UCC_LOG_LEVEL"] = "info"
    return prefix


def main() -> None:
    options = arguments()
    host = RANK % 2 == 1
    if host and options.blind:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    faulthandler.dump_traceback_later(options.limit + 20, exit=True)  # loading libraries takes its time, too
    from ucc_hetero.native.libraries import load

    prefix = settings(options, load().ucc_version)
    from mpi4py import MPI

    from ucc_hetero.bindings.oob import MPIExchange
    from ucc_hetero.bindings.ucc import Lib

    world = MPI.COMM_WORLD
    memory = HostMemory() if host else DeviceMemory()
    exchange = world.Dup()
    library = Lib(prefix)
    context = library.context(MPIExchange(exchange))
    team = context.team(range(world.size))
    for number, text in enumerate(options.calls):
        name, place, nbytes = text.split(":")
        faulthandler.dump_traceback_later(options.limit + 5, exit=True)
        # Roots of either memory in turn.
        roots = range(min(2, world.size)) if name in ROOTED and int(nbytes) <= 1 << 20 else [number % 2]
        for root in roots:
            job = Job(world.size, world.rank, int(nbytes), place == "in", root, seed=1000 + number)
            wrong = run(team, memory, name, job, options.limit)
            if wrong:
                print(f"wrong: rank {world.rank} {text} root {root}: {wrong}", flush=True)
                world.Abort(3)
    world.Barrier()
    faulthandler.dump_traceback_later(20, exit=True)
    team.close()
    context.close()
    library.close()
    print("right", flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        print(f"failed: rank {RANK}: {type(error).__name__}: {error}", flush=True)
        os._exit(4)  # what has failed in libucc cannot be taken down
    sys.exit(0)
