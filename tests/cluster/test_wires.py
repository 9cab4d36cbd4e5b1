"""Calls between devices of several hosts, queued in streams completely and carried by network threads; on fake GPUs."""

import json
import random
import re

import channel_failure_scripts as failures
import channel_scripts
import graph_scripts
import pytest
from channel_jobs import JOBS, OF_ITS_OWN, judge, judge_death
from settings import FEW_QUEUES, LATE_KERNELS, OWN_QUEUES

PAIR, THREE = ("nvidia:1,amd:1", 2, 1), ("nvidia:1,amd:2", 3, 1)
MIXED = ("nvidia:1,amd:2,nvidia:1", 2, 2)

# Small rings, so that streams wait for free slots all the time.
SMALL = {"UCCH_WIRE_SLOT": "16K", "UCCH_WIRES": "3", "DICE": "11", **FEW_QUEUES}
CASES = [
    ("every collective in every form", THREE, {}), ("every collective in every form", MIXED, {}),
    ("many calls in many streams", MIXED, SMALL), ("long calls", PAIR, {**FEW_QUEUES, "FAKEGPU_CONNECTIONS": "1"}),
    ("long calls", THREE, OWN_QUEUES), ("long calls", MIXED, {}), ("several communicators", PAIR, {}),
    ("calls under way at the end", THREE, {}), ("a rank that never calls", PAIR, {}),
    ("nobody takes garbage for a result", THREE, {}), ("ranks that call different things", PAIR, {}),
    ("connections that break", PAIR, {}), ("the driver waits", PAIR, LATE_KERNELS),
    ("the driver waits", THREE, {"FAKEGPU_AHEAD": "40"}), ("many groups", PAIR, {}),
    ("calls in graphs", PAIR, {"LENGTHS": "1000,100000", "UCCH_WIRES": "3", "UCCH_WIRE_SLOT": "16K", **OWN_QUEUES}),
    ("calls in graphs", MIXED, {"LENGTHS": "3,5000,70000", "UCCH_WIRES": "3", **OWN_QUEUES}),
    ("several graphs", PAIR, OWN_QUEUES), ("messages in graphs", MIXED, {"UCCH_WIRE_SLOT": "64K", **OWN_QUEUES}),
    ("a rank that does not replay", PAIR, {}), ("ranks that replay different things", PAIR, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "where", "env"), CASES, ids=[f"{name}, {where[0]}" for name, where, _ in CASES])
def test_on_several_hosts(request, name, where, env):
    run = request.getfixturevalue("alone" if name in OF_ITS_OWN else "on_crew")
    out = run(JOBS[name].script, *where, **{**JOBS[name].env, **env}).stdout
    judge(name, out)


@pytest.mark.parametrize("slot", ["16K", "auto"])  # messages by copies, and by a kernel
def test_a_rank_that_dies(alone, recovery, slot):
    job, after = JOBS["a rank that dies"], random.choice([0, random.uniform(0, 0.1)])
    env = {**job.env, "UCCH_WIRE_SLOT": slot, "AFTER": str(after)}
    if random.randrange(2):  # the receiver fetches, and libucp has more to finish
        env["UCX_RNDV_THRESH"] = "1K"
    judge_death(recovery, alone(job.script, *THREE, **env, options=recovery, check=False).stdout)


@pytest.mark.parametrize("way", ["SIGKILL", "SIGSTOP", "cut"])
def test_a_rank_is_lost_while_graphs_are_replayed(alone, appear, recovery, tmp_path, way):
    """The other rank notices long before its deadline, and its stream continues."""

    def cut(cluster):
        appear([tmp_path / f"up{rank}" for rank in (0, 1)], [])
        cluster.set_link(1, up=False)
        (tmp_path / "cut").touch()
        appear([tmp_path / "known"], [])
        cluster.set_link(1, up=True)

    env = {"UCCH_TIMEOUT": "300", "UCCH_HEARTBEAT": "1", "WAY": way, "FOLDER": str(tmp_path), **OWN_QUEUES}
    more = {"beside": cut} if way == "cut" else {"options": recovery} if way == "SIGKILL" else {}
    done = alone(graph_scripts.LOST, *PAIR, check=False, **more, **env)
    if way == "SIGKILL" and not recovery:
        pytest.skip("this launcher ends every rank when one dies")
    why = {"SIGSTOP": "rank 1 was stopped"}.get(way, "(rank 1 has left|host of rank 1 is gone)")
    assert re.search(f"next: .*{why}", done.stdout), done.output
    assert done.stdout.count("told") == 3 * (way == "SIGSTOP"), done.output


