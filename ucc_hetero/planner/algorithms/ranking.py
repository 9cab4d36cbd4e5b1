"""How algorithms rank for calls, and into how many fragments they cut them: limits from measurements."""

from __future__ import annotations

from ..topology import Topology
from .registry import Case

#: Levels of ranking. LAST serves everything; of the two algorithms that always fit, one is FIRST by length; ALONE is
#: above all others.
LAST, SECOND, FIRST, BETTER, BEST, ALONE = range(1, 7)

#: Size from which a call is optimized for bandwidth, below it for latency; bytes per island beyond the first, as every
#: further island adds rounds to the exchange.
LATENCY_LIMIT = 64 << 10
#: Size from which an allreduce between more than two hosts, in plain memory, is optimized for bandwidth, however many
#: hosts there are: more hosts cost rails more rounds, and ``doubling`` more copies of the vector. In measurements the
#: two met at 48 KiB on 2 + 2 + 1 ranks and 80 on 4 x 2 over 4 Gbit/s, at 24 to 32 KiB on 4, 8 and 16 hosts over 0.2 to
#: 1 Gbit/s.
RAILS_LIMIT = 48 << 10
#: Size in bytes from which a reduction in one host's memory is faster in one step.
SHARED_LIMIT = 64 << 10
#: Block size in bytes from which an alltoall between hosts in plain memory goes directly from rank to rank. Measured on
#: 2 x 2 to 8 x 2 and 4 x 4 ranks with a core each, blocks of 16, 32, 64 and 256 KiB: it took 0.8 to 1.5, 0.7 to 1.2,
#: 0.5 to 1 and 0.35 to 1 of the time with bundles.
BUNDLED_LIMIT = 32 << 10
#: Most bytes per rank, and most ranks, for which one-step calls on one host go over the arrival board (base/parcel.c).
PARCEL_LIMIT, MOST_WITH_PARCELS = 496, 32
#: Most bytes, and most ranks, for which queued calls are ``flat``: one kernel does such a call (coll/fused.c; an
#: allreduce of more ranks exceeds its limit of moves). Measured on 2 + 2 H200s, 64 and 256 KiB: allreduces in 92
#: instead of 95 and 110 us, allgathers in 45 instead of 96 and 64; the host was busy for 20 us instead of 63 to 108.
KERNEL_LIMIT, MOST_IN_KERNEL = 256 << 10, 8
#: Most islands for rings, and fragments of a ring times islands.
MOST_RING, MOST_HOPS = 8, 256
#: Most islands for rails of blocks whatever the islands' sizes.
MOST_UNLIKE = 8

#: Collectives with a block per rank; and ranks from which on these cross several levels in one fragment, as planning
#: takes time for each.
BLOCKS = ("allgather", "allgatherv", "reduce_scatter_block", "reduce_scatter")
MANY = 1024
#: Size in bytes below which fragments cost more than their overlap gains.
LEAST_FRAGMENT = 512 << 10
#: Most fragments, by ranks: fragments of 512 KiB stay in caches and came within 2 to 8 % of the limit of emulated links
#: (1 MiB: 2 to 14 %), but planning takes time for each.
MOST_FRAGMENTS = ((16, 128), (64, 64), (256, 16), (1024, 8))
LEAST_MOST = 4
#: Size in bytes from which reductions and broadcasts in one host's memory are cut, and bytes of a fragment. It stays in
#: caches, and glibc returns longer scratch of libucc's to the system after each call (mallopt(3), M_MMAP_THRESHOLD).
#: Measured on 4 ranks with a core each, 64 and 256 MiB: allreduce in place in 22 and 91 ms instead of 44 and 201,
#: reduce_scatter in 21 and 83 instead of 41 and 198, broadcast of 64 MiB in 11 instead of 19; allgather gained nothing,
#: and shorter calls lost a little.
CACHED_LIMIT, CACHED_FRAGMENT = 32 << 20, 1 << 20
#: Size in bytes from which a reduce in one host's memory is a reduce-scatter and a gather: in one step the root adds,
#: and libucc has scratch for three vectors there. Measured as above, 16, 64 and 256 MiB: in 5, 27 and 114 ms instead of
#: 33, 134 and 554.
SCATTERED_LIMIT = 4 << 20
#: Fragment size in bytes for plans on one host's devices, and most fragments: the island phases of one overlap with the
#: bridge phase of another. Shorter ones were slower on H200s, where a phase costs 60 us however short; libucc's scratch
#: for longer ones does not fit its pool (``UCC_MC_CUDA_MPOOL_ELEM_SIZE``).
DEVICE_FRAGMENT, MOST_ON_DEVICES = 64 << 20, 8
#: Sizes in bytes from which calls of devices on hosts with several vendors are cut, and into how many fragments:
#: traffic between vendors of a host overlaps with traffic between hosts. Measured on four H200 as two hosts with a
#: device of either vendor, allgathers and reduce_scatters of 4, 16 and 64 MiB: in 0.83, 0.9 and 0.83 of the time,
#: allreduces in 0.9, 0.92 and 0.98; the host is busy up to twice as long.
SHARED_FRAGMENTS = ((32 << 20, 4), (4 << 20, 2))


