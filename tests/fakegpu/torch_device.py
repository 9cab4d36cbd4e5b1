"""torch's device ``cuda`` over the fake GPU library: its streams, events, and tensors in device memory.

Import this before a group is created. A CPU build of torch has no such device: a tensor here is a host tensor
in the fake device's memory that pretends to be on a device. Only the methods that messages and the tests
need run in streams.
"""

import ctypes
import threading
from contextlib import contextmanager
from typing import Any

import arrays
import torch

from ucc_hetero.device import Event as NativeEvent
from ucc_hetero.device import place_of
from ucc_hetero.machine.vendors import VENDORS
from ucc_hetero.native.libraries import lib

RUNTIME = arrays.runtime()
HERE = place_of().device
RUNTIME.use(HERE)
DEVICE = torch.device("cuda", HERE)
# torch's name for both vendors' devices; the vendor is that of torch's build.
for _row in VENDORS.values():
    if _row.torch_build:
        setattr(torch.version, _row.torch_build, "1.0" if _row.name == RUNTIME.vendor else None)


class Event:
    _native: NativeEvent | None = None

    def record(self, stream=None):
        if self._native is None:
            RUNTIME.use(HERE)  # in any thread
            self._native = RUNTIME.event()
        self._native.record((stream or state.current).cuda_stream)

    def query(self):
        return self._native is None or self._native.done()


class Stream:
    device = DEVICE

    def __init__(self, device=None):
        RUNTIME.use(HERE)
        self._native = RUNTIME.stream()
        self.cuda_stream = self._native.handle

    def wait_event(self, event):
        if event._native is not None:
            RUNTIME.wait_event(self.cuda_stream, event._native)

    def record_event(self):
        event = Event()
        event.record(self)
        return event

    def query(self):
        return self.record_event().query()

    def synchronize(self):
        self._native.synchronize()


_first = Stream()


class _State(threading.local):
    """The current stream of a thread."""

    def __init__(self):
        self.current = _first


state = _State()


def _capturing():
    return bool(lib.ucch_stream_captures(state.current.cuda_stream))


@contextmanager
def _stream(stream):
    before, state.current = state.current, stream
    try:
        yield
    finally:
        state.current = before


@contextmanager
def _device(device):
    yield


for _name, _value in {
    "Stream": Stream, "Event": Event, "stream": _stream, "device": _device, "is_initialized": lambda: True,
    "current_stream": lambda device=None: state.current, "is_current_stream_capturing": _capturing,
    "get_device_capability": lambda device=None: (8, 0),
}.items():  # fmt: skip
    setattr(torch.cuda, _name, _value)
torch._C._cuda_getCurrentRawStream = lambda index: state.current.cuda_stream
torch._C._cuda_isCurrentStreamCapturing = _capturing


class Tensor(torch.Tensor):
    """A tensor on the fake device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cpu, is_cuda, device = False, True, DEVICE
    block: Any = None

    def get_device(self):
        return HERE

    def detach(self):
        return self

    def reshape(self, *shape):
        return super().reshape(*shape).as_subclass(Tensor)

    def view(self, *shape):
        return super().view(*shape).as_subclass(Tensor)

    def split(self, lengths):
        return [each.as_subclass(Tensor) for each in super().split(lengths)]

    def record_stream(self, stream):
        """Do nothing: only tests free memory."""

    def copy_(self, other):
        nbytes = self.numel() * self.element_size()
        RUNTIME.copy(self.data_ptr(), other.data_ptr(), nbytes, state.current.cuda_stream)
        return self

    def div_(self, other):
        """A kernel in the current stream; float32 only."""
        arrays.kernel("scale", state.current.cuda_stream, self.data_ptr(), self.numel(), 1 / other)
        return self

    def fill(self, value):
        """A kernel in the current stream; float32 only."""
        arrays.kernel("fill", state.current.cuda_stream, self.data_ptr(), self.numel(), value)
        return self

    def seen(self):
        """Return the contents in the current stream's order; the host waits for them."""
        state.current.synchronize()
        return self.as_subclass(torch.Tensor).clone()


Tensor.__module__ = "torch"  # the package treats it as one of torch's own


def empty(*shape, dtype=torch.float32):
    like = torch.empty(shape, dtype=dtype)
    block = RUNTIME.alloc(max(1, like.numel() * like.element_size()))
    memory = (ctypes.c_char * block.nbytes).from_address(block.handle)
    made = torch.frombuffer(memory, dtype=dtype, count=like.numel()).reshape(shape).as_subclass(Tensor)
    made.block = block
    return made


_empty_like, _empty, _cat, _as_strided = torch.empty_like, torch.empty, torch.cat, torch.as_strided


def _like(tensor, **how):
    if isinstance(tensor, Tensor):
        return empty(*tensor.shape, dtype=tensor.dtype)
    return _empty_like(tensor, **how)


#: Memory that the package has asked for; torch frees some once streams have passed the calls that use it.
_own = []


def _made(*shape, device=None, **how):
    if device is None or torch.device(device).type != "cuda":
        return _empty(*shape, device=device, **how)
    _own.append(empty(*shape, **how))
    return _own[-1]


def _joined(tensors, *, out=None, **how):
    if not isinstance(out, Tensor):
        return _cat(tensors, out=out, **how)
    for part, tensor in zip(out.split([each.numel() for each in tensors]), tensors, strict=True):
        part.copy_(tensor)
    return out


def _view(tensor, *layout):
    made = _as_strided(tensor, *layout)
    return made.as_subclass(Tensor) if isinstance(tensor, Tensor) else made


torch.empty_like, torch.empty, torch.cat, torch.as_strided = _like, _made, _joined, _view
