"""Some ranks of a communicator come together to make one of theirs, of which the others know nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..errors import CollectiveTimeout, PeerError
from . import faults, numbers
from .known import Known
from .timely import Timely, not_met

#: What ranks say, and the first one answers; that a rank is missing is less by its number.
_MISSING, _LATER, _READY = -1, 0, 1

#: Seconds that ranks wait longer for the answer than the first one does for them.
_GRACE_S = 1.0

#: Tags of such messages, for each communicator.
_TAGS = 256


class Gathering:
    """These ranks tell each other whether they have their turns at creating, by messages among the job's ranks.

    Open MPI 5.0.11 may hang where threads of a process make communicators at the same time, one by
    ``MPI_Comm_create_group``.

    Args:
        known: What the communicator's ranks know of each other.
        number: The communicator's.
        ranks: The ranks that come together. The first one asks the others.
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
        first, *others = self._ranks
        if self._known.rank != first:
            self._say(first, _READY if ready else _LATER)
            answer = self._hear(first, _GRACE_S)
        else:
            words = [_READY if ready else _LATER]
            for rank in others:
                if min(words) > _MISSING:
                    words.append(self._hear(rank))
            answer = min(words)
            for rank in others:
                self._say(rank, answer)
        if answer <= _MISSING:
            not_met()
            raise CollectiveTimeout(
                f"rank {self._known.rank}: Create_group: rank(s) [{_MISSING - answer}] did not come within "
                f"{self._mpi.seconds:g} s (UCCH_TIMEOUT)"
            )
        return answer == _READY

    def _say(self, rank: int, word: int) -> None:
        self._mpi.named(partial(self._known.job.say, self._known.members[rank], self._tag, word))

    def _hear(self, rank: int, grace: float = 0.0) -> int:
        """A rank's word; or that it is missing, this much longer after the time limit."""
        place, seconds = self._known.members[rank], self._mpi.seconds + grace
        word = self._mpi.named(partial(self._known.job.hear, place, self._tag, seconds, self._look))
        return _MISSING - rank if word is None else word

    def _look(self) -> None:
        """Raise once one of these ranks has died."""
        if faults.lacking(self._mpi):
            return
        if dead := sorted({*faults.dead_ranks(self._mpi)} & {*self._ranks}):
            raise PeerError(f"rank {self._known.rank}: Create_group: rank(s) {dead} died")
