"""Ranks grouped into islands by the links between them. Pure data, equal on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count
from typing import TypeVar

from ..machine.vendors import VENDORS

_Value = TypeVar("_Value", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Island:
    """Ranks that share one vendor's fabric and library: on hosts with RDMA between them, else on one host. An entry of
    :attr:`Topology.islands`.

    Attributes:
        index: Number of the island in its topology, from 0.
        vendor: Vendor of the ranks' devices: ``nvidia``, ``amd``, or ``host`` for ranks without one.
        ranks: Ranks of the communicator, ascending, which is their order in the island's native team.
    """

    index: int
    vendor: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Group:
    """A node of the tree of a topology, :attr:`Topology.tree`: a group of groups, or of ranks.

    Attributes:
        ranks: All ranks below, child by child.
        children: The groups that it consists of; empty for a group of ranks.
    """

    ranks: tuple[int, ...]
    children: tuple[Group, ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks below."""
        return len(self.ranks)

    @property
    def height(self) -> int:
        """0 for a group of ranks, 1 for a group of those, and so on."""
        return 1 + max(child.height for child in self.children) if self.children else 0

    def walk(self) -> Iterator[Group]:
        """Walk over the tree.

        Returns:
            All groups below and this one, children before their parents.
        """
        for child in self.children:
            yield from child.walk()
        yield self


