"""``python -m ucc_hetero.bench pairs``: latency and bandwidth between all pairs of ranks, one pair at a time.

    mpirun -np 4 python -m ucc_hetero.bench pairs --json pairs.json

A row is a sender, a column a receiver. What is measured is one byte there and back, halved, and a window of large
messages one way; the best of some repetitions. ``report`` draws the file as a heat map.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import permutations

from .files import write_job
from .links import bandwidth, latency, lengths
from .meanings import number
from .memory import Memory, open_memory
from .options import BadUsage, ProgramParser
from .peers import Peer, World, open_peer, open_world, prepare
from .session import Progress

__all__ = ["matrix", "run"]

Matrix = list[list[float | None]]


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = ProgramParser("pairs", description=about, epilog=more, formatter_class=raw)
    parser.add_argument("-m", "--message-size", help="bytes of the large messages (the best of some)")
    parser.add_argument("-d", "--accelerator", default="host", help="memory: cuda, rocm, host or auto (host)")
    parser.add_argument("--backend", default="ours", choices=("ours", "mpi4py"), help="whose messages (ours)")
    parser.add_argument("--json", metavar="FILE", help="also write everything to this file")
    found = parser.read(words)
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


def run(words: Sequence[str], command: list[str]) -> int:
    """Measure and print; returns the exit status."""
    arguments = _arguments(words)
    prepare([arguments.backend])
    world = open_world()
    if world.size < 2:
        raise BadUsage("pairs needs at least two ranks: mpirun -n 2 python -m ucc_hetero.bench pairs")
    local = world.local_rank()
    try:
        memory = world.agreed(lambda: open_memory(arguments.accelerator, "numpy", local), ValueError)
    except ValueError as why:
        raise BadUsage(f"pairs: {why}") from None
    arguments.sizes = arguments.sizes or lengths(world, memory)
    peer = open_peer(arguments.backend, world)
    try:
        us, rate = _measure(peer, world, memory, arguments.sizes)
        world.say(matrix(f"Latency in us, {peer.name}, {world.size} ranks", us, 2) + "\n")
        found = [value for row in rate for value in row if value is not None]
        world.say(matrix("Bandwidth in MB/s, one way", rate, 1))
        world.say(f"# slowest {min(found):.1f}, fastest {max(found):.1f} MB/s\n")
        if arguments.json:
            kinds = world.comm.allgather(memory.accelerator)
            vendors = kinds  # MPI knows of no vendors
            if peer.name == "ours":
                topology = peer.comm.topology
                vendors = [topology.islands[i].vendor for i in topology.island_of]
            more = {"backend": peer.name, "unit": "MB/s", "sizes": list(arguments.sizes)}
            more |= {"ranks": [f"{r} {vendor}" for r, vendor in enumerate(vendors)], "latency": us, "bandwidth": rate}
            write_job(arguments.json, "pairs", command, world, more, kinds)
    finally:
        peer.close()
    return 0
