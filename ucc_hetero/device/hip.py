"""AMD: the HIP runtime library, from the site's ROCm or from what another package loaded."""

from __future__ import annotations

import os

from ucc_hetero.native.libraries import lib, mapped

__all__ = ["CODE", "VENDOR", "candidates", "prepare"]

VENDOR = "amd"
CODE = lib.UCCH_HIP


def candidates() -> list[str]:
    """Where the library may be, best first: in this process, under ROCM_PATH or /opt/rocm, where the loader looks."""
    present = mapped("libamdhip64.so")
    folder = os.path.join(os.environ.get("ROCM_PATH") or "/opt/rocm", "lib")
    names = [f"libamdhip64.so.{major}" for major in (7, 6, 5)]
    return [*([present] if present else []), *(os.path.join(folder, name) for name in names), *names]


def prepare() -> None:
    """Before the library starts: kernels are loaded at once, not at first use, as for CUDA.

    HIP cannot be asked how it does that: where it runs already, and was not told, streams are not held (docs/gpu.md).
    """
    if not mapped("libamdhip64.so"):
        os.environ.setdefault("HIP_ENABLE_DEFERRED_LOADING", "0")
