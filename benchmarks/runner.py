"""One benchmark from its command line to its table and files. The loops that are timed are elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from . import collective, graph, onesided, output, pt2pt
from .interleave import Open, measure
from .limits import open_limit
from .memory import Memory, dtype_of, label_of, open_memory
from .option_table import Options
from .options import BadUsage
from .output import Row
from .peers import open_peer
from .result_file import Results
from .session import Progress, Session
from .stats import sizes, verdict
from .table import Bench
from .validate import Log
from .world import Peer, World


def _series(bench: Bench) -> Open:
    """What binds the calls of a benchmark for one peer and size."""
    if bench.family == "onesided":
        return onesided.Transfers
    if bench.collective is None:
        return pt2pt.SERIES[bench.name]
    return collective.Overlapped if bench.family == "nonblocking" else collective.Latency


def _check_offered(bench: Bench, peer: Peer, options: Options) -> None:
    """Raise NotOffered, before anything is printed, where the peer lacks what the benchmark calls."""
    if bench.family == "onesided":
        onesided.check(bench.name, peer, options)
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
    if bench.family != "startup" and world.size < 2:
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
    if options.places:  # OSU's SRC DST: the first half of the ranks and the second
        place = options.places[0 if world.rank < (world.size + 1) // 2 else 1]
        accelerator = "host" if place == "H" else accelerator
    try:
        return world.agreed(lambda: open_memory(accelerator, options.buffer, local), ValueError)
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
    graph.check(options.graph)
    memory = _memory(options, world)
    peers: dict[str, Peer] = {}
    try:
        for name in dict.fromkeys((options.backend, *options.peers)):
            peers[name] = open_peer(name, world)
            _check_offered(bench, peers[name], options)
        log = None
        if options.validation_log:
            world.barrier()  # every rank has seen that the directory was not there
            log = Log(options.validation_log, bench.name, world.rank)
        progress = Progress(options.progress and world.rank == 0)
        results = Results(bench.name, command, world, memory.accelerator)
        session = Session(bench, options, world, memory, peers, progress, results, log)
        session.options = _limited(session)
        if options.limit:
            progress.show("measuring the links")
            limit = open_limit(session)
            session.limit, results.links = limit.of, limit.links
        status = _nccl(session, dtypes) if options.format == "nccl" else _osu(session, dtypes)
        progress.clear()
        results.finish(session.bench, session.options, session.peer)
        return status
    finally:
        for peer in peers.values():
            peer.close()


def _rows(session: Session, dtype: np.dtype[Any]) -> Iterator[Row]:
    bench, options = session.bench, session.options
    wanted = list(sizes(options.min_size, options.max_size, dtype.itemsize)) if bench.sized else [0]
    for done, size in enumerate(wanted):
        if bench.sized:
            session.progress.show(f"{bench.name} {dtype.name}, {size} bytes", done, len(wanted))
        yield _with_limit(session, measure(session, _series(bench), dtype, size))


def _with_limit(session: Session, row: Row) -> Row:
    return row if session.limit is None else replace(row, limit=session.limit(row.size))


def _osu(session: Session, dtypes: list[np.dtype[Any]]) -> int:
    bench, options, world = session.bench, session.options, session.world
    accelerator = world.comm.bcast(session.memory.accelerator)
    pairs = options.pairs or world.size // 2
    session.print(output.osu_preamble(bench, options, accelerator, pairs))
    session.print(session.results.mix_line())
    if bench.name == "osu_mbw_mr" and options.vary_window:
        return pt2pt.varied_windows(session, dtypes)
    for dtype in dtypes:
        session.samples.clear()
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
        if options.graph and world.rank == 0:
            graph.write(options.graph, f"{bench.name}-{dtype.name}", session.samples)
    return 0


def _failed(session: Session, size: int) -> int:
    name = session.bench.name
    session.print(f"DATA VALIDATION ERROR: {name} exited with status 1 on message size {size}.\n")
    return 1


def _nccl(session: Session, dtypes: list[np.dtype[Any]]) -> int:
    """nccl-tests' table: every size out of place and in place. Its sizes are those of the longer buffer."""
    bench, options, world = session.bench, session.options, session.world
    row = bench.collective
    assert row is not None
    session.print(output.nccl_header(options, f"{bench.name} over {options.backend}, {world.size} ranks"))
    wrong, bandwidths = 0, []
    for dtype in dtypes:
        smallest = dtype.itemsize if row.whole else dtype.itemsize * world.size
        for size in sizes(options.min_size, options.max_size, smallest):
            each = size if row.whole else size // world.size // dtype.itemsize * dtype.itemsize
            total = each if row.whole else each * world.size
            sides: list[tuple[float, float, float, int | None] | None] = []
            for in_place in (False, True):
                if in_place and row.kind == "bcast":
                    sides.append(sides[0])
                    continue
                session.options = replace(options, in_place=in_place)
                got = _with_limit(session, measure(session, collective.Latency, dtype, each))
                algbw = total / 1e3 / got.value
                sides.append((got.value, algbw, algbw * row.busbw(world.size), got.wrong if options.validate else None))
                bandwidths.append(algbw * row.busbw(world.size))
                wrong += got.wrong
                session.results.add(dtype.name, got, in_place=in_place, plan=session.plan())
            session.options = options
            op, root = ("sum" if row.reduces else "none"), (options.root or 0) if row.rooted else -1
            count = total // dtype.itemsize if row.whole else each // dtype.itemsize
            session.print(output.nccl_row(total, count, label_of(dtype, "nccl"), op, root, sides))
    session.print(output.nccl_footer(wrong, bandwidths))
    return 1 if wrong else 0
