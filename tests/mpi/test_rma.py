"""One-sided transfers, notifications and counters between ranks, on host memory."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize("ranks", [1, 3])
def test_everybody_reaches_everybody(crew: Callable[..., Any], ranks: int) -> None:
    assert crew("tests/mpi/rma_cases.py", ranks).said("right") == ranks
