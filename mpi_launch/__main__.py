"""``ucch-run``: starts a job on this machine or on the hosts of a cluster file, with the MPI or scheduler there is.

ucch-run -np 8 python train.py
ucch-run -c cluster.yaml python train.py
ucch-run -c cluster.yaml --check
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from .._version import __version__
from ..closed_pipe import ends_with_its_reader
from ..installed import module
from ..machine.launchers import have_home
from ..machine.vendors import VENDORS
from . import cluster as cluster_file
from . import command, launcher, sources, supervise
from .cluster import Cluster, ClusterError

#: Program of every rank with --check.
DOCTOR = (*module("ucc_hetero.launch.doctor"), "--job")

#: Seconds within which every rank has to start; containers may have to pull an image first.
START_TIMEOUT = 120.0


class _Parser(argparse.ArgumentParser):
    """Explains how to pass mpirun options and values that begin with a dash, which argparse rejects."""

    def error(self, message: str) -> NoReturn:
        if "--mpi-args: expected" in message:
            message += "; use an equals sign if the value begins with a dash: --mpi-args='--x y'"
        if "unrecognized arguments" in message:
            message += "; those of mpirun or srun go into --mpi-args='--x y', ucch-run --help lists its own"
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ucch-run",
        usage="ucch-run [options] PROGRAM …",
        description="Start an MPI job on one machine or on a cluster that a file describes.",
    )
    parser.add_argument(
        "-np", "-n", "--np", type=int, dest="np", metavar="N", help="ranks; default: all slots of the cluster"
    )
    parser.add_argument("-c", "--cluster", type=Path, metavar="FILE", help="cluster file")
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="lines of: host slots=N")
    parser.add_argument("--vendor", choices=("auto", *VENDORS), help="of all hosts; default: as each host finds")
    parser.add_argument(
        "-x", action="append", default=[], dest="env", metavar="NAME[=VALUE]", help="variable for every rank"
    )
    parser.add_argument("--version", action="version", version=f"ucch-run of ucc_hetero {__version__}")
    parser.add_argument("--dry-run", action="store_true", help="print the command line and stop")
    parser.add_argument("--check", action="store_true", help="run the doctor on every rank instead of a program")
    parser.add_argument(
        "--devices", choices=("auto", "one", "all"), default="auto",
        help="devices that a rank sees; auto: one, but all in scripts that choose theirs by LOCAL_RANK",
    )  # fmt: skip
    parser.add_argument("--no-numa", action="store_true", help="do not bind ranks to the processors near their device")
    parser.add_argument("--emulate", action="store_true", help="pretend the hosts' vendors, on host memory")
    parser.add_argument(
        "--start-timeout", type=float, metavar="S", default=START_TIMEOUT,
        help="end the job when not all ranks have started after this many seconds (default %(default)g; 0: never)",
    )  # fmt: skip
    parser.add_argument("--master-port", type=int, metavar="PORT", help="of torch's rendezvous; default: a free one")
    parser.add_argument("--mpi-args", default="", metavar="WORDS", help="options for mpirun or srun, as one word")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM …", help="with its arguments")
    return parser


def _cluster(options: argparse.Namespace) -> Cluster:
    """The hosts: of the cluster file, the hostfile, the scheduler, or this machine."""
    if options.np is not None and options.np < 1:
        raise ClusterError(f"-np {options.np}: must be at least 1")
    if options.cluster and options.hostfile:
        raise ClusterError("--hostfile: the cluster file names the hosts already; give only one of the two")
    if options.cluster:
        found = cluster_file.load(options.cluster)
    elif options.hostfile:
        found = cluster_file.parse({"hostfile": str(options.hostfile.resolve())})
    elif sources.in_slurm(os.environ):
        found = cluster_file.parse({"source": "slurm"})
    else:
        if options.np is None:
            raise ClusterError("-np: say how many ranks, or where with -c cluster.yaml or --hostfile")
        found = cluster_file.local(options.np)
    if options.vendor:
        found = replace(found, hosts=tuple(replace(host, vendor=options.vendor) for host in found.hosts))
    return cluster_file.limited(found, options.np) if options.np else found


def _variables(words: Sequence[str]) -> dict[str, str]:
    """Parse ``-x NAME=VALUE``, and ``-x NAME`` for the value of this environment."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name:
            raise ClusterError(f"-x {word}: the variable has no name; -x NAME=VALUE or -x NAME is needed")
        if not equals and name not in os.environ:
            raise ClusterError(f"-x {name}: the variable is not set here; give a value: -x {name}=…")
        found[name] = value if equals else os.environ[name]
    return found


