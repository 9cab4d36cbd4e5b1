"""Choice of a call's algorithm and fragments, and the resulting plan.

Rules of the user come first, then measured ones, then defaults. All inputs are equal on every rank, so every rank
chooses the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from . import algorithms
from .algorithms.ranking import ALONE, LEAST_FRAGMENT, most_fragments
from .collectives import ROWS, Call, check, lengths
from .plan import Fragment, Plan, Step, no_collector
from .rules import Measured, Rule, load_table, match, parse_tune
from .topology import Topology

#: Most bytes in one call of libucc: with 1.4 longer calls never end.
LONGEST = 1 << 30


class Choice(NamedTuple):
    """An algorithm and a number of fragments; ``queued``: for streams, with messages in place of collectives over
    bridges."""

    algorithm: str
    fragments: int = 1
    queued: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Tuning:
    """What the ranks agreed on when the communicator was made: rules of the user and measured rules."""

    user: tuple[Rule, ...] = ()
    measured: tuple[Rule, ...] = ()
    #: Every rank's data is in plain host memory, whatever its vendor is called.
    plain: bool = False
    #: Calls on device memory are queued in streams.
    queued: bool = False
    _choices: dict[tuple[Topology, str, int], tuple[Choice, str]] = field(default_factory=dict, init=False, repr=False)


_DEFAULT = Tuning()


def agreed(
    bare: Topology, declared: Topology, rules: str, table: str, *, plain: bool = False
) -> tuple[Topology, Tuning]:
    """The topology and the tuning of a communicator: measured weights if there are any, else declared ones.

    ``bare`` has the islands only, ``declared`` also weights from the links' nominal speeds; ``rules`` is a text in the
    TUNE grammar, ``table`` that of a file of measured choices, or empty; ``plain`` as in ``Tuning``. All are equal on
    every rank. ``ValueError`` for a text in the wrong format.
    """
    measured = load_table(table, bare) if table else Measured()
    topology = replace(bare, weights=measured.weights) if measured.weights else declared
    return topology, Tuning(parse_tune(rules), measured.rules, plain)


def choose(topology: Topology, collective: str, nbytes: int, tune: Tuning = _DEFAULT) -> Choice:
    """Choose algorithm and fragments of a call. ``nbytes`` is ``collectives.elements(call)`` times the element size.

    All arguments must be equal on every rank; the ranks have agreed on ``tune``.
    """
    return _kept(topology, collective, nbytes, tune)[0]


def reason(topology: Topology, collective: str, nbytes: int, tune: Tuning = _DEFAULT) -> str:
    """Source of the choice for such a call: ``user``, ``measured`` or ``default``."""
    return _kept(topology, collective, nbytes, tune)[1]


def _kept(topology: Topology, collective: str, nbytes: int, tune: Tuning) -> tuple[Choice, str]:
    key = (topology, collective, nbytes)
    found = tune._choices.get(key)
    if found is None:
        if len(tune._choices) >= 4096:  # sizes that never recur must not pile up
            tune._choices.clear()
        found = tune._choices[key] = _choose(topology, collective, nbytes, tune)
    return found


def _choose(topology: Topology, collective: str, nbytes: int, tune: Tuning) -> tuple[Choice, str]:
    case = algorithms.Case(topology, collective, nbytes, tune.plain, tune.queued)
    for by, rules in (("user", tune.user), ("measured", tune.measured)):
        if rules and (rule := match(rules, topology, collective, nbytes)) is not None:
            return Choice(rule.algorithm, rule.fragments or _fragments(case, rule.algorithm), tune.queued), by
    name = algorithms.with_role(collective, algorithms.Role.ONE_STEP)
    if algorithms.find(collective, name).suits(case) < ALONE or algorithms.added():  # none of our own ranks higher
        name = max(algorithms.names(collective), key=lambda name: algorithms.find(collective, name).suits(case))
    return Choice(name, _fragments(case, name), tune.queued), "default"


def _fragments(case: algorithms.Case, name: str) -> int:
    return algorithms.find(case.collective, name).most(case)


def cut_to_length(choice: Choice, nbytes: int) -> Choice:
    """The choice with enough fragments for each call of libucc to be at most ``LONGEST`` bytes."""
    return choice._replace(fragments=max(choice.fragments, -(-nbytes // LONGEST)))


def candidates(topology: Topology, collective: str, nbytes: int) -> list[Choice]:
    """The choices worth measuring for a call: each candidate, and for long calls in 1, 2, 4, 8, … fragments."""
    out = []
    for name in algorithms.names(collective):
        algorithm = algorithms.find(collective, name)
        if algorithm.candidate:
            cut = algorithm.role is not algorithms.Role.ONE_STEP
            most = max(1, min(most_fragments(topology), nbytes // LEAST_FRAGMENT)) if cut else 1
            out += [Choice(name, 1 << k) for k in range(most.bit_length())]
    return out


def example_call(topology: Topology, collective: str, nbytes: int) -> Call:
    """A call of ``nbytes`` one-byte elements, in equal blocks, with root 0."""
    n, row = topology.size, ROWS[collective]
    block = nbytes // n
    counts = {"none": (), "vector": (nbytes,), "equal": (block,), "ranks": (block,) * n}.get(row.layout)
    if counts is None:
        counts = (block,) * (n * n)
    return Call(collective, n, counts, 0 if row.rooted else -1)


@lru_cache(maxsize=1024)
def make_plan(topology: Topology, call: Call, choice: Choice, rank: int | None = None) -> Plan:
    """The plan of a call; cached. ``ValueError`` if the call is invalid or the algorithm unknown.

    With ``rank`` it has only the steps of that rank; these equal those of the whole plan, except for offsets in other
    ranks' scratch, and ``sizes`` of other ranks are not set. For thousands of ranks this is a hundredth of the work.
    """
    check(call)
    if call.ranks != topology.size:
        raise ValueError(f"{call.collective} over {call.ranks} ranks on a topology of {topology.size}")
    if choice.fragments < 1:
        raise ValueError(f"{choice.fragments} fragments; at least one is needed")
    function = algorithms.find(call.collective, choice.algorithm).plan
    if call.ranks == 1:  # nothing to communicate
        function = algorithms.find(
            call.collective, algorithms.with_role(call.collective, algorithms.Role.ONE_STEP)
        ).plan
    scratch = algorithms.Scratch(call.ranks)
    pieces = (algorithms.Piece(k, choice.fragments, scratch, rank) for k in range(choice.fragments))
    vector = ROWS[call.collective].layout == "vector"
    with no_collector(call.ranks):
        made = (function(topology, call, piece) for piece in pieces if not vector or piece.vector(call).count)
        links: dict[tuple[int, ...], str] = {}
        fragments = tuple(_fragment(topology, stages, links) for stages in made if stages)
    sizes = tuple((send, recv, tmp) for (send, recv), tmp in zip(lengths(call), scratch.sizes, strict=True))
    plan = Plan(call.collective, choice.algorithm, sizes, fragments)
    return algorithms.expand_plan(plan, rank) if choice.queued else plan


def _fragment(topology: Topology, stages: algorithms.Stages, links: dict[tuple[int, ...], str]) -> Fragment:
    """A fragment without empty stages, which still count for depths: they must not depend on the rank of the plan.

    Steps get the link that their ranks need; ``links`` caches them.
    """
    depth, kept = -1, []
    for stage in stages:
        depth += not stage.local
        steps = []
        for step in stage.steps:
            link = links.get(step.ranks)
            if link is None:
                islands = {topology.island_of[rank] for rank in step.ranks}
                link = "local" if len(step.ranks) == 1 else "native" if len(islands) == 1 else "bridge"
                links[step.ranks] = link
            steps.append(Step(step.kind, step.ranks, step.src, step.dst, step.root, link))
        if steps:
            kept.append((tuple(steps), depth))
    return Fragment(tuple([steps for steps, _ in kept]), tuple([depth for _, depth in kept]))
