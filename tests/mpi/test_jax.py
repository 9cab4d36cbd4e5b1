"""JAX's arrays as what is sent. Skipped where JAX is not installed."""

import importlib.util

import pytest


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX: pip install jax")
def test_sent_from_jax(mpirun):
    mpirun("script_cases:jax_arrays", 3, env={"UCCH_EMULATE": "nvidia:2,amd:1"}, timeout=120)
