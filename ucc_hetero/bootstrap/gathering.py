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


class Gathering:
    """These ranks tell each other whether they have their turns at creating, by messages among the job's ranks.

    Open MPI 5.0.11 may hang where threads of a process make communicators at the same time, one by
    ``MPI_Comm_create_group``.

    Args:
        known: What the communicator's ranks know of each other.
        number: The communicator's.
        ranks: The ranks that come together.
        tag: Tells those of several threads apart.
        mpi: MPI's communicator, with a time limit.
    """

    def __init__(self, known: Known, number: int, ranks: Sequence[int], tag: int, mpi: Timely) -> None:
        self._known, self._ranks, self._mpi = known, ranks, mpi
        self._tag = numbers.MOST + number * _TAGS + tag % _TAGS  # beyond those of teams

    def come(self, ready: bool) -> bool:
        """True if all of them are ready; collective among them.

        Raises:
            CollectiveTimeout: One did not come in time.
            PeerError: One has died.
        """
        known, seconds = self._known, self._mpi.seconds
        places = [known.members[rank] for rank in self._ranks]
        least = self._mpi.named(partial(known.job.least, places, self._tag, int(ready), seconds, self._look))
        if least < 0:
            not_met()
            raise CollectiveTimeout(
                f"rank {known.rank}: Create_group: rank(s) [{self._ranks[-2 - least]}] did not come within "
                f"{seconds:g} s (UCCH_TIMEOUT)"
            )
        return bool(least)

    def _look(self) -> None:
        """Raise once one of these ranks has died."""
        if faults.lacking(self._mpi):
            return
        if dead := sorted({*faults.dead_ranks(self._mpi)} & {*self._ranks}):
            raise PeerError(f"rank {self._known.rank}: Create_group: rank(s) {dead} died")
