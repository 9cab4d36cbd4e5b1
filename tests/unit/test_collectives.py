"""The table of collectives: lengths, blocks, in-place rules, and calls that are refused."""

import pytest

from ucc_hetero.planner import collectives
from ucc_hetero.planner.collectives import ROWS, Call
from ucc_hetero.planner.plan import KINDS


def test_ucc_types() -> None:
    """``ucc_coll_type_t``: a bit each, in alphabetical order but for fanin and fanout."""
    names = (
        "allgather", "allgatherv", "allreduce", "alltoall", "alltoallv", "barrier", "bcast", "fanin", "fanout",
        "gather", "gatherv", "reduce", "reduce_scatter", "reduce_scatterv", "scatter", "scatterv",
    )  # fmt: skip
    value = {name: 1 << bit for bit, name in enumerate(names)}
    uneven = {"allgather", "alltoall", "gather", "reduce_scatter"}
    forms = {name: (value[name], value[name + "v" * (name in uneven)]) for name in KINDS if name in value}
    forms["scatter"] = (value["scatterv"],) * 2  # libucc's TL/UCP has no SCATTER
    assert {name: (kind.ucc, kind.ucc_v) for name, kind in KINDS.items() if kind.ucc} == forms
    assert {name for name, row in ROWS.items() if not row.step} == {"scan", "exscan"}


@pytest.mark.parametrize("call, text", [
    (Call("allsum", 2, (1,)), "'allsum' is not one of barrier"),
    (Call("allreduce", 0, (1,)), "at least one"),
    (Call("allreduce", 2, ()), "takes 1 counts, got 0"),
    (Call("gatherv", 3, (1, 2), 0), "takes 3 counts, got 2"),
    (Call("alltoallv", 2, (1, 2, 3)), "takes 4 counts"),
    (Call("scatterv", 2, (1, -2), 0), r"counts\[1\] is -2"),
    (Call("bcast", 2, (1,), 2), "root 2 is not a rank of a communicator of 2"),
    (Call("bcast", 2, (1,)), "root -1"),
    (Call("allreduce", 2, (1,), 0), "has no root"),
])  # fmt: skip
def test_refused(call: Call, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        collectives.check(call)
