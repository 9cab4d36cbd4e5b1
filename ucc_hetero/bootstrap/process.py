"""State of a process, apart from communicators: UCC libraries, contexts, workers; made once per set of processes.

A native context spans one island and may use every transport; the bridge context spans the job and uses ``ucp,self``
with settings that are forced equal. Communicators only make teams from them.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn

from .. import env, log
from ..bindings import quarantine, ucc, ucx
from ..bindings.oob import MPIExchange
from ..device import Block, DeviceRuntime, Place, collective_library, late_settings, own_device, place_of, runtime_of
from ..errors import LibraryError, NotSupported, PeerError, UCCHError
from ..machine import launchers, ucx_transports, vendors
from ..machine.discover import HostIdentity, host_cores, host_identity, link_speed
from ..machine.fabric import Fabric, fabric_of
from ..machine.facts import Facts
from ..native.libraries import FORKED, lib, load
from ..native.waiting import progress_until, refuse_finalized
from ..planner.algorithms import added
from ..planner.topology import Island, Topology, emulated_vendors, numbered
from ..trace import timeline
from ..transport import wires
from . import agreement, faults
from .pages import Page, Pages, share
from .timely import allow_roll_calls, stop_roll_calls, timely

#: Rounds that a waiter spins before it yields, if every rank of the host has a core of its own.
SPIN_ROUNDS = 400


#: Team numbers of libucc per process, in words of 64 (its default is 32 words; it supports 15 bits): four teams for
#: each of the communicators that this package has numbers for, and for closed ones.
TEAM_IDS = str(4 * 4096 // 64 + 1)


#: Most communicators whose teams and pages are kept for new ones.
MOST_SPARE = int(lib.UCCH_SPARES)

#: Seconds that ranks wait longer for the first rank's answer than it waits for them.
_GRACE_S = 1.0

#: Most files, sockets and segments that the libraries open on one host. Without them they fail in a hundred ways.
_OPENED = 48


class Process:
    """This process's libraries, its UCX worker, and the facts that it publishes."""

    def __init__(self) -> None:
        self.libraries = load()
        if mpi_runs():
            launchers.keep_from_children(os.environ)
        vendors.apply(os.environ, late=late_settings)  # as ucch-run does, for ranks started by other launchers
        if _place is None or runtime_of(_place.vendor) is None:
            agreement.keep_to_host_memory(os.environ)
        agreement.apply_settings(self.libraries.ucc_version, os.environ)
        self.name = os.urandom(8).hex()
        self.host: HostIdentity = host_identity()
        self._speed = link_speed()
        with env.meanwhile(ucx_transports.tcp_connections()):
            self.ucx = ucx.Context()
            self.worker = self.ucx.worker()
        #: Memory types and transports that UCX found at its start; it does not look again.
        self._memory_types, transports = tuple(self.ucx.memory_types()), self.ucx.transports()
        self._transports, self._idle_ports = tuple(sorted(transports)), wires.idle_ports(transports)
        #: By process name, and the number of cut links known when it was made.
        self.connections: dict[tuple[str, int], ucx.Connection] = {}
        self._connecting = threading.Lock()
        self._libs: dict[str, ucc.Lib] = {}
        self._fabrics: dict[tuple[str, str], Fabric] = {}

    def library(self, prefix: str) -> ucc.Lib:
        """The UCC library that reads variables with ``prefix``."""
        if prefix not in self._libs:
            self._libs[prefix] = ucc.Lib(prefix)
        return self._libs[prefix]

    def facts(self, place: Place, version: str) -> Facts:
        runtime = runtime_of(place.vendor)
        return Facts(
            process=self.name,
            package=version,
            ucc=self.libraries.ucc_version,
            ucx=self.libraries.ucx_version,
            memory_types=self._memory_types,
            transports=self._transports,
            idle_ports=self._idle_ports,
            settings=agreement.steering(env.settings(*agreement.STEERING_PREFIXES)),
            byteorder=sys.byteorder,
            host=self.host,
            vendor=place.vendor,
            device=place.device,
            address=self.worker.address,
            board="" if runtime is None else runtime.bus(place.device),
            device_memory="" if runtime is None else vendors.memory_name(runtime.memory_type),
            lazy_loading=runtime is not None and not runtime.eager and bool(env.get("CHANNELS")),
            link_speed=env.get("LINK_SPEED") or self._speed,
            group=env.get("GROUP"),
            algorithms=" ".join(added()),
            vendors=" ".join(vendors.VENDORS),
            pid=os.getpid(),
            fabric=self._fabric(place.vendor),
        )

    def _fabric(self, vendor: str) -> Fabric:
        """This host's fabric for a vendor's library, determined once: the library has read its settings by then."""
        wanted = env.get("FABRIC")
        if (vendor, wanted) not in self._fabrics:
            self._fabrics[vendor, wanted] = fabric_of(vendor, wanted)
        return self._fabrics[vendor, wanted]

    @property
    def usable(self) -> bool:
        """True if it belongs to this process, not to the parent that forked it, and is not closed."""
        return self is _process and self.worker.handle is not None

    def connection(self, facts: Facts, rank: int, peer: int) -> ucx.Connection:
        """The connection to another process, made at first use; ``PeerError`` if that fails.

        Communicators keep theirs, as two connections could reorder messages. After a link was found to be cut, other
        communicators get a new one: libucp may have given this one up.
        """
        with self._connecting:
            key = facts.process, int(lib.ucch_cuts())
            if key not in self.connections:
                try:
                    self.connections[key] = self.worker.connect(facts.address)
                except LibraryError as error:  # it died before the first message to it, and its memory is gone
                    raise PeerError(f"rank {rank}: rank {peer} cannot be reached: {error}") from error
            return self.connections[key]

    def discard(self, number: int) -> None:
        """Discard messages with a communicator's number that were not received."""
        lib.ucch_discard_all(self.worker.handle, number << 52, 0xFFF << 52)

    def settle(self) -> None:
        """Complete everything that was sent; nothing may be in flight."""
        # Discard unreceived messages of closed communicators: libucp would print warnings, and their senders may wait.
        # Twice, as messages in flight may arrive meanwhile.
        for _ in range(2):
            lib.ucch_progress_once()
            lib.ucch_discard_all(self.worker.handle, 0, 0)
            for connection in list(self.connections.values()):
                with suppress(UCCHError):
                    connection.flush().wait(1.0)

    def close(self) -> None:
        """Free everything; contexts must be destroyed, and everything that was sent must have arrived."""
        self.connections.clear()  # closed with the worker
        self.worker.close()
        self.ucx.close()
        for library in self._libs.values():
            library.close()
        self._libs.clear()


