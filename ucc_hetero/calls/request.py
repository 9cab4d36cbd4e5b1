"""Requests of non-blocking and persistent calls, with mpi4py's method names; filling of ``MPI.Status``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .. import log
from ..bindings.handle import Kept
from ..docstrings import forms
from ..errors import NotSupported, UCCHError
from ..native.libraries import ffi, lib, refuse_children, wait_all
from ..native.waiting import progress_mpi, refuse_finalized, wait_in_slices

_peek = lib.ucch_peek
_release = lib.ucch_launch_release


@dataclass(slots=True, eq=False)
class _Operation:
    """A native operation with the objects that it needs until its end, and the functions that complete or cancel it."""

    op: Any
    keep: object
    finish: Callable[[int, Any], None]
    withdraw: Callable[[], None] | None
    owner: object


#: Active operations. This set keeps them, not their requests: objects of a reference cycle are finalized in any order,
#: and the native operation must not be freed first.
under_way: set[_Operation] = set()
#: Active operations whose requests were dropped.
dropped_calls: Kept[_Operation] = Kept()


#: Functions that every wait calls now and then, to notice failures on other ranks.
poll_hooks: list[Callable[[], None]] = []


def run_poll_hooks() -> None:
    for hook in list(poll_hooks):
        hook()


def wait_op(op: Any, poll_hook: Callable[[], None] = run_poll_hooks) -> int:
    """Wait for a native operation. Returns 1: done, 2: failed. Checks for signals and lets MPI progress meanwhile."""
    refuse_finalized()
    return wait_in_slices(partial(lib.ucch_wait, op), poll_hook)


def reap() -> None:
    """Complete operations that have ended and whose requests were dropped."""
    dropped_calls.sweep(_is_active)


def _is_active(call: _Operation) -> bool:
    """True while an operation is active. Its end is handled once, even if that is interrupted."""
    state = int(_peek(call.op))
    if state:
        under_way.discard(call)
        if dropped_calls.take(call):
            _finish(call, state)
    return not state


def _finish(call: _Operation, state: int) -> None:
    try:
        call.finish(state, None)
    except Exception as error:  # the request was dropped, and the call that completes it here must not fail for it
        log.log("coll").warning("a call whose request was dropped failed: %s", error)


def dropped(owner: object) -> list[Any]:
    """A communicator's active native operations whose requests were dropped."""
    reap()
    return [each.op for each in dropped_calls.all() if each.owner is owner]


def withdraw(owner: object) -> None:
    """Cancel a communicator's unmatched receives whose requests were dropped."""
    for each in dropped_calls.all():
        if each.owner is owner and each.withdraw is not None:
            each.withdraw()


def set_status(status: Any, source: int, tag: int, nbytes: int, error: int = 0) -> None:
    if status is None:
        return
    refuse_finalized()
    status.source, status.tag, status.error = source, tag, error
    status.Set_elements(sys.modules["mpi4py.MPI"].BYTE, nbytes)
    status.Set_cancelled(False)


def fill_empty(status: Any) -> None:
    """Fill a status as MPI does for collectives and for inactive requests."""
    if status is not None:
        from mpi4py import MPI

        set_status(status, MPI.ANY_SOURCE, MPI.ANY_TAG, 0)


def forget(request: Request) -> None:
    """Detach a request from its call, which could not be started."""
    request._done = True
    if request._call is not None:
        under_way.discard(request._call)


