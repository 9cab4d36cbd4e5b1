"""The exceptions of ucc_hetero. Messages name what was wrong, the rank, and the way out."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AgreementError", "CollectiveError", "CollectiveTimeout", "DataError", "DeviceError", "LibraryError",
    "LibraryNotFound", "MismatchError", "NotSupported", "PeerError", "RefusedError", "RevokedError", "TruncationError",
    "UCCHError",
]  # fmt: skip


class UCCHError(RuntimeError):
    """Base class of all errors after communication has begun.

    Wrong arguments raise plain ``TypeError``, ``ValueError`` or ``BufferError``, before a byte is sent.
    """


class LibraryNotFound(UCCHError, ImportError):
    """libucc or libucp could not be loaded. The message lists every file tried, and why it was rejected."""


class DeviceError(UCCHError):
    """A GPU runtime refused a call, or has no such device. The message is the runtime's reason."""


class NotSupported(UCCHError, NotImplementedError):
    """The combination of collective, dtype, op and memory is not available."""


class AgreementError(UCCHError):
    """The ranks of a job differ in versions or settings that must be equal. The message is a table by rank."""


class CollectiveError(UCCHError):
    """A collective failed: a library reported it, or a check of the result did."""


class DataError(CollectiveError):
    """UCCH_CHECK=data has found that a call's result does not match the ranks' data."""


class MismatchError(CollectiveError, ValueError):
    """Ranks called different collectives, or the same one with different arguments."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """A collective or message did not complete before its deadline. The message names the ranks that did not make the
    call."""


class TruncationError(CollectiveError, ValueError):
    """A received message was longer than the buffer of its receive."""


class PeerError(CollectiveError, ConnectionError):
    """A rank of the communicator died, or cannot be reached any more."""


class RefusedError(CollectiveError):
    """Another rank found the arguments of its call wrong. The message names the rank and the mistake.

    The communicator has ended on all ranks: free it, and make a new one.
    """


class RevokedError(CollectiveError):
    """A rank has revoked the communicator for all ranks (``Revoke``, ``Shrink``). All its calls fail."""


class LibraryError(UCCHError):
    """A function of libucc or libucp failed. ``status`` is its error code, ``call`` its name."""

    def __init__(self, call: str, status: int, name: str, hint: str = "") -> None:
        self.call, self.status, self.name = call, status, name
        super().__init__(f"{call} failed: {name} ({status}){'; ' + hint if hint else ''}")


def counted(count: int, what: str) -> str:
    """A number with a noun: ``1 rank``, ``2 ranks``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as messages name them: ``rank 3``, ``ranks 0, 2``; of more than 16 the first ones."""
    more = ", …" if len(ranks) > 16 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:16]))}{more}"
