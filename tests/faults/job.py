"""A rank of a trial: ``job.py FOLDER [RANK]``. It writes a log file of its own, and keeps the file locked."""

import ctypes
import faulthandler
import fcntl
import os
import random
import resource
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from menu import DEADLY, INSIDE, TIMEOUT, Trial
from store import Store

import ucc_hetero
from ucc_hetero import rma
from ucc_hetero.errors import UCCHError

FOLDER = Path(sys.argv[1])
TRIAL = Trial.read((FOLDER / "trial").read_text())
RANK = int(sys.argv[2] if len(sys.argv) > 2 else os.environ["OMPI_COMM_WORLD_RANK"])
#: Seconds after which an operation is logged as slow.
LONG = 1.0
#: Maximum number of calls that survivors make before they agree.
TURN = 40


class Log:
    """This rank's log; each line is written at once."""

    def __init__(self):
        self.file = os.open(FOLDER / f"rank{RANK}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        fcntl.flock(self.file, fcntl.LOCK_EX)
        self.moment = "start"

    def say(self, word, text=""):
        line = " ".join(f"{time.monotonic():.3f} {word} {self.moment} {text}".split())
        os.write(self.file, line.encode() + b"\n")


LOG = Log()
faulthandler.enable(LOG.file)
faulthandler.register(signal.SIGUSR1, LOG.file)


class Thrown(Exception):
    """The exception of the fault `throw`."""


class Fault:
    """The trial's fault, on a victim."""

    def __init__(self):
        self.limits = {which: resource.getrlimit(which) for which in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)}
        victims = TRIAL.victims
        opened = TRIAL.moment in ("shrink", "after")
        self._opens = opened and victims[0] == RANK
        self._mine = RANK in (victims[1:] if opened else victims)
        self._at = TURN * victims.index(RANK) if self._mine and TRIAL.moment == "after" else _at(TRIAL.moment)
        self._armed = False
        signal.signal(signal.SIGALRM, self._throw)

    def is_to_come(self):
        """True on a victim whose fault is still to come, and which survives others' deaths."""
        return self._mine and not self._armed and TRIAL.moment in ("shrink", "after")

    def reach(self, moment, number=0):
        """Called when this rank reaches an operation of a moment: the fault may happen now."""
        if moment != LOG.moment:
            LOG.moment = moment
            LOG.say("comes")
        if self._opens and (moment, number) == ("collective", 8):
            LOG.say("fault", "kill")
            os.kill(os.getpid(), signal.SIGKILL)
        if not self._mine or self._armed or (moment, number) != (TRIAL.moment, self._at):
            return
        self._armed = True
        if TRIAL.fault == "throw":
            signal.setitimer(signal.ITIMER_REAL, TRIAL.delay + 1e-6)
        elif TRIAL.fault in (*DEADLY, *INSIDE):
            timer = threading.Timer(TRIAL.delay, self._befall)
            timer.daemon = True  # must not delay the end of the program
            timer.start()
        else:
            LOG.say("fault", f"{TRIAL.fault} {os.getpid()}")

    def _throw(self, *_):
        LOG.say("fault", "throw")
        raise Thrown("of no use any more")

    def _befall(self):
        LOG.say("fault", TRIAL.fault)
        rng = random.Random(TRIAL.seed)
        if TRIAL.fault in ("kill", "stop", "segfault"):
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segfault": signal.SIGSEGV}[TRIAL.fault]
            os.kill(os.getpid(), number)
        elif TRIAL.fault == "exit":
            os._exit(rng.choice([0, 3]))
        elif TRIAL.fault == "hold":
            ctypes.PyDLL(None).sleep(rng.choice([1, 3, TIMEOUT + 2]))
        elif TRIAL.fault == "descriptors":
            used = len(os.listdir("/proc/self/fd"))
            self._limit(resource.RLIMIT_NOFILE, used + rng.choice([0, 1, 4]))
        else:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            self._limit(resource.RLIMIT_AS, pages * 4096 + rng.choice([0, 1 << 16, 1 << 20, 1 << 23]))

    def _limit(self, which, most):
        resource.setrlimit(which, (most, self.limits[which][1]))

    def relent(self):
        """Give back the resources that were taken."""
        for which, both in self.limits.items():
            resource.setrlimit(which, both)


def _at(moment):
    """The number of the operation at which the fault is armed."""
    few, many = ("teams", "free"), ("collective", "message", "partitioned", "put")
    return TRIAL.at % (3 if moment in few else 12 if moment in many else 1)


FAULT = Fault()


