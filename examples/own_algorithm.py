"""A user-defined algorithm: an allreduce in two stages, a reduction to rank 0 and a broadcast from it.

    mpirun -np 4 python examples/own_algorithm.py
    python examples/own_algorithm.py --plan

Every rank registers it before the first communicator. It runs where its ``suits`` is the highest, or
where a rule asks for it (UCCH_TUNE=allreduce:@by_rank_0). docs/extending.md explains each part.
"""

from __future__ import annotations

import argparse

import numpy as np

from ucc_hetero import Communicator
from ucc_hetero.planner.algorithms import Case, Piece, Stages, algorithm, ranking
from ucc_hetero.planner.algorithms.builders import only, region, stages, without
from ucc_hetero.planner.collectives import Call
from ucc_hetero.planner.plan import Step
from ucc_hetero.planner.topology import Topology

LIMIT = 256  # bytes


def suits(case: Case) -> int:
    """Prefer this algorithm for very short calls to all algorithms of the package."""
    return ranking.ALONE + 1 if case.nbytes <= LIMIT else 0


@algorithm("allreduce", "by_rank_0", suits=suits)
def by_rank_0(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce to rank 0, then broadcast from it: two steps over all ranks, one after the other."""
    at, n = piece.vector(call), call.ranks
    everybody, send, recv = tuple(range(n)), region("send", at), region("recv", at)
    reduce = Step("reduce", everybody, (send,) * n, only(0, n, recv), 0)
    bcast = Step("bcast", everybody, only(0, n, recv), without(0, n, recv), 0)
    return stages([reduce], [bcast])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--plan", action="store_true", help="show a plan of it for 2 + 2 ranks, without running anything"
    )
    if parser.parse_args().plan:
        from ucc_hetero.planner.select import Choice, choose, make_plan

        topology = Topology.group(["nvidia", "nvidia", "amd", "amd"], [0, 0, 1, 1])
        plan = make_plan(topology, Call("allreduce", 4, (8,)), Choice("by_rank_0"))
        print(*(step for fragment in plan.fragments for stage in fragment.stages for step in stage), sep="\n")
        print("chosen for 8 bytes:", choose(topology, "allreduce", 8).algorithm)
        return
    with Communicator() as comm:
        comm.Allreduce(np.full(8, float(comm.rank)), total := np.empty(8))
        assert (total == sum(range(comm.size))).all()
        if comm.rank == 0:
            print(f"sum over {comm.size} ranks: right\n{comm.plan_summary()}")


if __name__ == "__main__":
    main()
