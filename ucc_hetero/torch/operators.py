"""torch's operators for collectives and messages, for groups that are written in Python.

torch calls the methods of such a group directly. Modes of its dispatcher (``CommDebugMode``, ``FakeTensorMode``) and
tensors that wrap others (``TwoTensor``, ``AsyncCollectiveTensor``) see operators only, so calls that these could see
take the way of a group in C++: through the operator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed import distributed_c10d as c10d

from ..machine import vendors
from .profiling import profiled
from .streams import tensors_in
from .work import CombinedWork

_M = TypeVar("_M", bound=Callable[..., Any])

_functional: Any = None


def install() -> None:
    """Serve ``_c10d_functional.all_gather_into_tensor_out``, into which Inductor packs all-gathers; once.

    torch's kernel for it calls a method that a group written in Python cannot override. This one serves every group.
    """
    global _functional
    if _functional is None:
        _functional = torch.library.Library("_c10d_functional", "IMPL")
        for kind in ("cpu", *vendors.TORCH):
            key = torch._C._dispatch_key_for_device(kind)
            _functional.impl("all_gather_into_tensor_out", _all_gather_out, key)


def _all_gather_out(input: Any, group_size: int, group: Any, *, out: Any) -> Any:
    found: Any = c10d._resolve_process_group(group) if isinstance(group, str) else group
    name = "all_gather_single" if hasattr(found, "all_gather_single") else "_allgather_base"  # torch up to 2.12
    torch._C._distributed_c10d._register_work(out, getattr(found, name)(out, input))
    return out


#: Number of modes of torch's dispatcher that are active in this thread.
modes = torch._C._len_torch_dispatch_stack
#: Types of most tensors. Fast paths look at these two themselves before they call :func:`seen`.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def seen(*tensors: Any) -> bool:
    """True if Python code would see an operator with these tensors: a mode of torch's dispatcher, or their class."""
    if modes():
        return True
    for value in tensors:
        if type(value) in PLAIN:
            continue
        if isinstance(value, torch.Tensor):
            if torch._C._dispatch_keys(value).has(torch._C.DispatchKey.Python):
                return True
        elif isinstance(value, (list, tuple)) and not PLAIN.issuperset(map(type, value)) and seen(*value):
            return True
    return False


@dataclass
class _Call:
    """A call of a group's method that goes through its operator."""

    operator: Any
    group: Any
    #: The method without its tensors, which come from the dispatcher.
    method: Callable[..., Any]
    #: The operator's arguments after the group, as the dispatcher takes them; None until torch has made them.
    boxed: tuple[Any, ...] | None = None
    #: Works made so far. C++ keeps only its own half of them.
    works: list[Any] = field(default_factory=list)

    def make(self, tensors: tuple[Any, ...], others: Sequence[Any], torch_method: Callable[..., Any]) -> Any:
        """Call the operator; return the Work."""
        # Only torch can box some arguments, such as operations: its method does, of a group that has no override.
        plain = dist.ProcessGroup(self.group.rank(), self.group.size())
        with torch._C._DisableTorchDispatch():
            torch_method(plain, *tensors, *others)
        assert self.boxed is not None, "torch's method calls the operator"
        made = self.operator(*tensors, self.group.boxed(), *self.boxed)
        work = dist.Work.unbox(made if isinstance(made, torch.ScriptObject) else made[1])
        # A tensor that wraps several returns the Work of one of them.
        return CombinedWork(self.group, self.works, []) if len(self.works) > 1 and work in self.works else work

    def takes(self, group: Any, tensors: tuple[Any, ...]) -> bool:
        """True unless the operator is called for another group, or for tensors without data."""
        return self.boxed is None or (group is self.group and not any(each.is_meta for each in tensors_in(tensors)))

    def serve(self, tensors: tuple[Any, ...], boxed: tuple[Any, ...]) -> Any:
        """Run the operator, or keep its arguments the first time."""
        work = self.group.done_work
        if self.boxed is None:
            self.boxed = boxed
        else:
            work = self.method(*tensors)
            self.works.append(work)
        return (tensors[0], work.boxed()) if len(self.operator._schema.returns) == 2 else work.boxed()


class _Thread(threading.local):
    call: _Call | None = None


_thread = _Thread()


def through_operator(name: str, torch_name: str | None = "") -> Callable[[_M], _M]:
    """Decorate a method of a group: modes of torch's dispatcher and tensors that wrap others see its operator, and
    profilers its name.

    Args:
        name: The operator's name.
        torch_name: The name of torch's method, if it is not the operator's without its last underscore. None: only
            profilers see the call.
    """
    operator = getattr(torch.ops.c10d, name).default
    count = [each.name for each in operator._schema.arguments].index("process_group")
    torch_method: Any = None
    if torch_name is not None:
        torch_method = getattr(dist.ProcessGroup, name.rstrip("_"), None) or getattr(dist.ProcessGroup, torch_name)

    def decorated(method: _M) -> _M:
        def shown(self: Any, *args: Any) -> Any:
            return profiled(name, tensors_in(args[count - 1 : count]), partial(method, self, *args))

        @wraps(method)
        def made(self: Any, *args: Any) -> Any:
            run = shown if profiler._is_profiler_enabled else method
            if torch_method is None or not seen(*args):
                return run(self, *args)
            tensors, others = args[:count], args[count:]
            call = _Call(operator, self, lambda *given: run(self, *given, *others))
            with _served(call):
                return call.make(tensors, _as_torch_takes(others), torch_method)

        return cast(_M, made)

    return decorated


def _as_torch_takes(others: tuple[Any, ...]) -> list[Any]:
    """Arguments without options that are None: torch's method has defaults. No split sizes are an empty list."""
    given = list(others)
    while given and given[-1] is None:
        given.pop()
    return [[] if each is None else each for each in given]


_lock = threading.Lock()
#: Operator -> the registration of its kernel, and the number of calls that need it.
_kernels: dict[Any, list[Any]] = {}


@contextmanager
def _served(call: _Call) -> Iterator[None]:
    """Serve a call's operator. Only meanwhile: other groups' calls of the operator pass through this kernel, too."""
    operator = call.operator
    with _lock:
        kernel = _kernels.get(operator)
        if kernel is None:
            kernel = _kernels[operator] = [torch.library.Library("c10d", "IMPL"), 0]
            kernel[0].impl(operator, partial(_kernel, operator), "BackendSelect")
        kernel[1] += 1
    outer, _thread.call = _thread.call, call
    try:
        yield
    finally:
        _thread.call = outer
        with _lock:
            kernel[1] -= 1
            if not kernel[1]:
                del _kernels[operator]
                kernel[0]._destroy()


_BACKEND_SELECT = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)


def _kernel(operator: Any, *args: Any, **more: Any) -> Any:
    """Serve this thread's call of the operator; pass on all others."""
    call = _thread.call
    at = next(i for i, each in enumerate(args) if isinstance(each, torch.ScriptObject))
    group = dist.ProcessGroup.unbox(args[at])
    if call is not None and call.operator is operator and call.takes(group, args[:at]):
        return call.serve(args[:at], args[at + 1 :])
    with torch._C._ExcludeDispatchKeyGuard(_BACKEND_SELECT):
        return operator(*args, **more)
