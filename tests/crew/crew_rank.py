"""A rank of a crew (crews.py). It receives cases through a socket, whose path is its argument.

A case may use some ranks only, with emulated vendors of its own; see `Worlds`.
"""

import faulthandler
import gc
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

from ucc_hetero.bootstrap import process  # before MPI, as users do
from ucc_hetero.device import bind, place_of
from ucc_hetero.machine.launchers import MPI as LAUNCHERS

from mpi4py import MPI  # isort: skip

from case import call

#: Modules in which a case may have kept the world.
CASES = Path(__file__).resolve().parents[1] / "mpi"


class Worlds:
    """Sets ``MPI.COMM_WORLD`` and the launcher's variables for a case: some of the crew's ranks, in some order.

    Communicators of a case share contexts only with cases of the same ranks and vendors.
    """

    def __init__(self):
        self.all, self.here = MPI.COMM_WORLD, ((), "")
        self.worlds = {}
        self.jobs = {}
        process.Job.close_pages = lambda job: None  # a job may be used again, after cases of other ranks

    def _world(self, ranks):
        if ranks not in self.worlds:
            all_of_them = ranks == tuple(range(self.all.size))
            world = self.all if all_of_them else self.all.Create_group(self.all.Get_group().Incl(ranks))
            host = world.Split_type(MPI.COMM_TYPE_SHARED)
            told = {
                "RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": host.rank, "LOCAL_WORLD_SIZE": host.size,
            }  # fmt: skip
            host.Free()
            self.worlds[ranks] = world, {n: v for kind, v in told.items() for n in LAUNCHERS[kind] if n in os.environ}
        return self.worlds[ranks]

    def enter(self, ranks):
        MPI.COMM_WORLD, told = self._world(ranks)
        os.environ.update({name: str(value) for name, value in told.items()})
        there, before = (ranks, os.environ.get("UCCH_EMULATE", "")), self.here
        if there == before:
            return
        self.here, process._place = there, None
        for job in process.all_jobs():
            of, team_abandoned = self.jobs.get(job, (before, job.team_abandoned))
            self.jobs[job] = of, job.team_abandoned if of == before else team_abandoned
            job.team_abandoned = of != there or self.jobs[job][1]
        for name, module in [*sys.modules.items()]:
            if Path(getattr(module, "__file__", None) or "/").parent == CASES:
                del sys.modules[name]


@contextmanager
def written_to(out):
    """Redirect all output of this process, from Python or not, to ``out`` with ``.out`` and ``.err``."""
    kept = []
    for fd, end in ((1, "out"), (2, "err")):
        kept.append(os.dup(fd))
        file = os.open(f"{out}.{end}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, fd)
        os.close(file)
    try:
        yield
    finally:
        for stream, fd, own in ((sys.stdout, 1, kept[0]), (sys.stderr, 2, kept[1])):
            stream.flush()
            os.dup2(own, fd)
            os.close(own)


@contextmanager
def environment(env):
    """Set variables for a case; settings of this package that the case itself makes are removed at the end too."""

    def of_the_case():
        ours = "UCCH_", "FAKEGPU_"
        return {name: value for name, value in os.environ.items() if name in env or name.startswith(ours)}

    before = of_the_case()
    os.environ.update(env)
    try:
        yield
    finally:
        for name in set(of_the_case()) - set(before):
            del os.environ[name]
        os.environ.update(before)


def script(path, *args):
    folder, before = str(Path(path).parent), set(sys.modules)
    kept, hook, here = sys.argv[:], sys.excepthook, os.getcwd()
    sys.argv[:] = [path, *args]
    sys.path.insert(0, folder)
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.argv[:], sys.excepthook = kept, hook
        os.chdir(here)
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(f"{folder}/"):
                del sys.modules[name]


def leave_torch():
    """Destroy torch groups that a case has left, and clear its alarm."""
    faulthandler.cancel_dump_traceback_later()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def run(worlds, world, path, case, args, env, out):
    with written_to(out), environment(env):
        try:
            worlds.enter(tuple(world))
            if "arrays" in sys.modules:
                sys.modules["arrays"].begin_case()
            script(*args) if path == __file__ else call(path, case, args)
            leave_torch()
        except BaseException:
            return traceback.format_exc()
        gc.collect()  # ends what the case has dropped
        gc.freeze()
    return ""


def main():
    if "FAKEGPU_LAYOUT" in os.environ:
        import arrays  # noqa: F401  it chooses the vendor

        bind(place_of())  # one device per rank, whatever ranks a case has
    worlds = Worlds()
    gc.freeze()  # keeps the collection after every case short
    talk = socket.socket(socket.AF_UNIX)
    talk.connect(sys.argv[1])
    faulthandler.register(signal.SIGUSR2)
    with talk, talk.makefile("rw") as lines:
        print(json.dumps({"rank": MPI.COMM_WORLD.rank}), file=lines, flush=True)
        for line in lines:
            order = json.loads(line)
            if "end" in order:
                break
            print(json.dumps({"error": run(worlds, **order)}), file=lines, flush=True)
    MPI.COMM_WORLD = worlds.all


if __name__ == "__main__":
    main()