def tree(case: Case) -> int:
    """The rank of trees: high for short calls, whose time is the number of rounds."""
    return SECOND if is_long(case) else FIRST


def rails(case: Case) -> int:
    """The rank of rails: high for long calls, which need all links."""
    return BEST if scattered(case) else FIRST if is_long(case) else SECOND


def is_long(case: Case) -> bool:
    islands = len(case.topology.islands)
    many = between_hosts(case) and islands > 2
    return case.nbytes >= (RAILS_LIMIT if many else LATENCY_LIMIT * max(islands - 1, 1))


def between_hosts(case: Case) -> bool:
    """True for an allreduce between hosts in plain memory, where the engine's own sums and messages cost little."""
    topology = case.topology
    return case.plain and case.collective == "allreduce" and not topology.one_host and not topology.deep


def unequal_links(topology: Topology) -> bool:
    """True if the links of islands differ in total bandwidth."""
    weights = topology.weights
    return bool(weights) and len({sum(weights[rank] for rank in i.ranks) for i in topology.islands}) > 1


def tree_of_blocks(case: Case) -> int:
    """The rank of trees for collectives with a block per rank."""
    # Between many islands that differ in size or links there would be thousands of rails.
    islands, weights = case.topology.islands, case.topology.weights
    unlike = len(islands) > MOST_UNLIKE and (len({i.size for i in islands}) > 1 or len(set(weights)) > 1)
    return BEST if unlike else tree(case)


def passed_along(case: Case, best: bool) -> int:
    """The rank of rings: best for long calls between few islands, if ``best``."""
    return BEST if best and 2 < len(case.topology.islands) <= MOST_RING and is_long(case) else 0


def hops(case: Case) -> int:
    """Fragments of a ring: each is a message per island."""
    return overlapped(case, max(LEAST_MOST, MOST_HOPS // len(case.topology.islands)))


def overlapped(case: Case, limit: int = MOST_FRAGMENTS[0][1]) -> int:
    """Fragments of algorithms with phases inside islands and between them, which overlap."""
    topology = case.topology
    if case.collective in BLOCKS and topology.deep and topology.size > MANY:
        return 1
    # On one host, island and bridge phases use the same memory and cores: nothing overlaps, except copies by devices'
    # own engines.
    if case.queued or topology.one_host:
        # Pieces of a message through a ring are pipelined in any case; only phases of levels can overlap.
        if case.queued and all(island.size == 1 for island in topology.islands):
            levels = topology.deep and case.collective in (*BLOCKS, "allreduce")
            return next((many for least, many in SHARED_FRAGMENTS if levels and case.nbytes >= least), 1)
        return cached(case) if case.plain else max(1, min(MOST_ON_DEVICES, case.nbytes // DEVICE_FRAGMENT))
    return max(1, min(limit, most_fragments(topology), case.nbytes // LEAST_FRAGMENT))


def scattered(case: Case) -> bool:
    """True for a long reduce on one host that is best done as a reduce-scatter and a gather."""
    one = case.plain and case.topology.flat and case.topology.one_host
    return one and case.collective == "reduce" and case.nbytes >= SCATTERED_LIMIT


def cached(case: Case) -> int:
    """Fragments of a collective in one host's memory."""
    if not (case.plain and case.topology.one_host and case.nbytes >= CACHED_LIMIT):
        return 1
    return min(most_fragments(case.topology), case.nbytes // CACHED_FRAGMENT)


def most_fragments(topology: Topology) -> int:
    """Most fragments of a call of any length."""
    return next((most for ranks, most in MOST_FRAGMENTS if topology.size <= ranks), LEAST_MOST)
