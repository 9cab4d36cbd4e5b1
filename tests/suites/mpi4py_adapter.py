"""A stand-in for ``mpi4py.MPI`` in mpi4py's own tests: communicators, requests and messages are this package's."""

import builtins
import os
import random
import sys
import types
import unittest

from mpi4py import MPI

import ucc_hetero

#: Types for each kind of array, if not all are tested.
FEW = 3


class _Either(type):
    """A class of requests that calls this package's or MPI's, depending on the requests that it gets."""

    ours: type
    theirs: type

    def __call__(cls, *args):
        return cls.ours(*args)

    def __instancecheck__(cls, instance):
        return isinstance(instance, (cls.ours, cls.theirs))

    def __getattr__(cls, name):
        ours, theirs = getattr(cls.ours, name), getattr(cls.theirs, name)

        def method(requests, *args):
            # Messages of pickled objects are MPI's, and so are their requests.
            own = any(isinstance(request, ucc_hetero.Request) for request in requests)
            return (ours if own else theirs)(requests, *args)

        return method


class Request(metaclass=_Either):
    ours, theirs = ucc_hetero.Request, MPI.Request


class Prequest(metaclass=_Either):
    ours, theirs = ucc_hetero.PersistentRequest, MPI.Prequest


class _Messages(type):
    """The class of matched messages, and of those that hold pickled objects."""

    def __instancecheck__(cls, instance):
        return isinstance(instance, (ucc_hetero.Message, MPI.Message))

    def __getattr__(cls, name):
        return getattr(ucc_hetero.Message, name)


class Message(metaclass=_Messages):
    pass


class StandIn(types.ModuleType):
    """``mpi4py.MPI``, with this package's objects where it has them."""

    def __init__(self):
        super().__init__("MPI")
        self.renew()
        self.Request, self.Prequest, self.Message = Request, Prequest, Message

    def renew(self):
        """Recreate the communicators; collective."""
        self.COMM_WORLD, self.COMM_SELF = map(ucc_hetero.Communicator, (MPI.COMM_WORLD, MPI.COMM_SELF))

    def __getattr__(self, name):
        return getattr(MPI, name)


def load(folder, names, standin):
    """Return the test cases of some of mpi4py's test files; and a collective function that renews their
    communicators."""
    sys.path.insert(0, str(folder))  # contains arrayimpl and mpiunittest, which use MPI themselves
    _within_reach()
    modules = [_module(folder / f"{name}.py", standin) for name in names]
    loader = unittest.TestLoader()
    cases = [case for module in modules for group in loader.loadTestsFromModule(module) for case in group]

    def renew():
        old = {id(standin.COMM_WORLD): "COMM_WORLD", id(standin.COMM_SELF): "COMM_SELF"}
        places = [
            (kind, attribute, old[id(value)])
            for module in modules
            for kind in vars(module).values()
            if isinstance(kind, type)
            for attribute, value in vars(kind).items()
            if id(value) in old
        ]
        standin.renew()
        for kind, attribute, name in places:
            setattr(kind, attribute, getattr(standin, name))

    return cases, renew


def _within_reach():
    """Exclude types that every test tries and this package does not have (docs/support.md): long double, and host
    memory exported as a device's, which no GPU runtime knows.

    UCCH_SUITE_TYPES is a seed: it draws some types of each kind of array instead of all.
    """
    import arrayimpl

    fake = arrayimpl.BaseFakeGPUArray
    arrayimpl.ArrayBackends[:] = [backend for backend in arrayimpl.ArrayBackends if not issubclass(backend, fake)]
    maps = [value for name, value in vars(arrayimpl).items() if name.startswith("TypeMap")]
    for numbers in [*maps, *(backend.TypeMap for backend in arrayimpl.ArrayBackends)]:
        for code in "gG":
            numbers.pop(code, None)
    if seed := os.environ.get("UCCH_SUITE_TYPES"):
        draw = random.Random(seed)
        for backend in arrayimpl.ArrayBackends:
            drawn = draw.sample(sorted(backend.TypeMap), FEW)
            backend.TypeMap = {code: backend.TypeMap[code] for code in drawn}


def _module(path, standin):
    """Return a module in which ``from mpi4py import MPI`` gives the stand-in."""

    def imports(name, scope=None, local=None, names=(), level=0):
        if name == "mpi4py" and names and "MPI" in names:
            return types.SimpleNamespace(MPI=standin)
        return builtins.__import__(name, scope, local, names, level)

    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": imports}
    sys.modules[path.stem] = module
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module
