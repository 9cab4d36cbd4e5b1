"""Bootstrap of ranks: what must agree, ids of communicators, and NCCL's first call."""

import math
import os
import random
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import combinations, count
from threading import Lock
from types import SimpleNamespace

import pytest

from ucc_hetero import UCCHError
from ucc_hetero.bindings import oob
from ucc_hetero.bindings.handle import locked
from ucc_hetero.bindings.ucc import MemType
from ucc_hetero.bootstrap import agreement, faults, meeting, process, timely
from ucc_hetero.bootstrap.agreement import apply_settings, bridge_settings, judge, judge_contexts
from ucc_hetero.bootstrap.board import salt
from ucc_hetero.bootstrap.known import MOST_NUMBERS, Known
from ucc_hetero.bootstrap.links import links_among, neighbours
from ucc_hetero.bootstrap.meeting import Bids, Seat, all_ready
from ucc_hetero.bootstrap.process import MOST_SPARE, SPIN_ROUNDS, Job, Process, spin_rounds
from ucc_hetero.bootstrap.settings import limit_text
from ucc_hetero.bootstrap.teams import Teams
from ucc_hetero.errors import AgreementError, CollectiveError, CollectiveTimeout, DeviceError, LibraryError, PeerError
from ucc_hetero.machine.discover import HostIdentity, host_cores
from ucc_hetero.machine.facts import Facts
from ucc_hetero.native.libraries import ffi, lib
from ucc_hetero.planner.collectives import ROWS, Call
from ucc_hetero.planner.plan import Step
from ucc_hetero.planner.select import Choice, make_plan
from ucc_hetero.planner.topology import Topology
from ucc_hetero.types import DTYPES, OPS

HERE = HostIdentity("one", "boot-1", "ipc:1", "pid:1")
THERE = replace(HERE, hostname="two", boot_id="boot-2")
FACTS = Facts(
    process="p", package="0.1.0", ucc="1.4.0", ucx="1.22.0", memory_types=("host",), settings=(), byteorder="little",
    host=HERE, vendor="host", device=0, address=b"", transports=("cma", "self", "sysv", "tcp"),
)  # fmt: skip


def job(*changes):
    return [replace(FACTS, **change) for change in changes]


#: What differs -> the ranks, and words of the refusal; no words if they are accepted.
AGREEMENT = {
    "nothing": (job({}, {}, {}), []),
    "releases of ucx": (job({}, {"ucx": "1.22.1"}), []),
    "networks but one": (job({}, {"host": THERE, "transports": ("self", "tcp", "rc_mlx5")}), []),
    "transports of a node": (job({"transports": ("self", "cma")}, {"transports": ("self", "sysv")}), []),
    "ucc": (job({}, {}, {"ucc": "1.6.0"}), ["ucc:", "ranks 0, 1  1.4.0", "rank 2      1.6.0", "UCCH_UCC_LIB"]),
    "ucx": (job({}, {"ucx": "1.18.0"}), ["ucx:", "1.18", "UCCH_UCX_DIR"]),
    "package": (job({}, {"package": "0.2.0"}), ["package:", "0.2.0", "install the same"]),
    "algorithms": (
        job({}, {"algorithms": "allreduce@own"}), ["algorithms:", "allreduce@own", "register the same algorithms"],
    ),
    "byte order": (job({}, {"byteorder": "big"}), ["byteorder:", "rank 1"]),
    "settings": (
        job({}, {"settings": (("UCC_TLS", "ucp"),)}), ["UCC_TLS:", "rank 0  (unset)", "rank 1  ucp", "-x NAME"],
    ),
    "host memory": (job({}, {"memory_types": ("cuda",)}), ["rank 1 cannot move host memory"]),
    "networks": (
        job({"transports": ("self", "rc_mlx5")}, {"host": THERE}),
        ["network transports:", "rank 0  rc_mlx5", "rank 1  tcp", "UCX_TLS"],
    ),
    "much": (
        job({}, {"ucc": "1.6.0", "package": "9", "settings": (("UCC_CLS", "hier"),)}), ["ucc:", "package:", "UCC_CLS:"],
    ),
    "one of many": (job(*({"ucc": "1.6.0"} for _ in range(1000)), {}), ["…"]),
}  # fmt: skip


