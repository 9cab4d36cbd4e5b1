"""The table of collectives: lengths, blocks, in-place rules, and calls that are refused."""

import pytest

from ucc_hetero.planner import collectives
from ucc_hetero.planner.collectives import ROWS, Alias, Block, Call, Shape, alias, lengths
from ucc_hetero.planner.plan import KINDS


def test_every_collective_has_a_row() -> None:
    assert set(ROWS) == {
        "barrier", "bcast", "reduce", "allreduce", "reduce_scatter_block", "reduce_scatter", "gather", "gatherv",
        "scatter", "scatterv", "allgather", "allgatherv", "alltoall", "alltoallv", "scan", "exscan",
    }  # fmt: skip
    assert all(name == row.name for name, row in ROWS.items())


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


@pytest.mark.parametrize("call, expected", [
    (Call("barrier", 2, ()), [(0, 0), (0, 0)]),
    (Call("bcast", 3, (5,), 1), [(0, 5), (5, 0), (0, 5)]),
    (Call("reduce", 2, (5,), 0), [(5, 5), (5, 0)]),
    (Call("allreduce", 2, (5,)), [(5, 5), (5, 5)]),
    (Call("reduce_scatter_block", 3, (2,)), [(6, 2)] * 3),
    (Call("reduce_scatter", 3, (2, 0, 5)), [(7, 2), (7, 0), (7, 5)]),
    (Call("gather", 2, (4,), 1), [(4, 0), (4, 8)]),
    (Call("gatherv", 2, (4, 1), 1), [(4, 0), (1, 5)]),
    (Call("scatter", 2, (4,), 1), [(0, 4), (8, 4)]),
    (Call("scatterv", 2, (4, 1), 0), [(5, 4), (0, 1)]),
    (Call("allgather", 2, (4,)), [(4, 8), (4, 8)]),
    (Call("allgatherv", 2, (4, 1)), [(4, 5), (1, 5)]),
    (Call("alltoall", 2, (4,)), [(8, 8), (8, 8)]),
    (Call("alltoallv", 2, (1, 2, 3, 4)), [(3, 4), (7, 6)]),
    (Call("scan", 2, (4,)), [(4, 4), (4, 4)]),
])  # fmt: skip
def test_lengths(call: Call, expected: list[tuple[int, int]]) -> None:
    assert lengths(call) == expected
    assert [(collectives.send_length(call, r), collectives.recv_length(call, r)) for r in range(call.ranks)] == expected


def test_blocks_of_a_matrix() -> None:
    shape = Shape(Call("alltoallv", 2, (1, 2, 3, 4)))
    assert [shape.send(0, 0), shape.send(0, 1), shape.send(1, 1)] == [Block(0, 1), Block(1, 2), Block(3, 4)]
    assert [shape.recv(0, 0), shape.recv(0, 1), shape.recv(1, 1)] == [Block(0, 1), Block(1, 3), Block(2, 4)]
    assert collectives.elements(shape.call) == 7
    with pytest.raises(ValueError, match="no blocks"):
        Shape(Call("scan", 2, (4,))).send(0, 0)


def test_in_place() -> None:
    assert alias(Call("allreduce", 2, (5,)), 1) == Alias("send", "recv", 0)
    assert alias(Call("allgatherv", 3, (2, 3, 4)), 2) == Alias("send", "recv", 5)
    assert alias(Call("gather", 2, (5,), 1), 1) == Alias("send", "recv", 5)
    assert alias(Call("gather", 2, (5,), 1), 0) is None
    assert alias(Call("scatter", 2, (5,), 1), 1) == Alias("recv", "send", 5)
    assert alias(Call("reduce_scatter", 2, (5, 1)), 1) == Alias("recv", "send", 5)
    assert alias(Call("alltoall", 2, (5,)), 1) is None and ROWS["alltoall"].staged


def test_busbw_factors_are_those_of_nccl_tests() -> None:
    assert ROWS["allreduce"].busbw(4) == 1.5
    assert ROWS["allgather"].busbw(4) == ROWS["reduce_scatter_block"].busbw(4) == ROWS["alltoall"].busbw(4) == 0.75
    assert ROWS["bcast"].busbw(4) == ROWS["reduce"].busbw(4) == 1.0


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
