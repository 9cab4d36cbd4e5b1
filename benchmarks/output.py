"""Tables as text: OSU's C format byte for byte, and nccl-tests' columns. Pure functions of measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .option_table import Options
from .stats import Interval, Overlap
from .table import VERSION, Bench

WIDTH = 20
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128)
_ACCELERATOR = {"host": "", "cuda": "-CUDA", "rocm": "-ROCM"}
_WINDOW = {"create": "MPI_Win_create", "allocate": "MPI_Win_allocate", "dynamic": "MPI_Win_create_dynamic"}
_SYNC = {
    "lock": "MPI_Win_lock/unlock",
    "pscw": "MPI_Win_post/start/complete/wait",
    "fence": "MPI_Win_fence",
    "flush": "MPI_Win_flush",
    "flush_local": "MPI_Win_flush_local",
    "lock_all": "MPI_Win_lock_all/unlock_all",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured line. ``value`` is µs, or MB/s (10⁶ bytes) in bandwidth tests; ``wrong`` counts wrong elements."""

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
    #: Limit set by the links, in the unit of the value; None without --limit.
    limit: float | None = None

    @property
    def compared(self) -> float:
        """The time that ratios and limits are of: of a non-blocking call that without computation."""
        return self.value if self.overlap is None else self.overlap.pure

    def of_limit(self, *, rates: bool) -> float | None:
        """The share of what the links allow that was reached. ``rates``: values are per time."""
        if self.limit is None or not self.compared or not self.limit:
            return None
        return self.compared / self.limit if rates else self.limit / self.compared


def _right(text: str) -> str:
    return f"{text:>{WIDTH}}"


def _fixed(value: float) -> str:
    return f"{value:{WIDTH}.2f}"


def _title(bench: Bench, accelerator: str) -> str:
    title = bench.title % _ACCELERATOR[accelerator] if "%s" in bench.title else bench.title
    return f"# {title} v{VERSION}\n"


def osu_preamble(bench: Bench, options: Options, accelerator: str = "host", pairs: int = 0) -> str:
    """Lines before the first header. ``accelerator`` is that of rank 0."""
    title = _title(bench, accelerator)
    if bench.family == "onesided":
        return title + f"# Window creation: {_WINDOW[options.win]}\n# Synchronization: {_SYNC[options.sync]}\n"
    if bench.name == "osu_init":
        return title
    if bench.name == "osu_mbw_mr":
        if options.vary_window:
            return f"{title}# [ pairs: {pairs} ] [ window size: varied ]\n\n# Uni-directional Bandwidth (MB/sec)\n"
        return f"{title}# [ pairs: {pairs} ] [ window size: {options.window} ]\n"
    if bench.family == "nonblocking":
        return f"\n{title}# Overall = Coll. Init + Compute + MPI_Test + MPI_Wait\n\n"
    return "\n" + title


def datatype(name: str) -> str:
    """The line naming the datatype, before each header of a benchmark that moves data."""
    return f"# Datatype: {name}.\n"


def _columns(bench: Bench, options: Options) -> list[str]:
    if bench.family == "nonblocking":
        full = ["Coll. Init(us)", "MPI_Test(us)", "MPI_Wait(us)"] if options.full else []
        spread = ["Min Comm.(us)", "Max Comm.(us)"] if options.full else []
        return ["Overall(us)", "Compute(us)", *full, "Pure Comm.(us)", *spread, "Overlap(%)"]
    if bench.name == "osu_mbw_mr":
        return ["MB/s", "Messages/s"] if options.print_rate else ["MB/s"]
    if bench.unit == "bandwidth":
        return ["Bandwidth (MB/s)"]
    return ["Latency (us)" if bench.family == "onesided" else "Avg Latency(us)"]


def osu_header(bench: Bench, options: Options) -> str:
    """The header line of the table."""
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
    if options.limit:
        text += _right(f"Limit({unit})") + _right("Of limit(%)")
    return text + "\n"


