"""Thin Python classes over libucc: contexts, teams, collectives and requests."""

from __future__ import annotations

from .bindings.ucc import *  # noqa: F403
from .bindings.ucc import __all__ as __all__
