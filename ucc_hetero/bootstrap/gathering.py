"""Some ranks of a communicator come together to make one of theirs, of which the others know nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..errors import CollectiveTimeout, PeerError
from . import faults, numbers
from .known import Known
from .timely import Timely, not_met

#: Tags of such messages, for each communicator.
_TAGS = 256


def all_ready(known: Known, number: int, ranks: Sequence[int], tag: int, mpi: Timely, ready: bool) -> bool:
    """True if all of these ranks have their turns at creating, as they tell each other by messages of the job's.

    Open MPI 5.0.11 may hang where threads of a process make communicators at the same time, one by
    ``MPI_Comm_create_group``.

    Args:
        known: What the communicator's ranks know of each other.
        number: The communicator's.
        ranks: The ranks that come together.
        tag: Tells those of several threads apart.
        mpi: MPI's communicator, with a time limit.
        ready: True if this rank has its turn.

    Raises:
        CollectiveTimeout: One did not come in time.
        PeerError: One has died.
    """
    where = f"rank {known.rank}: Create_group: rank(s)"

    def look() -> None:
        if not faults.lacking(mpi) and (dead := sorted({*faults.dead_ranks(mpi)} & {*ranks})):
            raise PeerError(f"{where} {dead} died")

    places = [known.members[rank] for rank in ranks]
    own = numbers.MOST + number * _TAGS + tag % _TAGS  # beyond those of teams
    least = mpi.named(partial(known.job.least, places, own, int(ready), mpi.seconds, look))
    if least < 0:
        not_met()
        raise CollectiveTimeout(f"{where} [{ranks[-2 - least]}] did not come within {mpi.seconds:g} s (UCCH_TIMEOUT)")
    return bool(least)
