"""Environments of the cases of channels and graphs, on one host and on several."""

from settings import OWN_QUEUES, USUAL

_LONG = {"UCCH_TIMEOUT": "200"}
#: Case -> what its environment has beside `USUAL`.
_MORE = {
    "collective_cases:on_devices": {"QUEUED": "y"},
    # Threads use streams in any order, which devices without enough queues do not allow (docs/gpu-inside.md).
    "channel_cases:several": OWN_QUEUES, "channel_cases:kept": OWN_QUEUES,
    "channel_cases:many": {"UCCH_WIRE_SLOT": "64K", **OWN_QUEUES}, "channel_cases:long": {"UCCH_WIRE_SLOT": "64K"},
    "channel_failure_cases:missing": _LONG, "channel_failure_cases:garbage": _LONG | OWN_QUEUES,
    "channel_failure_cases:different": _LONG, "channel_failure_cases:cut": _LONG,
    "channel_failure_cases:fails_often": _LONG | OWN_QUEUES,
    "channel_failure_cases:halfway": _LONG, "graph_cases:unlike_messages": _LONG | OWN_QUEUES,
    "graph_cases:broken": _LONG | OWN_QUEUES, "graph_cases:refused": {"UCCH_TUNE": ""},
}  # fmt: skip
#: Cases that end their processes, leave them without memory, or need processes without earlier calls: not for crews.
OF_ITS_OWN = {
    *("channel_cases:left", "channel_cases:pinned_out", "channel_cases:no_compiler", "channel_cases:grows"),
    *("channel_failure_cases:cut", "graph_cases:refused"),
}


def environment(case, more):
    return USUAL | _MORE.get(case, {}) | more
