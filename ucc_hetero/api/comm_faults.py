"""Going on after the death of ranks, with mpi4py's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from ..bootstrap import growth, settings
from ..bootstrap.storecomm import begin_without_mpi
from ..calls.recovery import Recovery

_Self = TypeVar("_Self", bound="FaultMethods")


class FaultMethods(ABC):
    """Methods for those that live when ranks have died (docs/faults.md).

    They need an exchange that goes on itself: ``mpirun --with-ft ulfm``, or torch's store. ``NotSupported`` otherwise.
    """

    _mpi: Any
    _recovery: Recovery

    @classmethod
    @abstractmethod
    def _adopt(cls: type[_Self], mpi: Any) -> _Self:
        """A communicator of this class over MPI's."""

    def Revoke(self) -> None:
        """Give the communicator up for all ranks, without waiting: their calls end with a ``RevokedError``."""
        self._recovery.revoke()

    def Is_revoked(self) -> bool:
        """Tell if the communicator has been revoked.

        Returns:
            True if this rank has heard so.
        """
        return self._recovery.revoked()

    def Get_failed(self) -> Any:
        """Tell which ranks have died.

        Returns:
            ``MPI.Group`` of those that this rank knows of.
        """
        self._recovery.revoked()  # MPI hears of deaths in calls that make progress
        return self._mpi.Get_failed()

    def Ack_failed(self, num_to_ack: int | None = None) -> int:
        """Acknowledge deaths, for which ``Agree`` then does not fail.

        Args:
            num_to_ack: The first so many; all if None.

        Returns:
            How many deaths are acknowledged.
        """
        self._recovery.revoked()
        return int(self._mpi.Ack_failed(num_to_ack))

    def Agree(self, flag: int) -> int:
        """Agree on a number; collective among the living ranks, also when revoked.

        Args:
            flag: This rank's bits.

        Returns:
            The bits that all living ranks have set.

        Raises:
            PeerError: On all of them, while a rank is dead that not all have acknowledged.
        """
        return self._recovery.agree(flag)

    def Shrink(self: _Self) -> _Self:
        """Go on with the ranks that live; collective among them.

        Revokes this one, so that ranks which wait in a call of it come as well. Free it at any time: that does not wait
        for other ranks.

        Returns:
            A new communicator of them, in the same order.
        """
        return self._recovery.shrink(type(self)._adopt)

    def Grow(self: _Self, store: Any, least: int = 1) -> _Self | None:
        """Let in the processes that wait in :meth:`Enter`; collective among these ranks, of which the first asks.

        Args:
            store: Where they wait: torch's store, or :class:`ucc_hetero.Store`.
            least: Let in so many or none.

        Returns:
            A new communicator of these ranks and, behind them, of the newcomers; None, at once, if fewer than ``least``
            wait. This communicator goes on, and is to be freed on its own.
        """
        return self._recovery.grow(type(self)._adopt, store, least)

    @classmethod
    def Enter(cls: type[_Self], store: Any, timeout: float | None = None) -> _Self:
        """Join the ranks that call :meth:`Grow`, as a process that has come later.

        Args:
            store: The same as theirs.
            timeout: Seconds to wait; ``UCCH_TIMEOUT`` if None.

        Returns:
            A communicator of all of them.

        Raises:
            CollectiveTimeout: They have not called :meth:`Grow` within that time.
        """
        begin_without_mpi()
        return cls._adopt(growth.arrive(store, settings.timeout() if timeout is None else timeout))
