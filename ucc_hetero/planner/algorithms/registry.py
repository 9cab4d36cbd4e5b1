"""The table of algorithms with their properties, and the slice of a call that one fragment carries."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from ..collectives import Block, Call
from ..plan import Operand, Region, Step
from ..topology import Topology


class Stage(NamedTuple):
    """Steps that may run side by side. ``local``: only copies and combinations, on whatever rank."""

    steps: tuple[Step, ...]
    local: bool = False


#: Also those without steps: what stages there are must not depend on the rank that a plan is for.
Stages = tuple[Stage, ...]

Operand_ = TypeVar("Operand_", bound=Operand)

#: Elements that cuts of long data are multiples of, so that addresses stay aligned for vector loads and DMA.
GRAIN = 64


def cut_at(count: int, part: int, whole: int) -> int:
    """Where to cut ``count`` elements so that ``part`` of ``whole`` lies before; on a multiple of ``GRAIN`` if long."""
    at = count * part // whole
    if part < whole and at >= 64 * GRAIN:  # off by less than 2 %
        at -= at % GRAIN
    return at


class Scratch:
    """Hands out each rank's ``tmp``; one for all fragments of a plan, so that theirs never overlap."""

    def __init__(self, ranks: int) -> None:
        self.sizes = [0] * ranks
        #: Divisions and the like that fragments of equal length share, by keys of the algorithms' own.
        self.memo: dict[Any, Any] = {}

    def take(self, rank: int, count: int) -> Region:
        """``count`` elements that nothing else uses."""
        offset = self.sizes[rank]
        self.sizes[rank] += count
        return Region("tmp", offset, count)

    def everywhere(self, count: int) -> Region:
        """``count`` elements that nothing else uses, at the same place of every rank's ``tmp``."""
        offset = max(self.sizes)
        self.sizes[:] = [offset + count] * len(self.sizes)
        return Region("tmp", offset, count)


class Piece:
    """Fragment ``index`` of ``total``: the same slice of every block of the call, as algorithms get it.

    The first and the last are half as long as the others: nothing overlaps the first stages of the first one, nor the
    last stages of the last one.

    Attributes:
        index: Number of the fragment, from 0.
        total: Number of fragments.
        only: The one rank whose steps are wanted; None for those of all ranks.
        memo: Divisions and the like that fragments of equal length share, by keys of the algorithm's own.
        tmp: ``tmp(rank, count)``: so many elements of the rank's scratch that nothing else uses.
        tmp_everywhere: ``tmp_everywhere(count)``: the same, at one place of every rank's scratch.
    """

    def __init__(self, index: int, total: int, scratch: Scratch, only: int | None = None) -> None:
        self.index = index
        self.total = total
        self.only = only
        self.memo = scratch.memo
        self.tmp = scratch.take
        self.tmp_everywhere = scratch.everywhere

    def wants(self, ranks: Container[int]) -> bool:
        """True if a step of these ranks belongs in the plan; algorithms need not make other steps.

        Args:
            ranks: Ranks of the step.
        """
        return self.only is None or self.only in ranks

    def members(self, ranks: Sequence[int], make: Callable[[int], Operand_]) -> tuple[Operand_, ...]:
        """Make the operands of a step's members, which are all of one form.

        In the plan of one rank the operands of other ranks do not matter: they are given that rank's own.

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
            The part of it that belongs to this fragment.
        """
        low, high = self._edge(block.count, self.index), self._edge(block.count, self.index + 1)
        return Block(block.offset + low, high - low)

    def _edge(self, count: int, index: int) -> int:
        """Where fragment ``index`` begins, in half fragments from the beginning of the first."""
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
    """A kind of call as the choice of its algorithm sees it: everything in it is equal on all ranks.

    Attributes:
        topology: The communicator's.
        collective: Name of the collective.
        nbytes: Bytes of the call: ``collectives.elements(call)`` times the element's size.
        plain: True if all data lies in plain host memory.
        queued: True if such calls are queued in streams whole.
    """

    topology: Topology
    collective: str
    nbytes: int
    plain: bool = False
    queued: bool = False


class Role(Enum):
    """Ability of an algorithm that no other has, so that it is run where nothing else will do."""

    USUAL = "nothing"
    ONE_STEP = "any ranks in one step, also one rank alone"
    UNCOUNTED = "needs the counts of the calling rank only"


#: (topology, call, piece) -> the stages of one fragment.
Planned = Callable[[Topology, Call, Piece], Stages]


def never(case: Case) -> int:
    """Run only where it is asked for: in rules, or for what its role says."""
    return 0


def once(case: Case) -> int:
    """In one fragment: nothing in it overlaps."""
    return 1


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A function that plans calls, and when to use it.

    ``suits``: how well it suits a case; of a collective's algorithms the one with the highest number runs, of equals
    the one registered first (`ranking` has the levels). ``most``: into how many fragments it cuts a case at most.
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
    """The algorithms of a collective, in order of registration."""
    return tuple(name for other, name in _TABLE if other == collective)


def find(collective: str, name: str) -> Algorithm:
    """The algorithm of that name; ``ValueError`` lists those that there are."""
    try:
        return _TABLE[collective, name]
    except KeyError:
        raise ValueError(f"{collective} has no algorithm {name!r}; it has {', '.join(names(collective))}") from None


def added() -> tuple[str, ...]:
    """``collective@name`` of every algorithm that is none of the package's own."""
    ours = __name__.partition(".")[0] + "."
    return tuple(sorted(f"{of}@{name}" for (of, name), a in _TABLE.items() if not a.plan.__module__.startswith(ours)))


def with_role(collective: str, role: Role) -> str:
    """The name of the algorithm of a collective that has a role other than the usual; ``ValueError`` without one."""
    for name in names(collective):
        if _TABLE[collective, name].role is role:
            return name
    raise ValueError(f"no algorithm of {collective} {role.value}")