@forms
class Request:
    """A call that has begun: the result of methods with ``I``, such as ``Iallreduce`` and ``Irecv``.

    ``Wait`` and ``Test`` raise the call's error, and fill an ``MPI.Status``. Dropping a request does not cancel the
    call: its buffers stay alive until it has finished. The class methods accept any mixture of requests of this
    package.
    """

    #: True if the call is part of a stream, which waits for its end.
    in_stream = False
    #: True if the native operation lives as long as the request.
    lasting = False
    _done = True  # if the constructor has failed
    #: True, or the call's failure, if a call on several requests has completed this one and not told its caller yet.
    _untold: bool | UCCHError = False
    #: Fills the status of a call that has ended; None for collectives, whose status is empty.
    _fill_status: Callable[[int, Any], None] | None = None

    def __init__(
        self,
        op: Any,
        keep: object = None,
        finish: Callable[[int, Any], None] | None = None,
        *,
        timeout: float = 0.0,
        cancel: Callable[[], None] | None = None,
        fill_status: Callable[[int, Any], None] | None = None,
        owner: object = None,
    ) -> None:
        self._op: Any = op
        self._keep = keep
        #: ``finish`` is called with the final state and the status to fill; it raises the call's error. None: the
        #: request combines others and has no native operation.
        self._call = None if finish is None else _Operation(op, keep, finish, cancel, owner)
        if fill_status is not None:
            self._fill_status = fill_status
        #: Seconds that a wait may take; 0: the operation has had its deadline since its start.
        self._timeout = timeout
        #: The communicator's runner.
        self._owner: Any = owner
        self._done = False
        if self._call is not None:  # last: from now on the end of the operation ends the call
            under_way.add(self._call)

    def __del__(self) -> None:
        if not self._done:
            self._drop()

    # --- comparison with MPI.REQUEST_NULL -----------------------------------------------------------------------------

    def __bool__(self) -> bool:
        """True if active or startable, as for mpi4py's requests."""
        return not self._done

    def __eq__(self, other: object) -> bool:
        """True if it is the same request. All finished requests are equal to each other and to ``MPI.REQUEST_NULL``."""
        return self is other or (not self and (_is_null(other) or (isinstance(other, Request) and not other)))

    __hash__ = object.__hash__

    def __reduce__(self) -> Any:
        raise ValueError("a request cannot be pickled")

    # --- one request --------------------------------------------------------------------------------------------------

    def Wait(self, status: Any = None) -> bool:
        """Wait until the call has finished.

        Args:
            status: ``MPI.Status`` to be filled.

        Returns:
            True.

        Raises:
            CollectiveTimeout, PeerError, CollectiveError: The call failed; as its blocking form.
        """
        if self._done:
            fill_empty(status)
            return True
        state = _peek(self._op)
        if not state:
            self._arm()
            state = wait_op(self._op)
        self._complete(state, status)
        return True

    def Test(self, status: Any = None) -> bool:
        """As :meth:`Wait`, with the same arguments, but make one round of progress and return.

        Returns:
            True if the call has finished and the request is completed.
        """
        if self._done:
            fill_empty(status)
            return True
        state = self._ended()
        if not state:
            return False
        self._complete(state, status)
        return True

    def _ended(self) -> int:
        """After a round of progress: 1: done, 2: failed, 0: active."""
        refuse_children()
        refuse_finalized()
        state = int(lib.ucch_test(self._op))
        if not state:
            progress_mpi()
            run_poll_hooks()
        return state

    def wait(self, status: Any = None) -> None:
        """As :meth:`Wait`, with the same arguments; there is no pickled object to return."""
        self.Wait(status)

    def test(self, status: Any = None) -> tuple[bool, None]:
        """As :meth:`Test`, with the same arguments.

        Returns:
            (True if the call has finished, None in place of a pickled object).
        """
        return self.Test(status), None

    def Get_status(self, status: Any = None) -> bool:
        """Test if the call has finished, without completing the request: the next ``Wait`` or ``Test`` does that.

        Args:
            status: ``MPI.Status`` to be filled.

        Returns:
            True if the call has finished.
        """
        state = 0 if self._done else self._ended()
        self._describe(state, status)
        return self._done or bool(state)

    def _describe(self, state: int, status: Any) -> None:
        """Fill the status of a call in this state (0: active) without completing the request."""
        if status is not None and state and self._fill_status is not None:
            self._fill_status(state, status)
        else:
            fill_empty(status)

    def Cancel(self) -> None:
        """Cancel a receive that has not been matched; ``Wait`` then returns and ``status.Is_cancelled()`` is true.

        Has no effect on a matched receive, nor on a send, which MPI allows.

        Raises:
            NotSupported: The request is a collective's.
        """
        if not self._done:
            if self._call is None or self._call.withdraw is None:
                raise NotSupported("collectives cannot be cancelled; let them finish")
            self._call.withdraw()

    def cancel(self) -> None:
        """:meth:`Cancel`, as mpi4py also spells it."""
        self.Cancel()

    def Free(self) -> None:
        """Drop the request; the call goes on and its buffers stay alive until it has finished."""
        if not self._done:
            self._done = True
            self._drop()

    def free(self) -> None:
        """:meth:`Free`, as mpi4py also spells it."""
        self.Free()

    @property
    def finished(self) -> bool:
        """True if the call has finished and ``Wait`` or ``Test`` has completed the request."""
        return self._done

    def _drop(self) -> None:
        if self._call is not None:
            dropped_calls.add(self._call)

    def at_end(self, then: Callable[[bool], None]) -> None:
        """Call ``then`` when the call has ended, before any wait returns; its argument is True if the call failed."""
        call = self._call
        assert call is not None, "requests made of others do not end as one native operation"
        finish = call.finish

        def both(state: int, status: Any) -> None:
            try:
                finish(state, status)
            except BaseException:
                then(True)
                raise
            then(False)

        call.finish = both

    def _ops(self) -> list[Any]:
        return [self._op]

    def _arm(self) -> None:
        """Start the time limit of a wait."""
        if self._timeout:
            lib.ucch_op_deadline(self._op, self._timeout)

    def _complete(self, state: int, status: Any) -> None:
        call, keep = self._call, self._keep
        assert call is not None, "requests made of others do not end as one native operation"
        try:
            self._done = True
            if not self.lasting:
                self._call = self._keep = None
            under_way.discard(call)
            call.finish(state, status)
        except UCCHError:
            raise
        except BaseException:  # a signal's: the call can be waited for again
            self._call, self._keep, self._done = call, keep, False
            under_way.add(call)
            raise

    def _complete_untold(self, status: Any) -> None:
        """As :meth:`Wait`, but keep the failure."""
        if self._done:
            self._describe(1 + (self._untold is not True) if self._untold else 0, status)
            return
        self._untold = True
        try:
            self.Wait(status)
        except UCCHError as failure:
            self._untold = failure

    # --- several requests ---------------------------------------------------------------------------------------------

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: list[Any] | None = None) -> bool:
        """Wait for all requests.

        Args:
            requests: Requests of this package; ``MPI.REQUEST_NULL`` counts as finished.
            statuses: A list of ``MPI.Status``, extended to the number of requests.

        Returns:
            True.

        Raises:
            TypeError: A request is not of this package.
            CollectiveError: The error of the first failed call, once all have ended.
        """
        if statuses is None and wait_all(requests):
            return True
        requests = _as_requests(requests)
        _wait_many(requests, every=True)
        return _complete_all(requests, statuses)

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: list[Any] | None = None) -> bool:
        """As :meth:`Waitall`, with the same arguments, but make one round of progress and return.

        Returns:
            True if all have finished; until then none is completed.
        """
        requests = _as_requests(requests)
        if not all(r._done or r._ended() for r in requests):
            return False
        return _complete_all(requests, statuses)

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: Any = None) -> int:
        """Wait for one of the requests.

        Args:
            requests: As in :meth:`Waitall`.
            status: ``MPI.Status`` to be filled.

        Returns:
            Index of the completed request; ``MPI.UNDEFINED`` if none was active.

        Raises:
            TypeError, CollectiveError: As in :meth:`Waitall`.
        """
        requests = _as_requests(requests)
        while True:
            index, found = cls.Testany(requests, status)
            if found:
                return index
            _wait_many(requests, every=False)

    @classmethod
    def Testany(cls, requests: Sequence[Request], status: Any = None) -> tuple[int, bool]:
        """As :meth:`Waitany`, with the same arguments, but make one round of progress and return.

        Returns:
            (index, True); (``MPI.UNDEFINED``, True) if none was active; (``MPI.UNDEFINED``, False) if none has
            finished.
        """
        requests = _as_requests(requests)
        index, found = cls.Get_status_any(requests, status)
        if index >= 0:
            requests[index].Wait(status)
        return index, found

    @classmethod
    def Waitsome(cls, requests: Sequence[Request], statuses: list[Any] | None = None) -> list[int] | None:
        """Wait for at least one request.

        Args:
            requests: As in :meth:`Waitall`.
            statuses: As in :meth:`Waitall`; ``statuses[i]`` belongs to the i-th index of the result.

        Returns:
            Indices of all completed requests; None if none was active.

        Raises:
            TypeError, CollectiveError: As in :meth:`Waitall`.
        """
        requests = _as_requests(requests)
        while (ready := cls.Testsome(requests, statuses)) == []:
            _wait_many(requests, every=False)
        return ready

    @classmethod
    def Testsome(cls, requests: Sequence[Request], statuses: list[Any] | None = None) -> list[int] | None:
        """As :meth:`Waitsome`, with the same arguments, but make one round of progress and return.

        Returns:
            Indices of the completed requests; None if none was active.
        """
        requests = _as_requests(requests)
        ready = cls.Get_status_some(requests)
        if ready is not None:
            _complete_all([requests[i] for i in ready], statuses)
        return ready

    @classmethod
    def Get_status_all(cls, requests: Sequence[Request], statuses: list[Any] | None = None) -> bool:
        """As :meth:`Testall`, with the same arguments, without completing requests.

        Returns:
            True if all have finished.
        """
        requests = _as_requests(requests)
        states = [0 if request._done else request._ended() for request in requests]
        _describe_all(requests, states, statuses)
        return all(state or request._done for request, state in zip(requests, states, strict=True))

    @classmethod
    def Get_status_any(cls, requests: Sequence[Request], status: Any = None) -> tuple[int, bool]:
        """As :meth:`Testany`, with the same arguments, without completing the request.

        Returns:
            As :meth:`Testany`.
        """
        from mpi4py import MPI

        fill_empty(status)
        requests = _as_requests(requests)
        active = [i for i, r in enumerate(requests) if not r._done]
        for i in active:
            if state := requests[i]._ended():
                requests[i]._describe(state, status)
                return i, True
        return int(MPI.UNDEFINED), not active

    @classmethod
    def Get_status_some(cls, requests: Sequence[Request], statuses: list[Any] | None = None) -> list[int] | None:
        """As :meth:`Testsome`, with the same arguments, without completing requests.

        Returns:
            As :meth:`Testsome`.
        """
        active = {i: r for i, r in enumerate(_as_requests(requests)) if not r._done or r._untold}
        if not active:
            return None
        ready = {i: state for i, r in active.items() if (state := int(r._done) or r._ended())}
        _describe_all([active[i] for i in ready], list(ready.values()), statuses)
        return list(ready)

    # --- mpi4py's lower-case names for messages of pickled objects; requests of this package have no object -----------

    get_status, get_status_all = Get_status, Get_status_all
    get_status_any, get_status_some = Get_status_any, Get_status_some

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: list[Any] | None = None) -> list[None]:
        """As :meth:`Waitall`, with the same arguments.

        Returns:
            A None for each request.
        """
        cls.Waitall(requests, statuses)
        return [None] * len(requests)

    @classmethod
    def testall(cls, requests: Sequence[Request], statuses: list[Any] | None = None) -> tuple[bool, list[None] | None]:
        """As :meth:`Testall`, with the same arguments.

        Returns:
            (True if all have finished, a None for each request).
        """
        done = cls.Testall(requests, statuses)
        return done, [None] * len(requests) if done else None

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Any = None) -> tuple[int, None]:
        """As :meth:`Waitany`, with the same arguments.

        Returns:
            (index, None).
        """
        return cls.Waitany(requests, status), None

    @classmethod
    def testany(cls, requests: Sequence[Request], status: Any = None) -> tuple[int, bool, None]:
        """As :meth:`Testany`, with the same arguments.

        Returns:
            (index, True if one has finished, None).
        """
        return *cls.Testany(requests, status), None

    @classmethod
    def waitsome(
        cls, requests: Sequence[Request], statuses: list[Any] | None = None
    ) -> tuple[list[int] | None, list[None] | None]:
        """As :meth:`Waitsome`, with the same arguments.

        Returns:
            (indices, a None for each of them).
        """
        ready = cls.Waitsome(requests, statuses)
        return ready, None if ready is None else [None] * len(ready)

    @classmethod
    def testsome(
        cls, requests: Sequence[Request], statuses: list[Any] | None = None
    ) -> tuple[list[int] | None, list[None] | None]:
        """As :meth:`Testsome`, with the same arguments.

        Returns:
            (indices, a None for each of them).
        """
        ready = cls.Testsome(requests, statuses)
        return ready, None if ready is None else [None] * len(ready)