class Spare(NamedTuple):
    """What a communicator leaves to the next one of its kind (:class:`.known.Known`): teams, and memory for its arrival
    board if some ranks share a host."""

    kind: tuple[object, ...]
    teams: dict[tuple[tuple[int, ...], str], ucc.Team]
    page: Page | None


class Job:
    """The contexts of one set of processes. Collective to create over ``comm``, which is used for the exchanges.

    ``name`` is the same on all its ranks, and unique. Its islands are those of ``split``; communicators of some of its
    ranks have the same islands.
    """

    def __init__(self, process: Process, comm: Any, everyone: list[Facts], split: agreement.Split, name: str) -> None:
        self.process, self.name = process, name
        #: True if a team's creation was given up: libucc would match its messages with those of the next one.
        self.team_abandoned = False
        #: True if ranks of it have died or a call has timed out: data left under way may be matched by a new
        #: communicator, and libucp may have dropped a broken connection without an error.
        self.stale = False
        #: Number of endpoint errors when the contexts were made. After a later one connections may be broken, and
        #: libucc may count data that it still receives for a failed task for the next task.
        self._errors = 0
        #: Number of cut links then: a connection that was given up because of one reports no error.
        self._cuts = 0
        #: True if a communicator uses it.
        self.used = False
        self.facts = everyone
        self.rank = comm.Get_rank()
        #: Ranks of this host whose processes have ended, also those that had left all communicators.
        self.ended = partial(ended, everyone, self.rank)
        self.index = {f.process: i for i, f in enumerate(everyone)}
        self.split = split
        #: What new communicators of the same ranks may reuse, by the number of the communicator that left it.
        self.spare: dict[int, Spare] = {}
        #: Ranks, by link, whose first team has passed its test.
        self.tried: set[tuple[str, tuple[int, ...]]] = set()
        hosts = numbered(f.host.node for f in everyone)
        self.topology = topology = Topology.group([f.vendor for f in everyone], hosts, fabrics=split.numbers)
        #: The number of each rank's host; and this host's memory for arrival boards, if other ranks are there.
        self.hosts: list[int] = []
        self.pages: Pages | None = None
        self._comms: list[Any] = []
        island = topology.islands[topology.island_of[self.rank]]
        self.island_index = {rank: i for i, rank in enumerate(island.ranks)}
        self.native: ucc.Context | None = None
        self.bridge: ucc.Context | None = None
        #: Used at the end, when all ranks leave together.
        seconds = min(comm.seconds, env.get("TIMEOUT"))
        self.comm = timely(comm.Dup(), seconds, "the making of contexts")
        try:
            self._create(comm, island, seconds)
        except BaseException:
            abandon_job(self)
            raise
        self._errors, self._cuts = lib.ucch_endpoint_errors(), lib.ucch_cuts()
        allow_roll_calls(self.comm)
        # Waiters yield at once where ranks outnumber cores, and spin first where they do not; there are fewer wires,
        # too.
        here = sum(f.host.node == self.process.host.node for f in self.facts)
        lib.ucch_set_spin(spin_rounds(here))
        wires.share(here)
        log.log("init").info(
            "job of %d ranks in %d islands; native context of %d ranks%s",
            topology.size, len(topology.islands), island.size, "" if topology.flat else ", bridge context of all",
        )  # fmt: skip
        if split.why and not self.rank:
            log.log("topo").info("fabric between hosts: %s", split.why)

    def _create(self, comm: Any, island: Island, seconds: float) -> None:
        timeline.join(self.comm, self.facts, self.facts[self.rank])
        sub = comm.Split(island.index, self.rank)
        self._comms += [self.comm, sub]
        self.pages, self.hosts = share(self.comm, self.facts, self.rank)
        self._part_memory(island.size > 1)
        if not self.topology.flat:
            self._comms.append(comm.Dup())
        with env.meanwhile(agreement.segments(os.environ)):
            if island.size > 1:
                self.native = self._context(agreement.NATIVE_PREFIX, sub, seconds)
            if not self.topology.flat:
                self.bridge = self._context(agreement.BRIDGE_PREFIX, self._comms[-1], seconds)
        contexts = {"native": self.native, "bridge": self.bridge}
        mine = {name: each.addresses("ucp") for name, each in contexts.items() if each is not None}
        agreement.judge_contexts(self.comm.allgather(mine))

    def _context(self, prefix: str, comm: Any, seconds: float) -> ucc.Context:
        """A context of the ranks of ``comm``, some of which may die meanwhile."""
        library, more = self.process.library(prefix), {"TEAM_IDS_POOL_SIZE": TEAM_IDS}
        found: ucc.Context = self.comm.named(lambda: library.context(MPIExchange(comm, seconds), more))
        return found

    def _part_memory(self, native: bool) -> None:
        """Decide which libraries use device memory, before the contexts are made.

        Only one UCX context of this process, that of messages, may open device memory of peers on this host: several
        abort (:mod:`.bounce`). The bridge carries host memory, and native teams need it only if there is no library of
        the vendor.
        """
        mine = self.facts[self.rank]
        ipc, runtime = vendors.VENDORS[mine.vendor].ipc, runtime_of(mine.vendor)
        if runtime is None or not runtime.memory_type:
            return
        prefixes = [agreement.BRIDGE_PREFIX]
        if native:
            self.process.library(agreement.NATIVE_PREFIX)  # loads the components, among them the vendor's library
        if native and _collectives(runtime.memory_type):
            prefixes.append(agreement.NATIVE_PREFIX)
            agreement.leave_broadcasts(mine.device_memory, os.environ)
        users = os.environ.get("UCX_TLS", "")
        for prefix in prefixes:
            if ipc and (not users or users.startswith("^")):
                os.environ.setdefault(f"{prefix}_UCX_TLS", ucx_transports.without(users, (ipc,)))

    def vendors_library(self, memory: int) -> bool:
        """True if native teams leave collectives on this memory (``ucc_memory_type_t``) to the vendor's library."""
        return self.native is not None and _collectives(memory)

    @cached_property
    def word(self) -> Block:
        """8 bytes on this rank's device, never freed: freeing would wait for all work of the device."""
        runtime = runtime_of(self.facts[self.rank].vendor)
        assert runtime is not None, "device memory is a runtime's"
        return runtime.alloc(8)

    def serves(self, everyone: Sequence[Facts]) -> bool:
        """True if all of these ranks took part in this job, with the fabrics that they have now."""
        theirs = (self.facts[self.index[f.process]] for f in everyone if f.process in self.index)
        return [f.fabric for f in theirs] == [f.fabric for f in everyone]

    def sound(self) -> bool:
        """True if new communicators may use its contexts, as far as this process knows."""
        same = (lib.ucch_endpoint_errors(), lib.ucch_cuts()) == (self._errors, self._cuts)
        return same and not (self.team_abandoned or self.stale)

    def send_word(self, place: int, tag: int, word: int) -> None:
        """Send a small number to a rank of the job."""
        self.comm.Send(array("i", [word]), place, tag)

    def recv_word(self, place: int, tag: int, seconds: float, poll_hook: Callable[[], object]) -> int | None:
        """Receive a small number from a rank; None if it does not come in time. ``poll_hook`` may raise to end the
        wait."""
        word = array("i", [0])
        request = self.comm.Irecv(word, place, tag)
        with quarantine.unless_over((request, word)):
            try:
                if progress_until(request.Test, seconds, poll_hook, step=1e-6):
                    return word[0]
            except BaseException:
                with suppress(*faults.EXCHANGE_ERRORS):  # its rank may have died
                    request.Cancel()
                raise
        request.Cancel()
        quarantine.keep((request, word))
        return None

    def min_word(
        self, places: Sequence[int], tag: int, word: int, seconds: float, poll_hook: Callable[[], object]
    ) -> int:
        """The least word (from -1 on) of some ranks of the job: the first rank gathers and sends it. Collective among
        them. The result is -2 - i if the i-th of these ranks did not answer within ``seconds``; ``poll_hook`` as for
        :meth:`recv_word`."""
        first, *others = places
        if self.rank != first:
            self.send_word(first, tag, word)
            answer = self.recv_word(first, tag, seconds + _GRACE_S, poll_hook)
            return -2 if answer is None else answer
        for at, place in enumerate(others, 1):
            if word > -2:
                heard = self.recv_word(place, tag, seconds, poll_hook)
                word = min(word, -2 - at if heard is None else heard)
        for place in others:
            self.send_word(place, tag, word)
        return word

    def drop_spare(self, seconds: float, most: int = 0) -> None:
        """Destroy spare teams, except those of the newest ``most`` entries, each within ``seconds``."""
        while len(self.spare) > most:
            oldest, *_ = tuple(self.spare)  # other threads may add to it
            _, teams, page = self.spare.pop(oldest)
            while teams:
                teams.popitem()[1].close(seconds)
            if page is not None:
                page.drop()

    def close(self) -> None:
        """Destroy the contexts; collective among the ranks."""
        self.drop_spare(min(self.comm.seconds, env.get("TIMEOUT")))
        for context in (self.bridge, self.native):
            if context is not None:
                context.close()
        self.bridge = self.native = None
        stop_roll_calls(self.comm)
        for comm in self._comms:
            comm.Free()
        self._comms.clear()
        self.close_pages()

    def close_pages(self) -> None:
        """Take no more pages of this host's memory: no communicator will be made."""
        if self.pages is not None:
            self.pages.close()


