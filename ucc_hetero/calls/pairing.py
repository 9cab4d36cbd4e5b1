"""Which message is which: both sides count those under a tag; a stream may wait for one that is still to come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from .message import Transfer

__all__ = ["Pairing"]


class Pairing:
    """Numbers of one rank's messages with ``peers``, which do the same.

    Messages of a tag are matched in their order, so that the n-th that was sent is the n-th to be received. Where one
    is received from anyone, under any tag, or by a matching probe, a rank no longer knows which are to come.
    """

    def __init__(self, peers: Container[int], any_source: int, any_tag: int) -> None:
        self._peers, self._wild = peers, (any_source, any_tag)
        self._sent: Counter[tuple[int, int]] = Counter()
        self._received: Counter[tuple[int, int]] = Counter()
        self._known = True

    def number(self, transfer: Transfer) -> int:
        """That of a message which is begun now; 0 where its receiver does not know, or nobody asks."""
        peer, tag = transfer.peer, transfer.tag
        counts = self._received if transfer.what == "receive" else self._sent
        if counts is self._received and (peer == self._wild[0] or tag == self._wild[1]):
            self.lose()
        if peer not in self._peers:
            return 0
        counts[peer, tag] += 1
        return counts[peer, tag] if self._known or counts is self._sent else 0

    def lose(self) -> None:
        """Stop numbering what is received."""
        self._known = False
