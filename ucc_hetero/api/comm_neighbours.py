"""The neighbourhood collectives of a communicator with a topology, with mpi4py's names and buffer forms."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ..calls.persistent import PersistentRequest
from ..calls.request import Request
from ..docstrings import described, forms
from ..p2p.neighbours import Neighbourhood
from .comm_p2p import MessageMethods


@forms
@described(raises="MismatchError, CollectiveTimeout: And the others that :class:`Communicator` names.")
class NeighbourMethods(MessageMethods):
    """Calls along the edges of a grid (``Create_cart``) or graph (``Create_graph``, ``Create_dist_graph``).

    A block per neighbour, in the order in which the topology lists them; of ``MPI.PROC_NULL`` nothing is received and
    its block stays as it is. Host and device memory. Blocks are messages: a rank that does not call makes its
    neighbours' calls end in an error after ``UCCH_TIMEOUT`` seconds, after which the edges can no longer be used.
    """

    @cached_property
    def _neighbourhood(self) -> Neighbourhood:
        return Neighbourhood(self._mpi, self._own_messages)

    def Neighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send one buffer to all neighbours, and receive an equal block from each.

        Args:
            sendbuf: Array that goes to all neighbours.
            recvbuf: Where a block of each neighbour goes.
        """
        self._neighbourhood.run("neighbor_allgather", sendbuf, recvbuf)

    def Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send one buffer to all neighbours, and receive a block of any size from each.

        Args:
            sendbuf: Array that goes to all neighbours.
            recvbuf: Where a block of each neighbour goes, ``[array, counts]`` or ``[array, (counts, displacements)]``.
        """
        self._neighbourhood.run("neighbor_allgatherv", sendbuf, recvbuf)

    def Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send an equal block to each neighbour, and receive one from each.

        Args:
            sendbuf: A block for each neighbour.
            recvbuf: Where a block of each neighbour goes.
        """
        self._neighbourhood.run("neighbor_alltoall", sendbuf, recvbuf)

    def Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send a block of any size to each neighbour, and receive one from each.

        Args:
            sendbuf: A block for each neighbour, ``[array, counts]`` or ``[array, (counts, displacements)]``.
            recvbuf: Where a block of each neighbour goes, ``[array, counts]`` or ``[array, (counts, displacements)]``.
        """
        self._neighbourhood.run("neighbor_alltoallv", sendbuf, recvbuf)

    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send a block of any size and datatype to each neighbour, and receive one from each.

        Args:
            sendbuf: A block for each neighbour, ``[array, (counts, displacements in bytes), datatypes]``.
            recvbuf: Where a block of each neighbour goes, ``[array, (counts, displacements in bytes), datatypes]``.
        """
        self._neighbourhood.run("neighbor_alltoallw", sendbuf, recvbuf)

    def Ineighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Neighbor_allgather`, with its arguments; return its request."""
        return self._neighbourhood.start("neighbor_allgather", sendbuf, recvbuf)

    def Ineighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Neighbor_allgatherv`, with its arguments; return its request."""
        return self._neighbourhood.start("neighbor_allgatherv", sendbuf, recvbuf)

    def Ineighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Neighbor_alltoall`, with its arguments; return its request."""
        return self._neighbourhood.start("neighbor_alltoall", sendbuf, recvbuf)

    def Ineighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Neighbor_alltoallv`, with its arguments; return its request."""
        return self._neighbourhood.start("neighbor_alltoallv", sendbuf, recvbuf)

    def Ineighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Neighbor_alltoallw`, with its arguments; return its request."""
        return self._neighbourhood.start("neighbor_alltoallw", sendbuf, recvbuf)

    def Neighbor_allgather_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> PersistentRequest:
        """Set up :meth:`Neighbor_allgather`, with its arguments; return a request that can be started many times."""
        return self._neighbourhood.persistent("neighbor_allgather", sendbuf, recvbuf)

    def Neighbor_allgatherv_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> PersistentRequest:
        """Set up :meth:`Neighbor_allgatherv`, with its arguments; return a request that can be started many times."""
        return self._neighbourhood.persistent("neighbor_allgatherv", sendbuf, recvbuf)

    def Neighbor_alltoall_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> PersistentRequest:
        """Set up :meth:`Neighbor_alltoall`, with its arguments; return a request that can be started many times."""
        return self._neighbourhood.persistent("neighbor_alltoall", sendbuf, recvbuf)

    def Neighbor_alltoallv_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> PersistentRequest:
        """Set up :meth:`Neighbor_alltoallv`, with its arguments; return a request that can be started many times."""
        return self._neighbourhood.persistent("neighbor_alltoallv", sendbuf, recvbuf)

    def Neighbor_alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> PersistentRequest:
        """Set up :meth:`Neighbor_alltoallw`, with its arguments; return a request that can be started many times."""
        return self._neighbourhood.persistent("neighbor_alltoallw", sendbuf, recvbuf)
