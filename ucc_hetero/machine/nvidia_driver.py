"""NVIDIA devices as their kernel driver knows them: models. Which of them NVLink joins it does not tell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .vendors import Known, text

_FOLDER = "proc/driver/nvidia/gpus"
#: Files of the driver that a machine's record holds.
FILES = (_FOLDER + "/*/information",)


def details(root: Path, devices: Sequence[str]) -> dict[str, Known]:
    """Details of these devices, by PCI address."""
    texts = ((pci, text(root / _FOLDER / pci / "information")) for pci in devices)
    models = ((pci, re.search(r"^Model:\s*(.+)$", about, re.MULTILINE)) for pci, about in texts)
    return {pci: Known(model[1].strip()) for pci, model in models if model}
