"""Offer of a machine with GPUs to the tests here."""

import importlib.util

from ucc_hetero import device


def gpus() -> int:
    """NVIDIA GPUs that this process may use, and torch to make arrays on them."""
    runtime = device.runtime_of("nvidia") if importlib.util.find_spec("torch") else None
    return 0 if runtime is None else runtime.count()
