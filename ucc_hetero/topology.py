"""Who can talk to whom through what: ranks grouped into islands. Pure data, equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Island", "Topology"]


@dataclass(frozen=True, slots=True)
class Island:
    """Ranks that share one vendor's fabric and library (and, for ``host`` ranks, one node)."""

    index: int
    vendor: str
    #: Communicator ranks, ascending. Their order is the order of the island's native team.
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Topology:
    """The islands of one communicator, ordered by their lowest rank."""

    islands: tuple[Island, ...]
    #: Host index of each rank (0, 1, ... in order of first appearance).
    hosts: tuple[int, ...]
    #: Island index of each rank.
    island_of: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        owner = [-1] * len(self.hosts)
        for island in self.islands:
            for rank in island.ranks:
                owner[rank] = island.index
        if -1 in owner or sum(i.size for i in self.islands) != len(self.hosts):
            raise ValueError("the islands do not partition the ranks")
        object.__setattr__(self, "island_of", tuple(owner))

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def flat(self) -> bool:
        """True when one native team spans everything."""
        return len(self.islands) == 1

    @classmethod
    def group(cls, vendors: list[str], hosts: list[int]) -> Topology:
        """Group ranks by vendor, and ``host`` ranks by node as well.

        ``vendors[r]`` and ``hosts[r]`` are the facts of rank r.
        """
        members: dict[tuple[str, int], list[int]] = {}
        for rank, (vendor, host) in enumerate(zip(vendors, hosts, strict=True)):
            members.setdefault((vendor, host if vendor == "host" else -1), []).append(rank)
        islands = tuple(Island(i, key[0], tuple(ranks)) for i, (key, ranks) in enumerate(members.items()))
        return cls(islands, tuple(hosts))
