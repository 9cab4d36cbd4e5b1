"""Calls between devices of several hosts, queued in streams completely and carried by network threads; on fake GPUs."""

import json
import random

import pytest
from channel_jobs import OF_ITS_OWN, environment
from settings import FEW_QUEUES, LATE_KERNELS, OWN_QUEUES

PAIR, THREE = ("nvidia:1,amd:1", 2, 1), ("nvidia:1,amd:2", 3, 1)
MIXED = ("nvidia:1,amd:2,nvidia:1", 2, 2)

# Small rings, so that streams wait for free slots all the time.
SMALL = {"UCCH_WIRE_SLOT": "16K", "UCCH_WIRES": "3", **FEW_QUEUES}
CASES = [
    ("collective_cases:on_devices", THREE, {}), ("collective_cases:on_devices", MIXED, {}),
    ("collective_cases:on_devices", ("amd:4", 2, 2), {"UCCH_FABRIC": "host"}),
    ("channel_cases:crowd", MIXED, SMALL), ("channel_cases:long", PAIR, {**FEW_QUEUES, "FAKEGPU_CONNECTIONS": "1"}),
    ("channel_cases:long", THREE, OWN_QUEUES), ("channel_cases:long", MIXED, {}), ("channel_cases:several", PAIR, {}),
    ("channel_cases:left", THREE, {}), ("channel_cases:kept", PAIR, LATE_KERNELS),
    ("channel_cases:kept", THREE, {"FAKEGPU_AHEAD": "40"}), ("channel_cases:many", PAIR, {}),
    ("channel_cases:grows", MIXED, {}),
    ("channel_failure_cases:missing", PAIR, {}), ("channel_failure_cases:garbage", THREE, {}),
    ("channel_failure_cases:different", PAIR, {}), ("channel_failure_cases:fails_often", PAIR, {}),
    ("channel_failure_cases:cut", PAIR, {}),
    ("graph_cases:replays 1000 100000", PAIR, {"UCCH_WIRES": "3", "UCCH_WIRE_SLOT": "16K", **OWN_QUEUES}),
    ("graph_cases:replays 3 5000 70000", MIXED, {"UCCH_WIRES": "3", **OWN_QUEUES}),
    ("graph_cases:replays 3000", PAIR, OWN_QUEUES),
    ("graph_cases:messages", MIXED, {"UCCH_WIRE_SLOT": "64K", **OWN_QUEUES}),
    ("graph_cases:broken missing 1000", PAIR, {}), ("graph_cases:broken different 1000", PAIR, {}),
    ("wire_cases:parts", MIXED, OWN_QUEUES), ("wire_cases:early", MIXED, {"UCCH_TIMEOUT": "20", **OWN_QUEUES}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "where", "env"), CASES, ids=[f"{case}, {where[0]}" for case, where, _ in CASES])
def test_on_several_hosts(request, case, where, env):
    name, *args = case.split()
    run = request.getfixturevalue("alone" if name in OF_ITS_OWN else "on_crew")
    run(name, *where, args, **environment(name, env))


@pytest.mark.parametrize("slot", ["16K", "auto"])  # messages by copies, and by a kernel
def test_a_rank_that_dies(alone, recovery, slot):
    case, after = "channel_failure_cases:halfway", random.choice([0, random.uniform(0, 0.1)])
    env = environment(case, {"UCCH_WIRE_SLOT": slot})
    if random.randrange(2):  # the receiver fetches, and libucp has more to finish
        env["UCX_RNDV_THRESH"] = "1K"
    done = alone(case, *THREE, [after], **env, options=recovery, check=False)
    assert done.said("died") == 2 or not recovery, done.output


@pytest.mark.parametrize("way", ["SIGKILL", "SIGSTOP", "cut"])
def test_a_rank_is_lost_while_graphs_are_replayed(alone, appear, recovery, tmp_path, way):
    """The other rank notices long before its deadline, and its stream continues."""

    def cut(cluster):
        appear([tmp_path / f"up{rank}" for rank in (0, 1)], [])
        cluster.set_link(1, up=False)
        (tmp_path / "cut").touch()
        appear([tmp_path / "known"], [])
        cluster.set_link(1, up=True)

    env = {"UCCH_TIMEOUT": "300", "UCCH_HEARTBEAT": "1", **OWN_QUEUES}
    more = {"beside": cut} if way == "cut" else {"options": recovery} if way == "SIGKILL" else {}
    done = alone("graph_cases:lost", *PAIR, [way, str(tmp_path)], check=False, **more, **env)
    assert done.said("told") == 1 or (way == "SIGKILL" and not recovery), done.output


def test_what_stands_in_the_way_is_said(alone, on_crew):
    """Ranks may have different settings: if one rank has no wires, none uses them."""
    case = "wire_cases:rings"
    unwanted = on_crew(case, *PAIR, [1])
    assert unwanted.stdout.count("by hosts rings: none (rank 1: UCCH_WIRES=0)") == 2
    assert "UCCH WARN" not in unwanted.stderr
    small = on_crew(case, *PAIR, [-1], UCCH_WIRE_SLOT="16K")
    assert small.stdout.count("queued rings: rank") == 2 and "8 x 16 KiB" in small.stdout
    straight = on_crew(case, *PAIR, [-1], UCCH_STAGING="direct")  # tests messages only
    assert straight.stdout.count("queued rings: rank") == 2, straight.output
    late = alone(case, *MIXED, [-1], UCCH_FABRIC="all", **LATE_KERNELS)
    assert late.stdout.count("by hosts rings: none (ranks 0, 1, 2, 3: load kernels at their first launch") == 4
    bare = alone(case, *MIXED, [-1], UCCH_RTC_LIB="none")
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


def test_wires_share_the_ports_of_their_hosts(alone, tmp_path):
    """Wires are rows of the timeline."""
    path = tmp_path / "trace.json"
    # UCX uses one port for each transfer: only wires share the ports.
    alone("wire_cases:shared_ports", *PAIR, links=2, UCCH_WIRES="4", UCX_MAX_EAGER_RAILS="1", UCCH_TRACE=str(path))
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
    alone("wire_cases:slower_link", *PAIR, links=2, rate="20mbit+180mbit", UCCH_WIRES="4", **env)


def test_one_of_two_links_is_cut(alone, appear, tmp_path):
    """Not the heartbeats' link. Both ranks of each pair name it, long before their deadline, and use it again once it
    is back."""

    def cut(cluster):
        appear([tmp_path / f"up{rank}" for rank in range(4)], [])
        cluster.set_link(1, up=False, link=1)
        appear([tmp_path / f"down{rank}" for rank in range(4)], [])
        cluster.set_link(1, up=True, link=1)
        (tmp_path / "back").touch()

    env = {"UCCH_TIMEOUT": "300", "UCCH_HEARTBEAT": "1"}
    alone("channel_failure_cases:cut_link", "nvidia:2,amd:2", 2, 2, [str(tmp_path)], links=2, beside=cut, **env)


def test_ports_of_different_speed(alone, tmp_path):
    for speed in ("200", "300"):
        (tmp_path / speed).write_text(speed)
    alone(
        "wire_cases:ports_of_different_speed", *PAIR, [str(tmp_path)], links=2, rate="200mbit+300mbit", UCCH_WIRES="4"
    )


def test_random_mistakes(on_crew):
    """One rank makes the mistake: ranks of other hosts name the rank that refused the call, too."""
    assert "mistakes told" in on_crew("refusal_cases:main", *MIXED, [15], UCCH_TIMEOUT="300", **OWN_QUEUES).stdout
