"""The emulated cluster's cases: where ranks are, what the least time is, how rows are printed."""

import pytest
from bench_cluster import CASES, ClusterCase, heading, limit, line, main
from bench_cluster import Test as Case
from bench_cluster_job import calls_of

GB = 1e9


def seconds(collective: str, nbytes: int, hosts: list[int], rates: list[float]) -> float:
    return limit(Case(collective, nbytes), hosts, rates)


def test_ranks_fill_hosts_or_take_turns() -> None:
    assert ClusterCase("x", (2, 2, 1), ()).hosts() == [0, 0, 1, 1, 2]
    assert ClusterCase("x", (2, 2, 1), (), interleaved=True).hosts() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(("collective", "hosts", "rates", "expected"), [
    ("allreduce", [0, 0, 1, 1], [GB, GB], 1.0),
    ("allreduce", [0, 0, 1, 1], [GB, GB / 4], 4.0),
    # 2(m-1)/m vectors per host, unless one host's own vector takes longer.
    ("allreduce", [0, 1, 2, 3], [GB] * 4, 1.5),
    ("allreduce", [0, 1, 2], [GB, GB, GB / 4], 4.0),
    ("bcast", [0, 0, 1], [GB, GB], 1.0),
    ("allgather", [0, 0, 1, 1], [GB, GB], 0.5),
    ("allgather", [0, 0, 0, 1], [GB, GB], 0.75),
    ("reduce_scatter", [0, 0, 1, 2], [GB] * 3, 0.75),
    ("alltoall", [0, 0, 1, 1], [GB, GB], 4.0),
])  # fmt: skip
def test_limit(collective: str, hosts: list[int], rates: list[float], expected: float) -> None:
    assert seconds(collective, 10**9, hosts, rates) == pytest.approx(expected)


def test_limit_of_something_unknown() -> None:
    with pytest.raises(ValueError, match="scan"):
        seconds("scan", 8, [0, 1], [GB, GB])


def test_cases_differ_and_sizes_are_of_what_they_say() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert Case("allreduce", 64 << 20).count(4) == 16 << 20
    assert Case("allgather", 64 << 20).count(4) == 4 << 20  # 64 MiB in all
    assert Case("alltoall", 16 << 20).count(4) == 4 << 20  # 16 MiB for each pair


def test_table() -> None:
    peers = ["ours", "ucc"]
    row = {"collective": "allreduce", "nbytes": 16 << 20, "limit": 0.04, "target": 1.05}
    row |= {"median": {"ours": 0.05, "ucc": 0.1}, "least": {"ours": 0.042}}
    columns = heading(peers).split()
    assert len(line("2x2", row, peers).split()) == len(columns) - 1  # "# case" is one column
    assert line("2x2", row, peers).split()[1:] == "allreduce 16M 40.000 50.000 100.000 1.25 1.05 1.05".split()
    small = {**row, "target": 0.0, "nbytes": 8, "median": {"ours": 1e-5}}
    assert line("2x2", small, peers).split()[-2:] == ["0.010", "-"]


def test_slower_links_keep_their_shape() -> None:
    case = ClusterCase("x", (2, 2), (), rate="4gbit+1gbit,100mbit", links=2)
    assert case.slower(1) is case
    slow = case.slower(4)
    assert [[link.rate for link in host.links] for host in slow.cluster().layout] == [
        [10**9, 25 * 10**7],
        [25 * 10**6, 25 * 10**6],
    ]
    assert (slow.slots, slow.links, slow.name) == (case.slots, case.links, case.name)


@pytest.mark.parametrize("factor", ["0", "0.5", "-2", "1000", "nan"])
def test_links_cannot_be_made_faster(factor: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--slower", factor])
    assert "--slower" in capsys.readouterr().err


def test_a_sample_is_one_long_call_or_several_short_ones() -> None:
    assert calls_of(0.1) == 1
    assert calls_of(4e-3) == 8
    assert calls_of(50e-6) == 100
    assert calls_of(0.0) == calls_of(1e-6) == 200
