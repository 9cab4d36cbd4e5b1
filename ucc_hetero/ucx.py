"""Thin Python classes over libucp: workers, connections, tagged messages and remote memory access."""

from __future__ import annotations

from .bindings.ucx import *  # noqa: F403
from .bindings.ucx import __all__ as __all__
