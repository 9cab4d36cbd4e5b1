"""State shared by threads and by import finders; waits that yield the core; memory that stays alive."""

import _thread
import os
import sys
import threading
import time
import weakref
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
from processes import in_child, interrupted_at, python

from ucc_hetero import Communicator
from ucc_hetero.bindings import quarantine
from ucc_hetero.bindings.handle import locked
from ucc_hetero.bootstrap import exit as end
from ucc_hetero.bootstrap import faults
from ucc_hetero.bootstrap.process import Process
from ucc_hetero.calls import closing
from ucc_hetero.calls.arguments import CallSpec, root_of
from ucc_hetero.calls.persistent import idle
from ucc_hetero.calls.request import Request, dropped_calls, reap, under_way
from ucc_hetero.errors import CollectiveTimeout
from ucc_hetero.native import threaded, waiting
from ucc_hetero.native.threaded import ThreadedCall, Watchdog
from ucc_hetero.native.waiting import progress_until
from ucc_hetero.p2p import probe
from ucc_hetero.p2p.messages import Messages


def test_finders_behind_ours_are_asked_for_mpi():
    """Python walks its live list of finders: if a finder removes itself, the next one is skipped."""
    python("""
import importlib.util, sys
import ucc_hetero
asked = []
class Behind:
    def find_spec(self, name, path=None, target=None):
        asked.append(name)
place = next(i for i, finder in enumerate(sys.meta_path) if type(finder).__module__.startswith("ucc_hetero"))
sys.meta_path.insert(place + 1, Behind())
importlib.util.find_spec("mpi4py.MPI")
assert "mpi4py.MPI" in asked, asked
""")


def test_things_are_kept_wherever_ctrl_c_comes():
    """Memory that libucp or MPI writes to is kept, and memory of ended operations is released at the next check, at the
    latest."""

    class Thing:
        pass

    at, interrupted = 0, True
    while interrupted:
        owner, over = Thing(), [False, True, False, True, False]
        things = [Thing() for _ in over]
        alive = [weakref.ref(thing) for thing in things]
        for thing, ends in zip(things, over, strict=True):
            quarantine.keep(thing, partial(bool, ends), owner)
        del thing, things
        interrupted = interrupted_at(at, partial(quarantine.release, owner))
        assert [ref() is not None for ref in alive[::2]] == [True] * 3, f"let go by Ctrl-C at {at}"
        assert quarantine.release(owner) == 3 and [ref() is not None for ref in alive] == [not ends for ends in over]
        at += 1
    assert at > 5 and quarantine.release(Thing()) == 0, "nothing is kept for another owner"


def test_things_are_there_while_a_thread_looks_at_them():
    """Another thread counts them meanwhile, without using them: one thread at a time may use MPI's requests."""
    owner, looks, goes_on, asked = threading.Event(), threading.Event(), threading.Event(), []

    def over():
        asked.append(threading.get_ident())
        looks.set()
        return not goes_on.wait(20)

    kept = threading.Event()
    quarantine.keep(kept, over, owner)
    thread = threading.Thread(target=quarantine.release, args=(owner,))
    thread.start()
    assert looks.wait(20)
    assert quarantine.release(owner) == 1
    goes_on.set()
    thread.join()
    assert asked == [thread.ident] and quarantine.release(owner) == 1


def test_ends_of_dropped_requests_are_taken_wherever_ctrl_c_comes():
    """Each end is handled once, or given up if Ctrl-C interrupted it; none counts as in progress afterwards."""
    at, interrupted = 0, True
    while interrupted:
        taken = []
        for number in range(3):
            op, keep = idle()
            Request(op, keep, lambda *_, take=taken.append, number=number: take(number)).Free()
        interrupted = interrupted_at(at, reap)
        reap()
        assert not (under_way or dropped_calls) and 2 + (not interrupted) <= len(taken) == len({*taken}), at
        at += 1
    assert at > 9


def test_ranks_and_tags_may_be_floats_that_are_integers():
    """As in mpi4py: programs divide numbers of ranks."""
    four = SimpleNamespace(size=4, rank=0, null=-2, any_source=-1, any_tag=-1)
    assert Messages.check(four, "dest", 1.0, 7.0) == (1, 7)
    assert [type(word) for word in Messages.check(four, "source", -1.0, -1.0)] == [int, int]
    assert root_of(CallSpec("bcast", None, None, None, 3.0), 4, 0) == 3
    for peer, tag in ((1.5, 0), (1, 0.5), ("1", 0), (float("inf"), 0), (float("nan"), 0)):
        with pytest.raises(TypeError, match="rank 0 must be integers"):
            Messages.check(four, "dest", peer, tag)
    with pytest.raises(TypeError, match="is not an integer"):
        root_of(CallSpec("bcast", None, None, None, 0.5), 4, 0)


