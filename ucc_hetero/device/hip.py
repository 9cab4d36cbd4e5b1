"""AMD: the HIP runtime library, from the site's ROCm or from what another package loaded."""

from __future__ import annotations

import os
from pathlib import Path

from ucc_hetero.machine import vendors
from ucc_hetero.native.libraries import lib, mapped, package_dirs

__all__ = ["CODE", "VENDOR", "candidates", "folders", "late_settings", "prepare"]

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
    """Before the library starts: what it is to know then (``ucc_hetero.vendors``).

    HIP cannot be asked: where it is here already, and was not told, streams are not held, and device memory is shared
    over xGMI alone (docs/gpu.md).
    """
    vendors.prepare(VENDOR, os.environ, late_settings())


def late_settings() -> tuple[str, ...]:
    """The settings that HIP has read by now, or may have: those for its load, and for its start."""
    return ("load", "start") if mapped("libamdhip64.so") else ()