@pytest.mark.parametrize("what", AGREEMENT)
def test_what_ranks_must_agree_in(what):
    """Every difference is listed, but not every rank."""
    ranks, words = AGREEMENT[what]
    with pytest.raises(AgreementError) if words else nullcontext() as refused:
        judge(ranks)
    said = str(refused.value) if refused else ""
    assert all(word in said for word in words) and len(said) < 1000


def test_contexts_without_connections_are_refused():
    bridge = {"bridge": True}
    with pytest.raises(AgreementError) as refused:
        judge_contexts([bridge | {"native": True}, bridge, bridge | {"native": False}, {"bridge": False}])
    assert [line[:40] for line in str(refused.value).splitlines()[1:3]] == [
        "  rank 3: libucc has made the bridge con", "  rank 2: libucc has made the native con"
    ]  # fmt: skip


def test_bridge_settings_win_and_native_ones_give_way_to_the_user():
    environ = {"UCC_TLS": "ucp", "UCCHB_UCC_TLS": "all"}
    apply_settings("1.4.0", environ)
    assert environ["UCCHB_UCC_TLS"] == "ucp,self", "the bridge is forced"
    assert environ["UCCHN_UCC_TLS"] == "ucp", "the user's setting reaches the native library"
    assert environ["UCC_TLS"] == "ucp", "nobody else's variables are touched"
    assert agreement.steering({"UCCH_TUNE": " ", "UCC_CLS": ""}) == (("UCC_CLS", ""),), "an empty one of ours is none"


@pytest.mark.parametrize("tls, used", [
    ("", True), ("^mlx5,sharp", True), ("all", True), ("ucp,nccl", True), ("^cuda,nccl", False), ("ucp,self", False),
])  # fmt: skip
@pytest.mark.parametrize("name", ["UCC_TLS", "UCC_CL_BASIC_TLS"])
def test_a_vendors_library_that_settings_shut_out(name, tls, used):
    environ = {name: tls} if tls else {}
    apply_settings("1.4.0", environ)
    assert agreement.native_uses("nccl", environ) == used


@pytest.mark.parametrize(
    ("version", "knomial"), [("1.4.0", False), ("1.7.2", False), ("1.8.0", True), ("1.10.0", True)]
)
def test_no_ring_without_a_topology_where_libucc_takes_its_order_from_it(version, knomial):
    settings = bridge_settings(version)
    assert ("allgatherv:0-inf:@knomial" in settings["UCC_TL_UCP_TUNE"]) is knomial
    assert settings["UCC_TL_UCP_USE_TOPO"] == ("y" if knomial else "n")


NONE = bytes(512)


@pytest.fixture(autouse=True)
def own_numbers(monkeypatch):
    """Start without any communicator."""
    monkeypatch.setattr(meeting, "_ids", bytearray(512))
    monkeypatch.setattr(meeting, "_last", [-1])
    monkeypatch.setattr(process, "process", lambda: SimpleNamespace(discard=lambda number: None))


def taken(*numbers):
    bits = bytearray(512)
    for number in numbers:
        bits[number >> 3] |= 1 << (number & 7)
    return bytes(bits)


def claimed(everyone, *used):
    """Return the id on which ranks agree; ``used`` are the ids in use, if the ranks have to ask."""

    def ask(mine):
        assert used, "they need not"
        return [mine, *used]

    bids = Bids(len(everyone))
    for words, (last, next_used) in zip(bids.all, everyone, strict=True):
        words.ready, words.last, words.next_used = lib.UCCH_GOES_ON, last, next_used
    assert bids.evaluate() and bids.agree(ask)
    meeting.claim_number(bids._claimed)
    return bids._claimed


