"""Tables in OSU's C format, byte for byte. Pure functions of measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from .options import Options
from .stats import Interval, Overlap
from .table import VERSION, Bench

WIDTH = 20
_ACCELERATOR = {"host": "", "cuda": "-CUDA", "rocm": "-ROCM"}


@dataclass(frozen=True, slots=True)
class Row:
    """A measured line. ``value``: µs, or MB/s (10⁶ bytes) in bandwidth tests; ``wrong``: number of wrong elements."""

    size: int
    value: float
    least: float = 0.0
    most: float = 0.0
    iterations: int = 0
    wrong: int = 0
    percentiles: tuple[float, ...] = ()
    rate: float = 0.0
    overlap: Overlap | None = None
    ratios: Mapping[str, tuple[float, Interval]] = field(default_factory=dict)

    @property
    def compared(self) -> float:
        """The time for ratios: of a non-blocking call, that without computation."""
        return self.value if self.overlap is None else self.overlap.pure


def _right(text: str) -> str:
    return f"{text:>{WIDTH}}"


def _fixed(value: float) -> str:
    return f"{value:{WIDTH}.2f}"


def _title(bench: Bench, accelerator: str) -> str:
    title = bench.title % _ACCELERATOR[accelerator] if "%s" in bench.title else bench.title
    return f"# {title} v{VERSION}\n"


def osu_preamble(bench: Bench, options: Options, accelerator: str = "host", pairs: int = 0) -> str:
    """Lines before the first header. ``accelerator``: that of rank 0."""
    title = _title(bench, accelerator)
    if bench.family == "onesided":
        return title + "# Window creation: MPI_Win_allocate\n# Synchronization: MPI_Win_flush\n"
    if bench.name == "osu_mbw_mr":
        return f"{title}# [ pairs: {pairs} ] [ window size: {options.window} ]\n"
    if bench.family == "nonblocking":
        return f"\n{title}# Overall = Coll. Init + Compute + MPI_Test + MPI_Wait\n\n"
    return "\n" + title


def mix_line(accelerators: Sequence[str]) -> str:
    """A comment with the kinds of memory if ranks differ in it; else empty."""
    if len(set(accelerators)) == 1:
        return ""
    runs = [f"{len(list(group))}x {kind}" for kind, group in groupby(accelerators)]
    short = [f"{n}x {kind}" for kind, n in sorted(Counter(accelerators).items())]
    return f"# Clusters: {', '.join(runs if len(runs) <= len(short) else short)}\n"


def datatype(name: str) -> str:
    """The line with the datatype, printed before each header of a benchmark that moves data."""
    return f"# Datatype: {name}.\n"


def _columns(bench: Bench, options: Options) -> list[str]:
    if bench.family == "nonblocking":
        full = ["Coll. Init(us)", "MPI_Test(us)", "MPI_Wait(us)"] if options.full else []
        spread = ["Min Comm.(us)", "Max Comm.(us)"] if options.full else []
        return ["Overall(us)", "Compute(us)", *full, "Pure Comm.(us)", *spread, "Overlap(%)"]
    if bench.name == "osu_mbw_mr":
        return ["MB/s", "Messages/s"]
    if bench.unit == "bandwidth":
        return ["Bandwidth (MB/s)"]
    return ["Latency (us)" if bench.family == "onesided" else "Avg Latency(us)"]


def osu_header(bench: Bench, options: Options) -> str:
    first, *rest = _columns(bench, options)
    text = f"{'# Size':<10}{_right(first)}" if bench.sized else f"# {first}"
    text += "".join(map(_right, rest))
    if options.full and bench.family != "nonblocking":
        text += _right("Min Latency(us)") + _right("Max Latency(us)") + f"{'Iterations':>12}"
    if options.validate:
        text += _right("Validation")
    tail = "Tail BW(MB/s)" if bench.unit == "bandwidth" else "Tail Lat(us)"
    text += "".join(_right(f"P{p} {tail}") for p in options.percentiles)
    unit = "MB/s" if bench.unit == "bandwidth" else "us"
    for peer in options.peers:
        # Above 1 where the backend is faster.
        over = (options.backend, peer) if bench.unit == "bandwidth" else (peer, options.backend)
        text += _right(f"{peer}({unit})") + f"{'/'.join(over):>22}"
    return text + "\n"


def osu_row(bench: Bench, options: Options, row: Row) -> str:
    """One line of the table."""
    if row.overlap is not None:
        text = _overlap_columns(bench, options, row)
    elif bench.sized:
        text = f"{row.size:<10}{_fixed(row.value)}"
    else:
        text = f"{row.value:17.2f}"
    if bench.name == "osu_mbw_mr":
        text += _fixed(row.rate)
    if options.full and row.overlap is None:
        text += f"{_fixed(row.least)}{_fixed(row.most)}{row.iterations:12d}"
    if options.validate:
        text += _right("Fail" if row.wrong else "Pass")
    text += "".join(map(_fixed, row.percentiles))
    for peer in options.peers:
        if peer in row.ratios:
            value, interval = row.ratios[peer]
            text += f"{_fixed(value)} {interval!s:>21}"
        else:
            text += f"{_right('-')}{'-':>22}"
    return text + "\n"


def noise_line(backend: str, unclear: Mapping[str, Sequence[int]]) -> str:
    """A line with peers and sizes whose measurements are too noisy; empty if there are none."""
    return "".join(
        f"# too noisy to tell whether {backend} or {peer} is faster at sizes {', '.join(map(str, sizes))}: "
        "repeat on a quiet machine or with more --rounds and iterations\n"
        for peer, sizes in unclear.items()
        if sizes
    )


def _overlap_columns(bench: Bench, options: Options, row: Row) -> str:
    times = row.overlap
    assert times is not None
    values = [times.compute, times.pure, times.percent]
    if options.full:
        values = [
            *(times.compute, times.init, times.test, times.wait),
            *(times.pure, times.least, times.most, times.percent),
        ]
    first = f"{row.size:<10}{_fixed(times.overall)}" if bench.sized else f"{times.overall:13.2f}"
    return first + "".join(map(_fixed, values))
