"""Device arrays of CuPy, numba, JAX and torch, and raw pointers, with one interface for array_cases.py.

``put(values)`` makes an array and returns when it is there, ``get(array)`` reads it back. ``stream()``, ``fill(array,
values, stream)``, ``read(array, stream)`` and ``work(stream)``, which keeps a stream busy for a while, are where the
library has streams. ``into`` makes the arrays that are received into.
"""

import importlib.util
import os

import numpy as np

from ucc_hetero import device

#: Elements that ``work`` moves, and how often.
LONG, TIMES = 1 << 27, 40


class RawArray:
    """Memory of the runtime with ``__cuda_array_interface__``: a raw pointer."""

    def __init__(self, gpu, values):
        self.gpu, self.shape, self.dtype = gpu, values.shape, values.dtype
        self.block = gpu.alloc(max(1, values.nbytes))
        self.strides = None

    @property
    def __cuda_array_interface__(self):
        data = self.block.handle, False
        return {"shape": self.shape, "typestr": self.dtype.str, "data": data, "version": 3, "strides": self.strides}


class Kind:
    streams = True

    def into(self, values):
        return self.put(values)

    def strided(self, values):
        return self.put(values)[::2]


class Raw(Kind):
    """Blocks of the runtime in use; the fake GPU has no others."""

    def __init__(self):
        (self.gpu,) = device.available()
        self.own = None
        self.kept = []
        self.fake = "fake" in os.path.basename(self.gpu.path)

    def put(self, values):
        array = RawArray(self.gpu, values)
        self.own = self.own or self.gpu.stream()
        self.fill(array, values, self.own)
        self.own.synchronize()
        return array

    def get(self, array):
        return self.read(array, self.own)

    def stream(self):
        return self.gpu.stream()

    def fill(self, array, values, stream):
        values = np.ascontiguousarray(values)
        self.kept.append(values)  # the stream reads it later
        self.gpu.copy(array.block.handle, values.ctypes.data, values.nbytes, stream.handle)

    def read(self, array, stream):
        out = np.empty(array.shape, array.dtype)
        self.gpu.copy(out.ctypes.data, array.block.handle, out.nbytes, stream.handle)
        stream.synchronize()
        return out

    def work(self, stream):
        elements = 1000 if self.fake else LONG
        self.long = getattr(self, "long", None) or [self.gpu.alloc(4 * elements) for _ in range(2)]
        for _ in range(TIMES):
            self.gpu.copy(self.long[0].handle, self.long[1].handle, 4 * elements, stream.handle)

    def strided(self, values):
        array = self.put(values)
        array.shape, array.strides = (array.shape[0] // 2,), (2 * array.dtype.itemsize,)
        return array


class Cupy(Kind):
    def __init__(self):
        import cupy

        self.cupy = cupy

    def put(self, values):
        array = self.cupy.asarray(values)
        self.cupy.cuda.get_current_stream().synchronize()
        return array

    def get(self, array):
        return np.asarray(self.cupy.asnumpy(array))

    def stream(self):
        return self.cupy.cuda.Stream(non_blocking=True)

    def fill(self, array, values, stream):
        array.set(values, stream=stream)

    def read(self, array, stream):
        with stream:
            doubled = array * 2  # a kernel, too
        out = self.cupy.asnumpy(doubled, stream=stream)
        stream.synchronize()
        return np.asarray(out / 2).astype(array.dtype)

    def work(self, stream):
        with stream:
            long = self.cupy.empty(LONG, np.float32)
            for k in range(TIMES):
                long.fill(k)


class Numba(Kind):
    def __init__(self):
        from numba import cuda

        self.cuda = cuda

    def put(self, values):
        array = self.cuda.to_device(np.ascontiguousarray(values))
        self.cuda.synchronize()
        return array

    def get(self, array):
        return np.asarray(array.copy_to_host())

    def stream(self):
        return self.cuda.stream()

    def fill(self, array, values, stream):
        array.copy_to_device(values, stream=stream)

    def read(self, array, stream):
        out = np.empty(array.shape, array.dtype)
        array.copy_to_host(out, stream=stream)
        stream.synchronize()
        return out

    def work(self, stream):
        one, two = (self.cuda.device_array(LONG, np.float32) for _ in range(2))
        for _ in range(TIMES):
            one.copy_to_device(two, stream=stream)


class Torch(Kind):
    def __init__(self):
        import torch

        self.torch = torch

    def put(self, values):
        tensor = self.torch.from_numpy(np.array(values)).cuda()
        self.torch.cuda.synchronize()
        return tensor

    def get(self, array):
        return np.asarray(array.cpu().numpy())

    def stream(self):
        return self.torch.cuda.Stream()

    def fill(self, array, values, stream):
        with self.torch.cuda.stream(stream):
            array.copy_(self.torch.from_numpy(np.array(values)))

    def read(self, array, stream):
        with self.torch.cuda.stream(stream):
            return np.asarray((array * 2).cpu().numpy() / 2).astype(self.get(array[:0]).dtype)

    def work(self, stream):
        with self.torch.cuda.stream(stream):
            self.torch.cuda._sleep(200_000_000)


class Jax(Kind):
    """JAX arrays are read-only, and JAX exposes no streams.

    It leaves the calling thread with the device it used last, which may not be the arrays'.
    """

    streams = False

    def __init__(self):
        import jax

        self.jax, self.raw = jax, Raw()
        self.mine = self.raw.gpu.current() or 0
        jax.config.update("jax_enable_x64", True)
        self.into = self.raw.put
        self.device = jax.devices()[device.local_rank() % len(jax.devices())]

    def put(self, values):
        array = self.jax.device_put(values, self.device).block_until_ready()
        self.raw.gpu.use(self.mine)
        return array

    def get(self, array):
        values = self.raw.get(array) if isinstance(array, RawArray) else np.asarray(array)
        self.raw.gpu.use(self.mine)
        return values


class Host(Kind):
    streams = False

    def put(self, values):
        return values.copy()

    def get(self, array):
        return array


KINDS = {"raw": Raw, "cupy": Cupy, "numba": Numba, "jax": Jax, "torch": Torch, "host": Host}


def gpus():
    """NVIDIA GPUs that this process may use, and torch to make arrays on them."""
    runtime = device.runtime_of("nvidia") if importlib.util.find_spec("torch") else None
    return 0 if runtime is None else runtime.count()
