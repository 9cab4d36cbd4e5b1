"""Runs one benchmark: command line, table and files. The timed loops are in other modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from . import collective, onesided, output, pt2pt
from .interleave import Open, measure
from .memory import Memory, dtype_of, label_of, memory_of
from .options import BadUsage, Options
from .output import Row
from .peers import open_peer
from .result_file import row_data, write_job
from .session import Session
from .stats import sizes, verdict
from .table import Bench
from .world import NotOffered, Peer, World


def _series(bench: Bench) -> Open:
    """The function that makes a benchmark's calls for a peer and size."""
    if bench.family == "onesided":
        return onesided.Transfers
    if bench.collective is None:
        return pt2pt.SERIES[bench.name]
    return collective.Overlapped if bench.family == "nonblocking" else collective.Latency


def _check_offered(bench: Bench, peer: Peer) -> None:
    """Raise ``NotOffered``, before anything is printed, if the peer lacks the benchmark's calls."""
    if bench.family == "onesided":
        if peer.name not in ("ours", "mpi4py"):
            raise NotOffered(f"{bench.name}: peer {peer.name!r} has no one-sided communication; ours and mpi4py do")
    elif bench.collective is None:
        peer.method("Isend")
    else:
        name = bench.collective.method
        peer.method({"nonblocking": f"I{name.lower()}", "persistent": f"{name}_init"}.get(bench.family, name))


def _limited(session: Session) -> Options:
    """The options, with the message size limited by ``-M``."""
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
    """This rank's memory; it may differ between the two halves of the ranks."""
    half = int(world.rank >= (world.size + 1) // 2)
    return memory_of(world, "host" if options.places and options.places[half] == "H" else options.accelerator)


def run(bench: Bench, options: Options, world: World, command: list[str]) -> int:
    """Run a benchmark and print its table. Collective. Returns the exit status, equal on all ranks.

    ``BadUsage`` or ``NotOffered`` on all ranks, before anything is measured.
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
        session = Session(bench, options, world, memory, peers)
        session.options = _limited(session)
        accelerators = world.comm.allgather(memory.accelerator)
        rows: list[dict[str, Any]] = []
        status = _osu(session, dtypes, accelerators, rows)
        if options.json:
            more = _about(session) | {"rows": rows}
            write_job(options.json, bench.name, command, world, more, accelerators)
        return status
    finally:
        for peer in peers.values():
            peer.close()


def _about(session: Session) -> dict[str, Any]:
    """What a result file says about the whole run."""
    bench, options, peer = session.bench, session.options, session.peer
    return {
        "family": bench.family, "unit": "us" if bench.unit == "time" else "MB/s", "backend": options.backend,
        "percentiles": list(options.percentiles),
        "topology": peer.comm.topology.describe() if peer.name == "ours" else None,
        "plans": peer.comm.plan_summary() if peer.name == "ours" else None,
    }  # fmt: skip


def _rows(session: Session, dtype: np.dtype[Any]) -> Iterator[Row]:
    bench, options = session.bench, session.options
    wanted = list(sizes(options.min_size, options.max_size, dtype.itemsize)) if bench.sized else [0]
    for size in wanted:
        yield measure(session, _series(bench), dtype, size)


def _osu(session: Session, dtypes: list[np.dtype[Any]], accelerators: Sequence[str], rows: list[dict[str, Any]]) -> int:
    """Print the tables and collect their rows. Returns the exit status."""
    bench, options, say = session.bench, session.options, session.world.say
    pairs = options.pairs or session.world.size // 2
    say(output.osu_preamble(bench, options, accelerators[0], pairs) + output.mix_line(accelerators))
    for dtype in dtypes:
        say((output.datatype(label_of(dtype)) if bench.sized else "") + output.osu_header(bench, options))
        unclear: dict[str, list[int]] = {}
        for row in _rows(session, dtype):
            say(output.osu_row(bench, options, row))
            rows.append(row_data(dtype.name, row, plan=session.plan()))
            for peer, (_, interval) in row.ratios.items():
                if verdict(interval) == "too noisy":
                    unclear.setdefault(peer, []).append(row.size)
            if row.wrong:
                say(f"DATA VALIDATION ERROR: {bench.name} exited with status 1 on message size {row.size}.\n")
                return 1
        say(output.noise_line(options.backend, unclear))
    return 0