def test_what_stands_in_the_way_is_said(alone, on_crew):
    """Ranks may have different settings: if one rank has no wires, none uses them."""
    script = """
from arrays import Array
from mpi4py import MPI
import os

if MPI.COMM_WORLD.Get_rank() == int(os.environ["WITHOUT"]):
    os.environ["UCCH_WIRES"] = "0"
from ucc_hetero import Communicator

with Communicator() as comm:
    x, y = Array(1000).set(comm.rank), Array(1000)
    comm.Allreduce(x, y)
    assert (y.peek == sum(range(comm.size))).all()
    summary = comm.plan_summary()
    (rings,) = [line for line in summary.splitlines() if line.startswith("rings: ")]
    print("queued" if "queued" in summary else "by hosts", rings)
"""
    unwanted = on_crew(script, *PAIR, WITHOUT="1")
    assert unwanted.stdout.count("by hosts rings: none (rank 1: UCCH_WIRES=0)") == 2
    assert "UCCH WARN" not in unwanted.stderr
    small = on_crew(script, *PAIR, WITHOUT="-1", UCCH_WIRE_SLOT="16K")
    assert small.stdout.count("queued rings: rank") == 2 and "8 x 16 KiB" in small.stdout
    straight = on_crew(script, *PAIR, WITHOUT="-1", UCCH_STAGING="direct")  # tests messages only
    assert straight.stdout.count("queued rings: rank") == 2, straight.output
    late = alone(script, *MIXED, WITHOUT="-1", UCCH_FABRIC="all", **LATE_KERNELS)
    assert late.stdout.count("by hosts rings: none (ranks 0, 1, 2, 3: load kernels at their first launch") == 4
    bare = alone(script, *MIXED, WITHOUT="-1", UCCH_RTC_LIB="none")
    assert bare.stdout.count("by hosts rings: none (ranks 1, 2: streams cannot wait for memory, nor") == 4
    assert (bare.stdout + bare.stderr).count("no channels between devices") == 1


@pytest.mark.parametrize("case", ["random_messages:main", "lane_cases:mistakes", "lane_cases:late"])
def test_streams_hand_each_other_messages(on_crew, case):
    on_crew(case, *PAIR, **OWN_QUEUES)


def test_random_messages_of_several_ranks_a_host(on_crew):
    on_crew("random_messages:main", *MIXED, **OWN_QUEUES)


@pytest.mark.parametrize("where, envs", [
    (PAIR, [OWN_QUEUES]), (PAIR, [SMALL | {"UCCH_HOLD": "n"}]),
    (MIXED, [OWN_QUEUES, {"UCCH_STAGING": "staged", "UCCH_TUNE": "", **OWN_QUEUES}]),
], ids=["own queues", "few slots", "several ranks a host"])  # fmt: skip
def test_messages_by_rules_of_mpi(on_crew, where, envs):
    """Each host's messages between its ranks by libucp, or through pinned memory."""
    on_crew("cases:run_module", *where, ["message_cases"], **random.choice(envs))


