"""Memory for a benchmark's messages: numpy's, or a GPU's through torch.

A ``Memory`` makes blocks: ``block.array`` is for the peer, ``block.put`` and ``block.get`` copy numpy data in and out,
and ``block.overrun`` is true after a write past the end.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ucc_hetero.types import DTYPES

from .options import BadUsage
from .world import World

Host = npt.NDArray[Any]
#: Guard elements behind each block, which no call may write, and the byte in them.
_GUARD, _GUARD_BYTE = 64, 0x5A

_OSU_NAMES = {"mpi_char": "int8", "mpi_int": "int32", "mpi_float": "float32"}
_MPI_NAMES = {"int8": "MPI_CHAR", "int32": "MPI_INT", "float32": "MPI_FLOAT", "float64": "MPI_DOUBLE"}


def dtype_of(name: str) -> np.dtype[Any]:
    """The numpy dtype of an OSU type name, or of one of this package's. ``ValueError`` if unknown."""
    known = _OSU_NAMES.get(name, name)
    if known not in DTYPES:
        raise ValueError(f"option -T {name!r}: known are all, {', '.join((*_OSU_NAMES, *DTYPES))}")
    try:
        return np.dtype(known)
    except TypeError:
        pass
    try:
        found: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), known))
        return found
    except ImportError:
        raise ValueError(f"option -T {name!r}: numpy lacks it; install ml_dtypes") from None


def label_of(dtype: np.dtype[Any]) -> str:
    """OSU's name of the datatype."""
    return _MPI_NAMES.get(dtype.name, f"MPI_{dtype.name.upper()}")


@dataclass(slots=True)
class Block:
    """``count`` elements and a guard behind them. ``whole``: numpy array for host memory, else a torch tensor."""

    array: Any
    whole: Any
    count: int
    dtype: np.dtype[Any]

    def put(self, data: Host) -> None:
        """Write ``data`` (at most ``count`` elements) to the beginning."""
        self._write(0, data)

    def get(self) -> Host:
        """A copy of the elements; for host memory a view."""
        return self._host()[: self.count]

    def overrun(self) -> bool:
        """True if the guard was written."""
        return bool((self._host()[self.count :].view(np.uint8) != _GUARD_BYTE).any())

    def head(self, count: int) -> Block:
        """A block of the first ``count`` elements, with a new guard behind them."""
        whole = self.whole[: count + _GUARD]
        block = Block(whole[:count], whole, count, self.dtype)
        filler = np.full(_GUARD * self.dtype.itemsize, _GUARD_BYTE, np.uint8)
        block._write(count, filler.view(self.dtype))
        return block

    def _host(self) -> Host:
        if isinstance(self.whole, np.ndarray):
            return self.whole
        torch = importlib.import_module("torch")
        raw: Host = self.whole.view(torch.uint8).cpu().numpy()
        return raw.view(self.dtype)

    def _write(self, start: int, data: Host) -> None:
        if isinstance(self.whole, np.ndarray):
            self.whole[start : start + data.size] = data
            return
        torch, size = importlib.import_module("torch"), self.dtype.itemsize
        raw = self.whole.view(torch.uint8)[start * size : (start + data.size) * size]
        raw.copy_(torch.from_numpy(data.copy().view(np.uint8)))
        if not self.whole.is_cpu:  # wait for the copy, as calls without a stream do not
            torch.cuda.current_stream().synchronize()


@dataclass(frozen=True, slots=True)
class Memory:
    """``accelerator`` is host, cuda or rocm."""

    accelerator: str

    def block(self, dtype: np.dtype[Any], count: int) -> Block:
        """A block of ``count`` elements whose pages were touched."""
        total: int = count + _GUARD
        store: Any
        if self.accelerator == "host":
            store = np.ones(total, dtype)
        else:
            torch = importlib.import_module("torch")
            store = torch.ones(total, dtype=getattr(torch, dtype.name), device="cuda")
        return Block(store[:count], store, count, dtype)


def _accelerator_here() -> tuple[str, str]:
    """("cuda" | "rocm" | "host", reason for "host") of this machine, from torch."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "host", "torch, through which the benchmarks use GPU memory, is not installed (extra 'torch')"
    if not torch.cuda.is_available():
        return "host", "torch sees no GPU on this rank"
    return ("rocm" if torch.version.hip else "cuda"), ""


def memory_of(world: World, accelerator: str) -> Memory:
    """Memory of each rank. Collective; ``BadUsage`` on all ranks if one rank cannot have it."""
    local = world.local_rank()
    try:
        return world.agreed(lambda: open_memory(accelerator, local), ValueError)
    except ValueError as why:
        raise BadUsage(str(why)) from None


def open_memory(accelerator: str, local_rank: int) -> Memory:
    """Memory of this rank. Binds a GPU to the rank if one is asked for.

    ``ValueError`` with the way out if the accelerator does not exist.
    """
    if accelerator == "host":
        return Memory("host")
    here, why = _accelerator_here()
    if here == "host":
        if accelerator == "auto":
            return Memory("host")
        raise ValueError(f"option -d {accelerator}: {why}; leave -d out to measure host memory")
    if accelerator not in ("auto", here):
        raise ValueError(f"option -d {accelerator}: torch on this rank was built for {here}; use -d {here} or -d auto")
    torch = importlib.import_module("torch")
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return Memory(here)