def test_numbers_of_communicators():
    assert [claimed([meeting.numbers_taken()]) for _ in range(20)] == list(range(20))
    # Messages of the last communicator with this id may still be in flight.
    meeting.release_number(3)
    assert claimed([meeting.numbers_taken()]) == 20
    # The last id of every rank counts, and so do the ids in use on every rank.
    assert claimed([meeting.numbers_taken(), (30, 4096)]) == 31
    assert claimed([meeting.numbers_taken(), (9, 32)], taken(32, 33)) == 34
    meeting.claim_number(4095)
    assert claimed([meeting.numbers_taken()], NONE) == 4096 + 3
    assert meeting.numbers_taken() == (4099, 4096 + 4), "the next one is in use here"
    assert claimed([meeting.numbers_taken(), (1, 4096)], taken(21)) == 4096 + 22
    assert [claimed([meeting.numbers_taken()]) for _ in range(8)] == list(range(4096 + 23, 4096 + 31))
    with pytest.raises(UCCHError, match="4096 communicators"):
        claimed([meeting.numbers_taken()], b"\xff" * 512)


def test_what_follows_from_what_ranks_say_that_make_a_communicator():
    """Their number, ranks of a color ordered by key, and the spare teams that all of them have, in the first rank's
    order."""
    for _ in range(300):
        size = random.randint(1, 9)
        every = ffi.new("ucch_bid[]", size)
        for words in every:
            words.ready = random.choice((lib.UCCH_GOES_ON,) * 9 + (lib.UCCH_READY,) + (0,) * (random.random() < 0.1))
            words.last, words.next_used = random.randint(-1, 50), random.randint(40, 90)
            words.color, words.key = random.choice((0, 1, -32766)), random.choice((-(1 << 31), 3, (1 << 31) - 1))
            offered = random.sample(range(1 << 40, (1 << 40) + 35), random.randint(25, lib.UCCH_SPARES))
            words.spares, words.spare[0 : len(offered)] = len(offered), offered
        ready = {words.ready for words in every}
        following = 1 + max(words.last for words in every)
        if ready != {lib.UCCH_GOES_ON}:
            expected = lib.UCCH_NOT_READY if 0 in ready else lib.UCCH_NO_MORE
        else:
            expected = following if all(following < words.next_used for words in every) else lib.UCCH_ASK
        assert lib.ucch_bids_claim(every, size) == expected
        mine = random.randrange(size)
        same = [(every[r].key, r) for r in range(size) if every[r].color == every[mine].color]
        ranks, common = ffi.new("int[]", [-9] * size), ffi.new("int64_t[]", [-9] * lib.UCCH_SPARES)
        count = lib.ucch_bids_ranks(every, size, mine, ranks)
        assert list(ranks)[:count] == [r for _, r in sorted(same)]
        spare = [list(every[r].spare)[: every[r].spares] for r in list(ranks)[:count]]
        count = lib.ucch_bids_spare(every, ranks, count, common)
        assert list(common)[:count] == [each for each in spare[0] if all(each in others for others in spare)]


def step(link, ranks, kind="allreduce"):
    found = object.__new__(Step)
    for name, value in (("link", link), ("ranks", ranks), ("kind", kind)):
        object.__setattr__(found, name, value)
    return found


def teams_of(
    job, members, claimed, spare = (), *, rank = 0,
    main = (), plain = True, rules = (),
):  # fmt: skip
    """Return the teams of a new communicator; ``members`` are its ranks in the job, which all have these ``spare``
    teams."""
    job.drop_spare = partial(Job.drop_spare, job)
    known = SimpleNamespace(
        job=job, members=tuple(members), kind=(tuple(members), rules), rank=rank, far=False,
        hosts=[0] * len(members), main=list(main), tuning=SimpleNamespace(plain=plain), page=lambda number: None,
    )  # fmt: skip
    known.in_context = partial(Known.in_context, known)
    known.makes_alone = partial(Known.makes_alone, known)
    return Teams(Seat(known, claimed, spare, 5.0), 5.0)


@pytest.fixture
def room():
    """Set the free bytes of the device."""
    return [2 << 30]


