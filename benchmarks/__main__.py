"""``python -m ucc_hetero.bench <name> [options]``: dispatch, help, and exit status."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from ..closed_pipe import CLOSED, closed_outputs, ends_with_its_reader
from .options import BadUsage, HelpWanted, Options, parse, probable_rank
from .table import BENCHES, VERSION, Bench
from .validate import WrongResult
from .world import NotOffered, open_world, prepare

# Programs beside the OSU benchmarks. Each module has run(arguments, command) -> status.
_PROGRAMS = {
    "compare": "this package, mpi4py and plain UCC in one job, with ratios (under mpirun)",
    "kv_transfer": "pages of a KV cache from rank to rank, converted or not (under mpirun)",
    "report": "draw result files into one HTML page and PNGs",
}


def _say(text: str, stream: str = "stderr") -> None:
    """Print on rank 0 only: a wrong command line is wrong on all ranks."""
    if probable_rank() == 0:
        print(text, file=getattr(sys, stream), flush=True)


def _refuse(why: Exception) -> int:
    """Print the error. Only rank 0 returns a status other than 0: mpirun kills the others as soon as one rank fails."""
    _say(f"error: {why}")
    return 1 if probable_rank() == 0 else 0


def overview() -> str:
    """A list of benchmarks and programs."""
    lines = ["Usage: mpirun -n N python -m ucc_hetero.bench NAME [options]", "", "Programs:"]
    lines += [f"  {name:<36}{text}" for name, text in _PROGRAMS.items()]
    lines += ["", f"Benchmarks (OSU {VERSION}; NAME --help lists the options):"]
    lines += [f"  {bench.name:<36}{bench.plain_title.removeprefix('OSU ')}" for bench in BENCHES.values()]
    return "\n".join(lines)


def _guarded(work: Callable[[], int]) -> int:
    """Run the collective part. If one rank raises, the job is aborted, so that the others do not wait."""
    try:
        return work()
    except HelpWanted:  # help was printed already
        return 0
    except (BadUsage, NotOffered, WrongResult) as why:  # raised on every rank
        return _refuse(why)
    except BaseException as why:
        if isinstance(why, SystemExit):
            raise
        unread = isinstance(why, BrokenPipeError) and closed_outputs()
        if not unread:
            traceback.print_exc()
            sys.stderr.flush()
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
            mpi.COMM_WORLD.Abort(CLOSED if unread else 1)
        if unread:
            raise
        return 1


def _benchmark(bench: Bench, options: Options, command: list[str]) -> int:
    from . import runner

    prepare((options.backend, *options.peers))
    world = open_world()
    status = runner.run(bench, options, world, command)
    world.close()
    # As in OSU's programs, only rank 0 reports the failure.
    return status if world.rank == 0 else 0


@ends_with_its_reader
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark or program. Returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # For result files: the command without local paths.
    shown = (os.path.basename(word) if os.path.isabs(word) else word for word in words)
    command = ["python", "-m", "ucc_hetero.bench", *shown]
    if not words or words[0] in ("-h", "--help"):
        _say(overview(), "stdout")
        return 0
    try:
        name, rest = (f"osu_{words[0]}" if f"osu_{words[0]}" in BENCHES else words[0]), words[1:]
        if name in _PROGRAMS:
            module = importlib.import_module(f".{name}", __package__)
            return _guarded(lambda: int(module.run(rest, command)))
        bench = BENCHES.get(name)
        if bench is None:
            near = difflib.get_close_matches(name, (*BENCHES, *_PROGRAMS), 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise BadUsage(f"benchmark {name!r} is not known; {hint}python -m ucc_hetero.bench --help lists all")
        options = parse(bench, rest)
    except HelpWanted:  # help was printed already
        return 0
    except BadUsage as why:
        return _refuse(why)
    return _guarded(lambda: _benchmark(bench, options, command))


if __name__ == "__main__":
    sys.exit(main())
