"""The table of benchmarks: family, OSU's title and options, default sizes and loop counts.

Titles, option letters and defaults are those of the OSU Micro-Benchmarks 7.4. A new collective is a row of
``COLLECTIVES``, from which its blocking, non-blocking and persistent benchmarks follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ucc_hetero.planner.collectives import ROWS

#: The OSU release whose output is printed.
VERSION = "7.4"
#: Message size above which the loop counts for large messages apply.
LARGE = 8192

Family = Literal["pt2pt", "blocking", "nonblocking", "persistent", "onesided"]
#: How data moves; two collectives of one kind differ only in counts per rank (``vector``).
Kind = Literal[
    "reduce_all", "reduce_root", "reduce_scatter", "gather_all", "gather_root", "scatter_root", "exchange", "bcast",
    "barrier",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loops:
    """Default iterations and warm-up calls for small and for large messages."""

    small: int
    warmup_small: int
    large: int
    warmup_large: int


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective: mpi4py's method, OSU's words, kind of data movement; ``vector``: counts per rank are given."""

    name: str
    method: str
    words: str
    kind: Kind
    vector: bool = False

    @property
    def rooted(self) -> bool:
        return ROWS[self.name].rooted

    @property
    def reduces(self) -> bool:
        return ROWS[self.name].reduces

    @property
    def whole(self) -> bool:
        """True if sizes are those of the whole vector, not of a rank's part."""
        return self.kind in ("reduce_all", "reduce_root", "reduce_scatter", "bcast")


@dataclass(frozen=True, slots=True)
class Bench:
    """A benchmark. ``title`` has ``%s`` for the accelerator, as in OSU; ``letters`` is a getopt string."""

    name: str
    family: Family
    title: str
    letters: str
    loops: Loops
    max_size: int
    ranks: Literal["two", "many"] = "many"
    collective: Collective | None = None
    min_size: int = 1

    @property
    def unit(self) -> Literal["time", "bandwidth"]:
        return "bandwidth" if self.name.endswith(("bw", "bw_persistent", "bw_mr")) else "time"

    @property
    def plain_title(self) -> str:
        """OSU's title without the accelerator."""
        return self.title.replace("%s", "")

    @property
    def sized(self) -> bool:
        """True if there is one row per message size."""
        return self.collective is None or self.collective.kind != "barrier"


_LATENCY = Loops(10000, 100, 1000, 10)
_BANDWIDTH = Loops(100, 10, 20, 2)
# OSU's osu_mbw_mr has no separate counts for large messages.
_MESSAGE_RATE = Loops(100, 10, 100, 10)
_COLL = Loops(1000, 100, 100, 10)

COLLECTIVES: dict[str, Collective] = {
    row.name: row
    for row in (
        Collective("allgather", "Allgather", "Allgather", "gather_all"),
        Collective("allgatherv", "Allgatherv", "Allgatherv", "gather_all", vector=True),
        Collective("allreduce", "Allreduce", "Allreduce", "reduce_all"),
        Collective("alltoall", "Alltoall", "All-to-All Personalized Exchange", "exchange"),
        Collective("alltoallv", "Alltoallv", "All-to-Allv Personalized Exchange", "exchange", vector=True),
        Collective("barrier", "Barrier", "Barrier", "barrier"),
        Collective("bcast", "Bcast", "Broadcast", "bcast"),
        Collective("gather", "Gather", "Gather", "gather_root"),
        Collective("gatherv", "Gatherv", "Gatherv", "gather_root", vector=True),
        Collective("reduce", "Reduce", "Reduce", "reduce_root"),
        Collective("reduce_scatter", "Reduce_scatter", "Reduce_scatter", "reduce_scatter", vector=True),
        Collective("reduce_scatter_block", "Reduce_scatter_block", "Reduce_scatter_block", "reduce_scatter"),
        Collective("scatter", "Scatter", "Scatter", "scatter_root"),
        Collective("scatterv", "Scatterv", "Scatterv", "scatter_root", vector=True),
    )
}

# Titles of OSU's non-blocking benchmarks that do not follow from the blocking one's.
_NONBLOCKING_TITLES = {"alltoall": "Non-blocking All-to-All", "bcast": "Non-Blocking Broadcast"}


def _letters(row: Collective, family: Family) -> str:
    calls = "t:" if family == "nonblocking" else ""
    if row.kind == "barrier":
        return f"d:hvfi:x:M:{calls}u:z::"
    in_place = "" if row.kind == "bcast" else "l"
    # OSU rotates roots only if the root is an argument of the timed call, and never in bcast.
    root = "k:" if row.rooted and row.kind != "bcast" and family != "persistent" else ""
    return f"d:hvfm:i:x:M:{calls}cu:T:{in_place}z::{root}"


def _collective_benches(row: Collective) -> tuple[Bench, ...]:
    nonblocking = _NONBLOCKING_TITLES.get(row.name, f"Non-blocking {row.words}")
    titles: tuple[tuple[str, Family, str], ...] = (
        (f"osu_{row.name}", "blocking", f"{row.words} Latency Test"),
        (f"osu_i{row.name}", "nonblocking", f"{nonblocking} Latency Test"),
        (f"osu_{row.name}_persistent", "persistent", f"{row.words} Persistent Latency Test"),
    )
    return tuple(
        Bench(name, family, f"OSU MPI%s {title}", _letters(row, family), _COLL, 1 << 20, collective=row)
        for name, family, title in titles
    )


def _onesided(name: str, title: str, letters: str = "", loops: Loops = _LATENCY) -> Bench:
    return Bench(name, "onesided", f"OSU MPI_{title} Test", f"{letters}hvm:x:i:z::d:", loops, 1 << 22, "two")


def _pt2pt(name: str, title: str, letters: str, loops: Loops, ranks: Literal["two", "many"] = "two") -> Bench:
    return Bench(name, "pt2pt", f"OSU {title}", letters, loops, 1 << 22, ranks)


_LAT_LETTERS = "x:i:m:d:hvcu:T:z::"
_BW_LETTERS = f"W:{_LAT_LETTERS}"
_MBW_LETTERS = f"p:{_BW_LETTERS}"

_BENCHES = (
    _pt2pt("osu_latency", "MPI%s Latency Test", _LAT_LETTERS, _LATENCY),
    _pt2pt("osu_bw", "MPI%s Bandwidth Test", _BW_LETTERS, _BANDWIDTH),
    _pt2pt("osu_bibw", "MPI%s Bi-Directional Bandwidth Test", _BW_LETTERS, _BANDWIDTH),
    _pt2pt("osu_mbw_mr", "MPI Multiple Bandwidth / Message Rate Test", _MBW_LETTERS, _MESSAGE_RATE, "many"),
    _pt2pt("osu_multi_lat", "MPI Multi Latency Test", _LAT_LETTERS, _LATENCY, "many"),
    _onesided("osu_put_latency", "Put%s Latency"),
    _onesided("osu_get_latency", "Get%s latency"),
    _onesided("osu_put_bw", "Put%s Bandwidth", "W:", _BANDWIDTH),
    _onesided("osu_get_bw", "Get%s Bandwidth", "W:", _BANDWIDTH),
    _onesided("osu_put_bibw", "Put%s Bi-directional Bandwidth", "W:", _BANDWIDTH),
    *(bench for row in COLLECTIVES.values() for bench in _collective_benches(row)),
)

#: Every benchmark by its name.
BENCHES: dict[str, Bench] = {bench.name: bench for bench in _BENCHES}
