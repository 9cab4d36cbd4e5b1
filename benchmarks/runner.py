"""One benchmark from its command line to its table and files. The loops that are timed are elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from . import collective, onesided, output, pt2pt
from .interleave import Open, measure
from .limits import open_limit
from .memory import Memory, dtype_of, label_of, open_memory
from .options import BadUsage, Options
from .output import Row
from .peers import open_peer
from .result_file import Results
from .session import Session
from .stats import sizes, verdict
from .table import Bench
from .world import Peer, World


def _series(bench: Bench) -> Open:
    """What binds the calls of a benchmark for one peer and size."""
    if bench.family == "onesided":
        return onesided.Transfers
    if bench.collective is None:
        return pt2pt.SERIES[bench.name]
    return collective.Overlapped if bench.family == "nonblocking" else collective.Latency


def _check_offered(bench: Bench, peer: Peer) -> None:
    """Raise NotOffered, before anything is printed, where the peer lacks what the benchmark calls."""
    if bench.family == "onesided":
        onesided.check(bench.name, peer)
    elif bench.collective is None:
        peer.method("Isend")
    else:
        name = bench.collective.method
        peer.method({"nonblocking": f"I{name.lower()}", "persistent": f"{name}_init"}.get(bench.family, name))


def _limited(session: Session) -> Options:
    """The options with the largest message that ``-M`` allows."""
    options, row = session.options, session.bench.collective
    if row is None or row.kind == "barrier":
        return options
    most = options.mem_limit if row.whole else options.mem_limit // session.world.size
    if options.max_size <= most:
        return options
    if session.world.rank == 0:
        print(f"Warning: limiting the message size to {most} bytes; -M, --mem-limit allows more.", file=sys.stderr)
    return replace(options, max_size=most)


def _check_ranks(bench: Bench, world: World, options: Options) -> None:
    if bench.ranks == "two" and bench.family in ("pt2pt", "onesided") and world.size != 2:
        raise BadUsage(f"{bench.name} requires exactly two ranks; the job has {world.size}")
    if world.size < 2:
        raise BadUsage(
            f"{bench.name} requires at least two ranks: start it with mpirun -n 2 python -m ucc_hetero.bench"
        )
    if options.pairs is not None and 2 * options.pairs > world.size:
        raise BadUsage(f"option -p {options.pairs}: {world.size} ranks make at most {world.size // 2} pairs")
    if bench.collective and bench.collective.rooted and options.root is not None and options.root >= world.size:
        raise BadUsage(f"option -k fixed:{options.root}: the job has ranks 0 to {world.size - 1}")


def _memory(options: Options, world: World) -> Memory:
    """This rank's memory; all ranks fail if one cannot have what was asked for."""
    accelerator, local = options.accelerator, world.local_rank()
    if options.places:  # the first half of the ranks and the second
        accelerator = "host" if options.places[world.rank >= (world.size + 1) // 2] == "H" else accelerator
    try:
        return world.agreed(lambda: open_memory(accelerator, local), ValueError)
    except ValueError as why:
        raise BadUsage(str(why)) from None


def run(bench: Bench, options: Options, world: World, command: list[str]) -> int:
    """Run a benchmark and print its table. Collective; returns the exit status, equal on all ranks.

    Raises BadUsage or NotOffered, on all ranks, before anything is measured.
    """
    _check_ranks(bench, world, options)
    try:
        dtypes = [dtype_of(name) for name in options.types]
    except ValueError as why:
        raise BadUsage(str(why)) from None
    memory = _memory(options, world)
    peers: dict[str, Peer] = {}
    try:
        for name in dict.fromkeys((options.backend, *options.peers)):
            peers[name] = open_peer(name, world)
            _check_offered(bench, peers[name])
        results = Results(bench.name, command, world, memory.accelerator)
        session = Session(bench, options, world, memory, peers, results)
        session.options = _limited(session)
        if options.limit:
            limit = open_limit(session)
            session.limit, results.links = limit.of, limit.links
        status = _osu(session, dtypes)
        results.finish(session.bench, session.options, session.peer)
        return status
    finally:
        for peer in peers.values():
            peer.close()


def _rows(session: Session, dtype: np.dtype[Any]) -> Iterator[Row]:
    bench, options = session.bench, session.options
    wanted = list(sizes(options.min_size, options.max_size, dtype.itemsize)) if bench.sized else [0]
    for size in wanted:
        yield _with_limit(session, measure(session, _series(bench), dtype, size))


def _with_limit(session: Session, row: Row) -> Row:
    return row if session.limit is None else replace(row, limit=session.limit(row.size))


def _osu(session: Session, dtypes: list[np.dtype[Any]]) -> int:
    bench, options, world = session.bench, session.options, session.world
    accelerator = world.comm.bcast(session.memory.accelerator)
    pairs = options.pairs or world.size // 2
    session.print(output.osu_preamble(bench, options, accelerator, pairs))
    session.print(session.results.mix_line())
    for dtype in dtypes:
        if bench.sized:
            session.print(output.datatype(label_of(dtype)))
        session.print(output.osu_header(bench, options))
        unclear: dict[str, list[int]] = {}
        for row in _rows(session, dtype):
            session.print(output.osu_row(bench, options, row))
            session.results.add(dtype.name, row, plan=session.plan())
            for peer, (_, interval) in row.ratios.items():
                if verdict(interval) == "too noisy":
                    unclear.setdefault(peer, []).append(row.size)
            if row.wrong:
                return _failed(session, row.size)
        session.print(output.noise_line(options.backend, unclear))
    return 0


def _failed(session: Session, size: int) -> int:
    name = session.bench.name
    session.print(f"DATA VALIDATION ERROR: {name} exited with status 1 on message size {size}.\n")
    return 1
