"""``-G tty,png,pdf``: every iteration of every size, as a plot in files or as text on stderr."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .options import BadUsage

Samples = Mapping[int, npt.NDArray[np.float64]]
_BARS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 60


def check(kinds: tuple[str, ...]) -> None:
    """Raise BadUsage where a kind of plot cannot be made, before anything is measured."""
    if set(kinds) & {"png", "pdf"}:
        try:
            importlib.import_module("matplotlib.figure")
        except ImportError:
            raise BadUsage(
                f"option -G {','.join(kinds)}: matplotlib is needed (extra 'plot'); -G tty works without"
            ) from None


def text(samples: Samples, columns: int = _COLUMNS) -> str:
    """One line per size: bars of the iterations' mean times in up to ``columns`` groups, with least and most in µs."""
    lines = []
    for size, values in samples.items():
        groups = np.array_split(values, min(columns, values.size))
        means = np.array([group.mean() for group in groups])
        top = means.max() or 1.0
        bars = "".join(_BARS[max(1, int(np.ceil(mean / top * (len(_BARS) - 1))))] for mean in means)
        lines.append(f"{size:>10} {bars:<{columns}} {values.min():.2f} to {values.max():.2f} us")
    return "\n".join(lines) + "\n"


def _figure(title: str, samples: Samples) -> Any:
    matplotlib = importlib.import_module("matplotlib.figure")
    drawing = matplotlib.Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = drawing.subplots()
    for size, values in samples.items():
        axes.plot(np.arange(values.size), values, linewidth=0.8, label=f"{size} bytes")
    axes.set_yscale("log")
    axes.set_xlabel("iteration")
    axes.set_ylabel("µs")
    axes.set_title(title)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    return drawing


def write(kinds: tuple[str, ...], name: str, samples: Samples) -> None:
    """Write ``name.png`` and ``name.pdf`` to the working directory and the text to stderr, as asked for."""
    if "tty" in kinds:
        sys.stderr.write(f"# {name}: every iteration\n{text(samples)}")
    for kind in ("png", "pdf"):
        if kind in kinds:
            _figure(name, samples).savefig(f"{name}.{kind}")