def _count(moment, few, many):
    opens = moment == "collective" and TRIAL.moment in ("shrink", "after")
    return range(many if moment == TRIAL.moment or opens else few)


#: Attempts in which all ranks are alive but calls fail, until a rank that lacked memory leaves: a connection that
#: libucp could not make then stays broken.
IN_VAIN = 3


@contextmanager
def timed(what):
    began = time.monotonic()
    try:
        yield
    finally:
        if time.monotonic() - began > LONG:
            LOG.say("took", f"{time.monotonic() - began:.1f} {what}")


class Job:
    """The work of a rank: every moment in turn; after a fault it goes on with the survivors."""

    def __init__(self, make):
        self._generation = 0
        self._worker = None
        self._peers = []
        FAULT.reach("init")
        with timed("init"):
            self.comm = make()
        self.members, self.me = list(range(self.comm.size)), self.comm.rank

    def _one(self, moment, number, comm=None, members=None):
        from fault_call import one_call

        FAULT.reach(moment, number)
        with timed("call"):
            one_call(comm or self.comm, f"{TRIAL.seed} {self._generation} {moment} {number} {members or ''}")

    def _messages(self, number):
        """Messages around a ring, in one of two forms."""
        FAULT.reach("message", number)
        rng, size = random.Random(f"{TRIAL.seed} message {number}"), len(self.members)
        place = self.members.index(self.me)
        shift, count = rng.randrange(size), rng.choice([1, 1000, 200_000])
        to, source = (place + shift) % size, (place - shift) % size
        data = np.random.default_rng(rng.getrandbits(32)).integers(-1000, 1000, (size, count)).astype("f8")
        pair = [self._memory(values) for values in (data[place], np.full(count, np.nan))]
        with timed("message"):
            if rng.random() < 0.5:
                self.comm.Sendrecv(pair[0], to, 1, pair[1], source, 1)
            else:
                wanted = self.comm.Irecv(pair[1], source, number)
                self.comm.Send(pair[0], to, number)
                wanted.Wait()
        got = getattr(pair[1], "peek", pair[1])
        assert np.array_equal(got, data[source]), (number, count, source)

    def _partitioned(self, number):
        """A partitioned message around the ring, with partitions in any order."""
        FAULT.reach("partitioned", number)
        rng, size = random.Random(f"{TRIAL.seed} partitioned {number}"), len(self.members)
        place, shift, parts = self.members.index(self.me), rng.randrange(size), rng.choice([1, 3, 8])
        count = parts * rng.choice([1, 1000, 30_000])
        to, source = (place + shift) % size, (place - shift) % size
        data = np.random.default_rng(rng.getrandbits(32)).integers(-1000, 1000, (size, count)).astype("f8")
        into = np.full(count, np.nan)
        with timed("partitioned"):
            requests = [self.comm.Precv_init(into, parts, source, 2), self.comm.Psend_init(data[place], parts, to, 2)]
            for each in requests:
                each.Start()
            for part in rng.sample(range(parts), parts):
                requests[1].Pready(part)
            for each in requests:
                each.Wait()
                each.Free()
        assert np.array_equal(into, data[source]), (number, count, source)

    def _told(self, mine):
        """Exchange a value among all ranks."""
        lengths = np.empty(self.comm.size, "i8")
        self.comm.Allgather(np.array([len(mine)]), lengths)
        room = np.empty((self.comm.size, lengths.max()), "u1")
        self.comm.Allgather(np.frombuffer(mine.ljust(lengths.max(), b"\0"), "u1"), room)
        return [bytes(row[:length]) for row, length in zip(room, lengths, strict=True)]

    def _put(self, number):
        """Put data and a notification to a rank, which takes no part."""
        FAULT.reach("put", number)
        rng, size = random.Random(f"{TRIAL.seed} put {number}"), len(self.members)
        place, shift, count = self.members.index(self.me), rng.randrange(size), rng.choice([1, 1000, 200_000])
        to, source = (place + shift) % size, (place - shift) % size
        data = np.random.default_rng(rng.getrandbits(32)).integers(-1000, 1000, (size, count)).astype("f8")
        into = np.full(count, np.nan)
        try:
            with timed("put"):
                if self._worker is None:
                    self._worker = rma.Worker()
                    self._peers = [self._worker.connect(address) for address in self._told(self._worker.address)]
                with self._worker.register(data[place].copy()) as mine, self._worker.register(into) as room:
                    theirs = self._peers[to].open(self._told(room.descriptor)[to])
                    put = self._peers[to].put(mine, theirs, notify=b"%d" % number)
                    found = self._worker.wait_notification(TRIAL.timeout)
                    put.Wait()
                    assert found.data == b"%d" % number, (number, found)
                    assert np.array_equal(into, data[source]), (number, count, source)
                    self.comm.Barrier()
        except UCCHError as error:  # errors of transfers do not name ranks
            raise type(error)(f"put to rank {to}: {error}") from error

    @staticmethod
    def _memory(values):
        """Values in memory from which messages are sent."""
        if not TRIAL.gpu:
            return values
        from arrays import Array

        return Array(values.size, values.dtype).set(values)

    def _teams(self, number):
        FAULT.reach("teams", number)
        rng = random.Random(f"{TRIAL.seed} teams {number}")
        colours = [rng.randrange(2) for _ in self.members]
        mine = colours[self.members.index(self.me)] if number % 2 else 0
        members = [m for m, colour in zip(self.members, colours, strict=True) if colour == mine or not number % 2]
        with timed("teams"):
            part = self.comm.Split(mine) if number % 2 else self.comm.Dup()
        self._one("teams", 100 + number, part, members)
        FAULT.reach("free", number)
        with timed("free"):
            part.Free()

    def work(self):
        for number in _count("collective", 3, 40):
            self._one("collective", number)
        for number in _count("message", 2, 30):
            self._messages(number)
        for number in _count("partitioned", 2, 30):
            self._partitioned(number)
        for number in _count("put", 1, 30):
            self._put(number)
        for number in range(4 if TRIAL.moment in ("teams", "free") else 1):
            self._teams(number)

    def _well(self, what):
        """True if the operation raised no error; tells the other ranks about an error."""
        try:
            what()
        except AssertionError as error:
            LOG.say("WRONG", error)
        except (UCCHError, MemoryError, OSError, RuntimeError) as error:
            FAULT.relent()
            LOG.say("answer", f"{type(error).__name__}: {error}")
            if TRIAL.exchange == "mpi" or (RANK in TRIAL.lost and not FAULT.is_to_come()):
                raise
            self.comm.Revoke()
            return False
        return True

    def run(self):
        well, vain = self._well(self.work), 0
        while TRIAL.exchange != "mpi" and not self._agreed(well):
            FAULT.reach("shrink")
            with timed("shrink"):
                old, self.comm = self.comm, self.comm.Shrink()
            vain += self.comm.size == old.size
            old.Free()
            self._generation += 1
            LOG.say("shrunk", self.comm.size)
            if vain == IN_VAIN and TRIAL.fault in ("memory", "descriptors") and RANK in TRIAL.victims:
                raise MemoryError(f"rank {RANK} was out of them as libucp connected it, and leaves")
            well = self._well(self._go_on)
        LOG.say("right", f"{len(self.members)}")

    def _agreed(self, well):
        """True if no rank has failed or died."""
        LOG.say("agrees", int(well))
        try:
            with timed("agree"):
                return self.comm.Agree(int(well)) == 1
        except ucc_hetero.PeerError as error:
            LOG.say("heard", error)
            return False

    def _go_on(self):
        found = np.empty(self.comm.size, "i8")
        self.comm.Allgather(np.array([self.me]), found)
        self.members = found.tolist()
        for number in _count("after", 6, TURN):
            self._one("after", TURN * self._generation + number)


def by_store():
    """Make the communicator over a store."""
    from ucc_hetero.bootstrap import exit as at_exit
    from ucc_hetero.bootstrap.storecomm import StoreComm
    from ucc_hetero.native.libraries import load

    store = Store(FOLDER / "store", TRIAL.host(RANK))
    load()
    at_exit.register()
    first = StoreComm.first(store, RANK, range(TRIAL.size), TRIAL.size, TRIAL.timeout)
    return ucc_hetero.Communicator._adopt(first)


def main():
    import mpi4py

    mpi4py.rc.initialize = TRIAL.exchange != "store"  # as in torch's backend
    if TRIAL.gpu:
        os.environ["PMI_RANK"] = str(RANK)  # a job that mpirun did not start
        import arrays  # noqa: F401  it chooses the vendor

        del os.environ["PMI_RANK"]
    from mpi4py import MPI  # noqa: F401

    try:
        job = Job(by_store if TRIAL.exchange == "store" else ucc_hetero.Communicator)
        job.run()
    except BaseException as error:
        FAULT.relent()
        LOG.say("raises", f"{type(error).__name__}: {error}")
        raise
    FAULT.reach("finalize")


main()