@dataclass(frozen=True, slots=True)
class Topology:
    """The islands of one communicator, ordered by their lowest rank, and the levels below and above them.

    ``comm.topology`` is the topology for which a communicator's calls are planned; :meth:`group` makes one from lists.
    It is immutable data that can be compared, hashed and pickled, and is equal on all ranks.

    Args:
        islands: The islands; island i has the index i, and each rank is in one of them.
        hosts: Host of each rank: 0, 1, ... in order of first appearance.
        weights: Relative bandwidth of the link by which each rank reaches other islands, as whole numbers from 1; empty
            if all are
            equal.
        levels: Further partitions of the ranks, outermost first, each as a number per rank. A level that splits an
            island (hosts, or
            devices on one fabric) divides islands, one that does not (sites, racks) joins them.

    Attributes:
        islands: As given, and so are ``hosts``, ``weights`` and ``levels``.
        island_of: Index of the island of each rank.
        tree: All levels as one tree, whose root has all ranks.

    Raises:
        ValueError: If a rank is in no island or in two, or a list does not have one entry per rank.
    """

    islands: tuple[Island, ...]
    hosts: tuple[int, ...]
    weights: tuple[int, ...] = ()
    levels: tuple[tuple[int, ...], ...] = ()
    island_of: tuple[int, ...] = field(init=False, compare=False, repr=False)
    tree: Group = field(init=False, compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        owner = [-1] * len(self.hosts)
        for index, island in enumerate(self.islands):
            if island.index != index:
                raise ValueError(f"island {index} says that it is island {island.index}")
            for rank in island.ranks:
                if not 0 <= rank < len(owner) or owner[rank] >= 0:
                    raise ValueError(f"rank {rank} of island {index} is not a rank of its own among {len(owner)}")
                owner[rank] = index
        if -1 in owner:
            raise ValueError(f"rank {owner.index(-1)} is in no island")
        if self.weights and (len(self.weights) != len(owner) or min(self.weights) < 1):
            raise ValueError(f"weights must be one integer of at least 1 for each of {len(owner)} ranks")
        if any(len(level) != len(owner) for level in self.levels):
            raise ValueError(f"a level must have one number for each of {len(owner)} ranks")
        object.__setattr__(self, "island_of", tuple(owner))
        object.__setattr__(self, "tree", _tree(self.island_of, self.levels))
        # Numbers only: hashes of strings differ between processes, and topologies are sent to other processes.
        numbers = {vendor: number for number, vendor in enumerate(VENDORS)}
        islands = tuple((numbers[island.vendor], island.ranks) for island in self.islands)
        object.__setattr__(self, "_hash", hash((islands, self.hosts, self.weights, self.levels)))

    def __hash__(self) -> int:
        # Stored, because topologies are cache keys of the hot path and may have thousands of ranks.
        return self._hash

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    def apart(self) -> Topology:
        """Make each rank an island.

        Returns:
            The topology of the same ranks in which each is an island of its own.
        """
        islands = tuple(Island(rank, self.vendor(rank), (rank,)) for rank in range(self.size))
        return Topology(islands, self.hosts)

    @property
    def flat(self) -> bool:
        """True if there is only one island, whose library serves all ranks in one step."""
        return len(self.islands) == 1

    @property
    def one_host(self) -> bool:
        """True if all ranks are on one host."""
        return len(set(self.hosts)) == 1

    def vendor(self, rank: int) -> str:
        """Tell which vendor's memory a rank's buffers are in.

        Args:
            rank: The rank.

        Returns:
            ``nvidia``, ``amd`` or ``host``.

        Raises:
            IndexError: If there is no such rank.
        """
        return self.islands[self.island_of[rank]].vendor

    @property
    def deep(self) -> bool:
        """True if there are groups inside islands, or groups of islands."""
        return self.tree.height > (0 if self.flat else 1)

    @classmethod
    def group(
        cls,
        vendors: Sequence[str],
        hosts: Sequence[int],
        weights: Sequence[int] = (),
        levels: Sequence[Sequence[int]] = (),
        fabrics: Sequence[int] = (),
    ) -> Topology:
        """Group ranks by vendor and fabric. All lists have an entry for each rank.

        Args:
            vendors: Vendors: ``nvidia``, ``amd`` or ``host``.
            hosts: Hosts, as any numbers; they are numbered anew.
            weights: Relative bandwidths to other islands, from 1; empty if all are equal.
            levels: Further partitions of the ranks, outermost first.
            fabrics: Numbers of the fabric that joins a rank to other hosts. Without them devices of one vendor are one
                island on whatever hosts, and ranks without a device one on each host.

        Returns:
            The topology.

        Raises:
            ValueError: If lists differ in length, or a vendor is not known.
        """
        if len(vendors) != len(hosts):
            raise ValueError(f"{len(vendors)} vendors and {len(hosts)} hosts: both need one entry per rank")
        if fabrics and len(fabrics) != len(hosts):
            raise ValueError(f"{len(fabrics)} fabrics for {len(hosts)} ranks: one for each rank is needed")
        members: dict[tuple[str, int], list[int]] = {}
        for rank, (vendor, host) in enumerate(zip(vendors, hosts, strict=True)):
            if vendor not in VENDORS:
                raise ValueError(f"rank {rank}: vendor {vendor!r} is not one of {', '.join(VENDORS)}")
            fabric = fabrics[rank] if fabrics else host if vendor == "host" else -1
            members.setdefault((vendor, fabric), []).append(rank)
        islands = tuple(Island(i, key[0], tuple(ranks)) for i, (key, ranks) in enumerate(members.items()))
        return cls(islands, numbered(hosts), tuple(weights), tuple(map(numbered, levels)))

    def sub(self, ranks: Sequence[int]) -> Topology:
        """Select ranks, as ``Split`` does.

        Args:
            ranks: Ranks of this topology, in the order of their new numbers.

        Returns:
            The topology in which rank i is rank ``ranks[i]`` of this one. Ranks of one island stay in one.

        Raises:
            ValueError: If a rank is out of range or named twice.
        """
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise ValueError(f"ranks {list(ranks)} are not distinct ranks of a communicator of {self.size}")
        members: dict[int, list[int]] = {}
        for new, old in enumerate(ranks):
            members.setdefault(self.island_of[old], []).append(new)
        islands = tuple(Island(i, self.islands[old].vendor, tuple(new)) for i, (old, new) in enumerate(members.items()))
        weights = tuple(self.weights[rank] for rank in ranks) if self.weights else ()
        hosts, *levels = (numbered(level[rank] for rank in ranks) for level in (self.hosts, *self.levels))
        return Topology(islands, hosts, weights, tuple(levels))

    def fingerprint(self) -> str:
        """Compute a name of the topology.

        Returns:
            16 hexadecimal digits, equal for equal topologies on every machine and in every run.
        """
        text = repr([(i.vendor, i.ranks) for i in self.islands]) + repr(self.hosts) + repr(self.weights)
        text += repr(self.levels) if self.levels else ""
        import hashlib  # only needed here, and slow to import

        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Describe the islands in one line.

        Returns:
            Vendor, ranks and hosts of each island: ``nvidia[0-3]@0 amd[4-7]@1``.
        """
        out = []
        for island in self.islands:
            hosts = sorted({self.hosts[rank] for rank in island.ranks})
            out.append(f"{island.vendor}[{ranges(island.ranks)}]@{ranges(hosts)}")
        return " ".join(out)


def numbered(keys: Iterable[Hashable]) -> tuple[int, ...]:
    """Number the keys in order of first appearance; equal keys get equal numbers."""
    numbers: dict[Hashable, int] = {}
    return tuple([numbers.setdefault(key, len(numbers)) for key in keys])


def ranks_by(values: Iterable[_Value], ranks: Iterable[int] | None = None) -> dict[_Value, list[int]]:
    """The ranks that have each value, in order of first appearance; ``values`` are of ``ranks``, or of all."""
    found: dict[_Value, list[int]] = {}
    for rank, value in zip(count() if ranks is None else ranks, values, strict=False):
        found.setdefault(value, []).append(rank)
    return found


def _tree(islands: Sequence[int], levels: Sequence[Sequence[int]]) -> Group:
    """The tree of levels: first those that join islands, then islands, then those that divide them."""
    joining: list[Sequence[int]] = []
    dividing: list[Sequence[int]] = []
    for level in levels:
        whole = len(set(zip(islands, level, strict=True))) == len(set(islands))
        (joining if whole else dividing).append(level)
    return _grown(range(len(islands)), [*joining, islands, *dividing], len(joining))


def _grown(ranks: Sequence[int], levels: Sequence[Sequence[int]], above: int) -> Group:
    """The group of these ranks, divided by the first level that divides them; ``above`` levels are above islands."""
    for i, level in enumerate(levels):
        members = ranks_by([level[rank] for rank in ranks], ranks)
        # Inside an island, groups of one rank each are not a level.
        if len(members) > 1 and (i <= above or len(members) < len(ranks)):
            children = tuple(_grown(of, levels[i + 1 :], above - i - 1) for of in members.values())
            return Group(tuple(rank for child in children for rank in child.ranks), children)
    return Group(tuple(ranks))


def levels_of(groups: Sequence[str]) -> list[tuple[int, ...]]:
    """Make the levels of :class:`Topology` from the groups of the ranks' hosts (``UCCH_GROUP``): names joined by ``/``,
    such as ``site1/rack3``. Returns a number per rank for each depth."""
    paths = [tuple(filter(None, group.split("/"))) for group in groups]
    depths = range(1, max(map(len, paths), default=0) + 1)
    return [numbered(path[:depth] for path in paths) for depth in depths]


def share_hosts(islands: Sequence[int], hosts: Sequence[int]) -> bool:
    """True if several islands share a host and no island spans hosts: grouping by host then saves links."""
    places = len(set(zip(islands, hosts, strict=True)))
    return places == len(set(islands)) and places > len(set(hosts)) > 1


def link_weights(hosts: Sequence[int], speeds: Sequence[int]) -> tuple[int, ...]:
    """Compute the weights of :class:`Topology`, in sixteenths of the least; empty if all are equal or one is unknown.

    ``speeds``: for each rank the bandwidth of all links of its host, in any unit; 0 if unknown. The ranks of a host
    share its links.
    """
    of_host: dict[int, int] = {}
    for host, speed in zip(hosts, speeds, strict=True):
        of_host[host] = max(of_host.get(host, 0), speed)
    if len(of_host) == 1 or not all(of_host.values()):
        return ()
    ranks = Counter(hosts)
    shares = [Fraction(of_host[host], ranks[host]) for host in hosts]
    if len(set(shares)) == 1:
        return ()
    # Speeds are rounded, and different weights would lead to different rails.
    least = min(shares)
    return tuple(round(16 * share / least) for share in shares)


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as text with runs joined: ``0-3,7`` for 0, 1, 2, 3, 7."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def emulated_vendors(spec: str, size: int = 0) -> list[str]:
    """Parse ``UCCH_EMULATE``: the vendor of each of ``size`` ranks (0: as many as it places).

    Such as ``nvidia:2,amd:2``. A vendor may occur again: ``nvidia:1,amd:1,nvidia:1,amd:1`` interleaves. ``ValueError``
    names the wrong part.
    """
    parts: list[tuple[str, int]] = []
    for part in spec.split(","):
        name, colon, number = (text.strip() for text in part.partition(":"))
        if name not in VENDORS:
            raise ValueError(f"{spec!r}: vendor {name!r} in {part.strip()!r} is not one of {', '.join(VENDORS)}")
        if not colon or not number.isascii() or not number.isdigit() or int(number) < 1:
            raise ValueError(f"{spec!r}: {part.strip()!r} should be vendor:ranks with at least 1 rank, as in amd:2")
        parts.append((name, int(number)))
    if size and (total := sum(number for _, number in parts)) != size:
        raise ValueError(f"{spec!r} places {total} ranks, but there are {size}")
    return [name for name, number in parts for _ in range(number)]
