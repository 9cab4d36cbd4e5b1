"""NVIDIA: the CUDA driver library, which comes with the driver."""

from __future__ import annotations

import os

from ucc_hetero.native.libraries import lib

__all__ = ["CODE", "VENDOR", "candidates", "prepare"]

VENDOR = "nvidia"
CODE = lib.UCCH_CUDA


def candidates() -> list[str]:
    """Where the library may be, best first."""
    return ["libcuda.so.1"]


def prepare() -> None:
    """Before the library starts: nothing is left to be set up at first use.

    Loading a kernel at its first launch, and NCCL's connecting at an algorithm's first call, wait for the device; while
    a stream of it waits for a collective, that would be for ever. Whoever set the variables keeps them, and where CUDA
    runs already the first comes too late (docs/gpu.md).
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
