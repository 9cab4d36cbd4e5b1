"""Numbers of our own in the memory that a rank's buffers live in, for measurements and checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..machine.vendors import VENDORS
from .runtime import DeviceRuntime

Array = npt.NDArray[Any]


class Vector:
    """``values`` in the memory of ``runtime``'s device, or for None in the host's."""

    def __init__(self, values: Array, runtime: DeviceRuntime | None) -> None:
        self.runtime = runtime
        self.host = np.ascontiguousarray(values)
        self.block = runtime.alloc(max(self.host.nbytes, 1)) if runtime else None
        if self.runtime and self.block:
            self._copy(self.runtime, self.block.handle, self.host.ctypes.data)
            interface = {
                "shape": self.host.shape,
                "typestr": self.host.dtype.str,
                "data": (self.block.handle, False),
                "version": 2,
            }
            for name in VENDORS[runtime.vendor].interfaces if runtime else ():
                setattr(self, name, interface)

    @property
    def buffer(self) -> Any:
        """The buffer to pass to a communicator."""
        return self if self.block else self.host

    def get(self) -> Array:
        if self.runtime and self.block:
            self._copy(self.runtime, self.host.ctypes.data, self.block.handle)
        return self.host

    def _copy(self, runtime: DeviceRuntime, dst: int, src: int) -> None:
        with runtime.stream() as stream:  # calls without a stream do not wait for the device's other work
            runtime.copy(dst, src, self.host.nbytes, stream.handle)
            stream.synchronize()

    def close(self) -> None:
        if self.block:
            self.block.close()
