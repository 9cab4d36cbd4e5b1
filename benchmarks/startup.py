"""``osu_init``: how long it takes until the first message could be sent."""

from __future__ import annotations

import importlib
import sys
from time import perf_counter

from .files import header, write_json
from .options import Options
from .output import init_line, osu_preamble
from .peers import open_peer, open_world, prepare
from .table import Bench

__all__ = ["run"]


def run(bench: Bench, options: Options, command: list[str]) -> int:
    """Time MPI's initialisation and, for other backends than mpi4py, the creation of their communicator."""
    import mpi4py

    mpi4py.rc.initialize = False
    importlib.import_module("mpi4py.MPI")  # loading the library is not timed
    prepare([options.backend])
    start = perf_counter()
    world = open_world(options.session)
    mpi_ms = (perf_counter() - start) * 1e3
    peer = open_peer(options.backend, world)
    total_ms = (perf_counter() - start) * 1e3
    peer.close()
    # OSU prints whole milliseconds, of MPI_Init alone for MPI.
    mean, least, most = world.spread(float(int(mpi_ms if options.backend == "mpi4py" else total_ms)))
    mpi_mean, _, _ = world.spread(mpi_ms)
    nodes = world.nodes()
    if world.rank == 0:
        sys.stdout.write(osu_preamble(bench, options) + init_line(world.size, int(least), int(most), int(mean)))
        sys.stdout.flush()
        if options.json:
            data = header(bench.name, command, world, ["host"] * world.size, nodes)
            rows = [{"backend": options.backend, "ms": mean, "least": least, "most": most, "mpi_ms": mpi_mean}]
            write_json(options.json, {**data, "family": bench.family, "unit": "ms", "rows": rows})
    world.close()
    return 0
