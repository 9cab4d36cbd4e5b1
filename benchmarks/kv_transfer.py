"""Measure the transfer of a KV cache's pages from one rank's memory to the other's.

    mpirun -np 2 python -m ucc_hetero.bench kv_transfer --pages 64,1024 --block-size 16,64 --concurrency 1,8

Rank 0 has computed prompts, and rank 1 asks for their pages, for so many prompts at a time. A way is how both caches
differ: plain (alike), layout (NHD to HND), half (float16 to bfloat16, too), float8 (e4m3fn to e4m3fnuz, too);
buffer is one put of as many bytes. GB/s are those of all prompts of a round; the milliseconds are the part of a
prompt's pages in the time to its first token, from asking until all are there. Medians; best is the fastest round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from ucc_hetero import rma

from ..errors import counted
from .memory import Block, Memory, memory_of
from .options import BadUsage, ProgramParser, number, value
from .result_file import write_job
from .world import World, open_world, prepare

#: Way -> layout and type of the sender's cache, and of the receiver's.
WAYS = {
    "buffer": ("KBNHD", "float16", "KBNHD", "float16"), "plain": ("KBNHD", "float16", "KBNHD", "float16"),
    "layout": ("KBNHD", "float16", "KBHND", "float16"), "half": ("KBNHD", "float16", "KBHND", "bfloat16"),
    "float8": ("KBNHD", "float8_e4m3fn", "KBHND", "float8_e4m3fnuz"),
}  # fmt: skip


class KVCase(NamedTuple):
    """A row: how the caches differ, tokens of a block, pages of a prompt, and prompts at a time."""

    way: str
    block_size: int
    pages: int
    concurrency: int


def _numbers(text: str) -> list[int]:
    return [number(each, 1) for each in text.split(",")]


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = ProgramParser("kv_transfer", description=about, epilog=more)
    many, one = value(_numbers), value(number, 1)
    parser.add_argument("--way", default="buffer,plain,layout", help=f"of {', '.join(WAYS)} (buffer,plain,layout)")
    parser.add_argument("--pages", default="16,64,256", **many, help="pages of a prompt (16,64,256)")
    parser.add_argument("--block-size", default="16", **many, help="tokens of a page (16)")
    parser.add_argument("--concurrency", default="1,4", **many, help="prompts at a time (1,4)")
    parser.add_argument("--layers", default="4", **one, help="layers of the model (4)")
    parser.add_argument("--heads", default="8", **one, help="heads of keys and values (8)")
    parser.add_argument("--dim", default="128", **one, help="elements of a head (128)")
    parser.add_argument("-r", "--rounds", default="11", **one, help="measured after two more (11)")
    parser.add_argument("-d", "--accelerator", default="host", help="memory: cuda, rocm, host or auto (host)")
    parser.add_argument("--json", metavar="FILE", help="also write everything to this file")
    found = parser.read(words)
    found.way = found.way.split(",")
    for way in found.way:
        if way not in WAYS:
            raise BadUsage(f"kv_transfer: --way {way}: known are {', '.join(WAYS)}")
    return found


class Cache:
    """A rank's cache of one case, as pages and, of the first layer alone, as a buffer."""

    def __init__(self, worker: rma.Worker, memory: Memory, case: KVCase, sizes: argparse.Namespace, rank: int) -> None:
        axes, dtype = WAYS[case.way][2 * rank : 2 * rank + 2]
        blocks = case.pages * case.concurrency
        size = {"K": 2, "B": blocks, "N": case.block_size, "H": sizes.heads, "D": sizes.dim}
        self.shape, self.axes = tuple(size[axis] for axis in axes), axes
        stored = np.dtype("uint8" if dtype.startswith("float8") else "float16")
        self.layers = 1 if case.way == "buffer" else sizes.layers
        shape = (self.shape[0] * sizes.layers, *self.shape[1:]) if case.way == "buffer" else self.shape
        self.blocks: list[Block] = [memory.block(stored, int(np.prod(shape))) for _ in range(self.layers)]
        rng = np.random.default_rng(rank)
        for block in self.blocks:
            block.put(rng.integers(0, 100, block.count, np.uint8).astype(stored))
        arrays = [block.array[: block.count].reshape(shape) for block in self.blocks]
        self.bytes = sum(block.count for block in self.blocks) * stored.itemsize
        self.worker = worker
        self.region = worker.register(arrays[0]) if case.way == "buffer" else None
        self.table = None if self.region else rma.PageTable(worker, arrays, axes, dtype=dtype)

    @property
    def descriptor(self) -> bytes:
        """Bytes by which the other rank opens it."""
        return (self.table or self.region).descriptor  # type: ignore[union-attr]

    def by_page(self) -> Any:
        """The numbers of the first layer, as [K, B, N, H, D]."""
        shape = (-1, *self.shape[1:])
        return self.blocks[0].get().reshape(shape).transpose([self.axes.index(axis) for axis in "KBNHD"])

    def close(self) -> None:
        (self.table or self.region).close()  # type: ignore[union-attr]


