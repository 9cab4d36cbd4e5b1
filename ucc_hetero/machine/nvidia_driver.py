"""NVIDIA devices in the kernel driver's files: model names. They do not tell which devices NVLink joins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .vendors import Known, text

_FOLDER = "proc/driver/nvidia/gpus"
#: Files of the driver for :func:`.discover.record`.
FILES = (_FOLDER + "/*/information",)


def details(root: Path, devices: Sequence[str]) -> dict[str, Known]:
    """PCI address -> details of the device."""
    texts = ((pci, text(root / _FOLDER / pci / "information")) for pci in devices)
    models = ((pci, re.search(r"^Model:\s*(.+)$", about, re.MULTILINE)) for pci, about in texts)
    return {pci: Known(model[1].strip()) for pci, model in models if model}
