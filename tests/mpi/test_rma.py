"""One-sided transfers, notifications and counters between ranks, on host memory."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(("ranks", "without"), [(1, ""), (3, ""), (2, "cma")])
def test_everybody_reaches_everybody(crew: Callable[..., Any], ranks: int, without: str) -> None:
    """Also where the kernel does not copy between processes."""
    env = {"UCX_TLS": f"^{without}"} if without else {}
    assert crew("tests/mpi/rma_cases.py", ranks, env=env).said("right") == ranks
