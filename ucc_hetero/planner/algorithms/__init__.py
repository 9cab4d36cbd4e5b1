"""The algorithms: functions (topology, call, piece) -> stages, registered by decorator. Every module here is loaded."""

import importlib
import pkgutil

from .expand import expand_plan
from .registry import Algorithm, Case, Piece, Role, Scratch, Stages, added, algorithm, find, names, once, with_role

__all__ = [
    "Algorithm", "Case", "Piece", "Role", "Scratch", "Stages", "added", "algorithm", "expand_plan", "find", "names",
    "once", "with_role",
]  # fmt: skip

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
