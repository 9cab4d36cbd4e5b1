"""Cases of one vendor on several hosts."""

from arrays import Array

from ucc_hetero import Communicator


def structure(comm):
    """Islands, teams by link, rings, fabric; of the job and of communicators inside and across hosts."""
    tell("all", comm)
    with Communicator(comm.mpi.Split(comm.topology.hosts[comm.rank])) as inside:
        tell("inside", inside)
    with Communicator(comm.mpi.Split(comm.rank % 2)) as across:
        tell("across", across)


def tell(name, comm):
    x, y = Array(1000).set(comm.rank + 1), Array(1000)
    comm.Allreduce(x, y)
    assert (y.peek == sum(range(1, comm.size + 1))).all()
    members, (first, *rest) = comm._runner.members, comm.plan_summary().splitlines()
    fabric = [line for line in rest if line.startswith("fabric: ")]
    teams = sorted((link, len(ranks)) for ranks, link in members.teams._teams)
    for ranks, link in members.teams._teams:
        assert link == "bridge" or len({comm.topology.island_of[rank] for rank in ranks}) == 1
    print(name, first, *fabric, "queued" if "queued" in rest[-1] else "else", teams[-1:], flush=True)
