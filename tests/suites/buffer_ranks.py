"""Ranks that make drawn calls twice, by mpi4py's communicator and by this package's, and compare. Started by
buffer_suite.py.

Arguments: how many cases, a seed, the file that rank 0 writes what it found to. Rank 0 draws; all judge by equal facts.
Whether an argument is refused is asked first, on each rank, of what sends nothing: MPI's persistent forms, and the
binder of this package. A call runs only where no rank refuses it, so that nobody waits for one that does.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from buffer_build import Arguments
from buffer_cases import CALLS, Case, cases
from hypothesis import HealthCheck, Phase, given, seed, settings
from mpi4py import MPI

from ucc_hetero import Communicator
from ucc_hetero.buffers import as_buffer
from ucc_hetero.calls.arguments import CallSpec, bind

#: Seconds that a case may take, of which none takes a hundredth, and MPI's own call, which stands still at times.
LIMIT, MPI_LIMIT = 300, 60
#: Mistakes that leave the exchange as it was, where they are accepted: such calls are run.
HARMLESS = frozenset(
    {"readonly", "strided", "reversed", "big endian", "masked", "structure", "fewer counts", "no root"}
)


class Library(NamedTuple):
    """A communicator of all ranks, and one of them on a circle; MPI's or this package's."""

    world: Any
    circle: Any

    @staticmethod
    def of(world: Any) -> Library:
        """With a circle of its own."""
        return Library(world, world.Create_cart([world.Get_size()], [True]))

    def on(self, case: Case) -> Any:
        """The communicator of a case."""
        return self.circle if case.call.startswith("Neighbor") else self.world


def method(comm: Any, case: Case, way: str) -> Callable[..., Any]:
    """A collective in one of its three forms."""
    return getattr(
        comm, {"": "{}", "I": "I{}", "init": "{}_init"}[way].format(case.call.lower() if way == "I" else case.call)
    )


def keywords(case: Case, args: Arguments) -> dict[str, Any]:
    """Arguments beside the buffers."""
    found: dict[str, Any] = {}
    if CALLS[case.call].reduces:
        found["op"] = getattr(MPI, case.op)
    if CALLS[case.call].rooted:
        found["root"] = args.root
    if case.call == "Reduce_scatter":
        found["recvcounts"] = args.recvcounts
    return found


def positional(case: Case, args: Arguments) -> tuple[Any, ...]:
    """The buffers of a collective."""
    return (args.send,) if case.call == "Bcast" else (args.send, args.recv)


def run(library: Library, case: Case, args: Arguments) -> None:
    """Make the call, to its end."""
    comm = library.on(case)
    if case.call == "Ring":
        return ring(comm, case, args)
    request = method(comm, case, case.way)(*positional(case, args), **keywords(case, args))
    finish(case, [request] if request is not None else [])
    return None


def finish(case: Case, requests: list[Any]) -> None:
    """Wait for requests; persistent ones are started first."""
    for request in requests:
        if case.way == "init":
            request.Start()
    for request in requests:
        request.Wait()
        if case.way == "init":
            request.Free()


def ring(comm: Any, case: Case, args: Arguments) -> None:
    """A message to the next rank, and one from the rank before."""
    rank, size = comm.Get_rank(), comm.Get_size()
    dest, source = ((rank + 1) % size, (rank - 1) % size) if case.root != -2 else (MPI.PROC_NULL,) * 2
    if not case.way:
        comm.Sendrecv(args.send, dest, 3, args.recv, source, 3)
    elif case.way == "I":
        finish(case, [comm.Irecv(args.recv, source, 3), comm.Isend(args.send, dest, 3)])
    else:
        finish(case, [comm.Recv_init(args.recv, source, 3), comm.Send_init(args.send, dest, 3)])


def refused(what: Callable[[], Any]) -> str:
    """Why something is refused; empty where it is not."""
    try:
        request = what()
    except Exception as error:
        text = error.Get_error_string() if isinstance(error, MPI.Exception) else str(error)
        return f"{type(error).__name__}: {text}"
    if hasattr(request, "Free"):
        request.Free()
    return ""


def theirs(library: Library, case: Case, args: Arguments, agree: Callable[[Any], list[Any]]) -> str:
    """Whether MPI refuses the arguments here."""
    comm = library.on(case)
    if case.call == "Ring":
        peer = 0 if case.root != -2 else MPI.PROC_NULL
        return refused(lambda: comm.Send_init(args.send, peer)) or refused(lambda: comm.Recv_init(args.recv, peer))
    if case.call == "Reduce_scatter":
        # It asks all ranks for their counts, so that all have to get there.
        early = "" if args.send is None or args.send is MPI.IN_PLACE else refused(lambda: comm.Send_init(args.send, 0))
        early = early or refused(lambda: comm.Recv_init(args.recv, 0))
        if any(agree(early)):
            return early
    return refused(lambda: method(comm, case, "init")(*positional(case, args), **keywords(case, args)))


def ours(library: Library, case: Case, args: Arguments) -> str:
    """Whether this package refuses the arguments here."""
    comm = library.on(case)
    if case.call == "Ring":
        if case.root == -2:
            return ""
        buffer = lambda side, spec: as_buffer(spec, writable=side == "recv", argument=side, rank=comm.rank)  # noqa: E731
        return refused(lambda: buffer("send", args.send)) or refused(lambda: buffer("recv", args.recv))
    if case.call.startswith("Neighbor"):
        return refused(lambda: method(comm, case, "init")(*positional(case, args)))
    more = keywords(case, args)
    rest = None, more.get("root", -1), more.get("recvcounts")
    send, recv = (None, args.send) if case.call == "Bcast" else positional(case, args)
    return refused(lambda: bind(CallSpec(case.call.lower(), send, recv, *rest), comm.size, comm.rank))


class Found(NamedTuple):
    """Outcome of a case: ``kind`` (see ``Ranks.judge``), the words of who refused, and which rank's they are."""

    kind: str
    words: str = ""
    rank: int = -1


