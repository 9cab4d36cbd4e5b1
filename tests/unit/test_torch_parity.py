"""The rule by which two training runs count as the same."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def parity():
    sys.path.insert(0, str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("torch_parity", ROOT / "tools" / "torch_parity.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_distances(parity) -> None:
    found = parity.distance([4.0, 2.0, 1.0, 1.0], [4.0, 2.5, 1.0, 1.5], tail=2)
    assert found == pytest.approx((0.0, 0.5, 0.25))
    for one, two in (([1.0], [1.0, 2.0]), ([], []), ([1.0, float("nan")], [1.0, 1.0])):
        with pytest.raises(ValueError, match="cannot be compared"):
            parity.distance(one, two)


@pytest.mark.parametrize(("dtype", "first", "worst", "tail", "good"), [
    ("fp32", 1e-7, 9e-6, 1e-6, True), ("fp32", 2e-6, 9e-6, 1e-6, False), ("fp32", 1e-7, 2e-5, 1e-6, False),
    ("bf16", 5e-3, 9e-3, 9e-4, True), ("bf16", 5e-3, 2e-2, 9e-4, False), ("bf16", 5e-3, 9e-3, 2e-3, False),
])  # fmt: skip
def test_the_rule(parity, dtype: str, first: float, worst: float, tail: float, good: bool) -> None:
    assert parity.holds(parity.Distance(first, worst, tail), parity.RULES[dtype]) == good


def test_runs_of_one_seed_and_of_another(parity) -> None:
    one = [5.0, 4.0, 3.0]
    near, far = [x * (1 + 1e-7) for x in one], [x * 1.1 for x in one]

    def verdict(mixed: list[float], control: list[float]) -> bool:
        runs = {"single": one, "homogeneous": near, "mixed": mixed, "control": control}
        return parity.judge({name: {"ddp": curve} for name, curve in runs.items()}, "fp32")[2]

    assert verdict(near, far)
    assert not verdict([5.0, 4.0, 3.001], far)
    assert not verdict(near, [x * (1 + 2e-7) for x in one])  # another seed must be far away
