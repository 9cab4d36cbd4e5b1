"""Processes and hosts that are lost: all ranks that are left know within a moment, whom they have lost, and go on."""

import random
import re
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from crews import alone

from ucc_hetero.launch import emulated_host

pytestmark = pytest.mark.usefixtures("libraries")
PARTING = Path(__file__).with_name("parting_job.py")
#: Of calls, which must have no part in it.
DEADLINE = 300.0


def hole(cluster, host, link=0, to="nomaster"):
    """Frames of a host end in the switch, and it has no way of noticing."""
    batch = f"link set dev {cluster.layout[host].links[link].port} {to}\n"
    emulated_host.configure(cluster._switch_pid(), batch, "")


OUTSIDE = {
    "cut": lambda cluster, host: cluster.set_link(host, up=False),
    "hole": hole,
    "off": lambda cluster, host: cluster.power_off(host),
}


@pytest.fixture
def outputs(emulate, launch, appear, tmp_path, room):
    """Call as ``outputs(slots, fault, lost)``: output of every rank, in good time of those that are not lost."""

    def run(slots, fault, lost):
        cluster = emulate(hosts=len(slots), slots=slots, rate="none")
        size, hosts = sum(slots), [host for host, count in enumerate(slots) for _ in range(count)]
        more = [str(size), fault, ",".join(map(str, lost))]
        words = [[sys.executable, str(PARTING), str(tmp_path), str(rank), *more] for rank in range(size)]
        ranks = [
            launch(cluster, host, each, env={"UCCH_TIMEOUT": str(DEADLINE)})
            for host, each in zip(hosts, words, strict=True)
        ]
        if fault in OUTSIDE:
            appear([tmp_path / "ready"], ranks)
            (tmp_path / "fault").write_text(repr(time.monotonic()))
            OUTSIDE[fault](cluster, hosts[lost[0]])
        return ["" if rank in lost else ranks[rank].communicate(timeout=60 * room)[0] for rank in range(size)]

    return run


class End(NamedTuple):
    """How the last rank ends, by one of some words for parting_job.py, and what the others say, if anything."""

    slots: tuple[int, ...]
    hows: str
    others: str
    lost: bool = True
    last: str = "^$"


