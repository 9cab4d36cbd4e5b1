"""Short calls on host memory: made again in one crossing into C, and carried by the arrival board within a host."""

from collections.abc import Callable
from typing import Any

import pytest

from ucc_hetero.native.libraries import lib
from ucc_hetero.planner.algorithms import ranking


def test_planner_and_engine_mean_the_same_calls() -> None:
    limits = int(lib.UCCH_PARCEL_BYTES), int(lib.UCCH_PARCEL_RANKS)
    assert limits == (ranking.PARCEL_LIMIT, ranking.MOST_WITH_PARCELS)


@pytest.mark.parametrize(("case", "ranks", "layout"), [
    ("known", 2, ""), ("ahead", 3, ""), ("few_files", 2, ""), ("few_frames", 2, ""),
    ("few_frames", 4, "nvidia:2,amd:2"), ("own_operations", 2, ""),
])  # fmt: skip
def test_short_calls(crew: Callable[..., Any], case: str, ranks: int, layout: str) -> None:
    crew(f"short_cases:{case}", ranks, layout=layout)
