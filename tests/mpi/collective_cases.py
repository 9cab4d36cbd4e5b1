"""Random cases of every collective, checked against numpy on inputs gathered by mpi4py.

`main` takes a seed, and then CASES [--all-algorithms] [--verbose] [NAME or type ...], or --table 3/8 [--verbose].

Outputs are poisoned and have guard bands; bytes that a call must not write must not change. All ranks draw the same
cases from the seed, and know each other's data. Each case is repeated in other memory, one time with another length on
a rank. ``--table 3/8`` goes through every collective, datatype, operation, calling form and algorithm, whole and in
fragments, in place and not, and runs the third of eight parts of that table. On devices calls are made in streams too,
in which inputs arrive late, and ranks use different forms. The first wrong case is described, and ends the job with
status 1.
"""

import os
import re
import secrets
import sys
import time
import zlib
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import collective_call
import numpy as np
from collective_call import UNEVEN, VECTOR, WITH_DISPLACEMENTS, Call, Case
from collective_reference import FOREIGN, NUMPY_TYPES, OPS_OF
from mpi4py import MPI

from ucc_hetero import Communicator, PersistentRequest, Request, device
from ucc_hetero.planner import algorithms
from ucc_hetero.planner.collectives import ROWS

#: Elements (of a vector, or of a rank's block); a job may ask for larger ones.
COUNTS = (0, 1, 2, 3, 7, 64, 65, 1000, 4097, 20000, *map(int, os.environ.get("MORE_COUNTS", "").split()))
#: Maximum bytes that the arrival board carries.
PARCEL = 496
#: Distance of the seeds of similar cases: they have the same form on each rank, and the same gaps.
AGAIN = collective_call.GAPS
METHODS = {name: name.capitalize() for name in ROWS if name != "barrier"}
SPECS = ("plain", "count", "dtype", "both", "at")
FORMS = ("blocking", "request", "persistent")
#: Forms of calls on devices, a random one per rank. If a rank does not know all counts, all ranks exchange them or
#: none.
IN_STREAMS = ("blocking", "queued", "request", "in stream", "persistent")
ASKING = {"blocking": ("blocking", "in stream"), "request": ("request",), "persistent": ("persistent",)}
UNCOUNTED = ("gatherv", "scatterv", "alltoallv")
DEFAULT = SimpleNamespace(handle=0)


def draw(rng, size, seed, names, types=tuple(NUMPY_TYPES)):
    name = str(rng.choice(names))
    reduces = ROWS[name].reduces
    dtype = str(rng.choice([each for each in types if each in OPS_OF or not reduces]))
    op = str(rng.choice(OPS_OF[dtype])) if reduces else None
    in_place = name != "bcast" and bool(rng.random() < 0.35)
    return fill_in(rng, size, seed, (name, dtype, op, in_place, str(rng.choice(FORMS))))


def table(names):
    for name in names:
        for dtype in OPS_OF if ROWS[name].reduces else NUMPY_TYPES:
            for op in OPS_OF[dtype] if ROWS[name].reduces else (None,):
                for in_place in (False, True)[: 1 if name == "bcast" else 2]:
                    yield from ((name, dtype, op, in_place, form) for form in FORMS)