@pytest.fixture
def teams(room, monkeypatch):
    notes = []
    job = SimpleNamespace(vendors_library=lambda memory: False, spare={})
    found = teams_of(job, [10, 11, 12, 13], 1)
    monkeypatch.setattr(found, "get", lambda ranks, link: notes.append(("get", ranks, link)))
    monkeypatch.setattr(found, "_all_ready", lambda places, ready, *_: notes.append(("met", places, ready)) or ready)
    monkeypatch.setattr("ucc_hetero.bootstrap.teams.free_memory", lambda: room[0])
    return found, notes


def test_ranks_meet_once_before_nccl_does(teams):
    made, notes = teams
    steps = [step("native", (0, 1)), step("bridge", (0, 2)), step("native", (0, 1)), step("local", (0,))]
    made.prepare(steps, int(MemType.CUDA))
    assert notes == [
        ("get", (0, 1), "native"), ("met", [10, 11], True), ("get", (0, 2), "bridge"), ("get", (0, 1), "native"),
    ]  # fmt: skip
    notes.clear()
    made.prepare(steps, int(MemType.CUDA))
    assert not [note for note in notes if note[0] == "met"]


@pytest.mark.parametrize("fails", ["here", "there", ""])
def test_a_vendors_library_begins_on_all_ranks_or_none(teams, monkeypatch, fails):
    """The broadcast that only NCCL may run starts once it can start on every rank; its request is finalized only
    afterwards."""
    made, notes = teams
    request = SimpleNamespace(
        post=partial(notes.append, "post"), wait=lambda *_: notes.append("wait"), close=partial(notes.append, "close")
    )
    refuse = failing(LibraryError("ucc_collective_init", -6, "no resource"))
    team = SimpleNamespace(collective=refuse if fails == "here" else lambda *_, **__: request)
    monkeypatch.setattr(made, "get", lambda ranks, link: team)
    met = iter([True, not fails])
    monkeypatch.setattr(made, "_all_ready", lambda places, ready, *_: ready and next(met))
    made.job.vendors_library = lambda memory: True
    made.job.word = SimpleNamespace(handle=1 << 20)
    with pytest.raises(DeviceError, match=r"ranks \[0, 1\].*NCCL_DEBUG=WARN") if fails else nullcontext() as refused:
        made.prepare([step("native", (0, 1))] * 2, int(MemType.CUDA))
    assert notes == ([] if fails else ["post", "wait", "close"])
    assert not refused or ("on another" in str(refused.value)) == (fails == "there")


def test_broadcasts_on_devices_are_the_vendors_librarys():
    environ = {"UCC_TL_CUDA_TUNE": "inf"}
    apply_settings("1.4.0", environ)
    for _ in range(2):
        agreement.leave_broadcasts("cuda", environ)
    assert environ["UCCHN_UCC_TL_UCP_TUNE"] == agreement.NATIVE_SETTINGS["UCC_TL_UCP_TUNE"] + "#bcast:cuda:0"
    assert environ["UCCHN_UCC_TL_CUDA_TUNE"] == "inf", "the user's own"


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.fixture
def bridge(monkeypatch):
    """Teams of rank 1 in a job of two ranks whose bridge has not been created."""
    monkeypatch.setattr("ucc_hetero.bootstrap.teams.Turn", lambda _: nullcontext())
    job = SimpleNamespace(team_abandoned=False, spare={}, tried=set())
    return job, teams_of(job, [10, 11], 1, rank=1)


@pytest.mark.parametrize("joined", [False, True])
def test_a_team_that_is_late_says_whose_it_is(bridge, monkeypatch, joined):
    (job, found), late = bridge, failing(CollectiveTimeout("not finished"))
    job.bridge = SimpleNamespace(team=(lambda *_: None) if joined else late)
    monkeypatch.setattr(found, "_canary", late)
    with pytest.raises(CollectiveTimeout, match=r"rank 1: the bridge team of ranks \[0, 1\]: .* within 5 s"):
        found.get((0, 1), "bridge")
    assert job.team_abandoned