ENDS = {
    # The first communicator has no older one beside it whose board would show that.
    "while teams are made, on one host": End((2,), "dead", "rank {0} knows: PeerError"),
    "while teams are made": End((1, 2), "kill exit error", "rank {0} knows: PeerError"),
    # The others know at once, and end: a rank that looks a little later sees that the first of them has, too.
    "while contexts are made": End(
        (1, 2), "early", r"rank {0} knows: PeerError rank {0}: rank\(s\) \[({1}, )?2\] of ucch/0"
    ),
    # They give up after the seconds of the store's exchange, or as the first of them does, and end.
    "stops while contexts are made": End((1, 2), "stop", "rank {0} knows: CollectiveTimeout|has given ucch/0"),
    # They hear of it at once, and do not wait for it at their end.
    "gives up what others have made": End((1, 2), "late", "rank {0} knows: PeerError.*has given ucch/0", lost=False,
                                          last=""),
    # They see that it has ended, though it had left, and do not wait for it at their end.
    "once all is abandoned": End((1, 2), "after", "^$"),
    # Ranks without communicators do not wait for it at their end.
    "its host, once all is freed": End((2, 1), "cut", "^$"),
    # Its rank ends, by a farewell, and they do not wait for a word of it that never comes.
    "its store, once all is freed": End((2, 1), "storeless", "^$", lost=False),
    # It ends without a farewell, and is taken for dead, though the store has no word of it.
    "its store, and then by an error": End(
        (2, 1), "failed", "rank {0} knows: PeerError", lost=False, last="RuntimeError"
    ),
    "is interrupted at its end": End((1, 2), "interrupt", "^$", lost=False, last="KeyboardInterrupt"),
    "never, and revokes another communicator": End((1, 2), "revoked", "rank {0} right", lost=False, last="right"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_a_rank_ends(outputs, name):
    end, last = ENDS[name], sum(ENDS[name].slots) - 1
    how = random.choice(end.hows.split())
    out = outputs(end.slots, how, [last] * end.lost)
    for rank in range(last):
        assert re.search(end.others.format(rank, 1 - rank), out[rank]), (how, out)
    assert re.search(end.last, out[last]), (how, out)


LINK = r"not answer over the link 10\.11\.0\.[12] - 10\.11\.0\.[12], "
GIVEN_UP = r"|libucp has given up the connection"


@pytest.fixture
def cut_link(emulate, appear, tmp_path):
    """Call as ``cut_link(slots, cases, jobs, cut, mend)`` -> how often each case matches its pattern, and the output.

    ``cases``: name of `link_cases.one_link` -> pattern; ``jobs``: the case of every rank. ``cut`` and ``mend`` get a
    cluster, of whose second host they cut the second link, and mend it when every rank is done.
    """

    def run(slots, cases, jobs, cut, mend):
        cluster, size = emulate(hosts=2, slots=slots, links=2, rate="none"), len(jobs)

        def beside():
            appear([tmp_path / f"up{rank}" for rank in range(size)], [])
            cut(cluster)
            (tmp_path / "cut").touch()
            appear([tmp_path / f"down{rank}" for rank in range(size)], [])
            mend(cluster)
            (tmp_path / "back").touch()

        threading.Thread(target=beside, daemon=True).start()
        env = {"UCX_NET_DEVICES": "eth1", "OMPI_MCA_btl_tcp_if_include": "eth0"}
        words = alone("link_cases:one_link", [str(tmp_path), list(cases), list(jobs)])
        done = cluster.mpirun([sys.executable, *words], env=env, timeout=120)
        right = {case: done.stdout.count(f"{case}: right") for case in cases}
        said = {case: len(re.findall(f"{case}: rank .*({why})", done.stdout)) for case, why in cases.items()}
        return right, said, (done.stdout, done.stderr)

    return run


def test_the_link_of_the_data_is_cut(cut_link):
    """And not that of the heartbeats. Ranks that wait name it long before their deadline, whatever they wait in."""
    calls = ("right", "send", "once", "any", "probe", "put")
    cases = {f"{call} {random.choice([3, 300_000])} 1 {DEADLINE}": LINK for call in calls}
    cut, mend = (lambda cluster, up=up: cluster.set_link(1, up=up, link=1) for up in (False, True))
    right, said, output = cut_link(len(calls), cases, [*range(len(calls))] * 2, cut, mend)
    assert right == dict.fromkeys(cases, 2), output
    assert said == {case: 1 if case.startswith("once") else 2 for case in cases}, output


def test_the_link_of_the_data_is_a_hole(cut_link):
    """Ranks begin to connect over it with the first call, and the other host does not answer: libucp often gives up
    after 14 seconds, or we find it before. A receive from any rank ends at its deadline, as a rank beside it could have
    sent, and names who is behind the cut."""
    n = random.choice([3, 300_000])
    # The kernel's attempts are 11, 19 and 35 seconds old when it tries again; a link is cut after five heartbeats.
    cut_off = rf".* timeout, .*; rank\(s\) \[2\] cannot be heard: .*(not answer over the link 10.11.0{GIVEN_UP})"
    cases = {
        f"send {n} 1 {DEADLINE} FIRST": LINK, f"send {n} 3 {DEADLINE} FIRST": LINK + GIVEN_UP,
        "of_any 300000 1 15": cut_off,
    }  # fmt: skip
    cut, mend = (lambda cluster, to=to: hole(cluster, 1, 1, to) for to in ("nomaster", "master br1"))
    right, said, output = cut_link((4, 3), cases, (0, 1, 2, 2, 0, 1, 2), cut, mend)
    assert [*right.values()] == [2, 2, 3] and [*said.values()] == [2, 2, 1], output


def test_a_team_that_fails_on_one_rank(emulate):
    """As a connection is refused there, say. Others used to wait for it until the deadline."""
    words = [sys.executable, *alone("link_cases:no_team_on_one_rank", [])]
    done = emulate(hosts=2, slots=1).mpirun(words, env={"UCCH_TIMEOUT": str(DEADLINE)}, timeout=60)
    assert "rank 1: mine alone" in done.stdout and "rank 1 could not create its teams" in done.stdout, done.stderr
