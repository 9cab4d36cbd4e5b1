"""``ucch-doctor``: checks this host, or with ``--job`` under mpirun (``ucch-run … --check``) all ranks of a job."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..._version import __version__
from ...closed_pipe import ends_with_its_reader
from ...errors import UCCHError, counted
from ...machine.launchers import have_home, number
from . import amd, checks, facts, findings, job, records
from .facts import Facts
from .findings import Finding, finding, ok

#: Seconds for measuring pairs, so that the check of a job takes two minutes.
SECONDS = 100.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ucch-doctor",
        usage="ucch-doctor [hang | amd] [options]",
        description="Check this host or job for problems, and print their cures.",
        epilog="ucch-doctor hang: find why a job hangs from its ranks' last calls (ucch-doctor hang --help). "
        "ucch-doctor amd: test on an AMD GPU what only hardware can show (ucch-doctor amd --help).",
    )
    parser.add_argument("--version", action="version", version=f"ucch-doctor of ucc_hetero {__version__}")
    parser.add_argument("--job", action="store_true", help="all ranks of an MPI job; ucch-run … --check does this")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S", help="with --job, for measuring pairs (%(default)g)"
    )
    return parser


def _show(found: Sequence[Finding], options: argparse.Namespace) -> int:
    print(findings.as_json(found) if options.json else findings.as_text(found))
    return findings.status(found)


def _here() -> Facts:
    return facts.collect(ranks=number("LOCAL_WORLD_SIZE", os.environ, 1))


def _measure(options: argparse.Namespace, hosts: list[str]) -> list[Finding]:
    """Findings from communicating for a while; equal on every rank."""
    from ... import AgreementError, Communicator
    from ...api.comm import runner_of
    from . import measure

    try:
        with Communicator() as comm:
            members = runner_of(comm).members
            text = f"{counted(comm.size, 'rank')} agree on versions and settings: {comm.topology.describe()}"
            found = [ok("job", text)]
            found += [ok("islands", text) for text in members.fabric()]
            found += measure.canaries(comm)
            if not findings.status(found):
                found += measure.slow_pairs(measure.pairs(comm, options.seconds), hosts)
            return found
    except AgreementError as error:
        return [finding("job-disagrees", str(error), cure="each part of the table says it")]
    except UCCHError as error:
        return [finding("run-failed", str(error))]


def _job(options: argparse.Namespace) -> int:
    from mpi4py import MPI  # UCX was loaded before, by ucc_hetero

    comm = MPI.COMM_WORLD
    mine = _here()
    everyone = comm.allgather(mine)
    local = comm.allgather(checks.examine(mine))
    found = findings.merged(local, [each.host for each in everyone])
    found += job.compare(everyone, comm.Get_size())
    if not findings.status(each for each in found if each.code != "mpi-missing"):
        found += _measure(options, [each.host for each in everyone])
    status = _show(found, options) if comm.Get_rank() == 0 else 0
    return int(comm.bcast(status, 0))


@ends_with_its_reader
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit status is 0 if a job can run, else 1."""
    have_home(os.environ)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["amd"]:
        return amd.main(words[1:])
    if words[:1] == ["hang"]:
        return records.main(words[1:], in_job=number("WORLD_SIZE", os.environ, 1, torchrun=False) > 1)
    if words and not words[0].startswith("-"):
        _parser().error(f"{words[0]!r} is not a command: hang, amd, or none to check this host")
    options = _parser().parse_args(words)
    if options.job:
        return _job(options)
    return _show(checks.examine(_here()), options)


if __name__ == "__main__":
    sys.exit(main())
