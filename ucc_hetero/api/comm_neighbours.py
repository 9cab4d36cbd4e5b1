"""Neighbourhood collectives of a communicator with a topology, with mpi4py's names and buffer forms."""

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

#: Lowest tag of messages along edges; partitioned messages use the tags below.
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


#: Name of a call -> functions that divide its send and its receive buffer among the edges.
_DIVIDED: dict[str, tuple[Callable[..., _Blocks], Callable[..., _Blocks]]] = {
    "neighbor_allgather": (_same, _even),
    "neighbor_allgatherv": (_same, _uneven),
    "neighbor_alltoall": (_even, _even),
    "neighbor_alltoallv": (_uneven, _uneven),
    "neighbor_alltoallw": (as_blocks, as_blocks),
}


class Neighbourhood:
    """The edges of one rank of a communicator with a topology, and the calls along them.

    All ranks make the calls in the same order, so that messages of an edge match in order. Two edges between the same
    two ranks are distinguished as in MPI: on a grid by direction, in a graph by the order in which both ends list them.
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
        #: (rank, tag) of the edges to this rank, and from it.
        # On a grid data for a dimension's first neighbour arrives there as data from its second neighbour.
        self.sources = [(source, _FIRST_TAG + (i if grid else 0)) for i, source in enumerate(sources)]
        self.destinations = [(dest, _FIRST_TAG + (i ^ 1 if grid else 0)) for i, dest in enumerate(destinations)]
        #: Why the edges are unusable: messages of a failed call may be under way. Empty while they are usable.
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
            watch.check()
            if not incoming and not outgoing:
                end()
                return finished()
            began = start_all(self._messages, [*incoming, *outgoing])
        except BaseException as error:
            self._fail(watch, error)
        return MessageGroup(began, end=end, fail=lambda error: self._fail(watch, error))

    def persistent(self, name: str, send: Any, recv: Any) -> PersistentRequest:
        """A call that can be started repeatedly, each time with the current content of the buffers."""
        self._understood(name, send, recv)  # raises for wrong arguments now
        return PersistentMessages(lambda: self.start(name, send, recv), self._messages.state)

    def _understood(self, name: str, send: Any, recv: Any) -> tuple[list[AnyTransfer], list[AnyTransfer]]:
        """The messages of a call. Wrong arguments refuse the call, as in any collective."""
        with self._messages.state.refusing:
            return self._transfers(name, send, recv)

    def _transfers(self, name: str, send: Any, recv: Any) -> tuple[list[AnyTransfer], list[AnyTransfer]]:
        if self._broken:
            raise CollectiveError(
                f"rank {self._messages.rank}: neighbourhood calls of this communicator are no longer possible, because "
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
        """Compare the lengths of received messages with recvbuf; messages that were too long have failed before."""
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
        lib.ucch_record_end(watch.record, lib.UCCH_FAIL_CANCELLED)  # the messages have records of their own
        why = refusal_text(watch.board, watch.seq)
        if why and not isinstance(error, RefusedError):
            raise RefusedError(f"rank {self._messages.rank}: {name}: {why}; {ANEW}") from error
        raise error


@forms
@described(raises="MismatchError, CollectiveTimeout, PeerError: And others; see :class:`Communicator`.")
class NeighbourMethods(MessageMethods):
    """Calls along the edges of a grid (``Create_cart``) or graph (``Create_graph``, ``Create_dist_graph``).

    Buffers have one block per neighbour, in the topology's order; a block of ``MPI.PROC_NULL`` stays unchanged. Host
    and device memory. Blocks are messages: if a rank does not make the call, its neighbours' calls fail after
    ``UCCH_TIMEOUT`` seconds, and the edges are unusable afterwards.
    """

    @cached_property
    def _neighbourhood(self) -> Neighbourhood:
        return Neighbourhood(self._mpi, self._own_messages)

    def Neighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send one buffer to all neighbours, and receive an equal block from each.

        Args:
            sendbuf: Elements for all neighbours.
            recvbuf: Room for one block per neighbour.
        """
        self._neighbourhood.run("neighbor_allgather", sendbuf, recvbuf)

    def Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send one buffer to all neighbours, and receive a block of any length from each.

        Args:
            sendbuf: Elements for all neighbours.
            recvbuf: ``[array, counts]`` or ``[array, (counts, displacements)]`` by neighbour, in elements.
        """
        self._neighbourhood.run("neighbor_allgatherv", sendbuf, recvbuf)

    def Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send an equal block to each neighbour, and receive one from each.

        Args:
            sendbuf: One block per neighbour.
            recvbuf: Room for one block per neighbour.
        """
        self._neighbourhood.run("neighbor_alltoall", sendbuf, recvbuf)

    def Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send a block of any length to each neighbour, and receive one from each.

        Args:
            sendbuf: ``[array, counts]`` or ``[array, (counts, displacements)]`` by neighbour, in elements.
            recvbuf: The same, for the blocks to receive.
        """
        self._neighbourhood.run("neighbor_alltoallv", sendbuf, recvbuf)

    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send a block of any length and datatype to each neighbour, and receive one from each.

        Args:
            sendbuf: ``[array, (counts, displacements in bytes), datatypes]`` by neighbour.
            recvbuf: The same, for the blocks to receive.
        """
        self._neighbourhood.run("neighbor_alltoallw", sendbuf, recvbuf)

    def Ineighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        return self._neighbourhood.start("neighbor_allgather", sendbuf, recvbuf)

    def Ineighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        return self._neighbourhood.start("neighbor_allgatherv", sendbuf, recvbuf)

    def Ineighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        return self._neighbourhood.start("neighbor_alltoall", sendbuf, recvbuf)

    def Ineighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        return self._neighbourhood.start("neighbor_alltoallv", sendbuf, recvbuf)

    def Ineighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        return self._neighbourhood.start("neighbor_alltoallw", sendbuf, recvbuf)

    def Neighbor_allgather_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> PersistentRequest:
        return self._neighbourhood.persistent("neighbor_allgather", sendbuf, recvbuf)

    def Neighbor_allgatherv_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> PersistentRequest:
        return self._neighbourhood.persistent("neighbor_allgatherv", sendbuf, recvbuf)

    def Neighbor_alltoall_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> PersistentRequest:
        return self._neighbourhood.persistent("neighbor_alltoall", sendbuf, recvbuf)

    def Neighbor_alltoallv_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> PersistentRequest:
        return self._neighbourhood.persistent("neighbor_alltoallv", sendbuf, recvbuf)

    def Neighbor_alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> PersistentRequest:
        return self._neighbourhood.persistent("neighbor_alltoallw", sendbuf, recvbuf)
