"""The table of algorithms and their properties, and the fragments of calls that they plan."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from ..collectives import Block, Call
from ..plan import Operand, Region, Step
from ..topology import Topology


class Stage(NamedTuple):
    """Steps that may run side by side. ``local``: only copies and combinations, on any ranks."""

    steps: tuple[Step, ...]
    local: bool = False


#: The stages of a plan, including those without steps: their number must not depend on the rank that a plan is for.
Stages = tuple[Stage, ...]

Operand_ = TypeVar("Operand_", bound=Operand)

#: Long data is cut at multiples of this many elements, so that addresses stay aligned for vector loads and DMA.
GRAIN = 64


def cut_at(count: int, part: int, whole: int) -> int:
    """Where to cut ``count`` elements so that ``part`` of ``whole`` comes before; at a multiple of ``GRAIN`` if
    long."""
    at = count * part // whole
    if part < whole and at >= 64 * GRAIN:  # moves the cut by less than 2 %
        at -= at % GRAIN
    return at


class Scratch:
    """Allocates each rank's ``tmp``; shared by all fragments of a plan, so that their scratch never overlaps."""

    def __init__(self, ranks: int) -> None:
        self.sizes = [0] * ranks
        #: Values, such as partitions, that fragments of equal length share; each algorithm uses keys of its own.
        self.memo: dict[Any, Any] = {}

    def take(self, rank: int, count: int) -> Region:
        """``count`` elements that nothing else uses."""
        offset = self.sizes[rank]
        self.sizes[rank] += count
        return Region("tmp", offset, count)

    def everywhere(self, count: int) -> Region:
        """``count`` elements that nothing else uses, at the same offset of every rank's ``tmp``."""
        offset = max(self.sizes)
        self.sizes[:] = [offset + count] * len(self.sizes)
        return Region("tmp", offset, count)


class Piece:
    """Fragment ``index`` of ``total`` of a call: the same slice of each of its blocks, as algorithms get it.

    The first and the last fragment are half as long as the others: the first stages of the first fragment overlap with
    nothing, nor do the last stages of the last.

    Attributes:
        index: Number of the fragment, from 0.
        total: Number of fragments.
        only: The rank whose steps are wanted; None for all ranks.
        memo: Values, such as partitions, that fragments of equal length share; each algorithm uses keys of its own.
        tmp: ``tmp(rank, count)`` allocates ``count`` elements of the rank's scratch.
        tmp_everywhere: ``tmp_everywhere(count)`` does so at the same offset of every rank's scratch.
    """

    def __init__(self, index: int, total: int, scratch: Scratch, only: int | None = None) -> None:
        self.index = index
        self.total = total
        self.only = only
        self.memo = scratch.memo
        self.tmp = scratch.take
        self.tmp_everywhere = scratch.everywhere

    def wants(self, ranks: Container[int]) -> bool:
        """True if a step of these ranks belongs in the plan; algorithms may leave out other steps.

        Args:
            ranks: Ranks of the step.
        """
        return self.only is None or self.only in ranks

    def members(self, ranks: Sequence[int], make: Callable[[int], Operand_]) -> tuple[Operand_, ...]:
        """Make the operands of a step's members, which all have the same form.

        In the plan of one rank the operands of other ranks do not matter: a copy of that rank's operand stands for
        each.

        Args:
            ranks: Ranks of the step.
            make: Makes the operand of the member with this index in ``ranks``.

        Returns:
            An operand for each member.
        """
        if self.only is None or self.only not in ranks:
            return tuple([make(i) for i in range(len(ranks))])
        return (make(ranks.index(self.only)),) * len(ranks)

    def cut(self, block: Block) -> Block:
        """Cut a block.

        Args:
            block: A block of the call.

        Returns:
            The part of the block that belongs to this fragment.
        """
        low, high = self._edge(block.count, self.index), self._edge(block.count, self.index + 1)
        return Block(block.offset + low, high - low)

    def _edge(self, count: int, index: int) -> int:
        """Where fragment ``index`` begins. Positions are counted in half fragments, from the beginning of the first."""
        halves = max(2 * self.total - 2, 1)
        return cut_at(count, min(max(2 * index - 1, 0), halves), halves)

    def vector(self, call: Call) -> Block:
        """Cut the vector of a call, such as an allreduce.

        Args:
            call: The call.

        Returns:
            The part of the vector that belongs to this fragment.
        """
        return self.cut(Block(0, call.counts[0]))


