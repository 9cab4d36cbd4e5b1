"""Groups of one vendor's devices are torch's own: Gloo represents an emulated vendor's backend, on host memory."""

import pytest

#: Ranks whose table of vendors is changed from the start.
REHEARSED = {"CASES_REHEARSE": "1"}


def test_groups_inside_a_vendor_are_torchs_own(crew):
    case = {"layout": "nvidia:2,amd:2", "env": {"OWN": "pairs"}, "job": REHEARSED, "of": 4}
    crew("torch_cases:run", 4, args=[["torch_vendors"]], timeout=170, **case)


def test_default_group_of_one_vendor(mpirun):
    """All groups are torch's own; scripts without MPI calls end as usual."""
    # The other cases use groups of that kind, too.
    names = ["case_world", "case_groups", "case_backends_per_device"]
    env = {"UCCH_EMULATE": "nvidia:4", "OWN": "all", **REHEARSED}
    mpirun("torch_cases:run", 4, args=[["torch_vendors"], names], env=env, timeout=170)


def test_turned_off_on_one_rank(crew):
    crew("script_cases:turned_off_on_one_rank", 3, layout="nvidia:3", job=REHEARSED, of=4, timeout=100)


def test_a_rank_that_fails_ends_the_job(mpirun):
    env = {"UCCH_EMULATE": "nvidia:2"}
    job = mpirun("script_cases:fails_in_a_group_of_torchs", 2, env=env, timeout=100, check=False)
    assert job.returncode and "on purpose" in job.stderr and "rank 1 has failed" in job.stderr


def test_torchrun(torchrun):
    assert torchrun("script_cases:replaced_inside_a_vendor", [], UCCH_EMULATE="amd:2").count("fine") == 2


@pytest.mark.parametrize(
    ("ranks", "shared"),
    [
        ("nccl|nvidia a|a 1, nccl|nvidia a|a 2", True),
        ("nccl|nvidia a|a 1", True),
        ("nccl|nvidia RoCE|a 1, nccl|nvidia RoCE|b 1", True),
        ("nccl|nvidia a|, nccl|nvidia a|", True),  # the devices are unknown
        ("nccl|nvidia a|a 1, nccl|nvidia b|b 1", False),  # hosts without a fabric
        ("nccl|nvidia a|a 1, nccl|amd a|a 2", False),
        ("nccl|nvidia a|a 1, |nvidia a|a 2", False),  # turned off there
        ("|host a|, |host a|", False),
        ("nccl|nvidia a|a 1, nccl|nvidia a|a 1", False),  # one device
    ],
)
def test_who_shares_a_fabric(ranks, shared):
    from ucc_hetero.torch.creation import RankFacts, share_fabric

    assert share_fabric([RankFacts(*each.split("|")) for each in ranks.split(", ")]) == shared


def test_ranks_of_a_mixed_group_that_share_a_fabric(monkeypatch):
    """The result is equal on both ranks, whatever the group."""
    from ucc_hetero.torch import creation

    facts = ["nccl|nvidia a|a 1", "nccl|nvidia a|a 2", "nccl|amd a|a 3", "nccl|nvidia a|a 1", "|nvidia a|a 5"]
    known = {rank: creation.RankFacts(*each.split("|")) for rank, each in enumerate(facts)}
    monkeypatch.setattr(creation, "_known", known)
    found = [creation.fabric_peers(range(5), at)[1] for at in range(5)]
    assert found == [{1}, {0, 3}, set(), {1}, set()], "rank 3 has rank 0's device; rank 4 wants none"
    assert creation.fabric_peers([2, 1, 0], 1) == ("nccl", {2}) and creation.fabric_peers([7, 0], 0) == ("", set())


@pytest.mark.parametrize(
    ("names", "shards"),
    [
        ("aabb", [[0, 1], [2, 3]]),
        ("abab", [[0, 2], [1, 3]]),
        ("aaaabb", [[0, 1], [2, 3], [4, 5]]),
        ("abb", [[0], [1], [2]]),
        ("aaa", [[0, 1, 2]]),
    ],
)
def test_shards_lie_inside_a_fabric(names, shards):
    from ucc_hetero.torch import creation

    assert creation.shards(list(names)) == shards