def test_plans_are_shown_while_other_threads_make_calls():
    used = {}

    class Choice:
        algorithm = "flat"

        @property
        def fragments(self):
            """Another thread makes a call in between."""
            used[f"call {len(used)}"] = Choice(), "model", None
            return 1

    used["bcast"] = Choice(), "model", None
    comm = Communicator.__new__(Communicator)
    run = SimpleNamespace(
        topology=SimpleNamespace(describe=lambda: "two islands"),
        members=SimpleNamespace(rings=lambda: (), fabric=lambda: ()),
        used=used,
        beside=[{"allgather": (Choice(), "user", None)}],
    )
    comm._runner = run
    assert comm.plan_summary().splitlines() == [
        "two islands", "bcast: flat (model)", "allgather: flat (user)",
    ]  # fmt: skip


def test_a_probe_that_waits_naps(monkeypatch):
    """A thread that only polls takes the core from the sending rank."""
    looks = []
    monkeypatch.setattr(probe, "probe", lambda *_, **__: looks.append(0))
    board = SimpleNamespace(hosts=[], cuts_off=lambda source, waited: False)
    state = SimpleNamespace(board=board)
    messages = SimpleNamespace(rank=3, timeout=0.3, is_gone=lambda source: False, any_source=-1, state=state)
    messages.check = lambda what, *place: place
    with pytest.raises(CollectiveTimeout, match="rank 3: probe for source 1, tag 7"):
        probe.mprobe(messages, 1, 7, None)
    assert 1 < len(looks) < 2000


# --- memory that MPI may still write to stays alive, however the wait for it ends -------------------------------------


class Failing:
    """An exchange over MPI that fails when it is polled, as after a rank's death."""

    def __init__(self):
        self.memory = []

    def Iallreduce(self, mine, worst, op):
        self.memory += [weakref.ref(mine), weakref.ref(worst)]
        return self

    def Test(self):
        raise OSError("a process has failed")


def test_at_the_end(monkeypatch):
    mpi = Failing()
    monkeypatch.setattr(faults, "lacking", lambda comm: True)
    job = type("Job", (), {"comm": mpi, "index": 0})
    assert end._together(job) == end._LOST
    assert len(mpi.memory) == 2 and all(each() is not None for each in mpi.memory)


def test_of_a_wait_that_is_given_up():
    class Memory:
        pass

    memory = Memory()
    found = weakref.ref(memory)
    with pytest.raises(KeyboardInterrupt), quarantine.unless_over((memory,)):
        raise KeyboardInterrupt
    del memory
    assert found() is not None


# --- waits during which progress is made, and blocking calls with a timeout in separate threads -----------------------


def gone():
    raise RuntimeError("the peer is gone")


def test_until_it_is_done_or_hopeless():
    for how in ({}, {"hopeless": lambda: False}):
        turns = count()
        assert progress_until(lambda: next(turns) == 5, **how) and next(turns) == 6  # noqa: B023
    turns = count()
    assert not progress_until(lambda: False, hopeless=lambda: next(turns) == 5) and next(turns) == 6
    assert progress_until(lambda: True, 0.02, lambda: True)
    assert progress_until(lambda: True, -1.0) and not progress_until(lambda: False, -1.0)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        progress_until(lambda: False, hopeless=gone)


def test_looks_are_apart_and_none_at_first(monkeypatch):
    seconds, looks = [0.0], []

    def asked():
        seconds[0] += 1.0
        return False

    def hopeless():
        looks.append(seconds[0])
        return len(looks) == 3

    clock = SimpleNamespace(monotonic=lambda: seconds[0], sleep=lambda nap: None)
    monkeypatch.setattr(waiting, "time", clock)
    assert not progress_until(asked, hopeless=hopeless, spin=10.0, apart=4.0)
    assert looks == [10.0, 14.0, 18.0]
    looks.clear()
    assert not progress_until(asked, 5.0, hopeless, apart=4.0)
    assert len(looks) == 2 and seconds[0] == 24.0


