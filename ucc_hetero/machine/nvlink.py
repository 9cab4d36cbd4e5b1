"""NVIDIA devices: models as their driver knows them, and which reach each other over NVLink, as NVML tells.

NVML is asked through ``nvidia-ml-py`` where that is installed; nothing needs it. Records of machines hold the answer in
a file of its own for each device, as the kernel has none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .vendors import Known, text

_DRIVER = "proc/driver/nvidia/gpus"
#: Files of the driver that a machine's record holds.
FILES = (_DRIVER + "/*/information",)
#: Where a record of a machine has the peers of a device, one address a line.
FOLDER = "nvml/nvlink"


def details(root: Path, devices: Sequence[str]) -> dict[str, Known]:
    """Details of these devices, by PCI address."""
    linked, found = peers(devices, root), {}
    for pci in devices:
        model = re.search(r"^Model:\s*(.+)$", text(root / _DRIVER / pci / "information"), re.MULTILINE)
        found[pci] = Known(model[1].strip() if model else "", "", linked.get(pci, ()))
    return found


def answers(root: Path, devices: Sequence[str]) -> dict[str, str]:
    """The files of a record that hold what NVML says."""
    return {f"{FOLDER}/{pci}": "\n".join(others) for pci, others in peers(devices, root).items()}


def peers(devices: Sequence[str], root: Path = Path("/")) -> dict[str, tuple[str, ...]]:
    """PCI address -> addresses of the devices that it reaches over NVLink; of ``devices``, those with any."""
    if root == Path("/"):
        return _asked(devices)
    found = {}
    for pci in devices:
        try:
            found[pci] = tuple((root / FOLDER / pci).read_text().split())
        except OSError:
            continue
    return found


def _asked(devices: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Answers of NVML; nothing where it is not there, or knows nothing of it."""
    if len(devices) < 2:
        return {}
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        handles = dict(_handles(pynvml))
        here = [pci for pci in devices if pci in handles]
        found = {one: tuple(o for o in here if o != one and _linked(pynvml, handles[one], handles[o])) for one in here}
    finally:
        pynvml.nvmlShutdown()
    return {pci: others for pci, others in found.items() if others}


def _handles(pynvml: Any) -> list[tuple[str, Any]]:
    """(PCI address as the kernel spells it, NVML's handle) of every device."""
    out = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            bus = pynvml.nvmlDeviceGetPciInfo(handle).busId
        except pynvml.NVMLError:
            continue  # a device that has fallen off the bus
        text = bus.decode() if isinstance(bus, bytes) else str(bus)
        # 00000000:1B:00.0: NVML spells domains with eight digits, the kernel with four.
        out.append((re.sub(r"^0000(?=[0-9a-f]{4}:)", "", text.lower()), handle))
    return out


def _linked(pynvml: Any, one: Any, other: Any) -> bool:
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except pynvml.NVMLError:
        return False
    return bool(status == pynvml.NVML_P2P_STATUS_OK)
