"""Going on after the death of ranks, with mpi4py's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from .. import env
from ..bootstrap import growth
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
        """Whether the communicator has been revoked, as far as this rank has heard."""
        return self._recovery.revoked()

    def Get_failed(self) -> Any:
        """The group of ranks that have died, as far as this rank knows (``MPI.Group``)."""
        self._recovery.revoked()  # MPI hears of deaths in calls that make progress
        return self._mpi.Get_failed()

    def Ack_failed(self, num_to_ack: int | None = None) -> int:
        """Acknowledge the first ``num_to_ack`` deaths, or all, which ``Agree`` then does not mind; how many are."""
        self._recovery.revoked()
        return int(self._mpi.Ack_failed(num_to_ack))

    def Agree(self, flag: int) -> int:
        """The bits of ``flag`` that all living ranks have set; collective among them, also when revoked.

        ``PeerError`` on all of them while a rank is dead that not all have acknowledged.
        """
        return self._recovery.agree(flag)

    def Shrink(self: _Self) -> _Self:
        """A new communicator of the ranks that live, in the same order; collective among them.

        Revokes this one, so that ranks which wait in a call of it come as well. It is to be freed when convenient,
        which waits for nobody.
        """
        return self._recovery.shrink(type(self)._adopt)

    def Grow(self: _Self, store: Any, least: int = 1) -> _Self | None:
        """A new communicator of these ranks and, behind them, of all that wait in ``Enter`` at the same ``store``.

        None, at once, where fewer than ``least`` do. Collective among these ranks, of which the first asks. This
        communicator goes on, and is to be freed on its own. ``store``: torch's, or :class:`ucc_hetero.Store`.
        """
        return self._recovery.grow(type(self)._adopt, store, least)

    @classmethod
    def Enter(cls: type[_Self], store: Any, timeout: float | None = None) -> _Self:
        """A communicator with the ranks that call ``Grow`` with the same ``store``, for a process that has come later.

        ``CollectiveTimeout`` where nobody calls it within ``timeout`` seconds (UCCH_TIMEOUT).
        """
        begin_without_mpi()
        return cls._adopt(growth.arrive(store, env.get("TIMEOUT") if timeout is None else timeout))