def _free_port(here: bool) -> int:
    """A port for torch's rendezvous: free if rank 0 runs here, otherwise a random one."""
    if not here:
        return random.randint(20000, 29999)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _check_interfaces(names: Sequence[str], kind: str) -> None:
    """Refuse names of which this host has none: mpirun would end without a word about them."""
    named = [name for name in names if ":" not in name]
    here = {name for _, name in socket.if_nameindex()}
    if named and kind != "srun" and here.isdisjoint(named):
        raise ClusterError(
            f"interfaces: this host has none of {', '.join(named)}; it has {', '.join(sorted(here - {'lo'})) or 'none'}"
        )


def _as_root(kind: str, given: str) -> list[str]:
    """mpirun options that Open MPI needs for root, unless the user gave them. Says so on stderr."""
    told = {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"} <= set(os.environ)
    if kind != "openmpi" or os.geteuid() != 0 or told or "--allow-run-as-root" in given:
        return []
    print("ucch-run: runs as root, so mpirun gets --allow-run-as-root", file=sys.stderr)
    return ["--allow-run-as-root"]


def _program(words: Sequence[str], python: str) -> tuple[str, ...]:
    """The program; a Python script that is not executable, or has no interpreter line, is run by ``python``."""
    script = Path(words[0] if words else "")
    if script.suffix == ".py" and os.access(script, os.R_OK) and script.is_file():
        with script.open("rb") as file:
            if file.read(2) != b"#!" or not os.access(script, os.X_OK):
                return (python, *words)
    return tuple(words)


def _checked(options: argparse.Namespace) -> list[str]:
    """The words of ``--mpi-args``; refuses options that cannot be."""
    if not 0 <= (options.master_port or 0) < 1 << 16:
        raise ClusterError(f"--master-port {options.master_port}: must be from 1 to 65535; 0 finds a free one")
    if not options.start_timeout >= 0:
        raise ClusterError(f"--start-timeout {options.start_timeout:g}: must be a number of seconds, or 0 for no limit")
    try:
        return shlex.split(options.mpi_args)
    except ValueError as error:
        raise ClusterError(f"--mpi-args {options.mpi_args}: {error}") from None


def run(arguments: Sequence[str]) -> int:
    """Start a job. Returns its exit status."""
    options = _parser().parse_args(arguments)
    mpi_args = _checked(options)
    found = _cluster(options)
    python = found.python or sys.executable
    program = _program(options.program[1:] if options.program[:1] == ["--"] else options.program, python)
    variables = _variables(options.env)
    if options.check:
        program = (python, *DOCTOR, *program)
        # UCX logs to standard output by default, where the report goes.
        variables.setdefault("UCX_LOG_FILE", "stderr")
    starter = launcher.find()
    job = command.Job(
        cluster=found, program=program,
        master_port=options.master_port or _free_port(found.only_here),
        env=variables, devices=options.devices, numa=not options.no_numa, emulate=options.emulate,
        report=not options.dry_run, mpi_args=(*_as_root(starter.kind, options.mpi_args), *mpi_args),
    )  # fmt: skip
    words = command.compile_job(job, starter)
    if options.dry_run:
        print(shlex.join(words))
        return 0
    _check_interfaces(found.interfaces, starter.kind)
    hosts = [(host.name, host.slots) for host in found.hosts]
    return supervise.supervise(words, hosts, options.start_timeout, found.ssh or "ssh")


@ends_with_its_reader
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    have_home(os.environ)
    try:
        return run(sys.argv[1:] if arguments is None else arguments)
    except (ValueError, launcher.LauncherError) as error:
        print(f"ucch-run: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