def test_a_limit_holds_while_another_thread_has_the_lock():
    """For example a thread that waits inside a library for a peer that never comes."""
    taken, over = threading.Event(), threading.Event()
    holder = ThreadedCall(lambda: locked(lambda: (taken.set(), over.wait())))
    taken.wait()
    try:
        assert not progress_until(lambda: False, 0.01)
    finally:
        over.set()
        assert holder.ended(600)


def test_calls_aside():
    thread = ThreadedCall(threading.get_ident)
    assert thread.ended(600) and thread.ended() and thread.result() != threading.get_ident()
    failed = ThreadedCall(gone)
    assert failed.ended(600)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        failed.result()
    go = threading.Event()
    late = ThreadedCall(go.wait)
    assert not late.ended(0.01)
    go.set()
    assert late.ended(600) and late.result()


def test_a_call_that_goes_on_for_too_long():
    """Its watchdog reports it; calls that have ended are not reported."""
    told = []
    bites = threading.Event()
    dog = Watchdog(lambda text: (told.append(text), bites.set()))
    assert dog.over(lambda: 5, 0.0, "short") == 5
    with pytest.raises(RuntimeError, match="the peer is gone"):
        dog.over(gone, 0.0, "failed")
    assert dog.over(lambda: bites.wait(600), 0.0, "long") and set(told) == {"long"}


def test_a_thread_that_has_ended_its_call_is_given_the_next_one(monkeypatch):
    """A child process has none of the threads, and starts one."""
    first = ThreadedCall(threading.get_ident)
    while not threaded._idle:
        os.sched_yield()
    with monkeypatch.context() as patched:
        patched.setattr(_thread, "start_new_thread", None)
        again = ThreadedCall(threading.get_ident)
        assert again.ended(600) and again.result() == first.result()
    while not threaded._idle:
        os.sched_yield()

    def starts_one():
        assert ThreadedCall(threading.get_ident).ended(600)

    in_child(starts_one)


def test_a_thread_that_never_begins_is_not_waited_for(monkeypatch):
    """For example if there is no memory for its first frame; threading.Thread.start() then never returns."""
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: 0)
    monkeypatch.setattr(threaded, "_idle", [])
    assert not ThreadedCall(time.time).ended(0.01)


def test_at_pythons_end_the_call_is_made_here(monkeypatch):
    """Python 3.12 starts no threads for functions of ``atexit``; any other reason is an error."""

    def refuse(*_):
        raise RuntimeError(refusals.pop())

    refusals = ["can't start new thread", "can't create new thread at interpreter shutdown"]
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    monkeypatch.setattr(threaded, "_idle", [])
    assert ThreadedCall(threading.get_ident).result() == threading.get_ident()
    with pytest.raises(RuntimeError, match="start new thread"):
        ThreadedCall(time.time)


def test_a_rank_leaves_once(monkeypatch):
    """Ctrl-C ended its first Free: the other ranks have taken part in one exchange, and will not in another."""
    asked = []

    class Interrupted:
        def Iallreduce(self, *arrays, op):
            asked.append(arrays)
            return self

        def Test(self):
            if looks.pop():
                raise KeyboardInterrupt
            return True

    looks = [False, True]
    monkeypatch.setattr(closing, "lib", SimpleNamespace(ucch_board_revoked=lambda board: False))
    ours = SimpleNamespace(
        mpi=Interrupted(), board=SimpleNamespace(native=None, shows_all=False), rank=0, _leaving=(), _hopeless=bool
    )
    with pytest.raises(KeyboardInterrupt):
        closing.Closing.meet(ours, 5.0)
    assert closing.Closing.meet(ours, 5.0) and len(asked) == 1


def test_threads_that_send_first_at_the_same_time_have_one_connection():
    """With two connections messages would overtake each other."""
    made = []
    connects, goes_on = threading.Event(), threading.Event()

    def connect(address):
        made.append(address)
        connects.set()
        goes_on.wait()
        return address

    here = object.__new__(Process)
    here.connections, here._connecting, here.worker = {}, threading.Lock(), SimpleNamespace(connect=connect)
    peer = SimpleNamespace(process="peer", address=b"there")
    threads = [threading.Thread(target=here.connection, args=(peer, 0, 1)) for _ in range(2)]
    threads[0].start()
    connects.wait()
    threads[1].start()
    while (frame := sys._current_frames().get(threads[1].ident or 0)) is None or (
        frame.f_code is not Process.connection.__code__ and len(made) < 2
    ):
        pass
    goes_on.set()
    for thread in threads:
        thread.join()
    assert made == [b"there"]
