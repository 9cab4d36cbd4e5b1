"""Division of work between unequal ranks, and what tells replicas apart: against every other way to divide."""

import itertools
import random

import pytest

pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")
import torch

from ucc_hetero.torch.balance import BalancedSampler, Profile, Share, split_layers
from ucc_hetero.torch.replicas import checksum


@pytest.mark.parametrize("seed", range(20))
def test_no_other_split_is_quicker(seed: int) -> None:
    rng = random.Random(seed)
    size, total = rng.randint(1, 4), rng.randint(4, 12)
    profile = Profile(0, tuple(rng.uniform(0, 3) for _ in range(size)), tuple(rng.uniform(0.1, 2) for _ in range(size)))
    most = [rng.randint(4, 12) for _ in range(size)] if sum([4] * size) >= total else None
    share = profile.split(total, most=most)
    assert share.total == total and min(share.counts) >= 1
    limits = most or [total] * size
    assert all(n <= limit for n, limit in zip(share.counts, limits, strict=True))
    others = (
        counts for counts in itertools.product(*(range(1, limit + 1) for limit in limits)) if sum(counts) == total
    )
    assert profile.seconds(share.counts) == pytest.approx(min(map(profile.seconds, others)))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_is_quicker(seed: int) -> None:
    rng = random.Random(seed)
    ranks, layers = rng.randint(1, 4), rng.randint(4, 9)
    seconds = [[rng.uniform(0.1, 2) for _ in range(layers)] for _ in range(ranks)]

    def slowest(cuts: list[tuple[int, int]]) -> float:
        return max(sum(row[a:b]) for row, (a, b) in zip(seconds, cuts, strict=True))

    cuts = split_layers(seconds)
    assert cuts[0][0] == 0 and cuts[-1][1] == layers and all(a < b for a, b in cuts)
    assert all(one[1] == two[0] for one, two in itertools.pairwise(cuts))
    others = (
        list(itertools.pairwise((0, *inner, layers))) for inner in itertools.combinations(range(1, layers), ranks - 1)
    )
    assert slowest(cuts) == pytest.approx(min(map(slowest, others)))


def test_weights_make_the_average_that_of_all_samples() -> None:
    counts = (1, 5, 2)
    values = torch.randn(8, dtype=torch.float64)
    shares = [Share(counts, rank) for rank in range(3)]
    assert [len(share.take(values)) for share in shares] == list(counts)
    mean = sum(share.take(values).mean() * share.weight for share in shares) / 3
    assert torch.allclose(mean, values.mean())


@pytest.mark.parametrize(("wrong", "said"), [
    (lambda: Profile(0, (0.0, 0.0), (1.0, 1.0)).split(1), "1 samples cannot be dealt to 2 ranks"),
    (lambda: Profile(0, (0.0, 0.0), (1.0, 1.0)).split(9, most=[4, 4]), "9 samples"),
    (lambda: Share((2, 3), 1).take([0] * 4), "batch on rank 1 has 4 samples; the shares add up to 5"),
    (lambda: split_layers([[1.0], [1.0]]), "each needs one"),
    (lambda: BalancedSampler(4, Share((2, 3), 0)), "no batch of 5"),
])  # fmt: skip
def test_mistakes_are_named(wrong, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wrong()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool, torch.uint8]
)
def test_checksums_tell_bits_and_places_apart(dtype: torch.dtype) -> None:
    one = (torch.arange(12) % 5).to(dtype).reshape(3, 4)
    assert checksum([one]) == checksum([one.clone()]) == checksum([one.t().contiguous().t()])
    swapped = one.clone()
    swapped[0, 0], swapped[0, 1] = one[0, 1], one[0, 0]
    changed = one.clone()
    changed[2, 1] = 0 if bool(one[2, 1]) else 1
    assert len({checksum([one]), checksum([swapped]), checksum([changed]), checksum([one, one])}) == 4
    if dtype.is_floating_point:
        assert checksum([torch.zeros(3, dtype=dtype)]) != checksum([-torch.zeros(3, dtype=dtype)])