def test_a_part_is_used_again_for_other_hosts(on_crew):
    """Ranks 0 and 1 are on one host, 0 and 2 on two: a communicator's ring to rank 1 has another pinned length if both
    ranks map it than if wires carry it."""
    script = (
        channel_scripts.COMMON
        + """
with Communicator() as comm:
    r = comm.rank
    for colors in ([0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1]):
        with comm.Split(colors[r], r) as part:
            for n in (100, 300_000):
                x, y = Array(n).set(numbers(n, part.rank, n)), Array(n).set(-7)
                part.Allreduce(x, y)
                assert (y.peek == numbers(n, 0, n) + numbers(n, 1, n)).all(), n
            assert "queued" in part.plan_summary(), part.plan_summary()
"""
    )
    on_crew(script, *MIXED, **OWN_QUEUES)


#: The timeline shows when rank 0's data has left. Its wire then sends that of a call on another communicator, so the
#: other rank has met the first data when this call ends.
EARLY = """
from ucc_hetero.native.libraries import ffi
from ucc_hetero.bootstrap import meeting
def has_left():
    events = ffi.cast("ucch_event *", ffi.cast("char *", lib.ucch_trace_memory(ffi.new("uint64_t *"))) + HEADER)
    return any(events[i].end and events[i].bytes > 60_000 and not events[i].step % 2 for i in range(64))

HEADER = lib.UCCH_TRACE_HEADER
with Communicator() as world, world.Split(world.rank % 2, world.rank) as beside:
    for k, made_before in enumerate([0, 2**18 - 2, 2**18 - 1]):
        meeting._last[0] += made_before  # first: the next one's number is that of `beside`, but for its upper bits
        with world.Split(world.rank % 2, world.rank) as comm:
            x, y = Array(300_000).set(numbers(k, comm.rank, 300_000)), Array(300_000).set(-7)
            assert lib.ucch_trace_open(ffi.NULL, 64) == 0
            if comm.rank == 0:
                request = comm.Iallreduce(x, y)
                while not has_left():
                    time.sleep(1e-3)
            beside.Allreduce(Array(100).set(1), Array(100))
            if comm.rank == 1:
                request = comm.Iallreduce(x, y)
            request.Wait()
            lib.ucch_trace_stop()
            assert (y.peek == numbers(k, 0, 300_000) + numbers(k, 1, 300_000)).all()
"""


def test_data_that_comes_before_its_ring_is_kept(on_crew):
    """However many communicators there were."""
    on_crew(channel_scripts.COMMON + EARLY, *MIXED, **OWN_QUEUES, UCCH_TIMEOUT="20")