def fill_in(rng, size, seed, kind):
    """A case of a kind: counts, root, displacements and the way to spell them are random."""
    name, dtype, op, in_place, form = kind
    most = PARCEL // NUMPY_TYPES[dtype].itemsize
    n = int(rng.choice([*COUNTS, most // size, most, most + 1]))
    if name in VECTOR:
        counts = (n * int(rng.choice([1, 5])),)
    elif name not in UNEVEN:
        counts = (n,)
    else:
        shape = (size, size) if name == "alltoallv" else (size,)
        table = rng.integers(0, n + 1, shape) * (rng.random(shape) < 0.75)
        if name == "alltoallv" and in_place:
            table = np.triu(table) + np.triu(table, 1).T
        counts = tuple(map(int, table.ravel()))
    root = int(rng.integers(size)) if ROWS[name].rooted else -1
    gaps = name in WITH_DISPLACEMENTS and bool(rng.random() < 0.6)
    spec = str(rng.choice(SPECS))
    return Case(name, dtype, op, form, in_place, root, counts, gaps, spec, seed)


def start(comm, call, stream=None):
    """Start a call in its form; None for a blocking call, which is complete."""
    method, form = METHODS[call.case.name], call.case.form
    more = {}
    if form in ("queued", "in stream"):
        more["stream"] = stream
        for buffer in call.buffers():
            buffer.late(stream)
    if form in ("blocking", "in stream"):
        getattr(comm, method)(*call.args(), **more)
        return None
    if form in ("request", "queued"):
        request = getattr(comm, f"I{method.lower()}")(*call.args(), **more)
        return request
    return getattr(comm, f"{method}_init")(*call.args())


def otherwise(case, size):
    """A call that differs from the case in its operation, its root, its spelling, whether it blocks, or its datatype:
    one of equal size and of another kind."""
    rng = np.random.default_rng([case.seed, 5])
    what = rng.choice(["spec", "form", "dtype", "dtype", *["op"] * bool(case.op), *["root"] * (case.root >= 0)])
    if what == "spec":
        return replace(case, spec=str(rng.choice(SPECS)))
    if what == "form":
        return replace(case, form=str(rng.choice(FORMS)))
    if what == "root":
        return replace(case, root=int(rng.integers(size)))
    own, alike = NUMPY_TYPES[case.dtype], [name for name in NUMPY_TYPES if name in OPS_OF or not case.op]
    alike = [name for name in alike if (name in FOREIGN) <= (case.dtype in FOREIGN)]
    alike = [name for name in alike if (each := NUMPY_TYPES[name]).itemsize == own.itemsize and each.kind != own.kind]
    dtype = str(rng.choice(alike or [case.dtype])) if what == "dtype" else case.dtype
    op = case.op if what == "dtype" and case.op in OPS_OF.get(dtype, [None]) else case.op and rng.choice(OPS_OF[dtype])
    return replace(case, dtype=dtype, op=op and str(op))


def repeated(case, size):
    """A case and similar calls: in other memory, in two buffers if it is in place, in another form, with another length
    on the last rank or the ranks' lengths exchanged, and the first again."""
    others = (*case.counts[:-1], case.counts[-1] + 1)
    if case.name in UNEVEN and case.seed % 2 and not (case.in_place and case.name == "alltoallv"):
        others = tuple(map(int, np.random.default_rng(case.seed).permutation(case.counts)))
    for turn, counts in enumerate((case.counts, case.counts, case.counts, others, case.counts)):
        like = otherwise(case, size) if turn == 2 else case
        yield replace(like, seed=case.seed + AGAIN * turn, counts=counts, in_place=case.in_place and turn != 1)


class Tester:
    """Runs cases on a communicator, and stops the job at the first failure."""

    def __init__(self, comm, where, stream=None):
        self.comm, self.mpi, self.where, self.stream = comm, MPI.COMM_WORLD, where, stream
        self.done, self.verbose = 0, False

    def form(self, case):
        if self.stream is None:
            return case.form
        forms = ASKING[case.form] if case.name in UNCOUNTED else IN_STREAMS
        return forms[(case.seed + self.comm.rank) % len(forms)]

    def one(self, case):
        alike = self.stream is None or case.name in UNCOUNTED
        case = replace(case, form=self.form(case))
        self.say(case)
        call = Call(case, self.comm)
        call.refill()
        request = start(self.comm, call, self.stream)
        if case.form == "queued":
            for buffer in call.buffers():
                buffer.seen(self.stream)
        rounds = 3 if alike and isinstance(request, PersistentRequest) else 1
        for again in range(rounds):
            if again:
                call.refill()
            if isinstance(request, PersistentRequest):
                request.Start()
            if request is not None and case.seed % 2:
                while not request.Test():
                    time.sleep(1e-4)  # others need the core
            elif request is not None:
                request.Wait()
            self.judge(call)
        if isinstance(request, PersistentRequest):
            request.Free()
        elif alike and case.form in ("blocking", "in stream") and not case.in_place:
            first = call.recv.whole.copy() if call.recv is not None else None
            start(self.comm, call, self.stream)
            if call.recv is not None:
                call.recv.get()
            if call.recv is not None and not np.array_equal(first, call.recv.whole):
                self.fail(case, "the same call gave other bits when repeated")

    def together(self, cases):
        """Start several calls, and wait for them in another order."""
        self.say(*cases)
        forms = ["request" if case.form == "blocking" else case.form for case in cases]
        calls = [Call(replace(case, form=form), self.comm) for case, form in zip(cases, forms, strict=True)]
        for call in calls:
            call.refill()
        requests = [start(self.comm, call) for call in calls]
        waiting = [r for r in requests if r is not None]
        persistent = [r for r in waiting if isinstance(r, PersistentRequest)]
        for again in range(2 if len(persistent) == len(waiting) else 1):
            if again:
                for call in calls:
                    call.refill()
            PersistentRequest.Startall(persistent)
            Request.Waitall(waiting[::-1])
            for call in calls:
                self.judge(call)
        for request in persistent:
            request.Free()

    def say(self, *cases):
        """With --verbose print each case before it runs, so that the last one of a crashed job is known."""
        if self.verbose:
            for case in cases:
                print(f"rank {self.comm.rank}: {case}", file=sys.stderr, flush=True)

    def judge(self, call):
        if problem := call.verify():
            self.fail(call.case, problem)
        if call.case.name == "allreduce" and call.recv is not None:
            sums = self.mpi.allgather(zlib.crc32(call.recv.view.tobytes()))
            if len(set(sums)) > 1:
                self.fail(call.case, f"replicas differ between ranks: {sums}")
        self.done += 1

    def fail(self, case, problem):
        print(f"rank {self.comm.rank} of {self.comm.size} {self.where}: {problem}\n{case}", file=sys.stderr, flush=True)
        os._exit(1)


def tunes():
    """(k, UCCH_TUNE): the k-th algorithm of every collective, whole and in fragments; first without rules."""
    every = {name: algorithms.names(name) for name in ROWS}
    texts = [
        (k, "#".join(f"{name}:@{found[k % len(found)]}:fragments={pieces}" for name, found in every.items()))
        for k in range(max(map(len, every.values())))
        for pieces in (1, 6)
    ]
    return [(0, ""), *texts]


def some(seed, count, every_algorithm, names, types):
    """(UCCH_TUNE, cases to run together): random cases under random rules, or under all rules."""
    size = MPI.COMM_WORLD.size
    rng = np.random.default_rng(seed)
    texts = [text for _, text in tunes()]
    for text in texts if every_algorithm else ["", *(str(t) for t in rng.choice(texts[1:], 2, replace=False))]:
        for index in range(count):
            where = int(rng.integers(1 << 30))
            yield text, [draw(rng, size, where + k, names, types) for k in range(3 if index % 5 == 4 else 1)]


def part(seed, shard):
    """One part of the whole table. All parts together have every kind of call under each of its algorithms."""
    this, parts = map(int, shard.split("/"))
    size, names = MPI.COMM_WORLD.size, tuple(METHODS)
    index = 0
    for k, text in tunes():
        for kind in table(tuple(name for name in names if k < len(algorithms.names(name)))):
            index += 1
            if index % parts == this % parts:
                yield text, [fill_in(np.random.default_rng([seed, index]), size, seed + index, kind)]


def on_devices():
    """Random cases with the job's own rules, and whether their calls were queued in streams."""
    import arrays

    gpu, world = arrays.runtime() if device.available() else None, MPI.COMM_WORLD
    seed = world.bcast(secrets.randbelow(1 << 30))
    everywhere = all(world.allgather(gpu is not None))
    with Communicator(world) as comm:
        if gpu:
            gpu.use(comm._runner.members.place.device)
        tester = Tester(comm, f"seed {seed}")
        streams = (gpu.stream(), DEFAULT) if gpu and everywhere else (None, None)
        rng = np.random.default_rng(seed)
        for index in range(int(os.environ.get("CASES", "20"))):
            case = draw(rng, world.size, seed + index, tuple(METHODS))
            if case.dtype in FOREIGN:  # the array interfaces lack names for these types
                continue
            hosts = int(rng.integers(10))  # the turn that is on host memory, if any
            for turn, each in enumerate(repeated(case, world.size)):
                tester.stream = None if turn == hosts else streams[(index + turn // 2) % 2]
                collective_call.device_memory = None if turn == hosts else arrays.Array
                tester.one(each)
        collective_call.device_memory = arrays.Array  # for the next script that runs here
        comm.Barrier()
        queued = {label: execution.name == "QUEUED" for label, (*_, execution) in comm._runner.used.items()}
        sure = re.compile(rf"(?!{'|'.join(UNCOUNTED)}|scan|exscan)\w+ float32\[[\d,]*\]( SUM)?( root=\d+)?$")
        if os.environ.get("QUEUED"):
            assert all(how for label, how in queued.items() if sure.match(label)), queued
        print("right", "queued" if any(queued.values()) else "by hosts", flush=True)


def main(seed, *words):
    """Cases drawn from a seed: CASES [--all-algorithms] [--verbose] [NAME or type ...], or --table PART [--verbose]."""
    world = MPI.COMM_WORLD
    if words[0] == "--table":
        cases = part(seed, words[1])
    else:
        names = tuple(word for word in words[1:] if word in METHODS) or tuple(METHODS)
        types = [word for word in words[1:] if word in NUMPY_TYPES] or tuple(NUMPY_TYPES)
        cases = some(seed, int(words[0]), "--all-algorithms" in words, names, types)
    total = 0
    for text, group in groupby(cases, key=lambda pair: pair[0]):
        os.environ["UCCH_TUNE"] = text
        with Communicator(world) as comm:
            tester = Tester(comm, f"seed {seed}, UCCH_TUNE={text!r}")
            tester.verbose = "--verbose" in words
            for _, together in group:
                if len(together) > 1:
                    tester.together(together)
                for case in repeated(together[0], world.size) if len(together) == 1 else ():
                    tester.one(case)
            comm.Barrier()
            total += tester.done
    if world.rank == 0:
        print(f"{total} calls right on {world.size} ranks (seed {seed})")


def placed(places, seed, cases):
    """Random cases of ranks with the placement ``places``."""
    os.environ["UCCH_GROUP"] = places[MPI.COMM_WORLD.rank]
    main(seed, cases)