def test_no_team_is_made_where_one_was_given_up():
    """A context in which ranks have died stays usable: communicators without the dead ranks still create teams."""
    job = SimpleNamespace(rank=10, team_abandoned=False, stale=True, spare={})
    job.min_word = partial(Job.min_word, job)
    found = teams_of(job, [10], 1)
    assert found._all_ready([10], True) and not found._all_ready([10], False)
    job.team_abandoned = True
    with pytest.raises(CollectiveError, match=r"rank 0: a team .* was given up .* make a new one"):
        found._all_ready([10], True)


def test_a_process_has_teams_for_all_its_communicators(bridge):
    """libucc's default is 2,048 teams, and there are ids for 4,096 communicators with several teams each."""
    asked = []
    library = SimpleNamespace(context=lambda exchange, settings: asked.append(settings))
    ranks = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 2, named=lambda call: call())
    job = SimpleNamespace(process=SimpleNamespace(library=lambda prefix: library), comm=ranks)
    Job._context(job, "ANY", ranks, 1.0)
    most = 64 * int(asked[0]["TEAM_IDS_POOL_SIZE"])
    assert 2 * 8 * len(meeting._ids) <= most < 1 << 15

    full, found = bridge
    full.bridge = SimpleNamespace(team=failing(LibraryError("ucc_team_create_test", -5, "UCC_ERR_NO_RESOURCE")))
    with pytest.raises(CollectiveError, match=f"rank 1: the bridge team .* has {most} numbers .*: Free"):
        found.get((0, 1), "bridge")


def test_nobody_begins_where_a_rank_has_no_memory(teams, room, monkeypatch):
    """NCCL fails on that rank, and the other ranks wait for it for ever."""
    made, notes = teams
    room[0] = 5 << 20
    with pytest.raises(DeviceError, match=r"rank 0: .*ranks \[0, 1\], and 5 MiB are free"):
        made.prepare([step("native", (0, 1))], int(MemType.CUDA))
    assert notes[-1] == ("met", [10, 11], False)
    room[0] = 2 << 30
    monkeypatch.setattr(made, "_all_ready", lambda places, ready: False)
    with pytest.raises(DeviceError, match="another rank has less"):
        made.prepare([step("native", (0, 1))], int(MemType.CUDA))
    monkeypatch.setattr(made, "_all_ready", lambda places, ready: True)
    made.prepare([step("native", (0, 1))], int(MemType.CUDA))


def asked(exchange, late):
    """Return the status of an exchange when libucc asks for it, or for its end, and the exception raised there."""
    coll, request = ffi.new("ucc_oob_coll_t *"), ffi.new("void **")
    key, record = oob.oob_of(exchange, coll)
    source, target = ffi.new("char[]", 8), ffi.new("char[]", 16)
    status = coll.allgather(source, target, 8, coll.coll_info, request)
    if late:
        assert status == 0
        status = locked(coll.req_test, request[0])  # as libucc calls it: it releases the lock and takes it again
        coll.req_free(request[0])
    oob.forget(key)
    return status, type(record.failure)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_what_a_callback_of_libucc_raises_is_kept(kind, late):
    """A signal handler may run in a callback: its exception used to be printed, and lost to the caller."""
    fails = failing(kind("mine"))
    begin = (lambda *_: SimpleNamespace(test=fails)) if late else fails
    assert asked(SimpleNamespace(rank=0, size=2, begin=begin), late) == (-6, kind)


@pytest.mark.parametrize("late", [False, True])
def test_ctrl_c_as_libucc_calls_is_kept(late):
    """Python raises it when the callback is entered, before any of its lines can catch it."""

    def interrupts(frame, event, _):
        if event == "call" and frame.f_code.co_name == ("ucch_oob_test" if late else "ucch_oob_allgather"):
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupts)
    exchange = SimpleNamespace(rank=0, size=2, begin=lambda *_: SimpleNamespace(test=bool))
    assert asked(exchange, late) == (-6, KeyboardInterrupt)


