"""The commands ``plan``, ``topo``, ``tune``, ``trace`` and ``store`` of ``python -m ucc_hetero``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from .. import env
from ..errors import counted
from ..machine.fabric import fabric_of
from ..machine.launchers import number
from ..planner.collectives import ROWS
from ..planner.select import Choice
from ..planner.topology import Topology, emulated_vendors, numbered
from .plan import facts, render
from .topo import DrawnHost, draw, tree

#: Collectives that ``tune`` measures by default.
_TUNED = ("allreduce", "allgather", "reduce_scatter_block", "bcast", "reduce", "alltoall")


def add(commands: Any) -> None:
    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}."
        )
        added.set_defaults(run=run)
        return added

    plan = command("plan", _plan, "show the plan of a collective, without running it")
    plan.add_argument("collective", choices=sorted(ROWS), metavar="collective", help=", ".join(sorted(ROWS)))
    plan.add_argument("size", help="bytes of the vector, or of all blocks together: 4096, 64K, 16M")
    plan.add_argument("--vendors", metavar="SPEC", help="a layout to plan for, not the job's: nvidia:2,amd:2")
    plan.add_argument("--hosts", metavar="N,N", help="ranks on each host of that layout; all on one without it")
    plan.add_argument("--weights", metavar="W,W", help="relative bandwidth of each rank's link in that layout")
    plan.add_argument("--algorithm", metavar="NAME", help="show this one, not the one that would be chosen")
    plan.add_argument("--fragments", type=int, metavar="N", help="of --algorithm (1)")
    plan.add_argument("--run", dest="measure", action="store_true", help="also measure it (under mpirun)")
    plan.add_argument("--json", action="store_true", help="as JSON")
    topo = command("topo", _topo, "draw the host, its devices and ports; under mpirun all hosts, ranks and islands")
    topo.add_argument(
        "--record", metavar="FILE", help="also write the system files that this was read from, without serial numbers"
    )
    topo.add_argument("--facts", metavar="FILE", help="draw the machine of such a record")
    tune = command("tune", _tune, "measure on the job's ranks which algorithms are fastest (under mpirun)")
    tune.add_argument("--file", default="", help="table to add the rules to (default: UCCH_TUNE_FILE)")
    tune.add_argument(
        "--collective",
        action="append",
        choices=sorted(ROWS),
        metavar="NAME",
        help=f"a collective to measure; again for more (default: {', '.join(_TUNED)})",
    )
    tune.add_argument("--sizes", default="64:16M", metavar="MIN:MAX", help="bytes, in steps of 8 (64:16M)")
    trace = command("trace", _trace, "merge the timeline of a job that did not end well (UCCH_TRACE)")
    trace.add_argument("file", type=Path, help="the file that UCCH_TRACE named")
    store = command("store", _store, "serve a store, at which ranks meet that come later (Grow and Enter)")
    store.add_argument("address", help="tcp://0.0.0.0:7000, with port 0 for a free one, or unix:///path")
    store.add_argument("secret", type=Path, help="file with at least 16 bytes, which all ranks are to know")


def _in_job() -> bool:
    return number("WORLD_SIZE", os.environ, 1, torchrun=False) > 1


def _bytes(text: str) -> int:
    size = env.parse_size(text)
    if size == inf:
        raise ValueError(f"{text!r} is no number of bytes, such as 4096, 4K or 1M")
    return int(size)


def _numbers(option: str, text: str | None) -> list[int]:
    """The numbers of an option such as ``--hosts 2,2``; empty if it is not given."""
    words = text.split(",") if text else []
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise ValueError(f"{option} {text}: must be numbers from 1 on, as in {option} 2,2")
    return [int(word) for word in words]


def _layout(args: argparse.Namespace) -> Topology:
    spec = args.vendors or env.get("EMULATE")
    hosts = _numbers("--hosts", args.hosts)
    if not spec and not hosts:
        raise ValueError("plan needs ranks: run it under mpirun, or give --vendors nvidia:2,amd:2 or --hosts 2,2")
    vendors = emulated_vendors(spec, sum(hosts)) if spec else ["host"] * sum(hosts)
    where = [host for host, n in enumerate(hosts or [len(vendors)]) for _ in range(n)]
    weights = _numbers("--weights", args.weights)
    # With this host's RDMA, as the planned hosts are not known.
    kinds = {vendor: fabric_of(vendor, env.get("FABRIC")).kind for vendor in vendors}
    fabrics = numbered((vendor, kinds[vendor] or host) for vendor, host in zip(vendors, where, strict=True))
    return Topology.group(vendors, where, weights, (), fabrics)


def _plan(args: argparse.Namespace) -> int:
    nbytes = _bytes(args.size)
    if args.fragments is not None and not args.algorithm:
        raise ValueError(f"--fragments {args.fragments}: is of --algorithm, which is not given")
    wanted = Choice(args.algorithm, 1 if args.fragments is None else args.fragments) if args.algorithm else None
    if args.vendors or args.hosts or not _in_job():
        if args.measure:
            raise ValueError("plan --run measures on a job's own ranks: start it under mpirun, without --vendors")
        found = facts(_layout(args), args.collective, nbytes, wanted=wanted)
        print(json.dumps(found, indent=2) if args.json else render(found))
        return 0
    from ..api.comm import Communicator, runner_of

    with Communicator() as comm:
        members = runner_of(comm).members
        wanted = wanted and wanted._replace(queued=members.tuning.queued)
        found = facts(comm.topology, args.collective, nbytes, tuning=members.tuning, wanted=wanted)
        if args.measure:
            from .tune import sampled

            times = sampled(comm, args.collective, nbytes, wanted, 9)
            found["measured"] = {"median": median(times), "best": min(times), "calls": len(times)}
        if comm.rank == 0:
            print(json.dumps(found, indent=2) if args.json else render(found), flush=True)
    return 0


def _topo(args: argparse.Namespace) -> int:
    import tempfile

    from ..machine.discover import machine, record, replay

    if args.facts:
        try:
            stored = json.loads(Path(args.facts).read_text())
            stored["files"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--facts {args.facts}: not a record of topo --record") from error
        with tempfile.TemporaryDirectory() as folder:
            host = DrawnHost(stored.get("machine", args.facts), machine(replay(stored["files"], Path(folder))))
        print(draw(tree([host])), flush=True)
        return 0
    if not _in_job():
        import socket

        if args.record:
            Path(args.record).write_text(json.dumps({"machine": socket.gethostname(), "files": record()}, indent=0))
        # A record has files of a machine, but not its libraries.
        transport = {} if args.record else _transport()
        print(draw(tree([DrawnHost(socket.gethostname(), machine(), transport=transport)])), flush=True)
        return 0
    from ..api.comm import Communicator, runner_of

    with Communicator() as comm:
        members = runner_of(comm).members
        first = [comm.topology.hosts.index(host) for host in range(max(comm.topology.hosts) + 1)]
        found = comm.mpi.gather((machine(), _transport()) if comm.rank in first else None)
        rings = comm.mpi.gather(members.rings()) or ()
        if comm.rank == 0:
            hosts = []
            for rank in first:
                here = [r for r, host in enumerate(comm.topology.hosts) if host == comm.topology.hosts[rank]]
                ranks = [(r, members.facts[r].vendor, members.facts[r].device) for r in here]
                hosts.append(DrawnHost(members.facts[rank].host.hostname, found[rank][0], ranks, found[rank][1]))
            print(draw(tree(hosts, comm.topology, rings, members.fabric())), flush=True)
    return 0


def _transport() -> dict[str, str]:
    from ..errors import LibraryNotFound
    from ..transport.wires import describe, survey

    try:
        return describe(survey()[1])
    except LibraryNotFound as error:
        return {"unknown": str(error).splitlines()[0]}


def _tune(args: argparse.Namespace) -> int:
    path = args.file or env.get("TUNE_FILE")
    low, _, high = args.sizes.rpartition(":")
    least, most = _bytes(low or "64"), _bytes(high)
    sizes = [least * 8**k for k in range(32) if 0 < least * 8**k <= most]
    if not sizes:
        raise ValueError(f"--sizes {args.sizes}: no size from {least} (1 or more) to {most} bytes")
    writes = path and number("RANK", os.environ, 0, torchrun=False) == 0
    if writes and not os.access(Path(path).absolute().parent, os.W_OK):  # check now, not after the measurement
        raise ValueError(f"--file {path}: its folder is not there, or cannot be written")
    # The table that will be written may not exist, and must not influence the measurement.
    os.environ.pop("UCCH_TUNE_FILE", None)
    from ..api.comm import Communicator
    from .tune import tune

    with Communicator() as comm:
        if comm.size < 2:
            raise ValueError("tune needs ranks: run it under mpirun or ucch-run")

        def tell(line: str, file: Any = None) -> None:
            if comm.rank == 0:
                print(line, file=file, flush=True)

        found = tune(comm, args.collective or _TUNED, sizes, tell)
        rules = found.save(path, comm.rank) if path else 0
        written = f"{counted(rules, 'rule')} in {path} for {found.bare.describe()}"
        what = written if path else "no --file: nothing written"
        tell(f"# {what}", sys.stderr)
        if found.doubtful:
            tell(
                f"# warning: no rule for {counted(found.doubtful, 'size')} (marked ?), as noise was as large as the "
                "difference: measure again on hosts that do nothing else",
                sys.stderr,
            )
    return 0


def _trace(args: argparse.Namespace) -> int:
    from ..trace.timeline import merge, write

    if args.file.is_dir():
        raise ValueError(f"{args.file} is a folder: name the file that UCCH_TRACE named")
    if args.file.exists():
        print(f"{args.file} is whole; open it at ui.perfetto.dev")
        return 0
    write(args.file, merge(args.file.absolute()))
    print(f"merged the ranks' files into {args.file}; open it at ui.perfetto.dev")
    return 0


def _store(args: argparse.Namespace) -> int:
    from ..bootstrap.store import StoreServer

    server = StoreServer(args.address, args.secret.read_bytes())
    print(server.address, flush=True)
    threading.Event().wait()
    return 0
