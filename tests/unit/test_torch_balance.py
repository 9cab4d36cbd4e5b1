"""Division of work between unequal ranks, and what tells replicas apart: against every other way to divide."""

import itertools
import logging
import random

import pytest

pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")
import torch

from ucc_hetero.torch.balance import BalancedSampler, Profile, Share, fitted, layer_seconds, split_layers
from ucc_hetero.torch.replicas import checksum


@pytest.mark.parametrize("seed", range(20))
def test_no_other_split_is_quicker(seed):
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
def test_no_other_cut_is_quicker(seed):
    rng = random.Random(seed)
    ranks, layers = rng.randint(1, 4), rng.randint(4, 9)
    seconds = [[rng.uniform(0.1, 2) for _ in range(layers)] for _ in range(ranks)]

    def slowest(cuts):
        return max(sum(row[a:b]) for row, (a, b) in zip(seconds, cuts, strict=True))

    cuts = split_layers(seconds)
    assert cuts[0][0] == 0 and cuts[-1][1] == layers and all(a < b for a, b in cuts)
    assert all(one[1] == two[0] for one, two in itertools.pairwise(cuts))
    others = (
        list(itertools.pairwise((0, *inner, layers))) for inner in itertools.combinations(range(1, layers), ranks - 1)
    )
    assert slowest(cuts) == pytest.approx(min(map(slowest, others)))


#: Microseconds of equal steps with 1 and with 4 samples, each on one of three processes at a time on two busy cores.
NOISY = (
    (((48708, 1138, 917, 680, 646), (64775, 92288, 50176, 38162, 37964)),
     ((32491, 1004, 689, 689, 46808), (41010, 31820, 72775, 53811, 64808)),
     ((1183, 785, 69296, 23644, 15218), (82283, 28074, 99688, 47809, 39732))),
    (((21236, 1112, 880, 681, 670), (31153, 20361, 28242, 27666, 19456)),
     ((18761, 3579, 983, 811, 711), (42230, 14972, 2864, 10809, 13680)),
     ((1059, 823, 633, 19746, 10997), (11867, 35080, 25746, 35316, 14424))),
    (((3464, 2975, 3768, 3160, 1949), (9219, 12605, 11390, 10028, 9648)),
     ((2889, 3643, 1661, 3568, 1453), (9729, 11757, 9803, 9196, 7286)),
     ((3050, 1637, 2139, 2077, 1434), (5759, 4741, 5509, 6430, 5184))),
)  # fmt: skip


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("ucc_hetero"), "propagate", True)  # whoever has configured it
    return caplog


@pytest.mark.parametrize("ranks", [[0, 1], [1, 2], [2, 0], [0, 1, 2]])
@pytest.mark.parametrize("job", NOISY)
def test_noise_divides_nothing(job, ranks, warnings):
    """Ranks that are alike got shares such as 255 and 1 of 256."""
    profile = fitted(0, (1, 4), [job[rank] for rank in ranks])
    counts = profile.split(240).counts
    assert counts == (240 // len(ranks),) * len(ranks) and "equal shares" in warnings.text
    rows = layer_seconds(0, [[*job[rank], *job[rank]] for rank in ranks])
    assert all(row == rows[0] for row in rows)


@pytest.mark.parametrize("seed", range(10))
def test_differences_beyond_noise_divide(seed, warnings):
    """Ranks that are twice and three times as fast, measured to two per cent."""
    rng, slower = random.Random(seed), (6, 3, 2)
    samples = [[[s * (1 + 2 * n) * rng.uniform(0.98, 1.02) for _ in range(5)] for n in (1, 4)] for s in slower]
    counts = fitted(0, (1, 4), samples).split(240).counts
    assert all(abs(n - due) <= 6 for n, due in zip(counts, (40, 80, 120), strict=True)) and not warnings.text
    rows = layer_seconds(0, samples)
    assert all(rows[r][i] == pytest.approx(s * n, rel=0.03) for r, s in enumerate(slower) for i, n in enumerate((3, 9)))


def test_weights_make_the_average_that_of_all_samples():
    counts = (1, 5, 2)
    values = torch.randn(8, dtype=torch.float64)
    shares = [Share(counts, rank) for rank in range(3)]
    assert [len(share.take(values)) for share in shares] == list(counts)
    mean = sum(share.take(values).mean() * share.weight for share in shares) / 3
    assert torch.allclose(mean, values.mean())


@pytest.mark.parametrize(("wrong", "said"), [
    (lambda: Profile(0, (0.0, 0.0), (1.0, 1.0)).split(1), "1 samples cannot be divided among 2 ranks"),
    (lambda: Profile(0, (0.0, 0.0), (1.0, 1.0)).split(9, most=[4, 4]), "9 samples"),
    (lambda: Share((2, 3), 1).take([0] * 4), "batch on rank 1 has 4 samples; the shares add up to 5"),
    (lambda: split_layers([[1.0], [1.0]]), "each needs one"),
    (lambda: BalancedSampler(4, Share((2, 3), 0)), "shorter than one global batch of 5"),
])  # fmt: skip
def test_mistakes_are_named(wrong, said):
    with pytest.raises(ValueError, match=said):
        wrong()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool, torch.uint8]
)
def test_checksums_tell_bits_and_places_apart(dtype):
    one = (torch.arange(12) % 5).to(dtype).reshape(3, 4)
    assert checksum([one]) == checksum([one.clone()]) == checksum([one.t().contiguous().t()])
    swapped = one.clone()
    swapped[0, 0], swapped[0, 1] = one[0, 1], one[0, 0]
    changed = one.clone()
    changed[2, 1] = 0 if bool(one[2, 1]) else 1
    assert len({checksum([one]), checksum([swapped]), checksum([changed]), checksum([one, one])}) == 4
    if dtype.is_floating_point:
        assert checksum([torch.zeros(3, dtype=dtype)]) != checksum([-torch.zeros(3, dtype=dtype)])
