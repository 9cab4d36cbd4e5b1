"""Jobs of the channel scripts, on one host and on several: their environment, and expected and forbidden output."""

import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple

import channel_failure_scripts as failures
import channel_life_scripts as lives
import channel_scripts as calls
import graph_scripts as graphs
import pytest
from settings import FEW_QUEUES, OWN_QUEUES

_LONG = {"UCCH_TIMEOUT": "200"}
_DRAWN = {"DICE": str(secrets.randbelow(1 << 30))}
_BROKEN = _LONG | {"LENGTH": "1000", **OWN_QUEUES}


class Job(NamedTuple):
    """A script, its environment, and patterns with their numbers in the output; without patterns ``right`` by each
    rank."""

    script: str
    env: Mapping[str, str] = {}
    says: Mapping[str, int] = {}
    never: str = "Traceback"


JOBS = {
    "every collective in every form": Job("collective_cases:on_devices", {"QUEUED": "y"}),
    "many calls in many streams": Job(calls.CROWD, {"DICE": "7"}), "replicas are equal": Job(calls.REPLICAS),
    # Threads use streams in any order, which devices without enough queues do not allow (docs/gpu-inside.md).
    "several communicators": Job(lives.SEVERAL, OWN_QUEUES),
    "many groups": Job(lives.MANY, {"UCCH_WIRE_SLOT": "64K", **OWN_QUEUES}),
    "the driver waits": Job(lives.KEPT, OWN_QUEUES), "no pinned memory is left": Job(lives.PINNED_OUT),
    "calls under way at the end": Job(lives.LEFT),
    "long calls": Job(lives.LONG, {"UCCH_WIRE_SLOT": "64K", "DICE": "5"}),
    "no compiler": Job(lives.NO_COMPILER), "rings come with calls": Job(lives.GROWS),
    "a rank that never calls": Job(
        failures.MISSING, _LONG,
        {r"waited for: \['CollectiveTimeout'": 2, "blocking: CollectiveTimeout": 2, "next: CollectiveError": 5},
        "nothing",
    ),
    # Two threads with one communicator each: calls are ordered within each communicator, not between the two.
    "nobody takes garbage for a result": Job(failures.GARBAGE, _LONG | OWN_QUEUES, {"outcome": 6}),
    "ranks that call different things": Job(
        failures.DIFFERENT, _LONG, {"MismatchError before .* after CollectiveError": 4},
    ),
    "calls in graphs": Job(graphs.REPLAYS, _DRAWN),
    "several graphs": Job(graphs.REPLAYS, {"LENGTHS": "3000", **_DRAWN, **FEW_QUEUES}),
    "messages in graphs": Job(graphs.MESSAGES, _DRAWN),
    "messages in graphs that differ": Job(
        graphs.UNLIKE_MESSAGES, _BROKEN, {"not waited for: CollectiveError": 2, "next: CollectiveError": 2},
    ),
    "refused in graphs": Job(graphs.REFUSED, {"UCCH_TUNE": ""}),
    "a rank that does not replay": Job(
        graphs.BROKEN, _BROKEN | {"WAY": "missing"}, {"next: CollectiveError": 2, "not complete": 1},
    ),
    "ranks that replay different things": Job(
        graphs.BROKEN, _BROKEN | {"WAY": "different"}, {"next: CollectiveError .*(?:other calls|left the job)": 2},
    ),
    "two graphs at a time": Job(
        graphs.BROKEN, _BROKEN | {"WAY": "overlap"}, {"next: CollectiveError": 2, "at a time|not complete": 1},
    ),
    "connections that break": Job(
        failures.CUT, _LONG, {"cut: CollectiveError True": 2, "message: CollectiveError True": 2, "right": 2},
    ),
    "a rank that dies": Job(failures.HALFWAY, _LONG, {r"died: (?:\w+Error|nothing) (?:Collective|Peer)Error": 2}),
}  # fmt: skip


#: Cases that end their processes, leave them without memory, or need processes without earlier calls: not for crews.
OF_ITS_OWN = {
    *("a rank that dies", "calls under way at the end", "no pinned memory is left", "no compiler", "refused in graphs"),
    *("rings come with calls", "connections that break"),
}


def judge(name, out):
    job = JOBS[name]
    assert {text: len(re.findall(text, out)) for text in job.says} == job.says and job.never not in out, out


def judge_death(recovery, out):
    if not recovery and "died" not in out:
        pytest.skip("this launcher ends every rank when one dies")
    judge("a rank that dies", out)