_process: Process | None = None
_jobs: list[Job] = []
_made = [0]
_place: Place | None = None


def _collectives(memory: int) -> bool:
    """True if native teams leave collectives on this memory to the vendor's library: it is available and enabled."""
    if not collective_library(memory):
        return False
    component = vendors.of_memory(memory).collectives[0].removeprefix("libucc_tl_")
    return agreement.native_uses(component, os.environ)


def spin_rounds(ranks_here: int) -> int:
    """Rounds that a waiter spins if ``ranks_here`` ranks share its host; where a launcher binds it does not matter."""
    return SPIN_ROUNDS if ranks_here <= len(host_cores()) else 0


def begun() -> bool:
    """True if this process's libraries and worker exist."""
    return _process is not None


def lacks_files() -> str:
    """Why the limit on open files is too low for the libraries, which have not started; empty if it is not."""
    if begun():
        return ""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        left = most - len(os.listdir("/proc/self/fd"))
    except OSError:  # not even this one can be opened
        left = 0
    if left >= _OPENED:
        return ""
    return (
        f"only {max(left, 0)} more files may be opened (ulimit -n is {most}), and UCX and UCC open up to {_OPENED}: "
        "raise the limit where the job is started, or close files"
    )


def process() -> Process:
    """This process's libraries and worker, made at first use."""
    global _process
    if _process is None:
        _process = Process()
    return _process


