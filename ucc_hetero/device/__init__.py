"""GPU runtimes behind one interface: which are installed, whose memory an address is, which device a rank uses.

A runtime's library is loaded when it is first needed, never at import. On a machine without one all ranks have the
vendor ``host``.
"""

from .rank import Place, bind, free_memory, local_rank, own_device, place_of
from .registry import (
    available,
    collective_library,
    late_settings,
    no_runtime,
    pointer_vendor,
    register,
    report,
    runtime_of,
    whose,
)
from .runtime import Block, DeviceRuntime, Event, Pointer, Stream, Vector, stream_handle, uncaptured

__all__ = [
    "Block", "DeviceRuntime", "Event", "Place", "Pointer", "Stream", "Vector", "available", "bind",
    "collective_library", "free_memory", "late_settings", "local_rank", "no_runtime", "own_device", "place_of",
    "pointer_vendor", "register", "report", "runtime_of", "stream_handle", "uncaptured", "whose",
]  # fmt: skip
