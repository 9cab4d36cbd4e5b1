"""Numbers by which the tags of unlike calls differ between hosts."""

from itertools import combinations

import pytest

from ucc_hetero.bootstrap.board import salt
from ucc_hetero.planner.collectives import ROWS
from ucc_hetero.types import DTYPES, OPS


@pytest.mark.parametrize("names", [ROWS, DTYPES, OPS], ids=["collective", "datatype", "operation"])
@pytest.mark.parametrize("call", ["{} float32[7] SUM root=2", "reduce {}[7] SUM root=2", "reduce float32[7] {} root=2"])
def test_one_name_that_differs_is_enough(call: str, names: list[str]) -> None:
    assert all(salt(call.format(one)) != salt(call.format(two)) for one, two in combinations(names, 2))


def test_one_number_that_differs_is_enough() -> None:
    for number in (1, 2, 1000, 1 << 20, 1 << 40):
        for more in (*range(1, 1021), number):
            assert salt(f"bcast int8[{number}] root=0") != salt(f"bcast int8[{number + more}] root=0")
            assert salt(f"bcast int8[4] root={number}") != salt(f"bcast int8[4] root={number + more}")


def test_salts_are_ten_bits_and_well_spread() -> None:
    found = [salt(f"allgatherv float64[{n},{n * n},3]") for n in range(4000)]
    assert max(found) < 1021 and len(set(found)) > 900
