"""AMD: the HIP runtime library, from the site's ROCm or from what another package loaded."""

from __future__ import annotations

import os
from pathlib import Path

from ucc_hetero.native.libraries import lib, mapped, package_dirs

__all__ = ["CODE", "VENDOR", "candidates", "folders", "prepare"]

VENDOR = "amd"
CODE = lib.UCCH_HIP


def folders() -> list[Path]:
    """Where HIP's libraries may be, best first: in torch's wheel, ROCM_PATH, ROCm's wheels and /opt/rocm.

    torch's come first: once it is imported, no other HIP should be in the process.
    """
    wheels = {package: [folder / "lib" for folder in package_dirs(package)] for package in ("torch", "_rocm_sdk_core")}
    path = os.environ.get("ROCM_PATH", "")
    chosen = [Path(path) / "lib"] if path else []
    return [*wheels["torch"], *chosen, *wheels["_rocm_sdk_core"], Path("/opt/rocm/lib")]


def candidates() -> list[str]:
    """Where the library may be, best first: in this process, in the folders, where the loader looks."""
    present = mapped("libamdhip64.so")
    found = [str(path) for folder in folders() for path in _newest_first(folder)]
    return [*([present] if present else []), *found, *(f"libamdhip64.so.{major}" for major in (7, 6, 5))]


def _newest_first(folder: Path) -> list[Path]:
    """By their major versions; torch's wheel has one file without any."""
    named = [folder / f"libamdhip64.so.{major}" for major in (7, 6, 5)]
    return [path for path in (*named, folder / "libamdhip64.so") if path.exists()]


def prepare() -> None:
    """Before the library starts: kernels are loaded at once, not at first use, as for CUDA.

    HIP cannot be asked how it does that: where it runs already, and was not told, streams are not held (docs/gpu.md).
    """
    if not mapped("libamdhip64.so"):
        os.environ.setdefault("HIP_ENABLE_DEFERRED_LOADING", "0")
