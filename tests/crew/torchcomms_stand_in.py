"""What torchcomms 0.3 gives a backend in Python, for tests where it is not installed: ``import torchcomms_stand_in``
puts it in its place."""

import enum
import sys
import types
from datetime import timedelta


class RedOpType(enum.Enum):
    SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM, AVG = range(9)


class TorchCommBackend:
    """The base class, as C++ completes it."""

    def gather_single(self, output, input, root, async_op):
        return self.gather([*output.chunk(self.get_size())] if self.get_rank() == root else [], input, root, async_op)


class TorchComm:
    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def split(self, ranks, name, hints=None):
        made = self._backend.split(ranks, name, _options(None, hints))
        return made and TorchComm(made)


_backends = {}


def _options(store, hints):
    limit = timedelta(seconds=60)
    return types.SimpleNamespace(store=store, timeout=limit, enable_reconfigure=False, hints=hints or {})


def register_backend(name, backend_class):
    _backends[name] = backend_class


def new_comm(backend, device, name, store=None, hints=None):
    made = _backends[backend]()
    made.init(device, name, _options(store, hints))
    return TorchComm(made)


ReduceOp = types.SimpleNamespace(**{each.name: types.SimpleNamespace(type=each) for each in RedOpType})

try:
    import torchcomms  # noqa: F401
except ImportError:
    sys.modules["torchcomms"] = sys.modules[__name__]
