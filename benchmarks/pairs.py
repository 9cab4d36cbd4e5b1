"""``python -m ucc_hetero.bench pairs``: latency and bandwidth between all pairs of ranks, one pair at a time.

    mpirun -np 4 python -m ucc_hetero.bench pairs --json pairs.json

A row is a sender, a column a receiver. What is measured is one byte there and back, halved, and a window of large
messages one way; the best of some repetitions. ``report`` draws the file as a heat map.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any, NoReturn

from .files import header, write_json
from .links import bandwidth, latency, lengths
from .meanings import number
from .memory import Memory, open_memory
from .options import BadUsage, HelpWanted
from .peers import Peer, World, open_peer, open_world, prepare
from .session import Progress

__all__ = ["matrix", "run"]

Matrix = list[list[float | None]]


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that all ranks leave together."""

    def error(self, message: str) -> NoReturn:
        raise BadUsage(f"pairs: {message}; --help lists the options")


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = _Parser(
        prog="python -m ucc_hetero.bench pairs", description=about, epilog=more, add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("-h", "--help", action="store_true", help="print this help")
    parser.add_argument(
        "-m",
        "--message-size",
        help="bytes of the large messages (the best of some)",
    )
    parser.add_argument("-d", "--accelerator", default="host", help="memory: cuda, rocm, host or auto (host)")
    parser.add_argument("--backend", default="ours", choices=("ours", "mpi4py"), help="whose messages (ours)")
    parser.add_argument("--json", metavar="FILE", help="also write everything to this file")
    found = parser.parse_args(list(words))
    if found.help:
        if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))) == 0:
            parser.print_help()
        raise HelpWanted
    try:
        found.sizes = (number(found.message_size, 1),) if found.message_size else ()
    except ValueError as why:
        raise BadUsage(f"pairs: -m {found.message_size}: {why}") from None
    return found


def _measure(peer: Peer, world: World, memory: Memory, sizes: Sequence[int]) -> tuple[Matrix, Matrix]:
    """(µs, MB/s) by sender and receiver; equal on every rank."""
    us: Matrix = [[None] * world.size for _ in range(world.size)]
    rate: Matrix = [[None] * world.size for _ in range(world.size)]
    progress = Progress(world.rank == 0)
    pairs = list(permutations(range(world.size), 2))
    for done, (a, b) in enumerate(pairs):
        progress.show(f"from rank {a} to rank {b}", done, len(pairs))
        rate[a][b] = max(bandwidth(peer, world, memory, {a: b}, nbytes) for nbytes in sizes) / 1e6
        # There and back takes both ways; each pair is measured once.
        us[a][b] = us[b][a] if a > b else latency(peer, world, memory, a, b) * 1e6
    progress.clear()
    return us, rate


def matrix(title: str, values: Matrix, digits: int) -> str:
    """A table with senders as rows."""
    n = len(values)
    lines = [f"# {title}", "# from\\to" + "".join(f"{b:>10}" for b in range(n))]
    for a in range(n):
        cells = ("-" if v is None else f"{v:.{digits}f}" for v in values[a])
        lines.append(f"{a:<9}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines) + "\n"


def _spread(values: Matrix) -> Iterator[float]:
    return (v for row in values for v in row if v is not None)


def run(words: Sequence[str], command: list[str]) -> int:
    """Measure and print; returns the exit status."""
    try:
        arguments = _arguments(words)
    except HelpWanted:
        return 0
    prepare([arguments.backend])
    world = open_world()
    if world.size < 2:
        raise BadUsage("pairs needs at least two ranks: mpirun -n 2 python -m ucc_hetero.bench pairs")
    memory, why = None, None
    try:
        memory = open_memory(arguments.accelerator, "numpy", world.local_rank())
    except ValueError as error:
        why = str(error)
    if first := world.first_error(why):
        raise BadUsage(f"pairs: {first}")
    assert memory is not None
    arguments.sizes = arguments.sizes or lengths(world, memory)
    peer = open_peer(arguments.backend, world)
    try:
        us, rate = _measure(peer, world, memory, arguments.sizes)
        _report(arguments, command, world, peer, memory, us, rate)
    finally:
        peer.close()
    return 0


def _report(
    arguments: argparse.Namespace,
    command: list[str],
    world: World,
    peer: Peer,
    memory: Memory,
    us: Matrix,
    rate: Matrix,
) -> None:
    from mpi4py import MPI

    nodes = world.comm.allgather(MPI.Get_processor_name())
    kinds = world.comm.allgather(memory.accelerator)
    vendors = kinds  # MPI knows of no vendors
    if peer.name == "ours":
        topology = peer.comm.topology
        vendors = [topology.islands[i].vendor for i in topology.island_of]
    if world.rank != 0:
        return
    print(matrix(f"Latency in us, {peer.name}, {world.size} ranks", us, 2))
    print(matrix("Bandwidth in MB/s, one way", rate, 1), end="")
    print(f"# slowest {min(_spread(rate)):.1f}, fastest {max(_spread(rate)):.1f} MB/s", flush=True)
    if arguments.json:
        data: dict[str, Any] = header("pairs", command, world, kinds, len(set(nodes)))
        data |= {"backend": peer.name, "unit": "MB/s", "sizes": list(arguments.sizes)}
        data |= {"ranks": [f"{r} {vendor}" for r, vendor in enumerate(vendors)], "latency": us, "bandwidth": rate}
        write_json(arguments.json, data)