def test_a_process_that_is_gone_before_the_first_message():
    """libucp cannot open the memory of a dead process: the error names that rank."""

    connect = failing(LibraryError("ucp_ep_create", -17, "UCS_ERR_SHMEM_SEGMENT"))
    process = SimpleNamespace(connections={}, _connecting=Lock(), worker=SimpleNamespace(connect=connect))
    with pytest.raises(PeerError, match=r"rank 3: rank 5 cannot be reached: ucp_ep_create failed: UCS_ERR_SHMEM"):
        Process.connection(process, job({})[0], 3, 5)
    assert not process.connections


def test_ranks_spin_that_have_a_core_each_though_they_are_bound_to_it():
    mine, every = os.sched_getaffinity(0), host_cores()
    os.sched_setaffinity(0, {min(every)})
    try:
        assert spin_rounds(len(every)) == SPIN_ROUNDS
        assert spin_rounds(len(every) + 1) == 0
    finally:
        os.sched_setaffinity(0, mine)


def test_an_error_names_the_limit_that_was_set(monkeypatch):
    """A torch group may have a shorter timeout than the default."""
    monkeypatch.setenv("UCCH_TIMEOUT", "5")
    assert [limit_text(seconds) for seconds in (5, 3.0)] == ["UCCH_TIMEOUT=5", "the limit was 3 s"]


@pytest.mark.parametrize("tls", ["ucp,self", "ucp", "^mlx5,sharp,cuda,shm"])
def test_which_teams_a_rank_makes_by_itself(monkeypatch, tls):
    """Teams of an island and of all ranks, if no rank has used the team's id before, such a team has been tested, and
    no libucc component exchanges more data between the ranks."""
    monkeypatch.setenv("UCCHN_UCC_TLS", tls)
    main = ((0, 1), "native"), ((0, 1, 2, 3), "bridge")
    asked = []
    context = SimpleNamespace(team=lambda places, *more: asked.append(more[-1]) or SimpleNamespace(ranks=tuple(places)))
    job = SimpleNamespace(native=context, bridge=context, island_index=range(4), tried=set(), spare={})
    monkeypatch.setattr(Teams, "_canary", lambda self, team, ranks, link: job.tried.add((link, ranks)))
    alone = tls != "^mlx5,sharp,cuda,shm"
    for claimed, number in ((7, 7), (8, 8), (MOST_NUMBERS, None)):
        made = teams_of(job, [0, 1, 2, 3], claimed, main=main)
        made.together = True
        for ranks, link in ((0, 2), "bridge"), *main:
            here = claimed == 8 and (ranks, link) in main and (alone or link == "bridge")
            assert made.by_itself(ranks, link) == here
            made.get(ranks, link)
        assert asked == [None, number, number]
        asked.clear()


def test_a_rank_without_a_device_keeps_to_components_for_host_memory():
    for users, found in (({}, "ucp,self"), ({"UCC_TLS": "^shm"}, "^shm")):
        environ = dict(users)
        agreement.keep_to_host_memory(environ)
        apply_settings("1.4.0", environ)
        assert environ["UCCHN_UCC_TLS"] == found
        assert agreement.native_makes_teams_alone(environ) == (not users)


@pytest.fixture
def left(monkeypatch):
    """Return a job of four ranks, and the list of its destroyed teams."""
    closed = []

    def create(self, ranks, link):
        return SimpleNamespace(close=lambda timeout: closed.append((self._seat.claimed, ranks, link)))

    monkeypatch.setattr(Teams, "_create", create)
    return SimpleNamespace(spare={}), closed


