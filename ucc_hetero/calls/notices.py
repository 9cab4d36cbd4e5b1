"""Messages by which ranks of several hosts tell each other of refused calls; looked for while one waits."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from ..errors import UCCHError
from ..native.libraries import ffi, lib
from .p2p import Messages
from .probe import probe
from .refusals import Refusals
from .request import lookouts

#: The tag of these messages, below those of partitioned ones.
_TAG = (1 << 30) - 1


class Notices:
    """The notices of one communicator, sent by the package's own ``messages`` to those who do not see our board."""

    def __init__(self, messages: Messages, refusals: Refusals) -> None:
        board = messages.runner.board
        near = board.ranks if board.shared else [messages.rank]
        self._messages, self._far = messages, [rank for rank in range(messages.size) if rank not in near]
        refusals.tell = self._tell
        lookouts.append(self.look)

    def _tell(self, refusal: Any) -> None:
        words = np.frombuffer(ffi.buffer(refusal), np.uint8).copy()
        for rank in self._far:
            self._messages.start(self._messages.outgoing(words, rank, _TAG, copy=True)).Free()

    def look(self) -> None:
        """Take note of what has come."""
        messages = self._messages
        with suppress(UCCHError):  # whoever waits looks, in another communicator perhaps: calls of this one will say it
            while not messages.runner.broken and (
                found := probe(messages, messages.any_source, _TAG, None, remove=True)
            ):
                refusal = ffi.new("ucch_refusal *")
                found.Recv(np.frombuffer(ffi.buffer(refusal), np.uint8))
                lib.ucch_lock()
                lib.ucch_board_told(messages.runner.board.native, refusal)
                lib.ucch_unlock()

    def close(self) -> None:
        """Look no more."""
        lookouts.remove(self.look)
