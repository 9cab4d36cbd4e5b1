"""``osu_init``: how long it takes until the first message could be sent."""

from __future__ import annotations

import importlib
from time import perf_counter

from .option_table import Options
from .output import init_line, osu_preamble
from .peers import open_peer
from .result_file import write_job
from .table import Bench
from .world import open_world, prepare


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
    world.say(osu_preamble(bench, options) + init_line(world.size, int(least), int(most), int(mean)))
    if options.json:
        rows = [{"backend": options.backend, "ms": mean, "least": least, "most": most, "mpi_ms": mpi_mean}]
        more = {"family": bench.family, "unit": "ms", "rows": rows}
        write_job(options.json, bench.name, command, world, more)
    world.close()
    return 0