def test_wires_share_the_ports_of_their_hosts(alone, tmp_path):
    """Wires are rows of the timeline. The next communicator reuses the rings of the previous one."""
    script = """
from ranks import *
with Communicator() as comm:
    x, y = Array(2_000_000).set(1), Array(2_000_000)
    comm.Allreduce(x, y)
    before = sent()
    for _ in range(3):
        comm.Allreduce(x, y)
    assert (y.peek == comm.size).all()
    carried = [b - a for a, b in zip(before, sent())]
    assert min(carried) > 0.3 * max(carried) > 1e6, carried
pinned = lib.ucch_channels_pinned()
with Communicator() as comm:
    comm.Allreduce(x, y)
    assert lib.ucch_channels_pinned() == pinned
"""
    path = tmp_path / "trace.json"
    # UCX uses one port for each transfer: only wires share the ports.
    alone(script, *PAIR, links=2, UCCH_WIRES="4", UCX_MAX_EAGER_RAILS="1", UCCH_TRACE=str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X" and "wire" in e["args"]]
    for rank in (0, 1):
        sent = [e for e in events if (e["pid"], e["cat"], e["args"]["peer"]) == (rank, "send", 1 - rank)]
        came = [e for e in events if (e["pid"], e["cat"], e["args"]["peer"]) == (1 - rank, "receive", rank)]
        assert sorted(e["args"]["bytes"] for e in sent) == sorted(e["args"]["bytes"] for e in came)
        assert {e["args"]["wire"] for e in sent} == {0, 1, 2, 3} and len({e["tid"] for e in sent}) == 4
        assert sum(e["args"]["bytes"] for e in sent) > 4 * 8_000_000 / 2
        assert not any({"unfinished", "status"} & set(e["args"]) for e in sent + came)


@pytest.mark.parametrize("env", [{}, {"UCX_RNDV_THRESH": "1K"}], ids=["at once", "by rendezvous"])
def test_a_slower_link_carries_less(alone, env):
    """A ninth of the other link's data, and what is in flight at the end. The next communicator reuses the rings."""
    script = """
from ranks import *
pinned, values = set(), np.random.default_rng(DICE).random(5_000_000).astype("f4")
for _ in range(2):
    with Communicator() as comm:
        x = Array(values.size).set(values if comm.rank == 0 else -7)
        before = sent()
        comm.Bcast(x, 0)
        assert (x.peek == values).all()
        slow, fast = [b - a for a, b in zip(before, sent())]
        assert comm.rank or 0 < slow < 0.3 * fast, (slow, fast)
        pinned.add(lib.ucch_channels_pinned())
assert len(pinned) == 1, pinned
"""
    script = script.replace("DICE", str(random.randrange(1 << 30)))
    alone(script, *PAIR, links=2, rate="20mbit+180mbit", UCCH_WIRES="4", **env)


def test_one_of_two_links_is_cut(alone, appear, tmp_path):
    """Not the heartbeats' link. Both ranks of each pair name it, long before their deadline, and use it again once it
    is back."""

    def cut(cluster):
        appear([tmp_path / f"up{rank}" for rank in range(4)], [])
        cluster.set_link(1, up=False, link=1)
        appear([tmp_path / f"down{rank}" for rank in range(4)], [])
        cluster.set_link(1, up=True, link=1)
        (tmp_path / "back").touch()

    env = {"UCCH_TIMEOUT": "300", "UCCH_HEARTBEAT": "1", "FOLDER": str(tmp_path)}
    done = alone(failures.CUT_LINK, "nvidia:2,amd:2", 2, 2, links=2, beside=cut, **env)
    for name in ("both", "one"):
        said = rf"^{name}: .*does not answer over the link 10.11.0.[12] - 10.11.0.[12], "
        assert len(re.findall(said, done.stdout, re.M)) == done.stdout.count(f"{name}: right") == 2, done.output


def test_ports_of_different_speed(alone, tmp_path):
    """Short calls use the faster port, long ones both, in either direction."""
    script = """
from subprocess import run
for name, speed in (("eth0", "200"), ("eth1", "300")):  # the kernel says 10 Gbit/s of all emulated ports
    run(["mount", "--bind", f"FOLDER/{speed}", f"/sys/class/net/{name}/speed"], check=True)

from ranks import *

def parts(comm, count):
    x, y = Array(count).set(1), Array(count)
    comm.Allreduce(x, y)
    before = sent()
    for _ in range(5):
        comm.Allreduce(x, y)
    assert (y.peek == comm.size).all()
    return [b - a for a, b in zip(before, sent())]

for _ in range(3):  # which of the wires it is differs
    with Communicator() as comm:
        slow, fast = parts(comm, 10_000)
        assert slow < 0.1 * fast, (slow, fast)
with Communicator() as comm:
    slow, fast = parts(comm, 1_000_000)
    assert 0.1 * fast < slow < fast, (slow, fast)
"""
    for speed in ("200", "300"):
        (tmp_path / speed).write_text(speed)
    script = script.replace("FOLDER", str(tmp_path))
    alone(script, *PAIR, links=2, rate="200mbit+300mbit", UCCH_WIRES="4")


def test_rings_come_with_calls(alone):
    """Those within and between hosts; ranks have pinned nothing before."""
    out = alone(JOBS["rings come with calls"].script, *MIXED).stdout
    assert out.count("right rings: ") == 4 and "wire" in out and "shared" in out, out


def test_random_mistakes(on_crew):
    """One rank makes the mistake: ranks of other hosts name the rank that refused the call, too."""
    assert "mistakes told" in on_crew("refusal_cases:main", *MIXED, [15], UCCH_TIMEOUT="300", **OWN_QUEUES).stdout
