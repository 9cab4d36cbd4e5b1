"""Emulated clusters for tests: the fixtures ``cluster`` (two hosts) and ``emulate`` (any), skipped where impossible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ucc_hetero.launch.emulate import Cluster, unavailable

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    """Call with the arguments of `Cluster` -> a running one, which ends with the test."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    # A cluster has slots enough, and mpirun must keep to them: whoever runs the tests may have asked for the contrary.
    monkeypatch.delenv("PRTE_MCA_rmaps_default_mapping_policy", raising=False)
    monkeypatch.delenv("OMPI_MCA_rmaps_base_oversubscribe", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with ExitStack() as running:
        yield lambda *args, **options: running.enter_context(Cluster(*args, **options))


@pytest.fixture
def cluster(emulate: Callable[..., Cluster]) -> Cluster:
    """Two hosts of two slots, joined by links of 4 Gbit/s."""
    return emulate(hosts=2, slots=2, rate="4gbit")
