"""The exceptions of ucc_hetero. Each names what was wrong, where, and the way out."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AgreementError", "CollectiveError", "CollectiveTimeout", "DataError", "DeviceError", "LibraryError",
    "LibraryNotFound", "MismatchError", "NotSupported", "PeerError", "RefusedError", "RevokedError", "TruncationError",
    "UCCHError",
]  # fmt: skip


class UCCHError(RuntimeError):
    """Base of everything that ucc_hetero raises after communication has begun.

    Mistakes in arguments are plain ``TypeError``, ``ValueError`` or ``BufferError``, raised before a byte is sent.
    """


class LibraryNotFound(UCCHError, ImportError):
    """libucc or libucp could not be loaded; the message lists every file tried and why it was refused."""


class DeviceError(UCCHError):
    """A GPU runtime refused a call, or has no such device; the message is the runtime's own reason."""


class NotSupported(UCCHError, NotImplementedError):
    """A combination of collective, dtype, op and memory that nothing here can run correctly."""


class AgreementError(UCCHError):
    """The ranks of a job differ in a fact that would break it; the message is a table of what each rank has."""


class CollectiveError(UCCHError):
    """A collective failed: a library reported it, or its result was checked and was wrong."""


class DataError(CollectiveError):
    """A call that UCCH_CHECK=data verified has brought other data than went into it."""


class MismatchError(CollectiveError, ValueError):
    """Ranks called different collectives, or the same one with different arguments."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """A collective or message did not complete before its deadline; the message names the ranks that had not
    arrived."""


class TruncationError(CollectiveError, ValueError):
    """A received message was longer than the buffer posted for it."""


class PeerError(CollectiveError, ConnectionError):
    """A rank of the communicator died or can no longer be reached."""


class RefusedError(CollectiveError):
    """A rank refused its part of a call, having found its arguments to be wrong; the message says which, and why.

    The communicator has ended on all its ranks: free it, and make a new one.
    """


class RevokedError(CollectiveError):
    """A rank has given the communicator up for all (``Revoke``, ``Shrink``): no call of it ends well any more."""


class LibraryError(UCCHError):
    """A call into libucc or libucp failed. ``status`` is the library's code, ``call`` the function's name."""

    def __init__(self, call: str, status: int, name: str, hint: str = "") -> None:
        self.call, self.status, self.name = call, status, name
        super().__init__(f"{call} failed: {name} ({status}){'; ' + hint if hint else ''}")


def counted(count: int, what: str) -> str:
    """So many of a thing: ``1 rank``, ``2 ranks``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as messages name them: ``rank 3``, ``ranks 0, 2``; of more than 16 the first ones."""
    more = ", …" if len(ranks) > 16 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:16]))}{more}"