class Case(NamedTuple):
    """What the choice of an algorithm depends on; equal on all ranks.

    Attributes:
        topology: The communicator's topology.
        collective: Name of the collective.
        nbytes: Bytes of the call: ``collectives.elements(call)`` times the element's size.
        plain: True if all data lies in plain host memory.
        queued: True if whole calls of this kind are queued in streams.
    """

    topology: Topology
    collective: str
    nbytes: int
    plain: bool = False
    queued: bool = False


class Role(Enum):
    """What only one algorithm of a collective can do: it then runs whatever suits better."""

    USUAL = "nothing"
    ONE_STEP = "any ranks in one step, also one rank alone"
    UNCOUNTED = "needs the counts of the calling rank only"


#: (topology, call, piece) -> the stages of one fragment.
Planned = Callable[[Topology, Call, Piece], Stages]


def never(case: Case) -> int:
    """Suits no case: the algorithm runs only if rules name it, or for its role."""
    return 0


def once(case: Case) -> int:
    """At most one fragment: nothing in it would overlap."""
    return 1


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A function that plans calls, and when to use it.

    ``suits``: how well it suits a case; the collective's algorithm with the highest number runs, of equals the first
    that was registered (`ranking` has the levels). ``most``: the most fragments that it cuts a case into.
    ``candidate``: whether ``tune`` tries it.
    """

    plan: Planned
    suits: Callable[[Case], int] = never
    most: Callable[[Case], int] = once
    role: Role = Role.USUAL
    candidate: bool = True


_TABLE: dict[tuple[str, str], Algorithm] = {}


def algorithm(
    collectives: str | Sequence[str],
    name: str,
    *,
    suits: Callable[[Case], int] = never,
    most: Callable[[Case], int] = once,
    role: Role = Role.USUAL,
    candidate: bool = True,
) -> Callable[[Planned], Planned]:
    """Decorator that registers a function as an algorithm.

    Every rank of a job registers the same ones before its first communicator, which compares them.

    Args:
        collectives: The collective, or several.
        name: The algorithm's name, as in UCCH_TUNE.
        suits: Says how well it suits a case; the algorithm with the highest number runs.
        most: Says into how many fragments it cuts a case at most.
        role: What this algorithm alone can do.
        candidate: True if ``tune`` tries it.

    Returns:
        The decorator; it returns the function.

    Raises:
        ValueError: If the name is taken.
    """

    def register(function: Planned) -> Planned:
        for collective in (collectives,) if isinstance(collectives, str) else collectives:
            if (collective, name) in _TABLE:
                raise ValueError(f"{collective} has an algorithm {name!r} already")
            _TABLE[collective, name] = Algorithm(function, suits, most, role, candidate)
        return function

    return register


def names(collective: str) -> tuple[str, ...]:
    """Names of the algorithms of a collective, in order of registration."""
    return tuple(name for other, name in _TABLE if other == collective)


def find(collective: str, name: str) -> Algorithm:
    """The algorithm of that name; ``ValueError`` lists the existing ones."""
    try:
        return _TABLE[collective, name]
    except KeyError:
        raise ValueError(f"{collective} has no algorithm {name!r}; it has {', '.join(names(collective))}") from None


def added() -> tuple[str, ...]:
    """``collective@name`` of every algorithm that was not registered by this package itself."""
    ours = __name__.partition(".")[0] + "."
    return tuple(sorted(f"{of}@{name}" for (of, name), a in _TABLE.items() if not a.plan.__module__.startswith(ours)))


def with_role(collective: str, role: Role) -> str:
    """Name of the algorithm of a collective that has this role, which is not the usual one; ``ValueError`` if
    none has."""
    for name in names(collective):
        if _TABLE[collective, name].role is role:
            return name
    raise ValueError(f"no algorithm of {collective} {role.value}")
