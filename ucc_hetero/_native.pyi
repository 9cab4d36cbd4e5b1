"""cffi generates this module; its two objects have no static types."""

from typing import Any

ffi: Any
lib: Any
