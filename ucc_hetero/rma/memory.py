"""Memory by one interface, whosever it is: of the host, or of this process's device; made here, or an array's."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..bindings.handle import Handle
from ..buffers import as_buffer
from ..device import Block, DeviceRuntime, Place, bind, own_device, place_of, pointer_vendor
from ..device.rank import bound
from ..errors import DeviceError
from ..machine.vendors import VENDORS
from ..native.libraries import ffi


class _Bytes:
    """Allocated device memory, as arrays of its vendor describe theirs."""

    def __init__(self, block: Block) -> None:
        self.block = block
        interface = {"shape": (block.nbytes,), "typestr": "|u1", "data": (block.handle, False), "version": 2}
        for name in VENDORS[block.runtime.vendor].interfaces:
            setattr(self, name, interface)


class Memory(Handle):
    """Memory of the host or of this process's device: an array's, or with :meth:`allocate` its own.

    Args:
        array: A contiguous array, which stays alive.

    Attributes:
        array: The array.
        nbytes: Its length.
        vendor: Vendor of the memory, or ``host``.

    Raises:
        BufferError: If the array is empty, read-only or not contiguous.
        DeviceError: If the array is of a device that this process cannot use.
    """

    def __init__(self, array: Any) -> None:
        found = as_buffer(array, writable=True, argument="memory", rank=0, pointer_vendor=pointer_vendor)
        if not found.contiguous or not found.nbytes:
            raise BufferError("memory: a region is contiguous and not empty")
        #: The array, for whatever takes arrays of its vendor.
        self.array, self._keep = array, found.owner
        #: Where it lies; ``vendor`` is ``host`` for the host's.
        self.address, self.nbytes, self.vendor = found.ptr, found.nbytes, found.vendor
        self._runtime = None if found.vendor == "host" else _runtime(Place(found.vendor, found.device))

    @classmethod
    def allocate(cls, nbytes: int, on: str = "device") -> Memory:
        """Memory of this process's ``device``, or of the ``host`` where that is asked for or there is no device.

        Args:
            nbytes: How many bytes, 1 or more; what is in them is not defined.
            on: ``device`` or ``host``.

        Returns:
            The memory, which is given back by :meth:`close`.

        Raises:
            ValueError: For another ``on``, or less than a byte.
            DeviceError: When the device has not so many bytes left.
        """
        if on not in ("device", "host") or nbytes < 1:
            raise ValueError(f"allocate: {nbytes} bytes on {on!r}: one or more, on 'device' or 'host', are wanted")
        runtime = bind(place_of()) if on == "device" else None
        if runtime is None:
            return cls(np.empty(nbytes, np.uint8))
        with own_device():
            return cls(_Bytes(runtime.alloc(nbytes)))

    def copy(self, source: Any) -> None:
        """Have in it what is in ``source``: an array on any side, or another Memory; done when it returns.

        Args:
            source: As many bytes as here.

        Raises:
            ValueError: When there are more bytes or fewer.
        """
        other = source if isinstance(source, Memory) else Memory(source)
        if other.nbytes != self.nbytes:
            raise ValueError(f"source: {other.nbytes} bytes, and there are {self.nbytes} here")
        runtime = self._runtime or other._runtime
        if runtime is None:
            ffi.memmove(ffi.cast("char *", self.address), ffi.cast("char *", other.address), self.nbytes)
            return
        with own_device(), runtime.stream() as stream:
            runtime.copy(self.address, other.address, self.nbytes, stream.handle)
            stream.synchronize()

    def close(self) -> None:
        """Give allocated memory back; nothing may use it any more."""
        if isinstance(self.array, _Bytes):
            self.array.block.close()


def _runtime(place: Place) -> DeviceRuntime:
    """The runtime of a device, which the engine works with from now on."""
    now = bound()
    if now is not None and now.device == place.device and now != place:
        place = now  # a library that stands in for a vendor's: it has another vendor's memory
    runtime = bind(place)
    if runtime is None:
        raise DeviceError(f"memory is of {place.vendor} device {place.device}, whose runtime is not here")
    return runtime