class Pair:
    """Both ranks of one case: rank 1 asks, rank 0 sends."""

    def __init__(self, world: World, peer: rma.Endpoint, cache: Cache, case: KVCase) -> None:
        self.world, self.peer, self.cache, self.case = world, peer, cache, case
        theirs = world.comm.sendrecv(cache.descriptor, 1 - world.rank, source=1 - world.rank)
        self.target: Any = cache.table.open(peer, theirs) if cache.table else peer.open(theirs)
        # A prompt's pages lie here and there.
        order = np.random.default_rng(world.rank).permutation(case.pages * case.concurrency)
        self.pages = order.reshape(case.concurrency, case.pages)

    def ask(self) -> list[float]:
        """Rank 1: seconds until each prompt's pages are there."""
        began, done = time.perf_counter(), [0.0] * self.case.concurrency
        if self.cache.table is None:
            counter = self.cache.worker.counter()
            waiting: list[Any] = [counter.wait(n + 1, peer=self.peer) for n in range(self.case.concurrency)]
            self.world.comm.send(counter.number, 0)
        else:
            waiting = [self.cache.table.recv_pages(pages, self.target) for pages in self.pages]
            self.world.comm.send([receipt.ticket for receipt in waiting], 0)
        while not all(done):
            for i, each in enumerate(waiting):
                if not done[i] and each.Test():
                    done[i] = time.perf_counter() - began
        if self.cache.table is None:
            counter.close()
        return done

    def answer(self) -> None:
        """Rank 0: send the requested pages."""
        told = self.world.comm.recv(source=1)
        region = self.cache.region
        if region is None:
            sent = [self.target.send_pages(p, ticket) for p, ticket in zip(self.pages, told, strict=True)]
        else:
            each = self.cache.bytes // self.case.concurrency
            offsets = [i * each for i in range(self.case.concurrency)]
            sent = [self.peer.put(region, self.target, at, at, each, counter=told) for at in offsets]
        for request in sent:
            request.Wait()

    def check(self) -> str:
        """Describe wrong data in the pages that rank 1 received; empty if numbers were converted."""
        found = self.cache.by_page()
        if self.world.rank == 0:
            for each in self.pages, *found:  # one by one: a message of MPI's holds 2 GiB
                self.world.comm.send(each, 1)
            return ""
        pages, *layers = (self.world.comm.recv(source=0) for _ in range(1 + len(found)))
        source = np.stack(layers)
        if self.case.way == "buffer":
            wrong = (found != source).sum()
        elif self.case.way in ("plain", "layout"):
            wrong = (found[:, self.pages.ravel()] != source[:, pages.ravel()]).sum()
        else:
            wrong = 0  # tests/native/test_pages.py has all types
        return f"kv_transfer: {wrong} elements are wrong in {self.case}" if wrong else ""


def _measure(
    world: World, worker: rma.Worker, peer: rma.Endpoint, memory: Memory, case: KVCase, sizes: argparse.Namespace
) -> dict[str, Any]:
    """A row of results, on every rank."""
    cache = Cache(worker, memory, case, sizes, world.rank)
    pair = Pair(world, peer, cache, case)
    rounds: list[list[float]] = []
    for _ in range(sizes.rounds + 2):
        world.barrier()
        if world.rank:
            rounds.append(pair.ask())
        else:
            pair.answer()
    why = world.first_error(pair.check())
    if why:
        raise SystemExit(why)
    world.barrier()
    cache.close()
    rounds = world.comm.bcast(rounds[2:], 1)
    seconds, each = [max(times) for times in rounds], median(t for times in rounds for t in times)
    rates = {"gbs": cache.bytes / median(seconds) / 1e9, "best": cache.bytes / min(seconds) / 1e9}
    return {**case._asdict(), "bytes": cache.bytes, **rates, "ms": each * 1e3}


def run(words: Sequence[str], command: list[str]) -> int:
    """Measure and print; returns the exit status."""
    sizes = _arguments(words)
    prepare(["ours"])
    world = open_world()
    if world.size != 2:
        raise BadUsage("kv_transfer needs two ranks: mpirun -n 2 python -m ucc_hetero.bench kv_transfer")
    memory = memory_of(world, sizes.accelerator)
    cases = [KVCase(*each) for each in product(sizes.way, sizes.block_size, sizes.pages, sizes.concurrency)]
    shape = f"{counted(sizes.layers, 'layer')}, {counted(sizes.heads, 'head')} of {sizes.dim}"
    world.say(f"# Pages of a KV cache, {shape}\n")
    world.say("# way     tokens/page   pages  prompts       MiB      GB/s      best  ms to first\n")
    rows = []
    with rma.Worker() as worker:
        peer = rma.connect_all(worker, world.comm)[1 - world.rank]
        for case in cases:
            row = _measure(world, worker, peer, memory, case, sizes)
            mib = row["bytes"] / 2**20
            counts = f"{case.block_size:>13}{case.pages:>8}{case.concurrency:>9}{mib:>10.1f}"
            world.say(f"{case.way:<8}{counts}{row['gbs']:>10.2f}{row['best']:>10.2f}{row['ms']:>13.3f}\n")
            rows.append(row)
        world.barrier()
    if sizes.json:
        more = {"unit": "GB/s", "layers": sizes.layers, "heads": sizes.heads, "dim": sizes.dim, "rows": rows}
        write_job(sizes.json, "kv_transfer", command, world, more, world.comm.allgather(memory.accelerator))
    return 0