def osu_row(bench: Bench, options: Options, row: Row) -> str:
    """One line of the table."""
    if row.overlap is not None:
        text = _overlap_columns(bench, options, row)
    elif bench.sized:
        text = f"{row.size:<10}{_fixed(row.value)}"
    else:
        text = f"{row.value:17.2f}"
    if bench.name == "osu_mbw_mr" and options.print_rate:
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
    if options.limit and row.limit is not None:
        share = row.of_limit(rates=bench.unit == "bandwidth")
        text += _fixed(row.limit) + (_right("-") if share is None else _fixed(100 * share))
    return text + "\n"


def noise_line(backend: str, unclear: Mapping[str, Sequence[int]]) -> str:
    """Says of which peers and sizes nothing can be said; empty where there are none."""
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


def window_header() -> str:
    """The header of ``osu_mbw_mr -V``."""
    return "#      " + "".join(f"  {window:10d}" for window in WINDOWS) + "\n"


def window_row(size: int, values: Sequence[float]) -> str:
    """One line of ``osu_mbw_mr -V``: a value per window size."""
    return f"{size:<7d}" + "".join(f"  {value:10.2f}" for value in values) + "\n"


def init_line(ranks: int, least: int, most: int, average: int) -> str:
    """The result of ``osu_init``, in whole ms."""
    return f"nprocs: {ranks}, min: {least} ms, max: {most} ms, avg: {average} ms\n"


def nccl_header(options: Options, title: str) -> str:
    """nccl-tests' comment lines before the table."""
    blank = f"# {'':>10}  {'':>12}  {'':>8}  {'':>6}  {'':>6}"
    sides = f"  {'time':>7}  {'algbw':>6}  {'busbw':>6}  {'#wrong':>6}" * 2
    units = f"  {'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6}  {'':>6}" * 2
    iterations = "default" if options.iterations is None else options.iterations
    warmup = "default" if options.warmup is None else options.warmup
    return (
        f"# {title}\n"
        f"# nThread 1 nGpus 1 minBytes {options.min_size} maxBytes {options.max_size} step: 2(factor) "
        f"warmup iters: {warmup} iters: {iterations} agg iters: 1 validation: {int(options.validate)} graph: 0\n"
        "#\n"
        f"{blank}           out-of-place                       in-place          \n"
        f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}{sides} \n"
        f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}{units} \n"
    )


def _narrow(value: float, width: int) -> str:
    """As many decimals, at most two, as fit: nccl-tests' rule."""
    for decimals in (2, 1, 0):
        if len(text := f"{value:{width}.{decimals}f}") <= width:
            return text
    return f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"


def nccl_row(
    size: int,
    count: int,
    dtype: str,
    op: str,
    root: int,
    sides: Sequence[tuple[float, float, float, int | None] | None],
) -> str:
    """One line: ``sides`` has (µs, algbw, busbw in GB/s, wrong elements or None) out of place and in place."""
    text = f"{size:12d}  {count:12d}  {dtype:>8}  {op:>6}  {root:6d}"
    for side in sides:
        if side is None:
            text += f"  {'N/A':>7}  {'N/A':>6}  {'N/A':>6}  {'N/A':>6}"
            continue
        time, algbw, busbw, wrong = side
        errors = "   N/A" if wrong is None else f"{wrong:6d}"
        text += f"  {_narrow(time, 7)}  {_narrow(algbw, 6)}  {_narrow(busbw, 6)}  {errors}"
    return text + "\n"


def nccl_footer(wrong: int, bandwidths: Sequence[float]) -> str:
    """nccl-tests' last lines; ``bandwidths`` are all bus bandwidths in GB/s."""
    average = sum(bandwidths) / len(bandwidths) if bandwidths else 0.0
    return (
        f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}\n"
        f"# {'Avg bus bandwidth':<20} : {average:g} \n"
        "#\n"
    )
