"""One-sided transfers, notifications and counters between ranks, on host memory."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_everybody_reaches_everybody(mpirun: Callable[..., Any], ranks: int) -> None:
    assert mpirun("tests/mpi/rma_cases.py", ranks).said("right") == ranks


def test_over_tcp(mpirun: Callable[..., Any]) -> None:
    assert mpirun("tests/mpi/rma_cases.py", 2, env={"UCX_TLS": "tcp,self"}).said("right") == 2