def place_here(world_rank: int, world_size: int) -> Place:
    """Vendor and device of this rank's buffers; fixed at the first call, even if ranks are renumbered."""
    global _place
    if _place is None or not begun():
        layout = env.get("EMULATE")
        try:
            vendor = emulated_vendors(layout, world_size)[world_rank] if layout else ""
        except ValueError as error:
            raise ValueError(f"UCCH_EMULATE: {error}") from None
        _place = place_of(vendor)
    return _place


def here(mpi: Any) -> tuple[Place, int]:
    """Where this rank of ``mpi`` is (see :func:`place_here`), and its rank in the whole job."""
    world = world_of(mpi)
    return place_here(world.Get_rank(), world.Get_size()), world.Get_rank()


def world_of(mpi: Any) -> Any:
    """The communicator of the whole job: MPI's, or that of an exchange that is not MPI."""
    from mpi4py import MPI

    return getattr(mpi, "world", MPI.COMM_WORLD)


def offer() -> tuple[str, ...]:
    """Name for the next job, followed by names of jobs that new communicators may use, as far as this process knows."""
    return f"{process().name}/{_made[0]}", *(job.name for job in _jobs if job.sound())


def spare(of: Job | None = None) -> tuple[int, ...]:
    """Numbers of communicators that have left something: of a job, or of all."""
    return tuple(of.spare if of else [number for job in _jobs for number in tuple(job.spare)])[-MOST_SPARE:]