#: Methods that requests of calls that C has begun have there, too (posted.py).
WAYS = Request.Wait, Request.Test, Request._ended, Request._arm


def native_of(request: Request) -> Any:
    """The native operation of a request. It lives as long as the object that :func:`kept_by` returns."""
    return request._op


def kept_by(request: Request) -> Any:
    """The object that keeps the native operation of a request alive; None once it is completed."""
    return request._keep


def arm(requests: Sequence[Request]) -> None:
    for request in requests:
        request._arm()


def finished() -> Request:
    request = Request(None)
    request._done = True
    return request


class Launched(Request):
    """A call in a stream, which waits for its end. ``Wait`` is not required.

    The arrays must stay allocated until the stream has passed the call, as for a kernel.
    """

    _call, _keep, _timeout = None, None, 0.0
    in_stream = lasting = True

    def __init__(self, op: Any, about: tuple[Any, str, float], owner: Any) -> None:
        """``about``: program, label and time limit of the call; ``owner`` raises its error."""
        # The base class's constructor is not called: each line here adds to the time of a launch.
        self.op = self._op = op
        self._about, self._owner, self._done = about, owner, False

    def __del__(self, release: Any = _release) -> None:
        """Release the engine's object; the launched call goes on."""
        release(self._op)

    def Wait(self, status: Any = None) -> bool:
        """As :meth:`Request.Wait`, with a fast path for a call that has succeeded."""
        if self._done or _peek(self._op) != 1:
            return super().Wait(status)
        self._done = True
        if status is not None:
            fill_empty(status)
        return True

    def _complete(self, state: int, status: Any) -> None:
        self._done = True
        if state != 1:
            self._owner.failed_in_stream(self._op, *self._about)