def test_a_communicator_leaves_its_teams_to_the_next_one_of_the_same_ranks(left):
    job, closed = left
    first = teams_of(job, [2, 0, 1], 1)
    team = first.get((0, 1, 2), "native")
    first.close()
    (number,) = job.spare
    for members, spare in (([2, 0, 1], ()), ([2, 0, 1], [2]), ([0, 1, 2], [number]), ([2, 0], [number])):
        other = teams_of(job, members, 3, spare)
        assert other.get((0, 1), "native") is not team
    other = teams_of(job, [2, 0, 1], 3, [number], rules=("allreduce",))
    assert other.get((0, 1, 2), "native") is not team, "its plans may need other teams"
    again = teams_of(job, [2, 0, 1], 4, [2, number])
    assert again.get((0, 1, 2), "native") is team and not closed
    assert teams_of(job, [2, 0, 1], 5, [number]).get((0, 1, 2), "native") is not team, "somebody else has them"
    again.close()
    (number,) = job.spare
    assert teams_of(job, [2, 0, 1], 6, [number]).get((0, 1, 2), "native") is team


def test_ranks_without_a_team_exchange_messages(left):
    """A broadcast of rank 1 to the leader of the other island, and inside its own."""
    made = teams_of(left[0], range(4), 1, rank=1)
    made.get((0, 1), "native")
    topology = Topology.group(["host"] * 4, [0, 0, 1, 1])
    plan = make_plan(topology, Call("bcast", 4, (8,), 1), Choice("tree"), 1)
    found = [(step.kind, step.ranks) for *_, step in made.fitted(plan).steps_of(1)]
    assert found == [("message", (1, 3)), ("bcast", (0, 1))]
    made.get((1, 3), "bridge")
    assert made.fitted(plan) is plan


def test_what_not_all_ranks_have_left_is_nobodys(left):
    """A rank that is late in freeing a communicator still uses its teams, or offers them with others."""
    job, closed = left
    late = teams_of(job, [2, 0, 1], 1)
    late.get((0, 1, 2), "native")
    late.close(together=False)
    assert not closed and not job.spare and not len(late)


def test_the_oldest_is_used_that_a_rank_has_offered_although_it_has_freed_more_since(left):
    """Otherwise a rank that destroyed it would use another team than the other ranks."""
    job, closed = left
    for number in range(MOST_SPARE + 1):
        made = teams_of(job, [0, 1], number)
        made.get((0, 1), "native")
        made.close()
    oldest = next(iter(job.spare))
    kept = job.spare[oldest].teams.copy()
    again = teams_of(job, [0, 1], 70, [oldest])
    assert again.get((0, 1), "native") in kept.values() and not closed


def test_the_oldest_spare_teams_are_destroyed(left):
    """Also all that hold device memory."""
    job, closed = left
    for number in range(MOST_SPARE + 2):
        made = teams_of(job, [0, 1], number)
        made.get((0, 1), "native")
        made.get((0, 1), "bridge")
        made.close()
    assert [number for number, *_ in closed] == [0, 0], "that takes a turn"
    made = teams_of(job, [0, 1], 70, plain=False)
    assert [number for number, *_ in closed] == [0, 0, 1, 1] and len(job.spare) == MOST_SPARE
    made.get((0, 1), "native")
    made.close()
    assert closed[4:] == [(70, (0, 1), "native")]


# --- ranks of several hosts: control connections, and numbers of calls -----------------------------------------------


def reached(hosts, lost):
    """Return the ranks that receive news from the first living one."""
    found, links = {next(r for r in range(len(hosts)) if r not in lost)}, links_among(hosts)
    while more := {s for r in found for s in links[r]} - found - lost:
        found |= more
    return found


@pytest.mark.parametrize("count", range(1, 40))
def test_neighbours_are_mutual_and_few(count):
    every = [neighbours(count, place) for place in range(count)]
    assert all(place in every[other] for place in range(count) for other in every[place])
    assert all(place not in every[place] and len(every[place]) <= 2 * count.bit_length() for place in range(count))
    assert count == 1 or all(every)


