"""The neighbourhood collectives of a communicator with a topology, with mpi4py's names and buffer forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn

from ..buffers import Buffer, as_blocks, as_buffer, as_vbuffer
from ..calls.persistent import PersistentRequest
from ..calls.request import Request, finished
from ..calls.state import ANEW, Watch, refusal_text
from ..device import pointer_vendor
from ..docstrings import described, forms
from ..errors import CollectiveError, MismatchError, RefusedError
from ..native.libraries import lib
from ..p2p.composite import MessageGroup, PersistentMessages, start_all
from ..p2p.messages import Messages, part_of
from ..p2p.transfer import AnyTransfer
from .comm_p2p import MessageMethods

#: The least tag of messages along edges; what is below belongs to partitioned messages.
_FIRST_TAG = 1

#: The blocks of a buffer, one per edge.
_Blocks = Sequence[Buffer]


def _same(spec: Any, edges: int, **about: Any) -> _Blocks:
    return [as_buffer(spec, **about)] * edges


def _even(spec: Any, edges: int, **about: Any) -> _Blocks:
    buffer = as_buffer(spec, blocks=edges, **about)
    each = buffer.count // edges
    return [part_of(buffer, i * each, each) for i in range(edges)]


def _uneven(spec: Any, edges: int, **about: Any) -> _Blocks:
    found = as_vbuffer(spec, edges, **about)
    if found.blocks:
        return found.blocks
    return [part_of(found.buffer, *where) for where in zip(found.displs, found.counts, strict=True)]


#: call -> how its send and its receive buffer are divided among edges.
_DIVIDED: dict[str, tuple[Callable[..., _Blocks], Callable[..., _Blocks]]] = {
    "neighbor_allgather": (_same, _even),
    "neighbor_allgatherv": (_same, _uneven),
    "neighbor_alltoall": (_even, _even),
    "neighbor_alltoallv": (_uneven, _uneven),
    "neighbor_alltoallw": (as_blocks, as_blocks),
}


class Neighbourhood:
    """The edges of one rank of a communicator with a topology, and the calls along them.

    Calls are made in one order on all ranks, so that messages of an edge match by their order. Two edges between the
    same two ranks are told apart as in MPI: on a grid by their direction, in a graph by the order in which both ends
    list them.
    """

    def __init__(self, mpi: Any, messages: Messages) -> None:
        from mpi4py import MPI

        kind = mpi.Get_topology()
        if kind == MPI.UNDEFINED:
            raise ValueError(
                f"this communicator has no topology (rank {messages.rank}): make one with Create_cart, Create_graph, "
                "Create_dist_graph or Create_dist_graph_adjacent"
            )
        sources, destinations = mpi.inoutedges
        self._messages = messages
        grid = kind == MPI.CART
        #: The ranks from and to which edges lead, with their tags.
        # Data sent to a dimension's first neighbour arrives there as from that rank's second.
        self.sources = [(source, _FIRST_TAG + (i if grid else 0)) for i, source in enumerate(sources)]
        self.destinations = [(dest, _FIRST_TAG + (i ^ 1 if grid else 0)) for i, dest in enumerate(destinations)]
        #: Why the edges can no longer be used: messages of a call that failed may be under way.
        self._broken = ""

    def run(self, name: str, send: Any, recv: Any) -> None:
        self.start(name, send, recv).Wait()

    def start(self, name: str, send: Any, recv: Any) -> Request:
        incoming, outgoing = self._understood(name, send, recv)
        watch = Watch(self._messages.state, name)

        def end() -> None:
            self._check(name, incoming)
            watch.finish(0)

        try:
            watch.look()
            if not incoming and not outgoing:
                end()
                return finished()
            began = start_all(self._messages, [*incoming, *outgoing])
        except BaseException as error:
            self._fail(watch, error)
        return MessageGroup(began, end=end, fail=lambda error: self._fail(watch, error))

    def persistent(self, name: str, send: Any, recv: Any) -> PersistentRequest:
        """A call that can be started many times, with what the buffers then hold."""
        self._understood(name, send, recv)  # mistakes are found here
        return PersistentMessages(lambda: self.start(name, send, recv), self._messages.state)

    def _understood(self, name: str, send: Any, recv: Any) -> tuple[list[AnyTransfer], list[AnyTransfer]]:
        """The messages of a call; a mistake is a refused call, as that of any collective."""
        with self._messages.state.refusing:
            return self._transfers(name, send, recv)

    def _transfers(self, name: str, send: Any, recv: Any) -> tuple[list[AnyTransfer], list[AnyTransfer]]:
        if self._broken:
            raise CollectiveError(
                f"rank {self._messages.rank}: the neighbours of this communicator can no longer be reached, because "
                f"{self._broken}; make a new one"
            )
        divide_send, divide_recv = _DIVIDED[name]
        targets = self._blocks(name, divide_recv, recv, len(self.sources), "recvbuf")
        sources = self._blocks(name, divide_send, send, len(self.destinations), "sendbuf")
        messages = self._messages
        return (
            [messages.incoming(block, *edge) for edge, block in zip(self.sources, targets, strict=True)],
            [messages.outgoing(block, *edge) for edge, block in zip(self.destinations, sources, strict=True)],
        )

    def _blocks(self, name: str, divide: Callable[..., _Blocks], spec: Any, edges: int, which: str) -> _Blocks:
        argument, writable = f"{name}: {which}", which == "recvbuf"
        about = {"argument": argument, "rank": self._messages.rank, "pointer_vendor": pointer_vendor}
        return divide(spec, edges, writable=writable, **about) if edges else ()

    def _check(self, name: str, incoming: list[AnyTransfer]) -> None:
        """Compare what came with what was expected; more than that has failed already."""
        messages = self._messages
        for i, transfer in enumerate(incoming):
            if transfer.peer == messages.null:
                continue
            nbytes = transfer.envelope()[2]
            if nbytes != transfer.nbytes:
                raise MismatchError(
                    f"rank {messages.rank}: {name}: rank {transfer.peer}, neighbour {i}, sent {nbytes} bytes where "
                    f"recvbuf has {transfer.nbytes} for it"
                )

    def _fail(self, watch: Watch, error: BaseException) -> NoReturn:
        name = watch.label
        self._broken = self._broken or f"{name} failed ({error or type(error).__name__})"
        lib.ucch_record_end(watch.record, lib.UCCH_FAIL_CANCELLED)  # its messages have records of their own
        why = refusal_text(watch.board, watch.seq)
        if why and not isinstance(error, RefusedError):
            raise RefusedError(f"rank {self._messages.rank}: {name}: {why}; {ANEW}") from error
        raise error


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