class Captured(Request):
    """A call captured in a graph: there is nothing to wait for, and replays are not tracked."""

    in_stream = True

    def __init__(self) -> None:
        super().__init__(ffi.NULL)
        self._done = True


def _is_null(request: object) -> bool:
    """True for ``MPI.REQUEST_NULL``, which lists of requests may contain."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and isinstance(request, module.Request) and request == module.REQUEST_NULL


def _as_requests(requests: Sequence[Any]) -> Sequence[Request]:
    """The requests, with finished ones in place of ``MPI.REQUEST_NULL``."""
    found = list(requests)
    for i, request in enumerate(requests):
        if isinstance(request, Request):
            continue
        if not _is_null(request):
            raise TypeError(
                f"requests[{i}] is a {type(request).__name__}, not a request of ucc_hetero; "
                "wait for MPI's own requests with MPI.Request"
            )
        found[i] = finished()
    return found


def _wait_many(requests: Sequence[Request], *, every: bool) -> None:
    """Wait until every, or one, active request has ended."""
    active = [r for r in requests if not r._done]
    if active:
        refuse_finalized()
        arm(active)
        ops = [op for r in active for op in r._ops()]
        native = ffi.new("ucch_op *[]", ops)
        wait_in_slices(partial(lib.ucch_wait_any, native, len(ops), every), run_poll_hooks)


def _complete_all(requests: Sequence[Request], statuses: list[Any] | None) -> bool:
    """Complete requests that have ended, then raise the first failure in order.

    After a signal's exception the next call tells of those that this one has completed."""
    _extend(statuses, len(requests))
    for i, request in enumerate(requests):
        request._complete_untold(statuses[i] if statuses is not None else None)
    failures = [request._untold for request in requests if isinstance(request._untold, UCCHError)]
    for request in requests:
        request._untold = False
    if failures:
        raise failures[0]
    return True


def _extend(statuses: list[Any] | None, count: int) -> None:
    """Extend a list of statuses, as mpi4py does."""
    if statuses is not None and len(statuses) < count:
        from mpi4py import MPI

        statuses += [MPI.Status() for _ in range(count - len(statuses))]


def _describe_all(requests: Sequence[Request], states: Sequence[int], statuses: list[Any] | None) -> None:
    """Fill the statuses of requests in these states (0: active) without completing them."""
    _extend(statuses, len(requests))
    for request, state, status in zip(requests, states, statuses or (), strict=False):
        request._describe(state, status)