def job_of(comm: Any, everyone: list[Facts], offers: Sequence[tuple[str, ...]], runtime: DeviceRuntime | None) -> Job:
    """The job that these processes share: the first one that all offer, in order of joining, or a new one
    (collective)."""
    usable = set.intersection(*(set(each[1:]) for each in offers))
    for job in _jobs:
        if job.name in usable and job.serves(everyone):
            return job
    _made[0] += 1
    for job in _jobs:
        if not job.sound():
            job.close_pages()

    def library() -> bool:
        process().library(agreement.NATIVE_PREFIX)  # loads the components, among them the vendor's library
        return runtime is not None and _collectives(runtime.memory_type)

    job = Job(process(), comm, everyone, agreement.split(comm, everyone, runtime, library), offers[0][0])
    _jobs.append(job)
    return job


def meet(everyone: Sequence[Facts], rank: int) -> None:
    """Remember the processes on the host of ``rank``, all alive: a pid may be reused after a death."""
    for r in _near(everyone, rank):
        lib.ucch_process_meet(everyone[r].pid)


def ended(everyone: Sequence[Facts], rank: int) -> list[int]:
    """Ranks on the host of ``rank`` whose processes have ended, with or without a board."""
    return [r for r in _near(everyone, rank) if lib.ucch_process_ended(everyone[r].pid)]


def _near(everyone: Sequence[Facts], rank: int) -> list[int]:
    here = everyone[rank].host.memory
    return [r for r, facts in enumerate(everyone) if facts.pid and facts.host.memory == here]


def all_jobs() -> list[Job]:
    """The jobs that this process is part of, in order of creation."""
    return list(_jobs)


def abandon_job(job: Job) -> None:
    """Abandon a job that was made in vain for ranks that meet in a store, and tell the other ranks.

    At their end those that did make it would wait for this rank, which has no part in it. Ranks with MPI do not come
    here.
    """
    if not job.used and hasattr(job.comm, "watch"):
        faults.give_up(job.comm)
        quarantine.keep(job, bool, has_abandoned_jobs)
        if job in _jobs:
            _jobs.remove(job)


