"""Marks of all tests here: they start ranks, and those of the PyTorch backend need torch."""

import importlib.util
from pathlib import Path

import pytest

TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: pip install '.[torch]'")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.mpi)
            if item.path.name.startswith("test_torch_"):
                item.add_marker(TORCH)
