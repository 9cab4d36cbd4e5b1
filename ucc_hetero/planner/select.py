"""Which algorithm, how many fragments and which path a call takes, and the plan that comes of it.

User's rules, then measured ones, then the cost model where links were measured, else defaults. Every input is equal on
every rank, so every rank chooses the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from ucc_hetero.planner import algorithms
from ucc_hetero.planner.collectives import ROWS, Call, check, lengths
from ucc_hetero.planner.cost import Links, predicted_time
from ucc_hetero.planner.plan import Fragment, Plan, no_collector
from ucc_hetero.planner.rules import Measured, PairRule, Rule, load_table, match, parse_tune
from ucc_hetero.planner.topology import Topology
from ucc_hetero.types import Op

__all__ = ["Choice", "Tuning", "agreed", "candidates", "choose", "example_call", "make_plan", "reason"]

#: From here on a call goes for bandwidth, below it for latency; bytes per island beyond the first, as every further
#: one adds rounds to the exchange.
LATENCY_LIMIT = 64 << 10
#: From here on leaders of two hosts exchange short vectors by messages of our own: libucc 1.4 then sends these in
#: halves, one after the other; bytes. Measured on 2 x 2 ranks: 4 KiB in 33 instead of 42 us, but 2 KiB in 28 instead
#: of 24. Between more hosts it holds at every length: 8 B in 48 instead of 59 us on three, 105 instead of 128 on four.
DOUBLING_LIMIT = 4 << 10
#: From here on an allreduce between more than two hosts, in plain memory, goes for bandwidth however many they are:
#: what more of them cost rails in rounds, they cost ``doubling`` in copies of the vector. Measured, the two met at
#: 48 KiB on 2 + 2 + 1 ranks and 80 on 4 x 2 over 4 Gbit/s, at 24 to 32 KiB on 4, 8 and 16 hosts over 0.2 to 1 Gbit/s.
RAILS_LIMIT = 48 << 10
#: Fragments of less than this cost more than their overlap gains; bytes.
LEAST_FRAGMENT = 512 << 10
#: Most fragments, by ranks: those of 512 KiB stay in caches and came within 2 to 8 % of the limit of emulated links
#: (1 MiB: 2 to 14 %), but planning takes its time for each.
MOST_FRAGMENTS = ((16, 128), (64, 64), (256, 16), (1024, 8))
LEAST_MOST = 4
#: Fragments of a ring by islands, each of which is a message on the way of each of them.
MOST_HOPS = 256

#: Fragments of direct plans on one host's devices, bytes, and how many at most: the island phases of one go beside the
#: bridge of another. Shorter ones were slower on H200s, where a phase costs 60 us however short; libucc's scratch for
#: longer ones does not come from its pool (``UCC_MC_CUDA_MPOOL_ELEM_SIZE``).
DEVICE_FRAGMENT, MOST_ON_DEVICES = 64 << 20, 8
#: From here on a reduction in one host's memory is faster in one step; bytes.
SHARED_LIMIT = 64 << 10
#: From here on messages through windows take the place of the host's library, among one host's devices; bytes.
WINDOW_LIMIT = 256 << 10
#: Bytes up to which queued calls are ``flat``, and ranks: one kernel does such a call (coll/fused.c, whose 40 moves an
#: allreduce of more ranks exceeds). Measured on 2 + 2 H200s, 64 and 256 KiB: allreduces in 92 instead of 95 and 110 us,
#: allgathers in 45 instead of 96 and 64; the host had 20 us to do instead of 63 to 108.
KERNEL_LIMIT, MOST_IN_KERNEL = 256 << 10, 8
#: Islands up to which ``direct`` exchanges straight between all of them, and up to which ``ring`` passes data along.
MOST_DIRECT, MOST_RING = 16, 8
#: Ranks from which on the blocks of all of them cross several levels in one piece: planning takes its time for each.
MANY = 1024
#: Islands up to which blocks go over rails whatever the islands' sizes.
MOST_UNLIKE = 8
#: Messages that leave an island in an alltoall from which on short ones are bundled.
MANY_MESSAGES = 64
#: Messages up to which an alltoall aggregates between irregular islands.
MOST_ALLTOALL = 2048

#: Up to this many ranks the cost model is asked; beyond, planning all candidates would take too long.
MODELLED_RANKS = 64
#: What the cost model must promise: it knows nothing of processors.
MODEL_GAIN = 0.8

#: Reductions that UCC lacks: our own steps combine the operands, in the order of the ranks.
ORDERED = ("MAXLOC", "MINLOC")


class Choice(NamedTuple):
    """What runs: an algorithm's name, into how many fragments it cuts the data, and how bytes cross bridges.

    ``path``: ``direct``, ``staged``, or ``window``, which is staged with messages in the place of collectives.
    """

    algorithm: str
    fragments: int = 1
    path: str = "direct"


@dataclass(frozen=True, slots=True, eq=False)
class Tuning:
    """What the ranks agreed on when the communicator was made: the user's rules and the measured ones."""

    user: tuple[Rule, ...] = ()
    measured: tuple[Rule, ...] = ()
    path: str = "direct"
    #: Measured costs of the links, where there are: choices that no rule makes go by the cost model.
    links: Links | None = None
    #: Every rank's data lies in plain host memory, whatever its vendor is called.
    plain: bool = False
    #: All ranks share windows: memory of one host that the devices of all islands copy to and from.
    windows: bool = False
    #: Calls among them are queued in streams whole, if messages take the place of the host's library in them.
    channels: bool = False
    #: Measured ways of messages between devices.
    messages: tuple[PairRule, ...] = ()
    _choices: dict[tuple[Topology, str, int, Op | None], tuple[Choice, str]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def least_through_windows(self) -> float:
        """Bytes from which on messages through windows take the place of the host's library."""
        return math.inf if not self.windows else 0 if self.channels else WINDOW_LIMIT

    @classmethod
    def parse(
        cls,
        text: str,
        measured: tuple[Rule, ...] = (),
        path: str = "direct",
        *,
        plain: bool = False,
        windows: bool = False,
        links: Links | None = None,
    ) -> Tuning:
        """From a text in the TUNE grammar; ``ValueError`` names the part at fault."""
        return cls(parse_tune(text), measured, path, links, plain, windows)


_DEFAULT = Tuning()


def agreed(
    bare: Topology,
    declared: Topology,
    rules: str,
    table: str,
    path: str = "direct",
    *,
    plain: bool = False,
    windows: bool = False,
) -> tuple[Topology, Tuning]:
    """The topology and the tuning of a communicator: what was measured for it, else what was declared.

    ``bare`` has the islands alone, ``declared`` also weights by the links' nominal speeds; ``rules`` is a text in the
    TUNE grammar, ``table`` that of a file of measured choices, empty for none; ``plain`` and ``windows`` as in
    ``Tuning``. All of them are equal on every rank.
    ``ValueError`` for texts that are neither.
    """
    measured = load_table(table, bare) if table else Measured()
    topology = replace(bare, weights=measured.weights) if measured.weights else declared
    tuning = Tuning.parse(rules, measured.rules, path, plain=plain, windows=windows, links=measured.links)
    return topology, replace(tuning, messages=measured.messages)


def choose(topology: Topology, collective: str, nbytes: int, op: Op | None = None, tune: Tuning = _DEFAULT) -> Choice:
    """What a call runs. ``nbytes`` is ``collectives.elements(call)`` times the element's size.

    All arguments must be equal on every rank; ``tune`` because the ranks agreed on it.
    """
    return _kept(topology, collective, nbytes, op, tune)[0]


def reason(topology: Topology, collective: str, nbytes: int, op: Op | None = None, tune: Tuning = _DEFAULT) -> str:
    """What made the choice of such a call: ``user``, ``measured``, ``model``, ``default`` or ``order`` of operands."""
    return _kept(topology, collective, nbytes, op, tune)[1]


def _kept(topology: Topology, collective: str, nbytes: int, op: Op | None, tune: Tuning) -> tuple[Choice, str]:
    key = (topology, collective, nbytes, op)
    found = tune._choices.get(key)
    if found is None:
        if len(tune._choices) >= 4096:  # sizes that never come again must not pile up
            tune._choices.clear()
        found = tune._choices[key] = _choose(topology, collective, nbytes, op, tune)
    return found


def _choose(topology: Topology, collective: str, nbytes: int, op: Op | None, tune: Tuning) -> tuple[Choice, str]:
    if op is not None and (op.code < 0 or op.name in ORDERED) and ROWS[collective].ucc >= 0:
        return Choice("ordered", 1, tune.path), "order"
    for by, rules in (("user", tune.user), ("measured", tune.measured)):
        rule = match(rules, topology, collective, nbytes)
        if rule is not None:
            path = rule.path or _path(nbytes, tune)
            fragments = rule.fragments or _fragments(topology, rule.algorithm, collective, nbytes, path, tune.plain)
            return Choice(rule.algorithm, fragments, path), by
    path = _path(nbytes, tune)
    if (tune.plain and _shared(topology, collective, nbytes)) or _one_kernel(topology, collective, nbytes, path, tune):
        name = "flat"
    else:
        name = _algorithm(topology, collective, nbytes, tune.plain)
    default = Choice(name, _fragments(topology, name, collective, nbytes, path, tune.plain), path)
    if tune.links is not None and (topology.deep or not topology.flat) and topology.size <= MODELLED_RANKS:
        # One prediction serves all sizes up to twice as large: each takes a plan per candidate.
        size = 1 << max(nbytes, 1).bit_length() - 1
        best = _predicted(topology, collective, size, tune.links, default)
        return (best, "model") if best != default else (default, "default")
    return default, "default"


def _path(nbytes: int, tune: Tuning) -> str:
    return "window" if tune.path == "staged" and nbytes >= tune.least_through_windows else tune.path


def _one_kernel(topology: Topology, collective: str, nbytes: int, path: str, tune: Tuning) -> bool:
    """Whether a call is queued, and so short that one kernel does it best, from every rank straight to every other."""
    if not tune.channels or path != "window" or "flat" not in algorithms.names(collective):
        return False
    return topology.size <= MOST_IN_KERNEL and nbytes <= KERNEL_LIMIT


def _shared(topology: Topology, collective: str, nbytes: int) -> bool:
    """Whether all ranks share one memory and the call gains nothing from islands: every copy more costs the same."""
    if not topology.one_host or "flat" not in algorithms.names(collective):
        return False
    return not ROWS[collective].reduces or nbytes >= SHARED_LIMIT


def _sums_between_hosts(topology: Topology, collective: str, plain: bool) -> bool:
    """Whether a call is an allreduce between hosts in plain memory, where sums and messages of our own cost little."""
    return plain and collective == "allreduce" and not topology.one_host and not topology.deep


def _algorithm(topology: Topology, collective: str, nbytes: int, plain: bool) -> str:
    if topology.size == 1 or (topology.flat and not topology.deep):
        return "flat"
    available = algorithms.names(collective)
    wanted = _for_bandwidth(topology, collective, nbytes, plain)
    if not wanted:
        many = len(topology.islands) > 2
        doubled = _sums_between_hosts(topology, collective, plain) and (many or nbytes >= DOUBLING_LIMIT)
        wanted = ("doubling",) if doubled else ("tree", "split_rail")
    if collective.startswith("alltoall") and not _bundled(topology, nbytes):
        wanted = ("split_rail",)
    if collective in _UNLIKE and _unlike(topology, collective):
        wanted = _UNLIKE[collective]
    return next((name for name in (*wanted, "flat") if name in available), available[0])


def _for_bandwidth(topology: Topology, collective: str, nbytes: int, plain: bool) -> tuple[str, ...]:
    """What a call wants that is long enough to go for bandwidth, the best first; empty for one that is not."""
    islands, ours = len(topology.islands), _sums_between_hosts(topology, collective, plain)
    if nbytes < (RAILS_LIMIT if ours and islands > 2 else LATENCY_LIMIT * max(islands - 1, 1)):
        return ()
    wanted: tuple[str, ...] = ("split_rail", "tree")
    if 2 < islands <= MOST_DIRECT and _unequal(topology):
        wanted = ("direct", *wanted)  # between two islands all have to send everything, whatever their links
    if 2 < islands <= MOST_RING and _by_ring(topology, collective, nbytes, ours):
        wanted = ("ring", *wanted)
    return wanted


#: What blocked collectives run between many islands that differ in size: rails between all of them would be thousands.
_UNLIKE = dict.fromkeys(("allgather", "allgatherv", "reduce_scatter_block", "reduce_scatter"), ("tree",))
_UNLIKE |= {"alltoall": ("flat",), "alltoallv": ("flat",)}


#: Collectives whose rails carry one block of each island, in a ring of the library's own, if islands are equal.
_BLOCKS = ("allgather", "allgatherv", "reduce_scatter_block", "reduce_scatter")


def _unequal(topology: Topology) -> bool:
    """Whether the links of some island carry more together than those of another."""
    weights = topology.weights
    return bool(weights) and len({sum(weights[rank] for rank in i.ranks) for i in topology.islands}) > 1


def _by_ring(topology: Topology, collective: str, nbytes: int, ours: bool) -> bool:
    """Whether rails had better pass data along than leave them to the library.

    It would run a broadcast or a reduction per block, of which it sends the halves twice; a broadcast along m islands
    takes m - 2 fragments longer than the data itself, so there must be many. ``ours``: an allreduce of which messages
    of our own are quicker, as long as it is one fragment (measured on 2 + 2 + 1 ranks: 64 KiB in 220 instead of 285 us,
    512 KiB on 4 x 2 in 1.75 instead of 2.1 ms; with 32 fragments the library is faster by 2 to 15 %).
    """
    if ours:
        return nbytes < 2 * LEAST_FRAGMENT and not _unequal(topology)
    if collective == "bcast":
        return nbytes >= 8 * (len(topology.islands) - 2) * LEAST_FRAGMENT
    return collective in _BLOCKS and len({island.size for island in topology.islands}) > 1


def _bundled(topology: Topology, nbytes: int) -> bool:
    """Whether an alltoall sends so many and so short messages that they had better go through leaders.

    ``nbytes`` is what all ranks send to one.
    """
    most = max(island.size for island in topology.islands)
    return most * (len(topology.islands) - 1) >= MANY_MESSAGES and nbytes * most <= LATENCY_LIMIT


def _unlike(topology: Topology, collective: str) -> bool:
    islands = topology.islands
    if collective.startswith("alltoall"):  # every message is a step, unless islands are regular
        many = topology.size * (len(islands) - 1) > MOST_ALLTOALL
        return many and (collective == "alltoallv" or not algorithms.alltoall.regular(topology))
    return len(islands) > MOST_UNLIKE and (len({i.size for i in islands}) > 1 or len(set(topology.weights)) > 1)


#: Algorithms and collectives that run in one piece: nothing in them overlaps.
_WHOLE = ("flat", "tree", "doubling", "ordered", "gather", "gatherv", "scatter", "scatterv")


def _fragments(topology: Topology, algorithm: str, collective: str, nbytes: int, path: str, plain: bool = True) -> int:
    # On one host island and bridge phases share the same memory and cores: there is nothing to overlap, but for the
    # copies between devices and the host, and devices' own engines.
    if (
        algorithm in _WHOLE
        or collective in _WHOLE
        or (collective in _BLOCKS and topology.deep and topology.size > MANY)
    ):
        return 1
    if topology.one_host and path != "staged":
        # Pieces of a message through windows are under way at a time in any case; only islands' phases can overlap.
        together = plain or (path == "window" and all(island.size == 1 for island in topology.islands))
        return 1 if together else max(1, min(MOST_ON_DEVICES, nbytes // DEVICE_FRAGMENT))
    most = _most_fragments(topology)
    if algorithm == "ring":
        most = min(most, max(LEAST_MOST, MOST_HOPS // len(topology.islands)))
    return max(1, min(most, nbytes // LEAST_FRAGMENT))


def _most_fragments(topology: Topology) -> int:
    return next((most for ranks, most in MOST_FRAGMENTS if topology.size <= ranks), LEAST_MOST)


def candidates(topology: Topology, collective: str, nbytes: int) -> list[Choice]:
    """The choices worth measuring or predicting for a call: every algorithm, in 1, 2, 4, 8, … fragments if long."""
    out = []
    for name in algorithms.names(collective):
        if name not in ("ordered", "straight"):  # slower on purpose; a message per pair, which is no choice for many
            most = 1 if name == "flat" else max(1, min(_most_fragments(topology), nbytes // LEAST_FRAGMENT))
            out += [Choice(name, 1 << k) for k in range(most.bit_length())]
    return out


def example_call(topology: Topology, collective: str, nbytes: int) -> Call:
    """A call of ``nbytes`` one-byte elements, in equal blocks, from root 0."""
    n, row = topology.size, ROWS[collective]
    block = nbytes // n
    counts = {"none": (), "vector": (nbytes,), "equal": (block,), "ranks": (block,) * n}.get(row.layout)
    if counts is None:
        counts = (block,) * (n * n)
    return Call(collective, n, counts, 0 if row.rooted else -1)


@lru_cache(maxsize=1024)
def _predicted(topology: Topology, collective: str, nbytes: int, links: Links, default: Choice) -> Choice:
    """The candidate that the cost model finds fastest, if clearly faster than the choice made without it."""
    call = example_call(topology, collective, nbytes)
    times = {
        choice: predicted_time(make_plan(topology, call, choice), topology, links)
        for choice in (default, *candidates(topology, collective, nbytes))
    }
    best = min(times, key=times.__getitem__)
    return best._replace(path=default.path) if times[best] < MODEL_GAIN * times[default] else default


@lru_cache(maxsize=1024)
def make_plan(topology: Topology, call: Call, choice: Choice, rank: int | None = None) -> Plan:
    """The plan of a call; made once and kept. ``ValueError`` for a call or an algorithm that does not exist.

    With ``rank`` it has the steps of that rank alone, each as in the whole plan up to the places of other ranks'
    scratch, and ``sizes`` says nothing of theirs: for thousands of ranks a hundredth of the work.
    """
    check(call)
    if call.ranks != topology.size:
        raise ValueError(f"{call.collective} over {call.ranks} ranks on a topology of {topology.size}")
    if choice.fragments < 1:
        raise ValueError(f"{choice.fragments} fragments; at least one is needed")
    function = algorithms.find(call.collective, choice.algorithm)
    if call.ranks == 1:  # nothing to communicate, whatever was chosen
        function = algorithms.find(call.collective, "flat")
    scratch = algorithms.Scratch(call.ranks)
    pieces = (algorithms.Piece(k, choice.fragments, scratch, rank) for k in range(choice.fragments))
    with no_collector(call.ranks):
        fragments = tuple(_fragment(stages) for stages in (function(topology, call, p) for p in pieces) if stages)
    sizes = tuple((send, recv, tmp) for (send, recv), tmp in zip(lengths(call), scratch.sizes, strict=True))
    plan = Plan(call.collective, choice.algorithm, sizes, fragments)
    return algorithms.spell(plan, rank) if choice.path == "window" else plan


def _fragment(stages: algorithms.Stages) -> Fragment:
    """Without the stages that turned out empty, which count none the less: the rank of a plan must not matter."""
    depth, kept = -1, []
    for stage in stages:
        depth += not stage.local
        if stage.steps:
            kept.append((stage.steps, depth))
    return Fragment(tuple([steps for steps, _ in kept]), tuple([depth for _, depth in kept]))