def test_connections_are_mutual_and_reach_every_rank_but_those_that_are_lost():
    rng = random.Random(7)
    for _ in range(200):
        hosts = [rng.randrange(rng.randint(2, 9)) for _ in range(rng.randint(2, 24))]
        hosts = tuple(sorted(set(hosts)).index(host) for host in hosts)
        links = links_among(hosts)
        for rank, linked in enumerate(links):
            assert all(rank in links[other] for other in linked), (hosts, rank)
            assert neighbours(max(hosts) + 1, hosts[rank]) <= {hosts[other] for other in linked}, (hosts, rank)
        assert len(reached(hosts, set())) == len(hosts), hosts
        one = rng.randrange(len(hosts))
        assert len(reached(hosts, {one})) == len(hosts) - 1, (hosts, one)


@pytest.mark.parametrize("names", [ROWS, DTYPES, OPS], ids=["collective", "datatype", "operation"])
@pytest.mark.parametrize("call", ["{} float32[7] SUM root=2", "reduce {}[7] SUM root=2", "reduce float32[7] {} root=2"])
def test_one_name_that_differs_is_enough(call, names):
    assert all(salt(call.format(one)) != salt(call.format(two)) for one, two in combinations(names, 2))


def test_numbers_that_differ_are_enough_and_salts_well_spread():
    for number in (1, 2, 1000, 1 << 20, 1 << 40):
        for more in (*range(1, 1021), number):
            assert salt(f"bcast int8[{number}] root=0") != salt(f"bcast int8[{number + more}] root=0")
            assert salt(f"bcast int8[4] root={number}") != salt(f"bcast int8[4] root={number + more}")
    found = [salt(f"allgatherv float64[{n},{n * n},3]") for n in range(4000)]
    assert max(found) < 1021 and len(set(found)) > 900


def test_an_exchange_that_was_given_up_meanwhile_ends(monkeypatch):
    """Open MPI was seen to continue it for ever on a rank that had not learned of the death."""
    asked = count()
    never = SimpleNamespace(Test=lambda: False)
    ranks = SimpleNamespace(
        Get_rank=lambda: 1, Get_size=lambda: 2, Get_attr=lambda _: 9, Improbe=lambda tag: None,
        Iallgather=lambda *_: never, Is_revoked=lambda: next(asked) > 2, dead=list,
    )  # fmt: skip
    monkeypatch.setattr(faults, "mpi_lacks", lambda: "")
    monkeypatch.setattr(timely, "largest_tag", lambda: 9)
    with pytest.raises(PeerError, match=r"rank 1: a test: another rank died, or has given this communicator up"):
        timely.Timely(ranks, 60.0, "a test").allgather(1)


def test_without_a_limit_nothing_is_late(monkeypatch):
    """Neither an MPI call nor a rank that is late for Create_group."""
    limits = []
    ranks = timely.Timely(SimpleNamespace(), 0.0, "a test")
    monkeypatch.setattr(faults, "mpi_lacks", lambda: "mpirun ends the job")
    monkeypatch.setattr(timely._watchdog, "over", lambda call, seconds, what: limits.append(seconds) or call())
    assert ranks.at_once(lambda: 5) == 5
    job = SimpleNamespace(
        rank=1, send_word=lambda *_: None, recv_word=lambda place, tag, seconds, poll_hook: limits.append(seconds) or 1
    )
    job.min_word = partial(Job.min_word, job)
    known = SimpleNamespace(job=job, rank=1, members=(0, 1))
    assert all_ready(known, 3, [0, 1], 0, ranks, True)
    assert limits == [math.inf, math.inf]


def test_ranks_that_cannot_be_heard_are_lost_and_refuse_nothing():
    """A refused call counts as the caller's mistake, after which all ranks are assumed to be alive."""

    def send(*_):
        raise ConnectionError("the store is out of reach")

    teams = Teams.__new__(Teams)
    teams.rank, teams.timeout, teams.poll_hook, teams._seat = 1, 1.0, None, (SimpleNamespace(id=0))
    teams.job = Job.__new__(Job)
    teams.job.rank, teams.job.team_abandoned, teams.job.comm = 1, False, SimpleNamespace(Send=send)
    with pytest.raises(PeerError, match="rank 1: .* out of reach"):
        teams._all_ready([0, 1], True)