def has_abandoned_jobs() -> bool:
    return quarantine.release(has_abandoned_jobs) > 0


def close_all() -> None:
    """Destroy every job and the process's own resources; collective among all their ranks."""
    global _process
    wires.stop()
    if _process is not None:
        _process.settle()
    for job in _jobs:
        job.comm.allgather(None)  # libucp prints an error about a peer that ended first
    while _jobs:
        _jobs.pop().close()
    if _process is not None:
        _process.close()
        _process = None


def close_alone() -> None:
    """Destroy the process's own resources if it has met no other process."""
    global _process
    if _process is None or mpi_runs() or not _jobs or any(len(job.facts) > 1 for job in _jobs):
        return
    closed, _process = _process, None  # first: another thread may make a communicator
    _jobs.clear()
    with own_device():
        closed.settle()
        closed.close()


#: True in a child that was forked from a process that used MPI.
_inherited = False


def inherited() -> bool:
    """True if MPI, or UCX and UCC, belong to the parent process."""
    return _inherited or bool(lib.ucch_inherited())


class Unusable:
    """Replaces an object that can no longer be used: every use raises an error."""

    def __init__(self, kind: type[BaseException], text: str) -> None:
        self._error = kind, text

    def raise_error(self) -> NoReturn:
        kind, text = self._error
        raise kind(text)

    def __getattr__(self, name: str) -> NoReturn:
        self.raise_error()


class Ended(Unusable):
    """Replaces an object at the end of the process, which ends daemon threads that use it, or at ``MPI.Finalize``."""

    def raise_error(self) -> NoReturn:
        refuse_finalized()
        super().raise_error()


def refuse_without_mpi() -> None:
    """Raise if MPI is not initialized, finalized or the parent process's: any MPI call would end the process."""
    from mpi4py import MPI

    if inherited():
        raise NotSupported(FORKED)
    refuse_finalized()
    if not MPI.Is_initialized():
        raise NotSupported("MPI has not begun: call MPI.Init_thread(), or leave mpi4py.rc.initialize True")


def mpi_runs() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


#: Variables with the number of ranks that launchers without MPI have started: the launcher's marks, its name, and the
#: cure.
_WITHOUT_MPI = {
    "WORLD_SIZE": (
        "TORCHELASTIC_RUN_ID", "torchrun", "start the script with mpirun or ucch-run, or use torch.distributed's "
        "methods with the backend ucch",
    ),
    "SLURM_STEP_NUM_TASKS": (
        "SLURM_PROCID", "srun", "srun --mpi=pmix (srun --mpi=list shows what there is), or mpirun in an allocation",
    ),
}  # fmt: skip


def refuse_foreign_launcher() -> None:
    """``NotSupported`` if another MPI's launcher has started this rank: each rank would be a job of its own."""
    from mpi4py import MPI

    told = {name: os.environ[name] for name in launchers.MPI["WORLD_SIZE"] if os.environ.get(name, "").isdigit()}
    (name, size), alone = next(iter(told.items()), ("", "1")), MPI.COMM_WORLD.Get_size() == 1
    if launchers.CHILD in os.environ:
        return
    if alone and int(size) > 1:
        raise NotSupported(
            f"{name}={size}: a launcher has started {size} ranks, but each is alone in its MPI "
            f"({MPI.get_vendor()[0]}, as mpi4py found it): take the mpirun of the same MPI, or name the launcher's MPI "
            "in MPI4PY_LIBMPI"
        )
    for name, (mark, launcher, cure) in _WITHOUT_MPI.items() if alone and not told else ():
        size = os.environ.get(name, "")
        if mark in os.environ and size.isdigit() and int(size) > 1:
            raise NotSupported(
                f"{name}={size}: {launcher} has started {size} ranks, but each is alone in its MPI: {cure}"
            )


def _after_fork() -> None:
    """In a child: it has none of its parent's connections and must not touch them."""
    global _process, _inherited
    module = sys.modules.get("mpi4py.MPI")
    _inherited = _inherited or bool(module and module.Is_initialized())
    _jobs.clear()
    _process = None


os.register_at_fork(after_in_child=_after_fork)