class Ranks:
    """This rank's part of the run."""

    def __init__(self) -> None:
        self.control = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.control.rank, self.control.size
        self.asked = Library.of(MPI.COMM_WORLD.Dup())
        #: Told whose call a case is in.
        self.stage: Callable[[str], None] = lambda whose: None
        self.renew()

    def renew(self) -> None:
        """New communicators, after errors in calls that were under way; collective."""
        self.mpi, self.own = Library.of(MPI.COMM_WORLD.Dup()), Library.of(Communicator(MPI.COMM_WORLD))

    def judge(self, case: Case) -> Found:
        """``alike`` (results or refusals), ``only mpi4py refuses``, ``only we refuse``, ``differs``, or ``not run``: a
        mistake that neither sees, and that MPI says nothing about. Collective, and equal on all ranks."""
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        one, two = Arguments(case, self.rank), Arguments(case, self.rank)
        try:
            verdicts = self.control.allgather(
                (theirs(self.asked, case, one, self.control.allgather), ours(self.own, case, two))
            )
            if any(any(both) for both in verdicts):
                if case.call.startswith("Neighbor"):  # some ranks have refused a call, which ends a communicator
                    self.renew()
                return self._refusals(verdicts)
            if case.fault is not None and case.fault.name not in HARMLESS:
                return Found("not run", case.fault.name)
            return self._run(case, one, two)
        finally:
            one.free()
            two.free()

    @staticmethod
    def _refusals(verdicts: list[tuple[str, str]]) -> Found:
        for rank, (they, we) in enumerate(verdicts):
            if they and not we:
                return Found("only mpi4py refuses", they, rank)
            if we and not they:
                return Found("only we refuse", we, rank)
        return Found("alike", "both refuse")

    def _run(self, case: Case, one: Arguments, two: Arguments) -> Found:
        self.stage("mpi")
        faulthandler.dump_traceback_later(MPI_LIMIT, exit=True)
        errors = self.control.allgather(refused(lambda: run(self.mpi, case, one)))
        self.stage("ours")
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        failed = self.control.allgather(refused(lambda: run(self.own, case, two)))
        if any(errors) or any(failed):
            self.renew()
            if any(errors) and any(failed):
                return Found("alike", "both fail")
            who = "only mpi4py fails" if any(errors) else "only we fail"
            return Found(
                who, *next((text, rank) for rank, text in enumerate(errors if any(errors) else failed) if text)
            )
        for rank, differs in enumerate(self.control.allgather(difference(one.contents(), two.contents()))):
            if differs:
                return Found("differs", differs, rank)
        return Found("alike", "results")


def difference(one: bytes, two: bytes) -> str:
    """How memory differs."""
    if one == two:
        return ""
    at = [i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
    return f"{len(at)} of {len(one)} bytes, from {at[0]} on: {one[at[0] :][:8].hex()} by MPI, {two[at[0] :][:8].hex()}"


def main() -> None:
    """Draw cases on rank 0, and judge them on all."""
    number, start, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    ranks = Ranks()
    if ranks.rank:
        while (case := ranks.control.bcast(None)) is not None:
            ranks.judge(case)
        return
    with out.open("w") as lines:
        ranks.stage = lambda whose: print(json.dumps({"stage": whose}), file=lines, flush=True)

        @seed(start)
        @settings(max_examples=number, database=None, deadline=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(cases(ranks.size))
        def each(case: Case) -> None:
            print(json.dumps({"stage": "begun", "case": repr(case)}), file=lines, flush=True)
            found = ranks.judge(ranks.control.bcast(case))
            print(json.dumps([*found, case.call, repr(case)]), file=lines)

        each()
    ranks.control.bcast(None)


if __name__ == "__main__":
    main()
