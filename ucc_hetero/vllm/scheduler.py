"""The scheduler's side: which requests are loaded from other engines, and whose blocks are kept for them."""

from __future__ import annotations

from typing import Any

from ..log import log
from .messages import Load, Remote, Step
from .settings import Settings

#: Ends of a request that has all of its tokens.
_COMPLETE = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}


class SchedulerSide:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._step = Step()
        self._offered: set[str] = set()

    def _remote(self, request: Any) -> tuple[Remote, int] | None:
        """(the remote request that a request here continues, tokens that it has of it), until it has been asked for."""
        params = request.kv_transfer_params
        if not self.settings.receives or not params or not params.get("do_remote_prefill"):
            return None
        try:
            remote = Remote.of(params)
        except ValueError as error:
            log("net").error("request %s is computed here: %s", request.request_id, error)
            params["do_remote_prefill"] = False
            return None
        return remote, min(remote.tokens, request.num_prompt_tokens)

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """(tokens beyond those computed that can be loaded, whether between steps)."""
        found = self._remote(request)
        count = found[1] - computed if found else 0
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """Load ``tokens`` into blocks, the last ones of all that the remote request has."""
        found = self._remote(request)
        if found is None:
            return
        remote, total = found
        request.kv_transfer_params["do_remote_prefill"] = False  # once: what fails is computed here
        (ids,) = blocks.get_block_ids()
        size = self.settings.block
        first, last = (total - tokens) // size, -(-total // size)
        mine = list(ids[first:last]) if tokens > 0 else []
        self._step.loads.append(Load(request.request_id, remote, mine, first))

    def finished(self, request: Any, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """(whether blocks are to be kept until they are sent, what the other engine has to know)."""
        if (found := self._remote(request)) is not None:  # it ends before it has begun
            request.kv_transfer_params["do_remote_prefill"] = False
            self._step.loads.append(Load(request.request_id, found[0], [], 0))
            return False, None
        params = request.kv_transfer_params
        wanted = self.settings.sends and params and params.get("do_remote_decode")
        if not wanted or request.status.name not in _COMPLETE or not blocks:
            return False, None
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        kept = list(blocks[: -(-tokens // self.settings.block)])
        self._step.offers[request.request_id] = kept
        self._offered.add(request.request_id)
        own = self.settings
        return True, Remote(request.request_id, own.engine, own.host, own.port, own.ranks, tokens).params()

    def step(self) -> Step:
        """Loads and offers since the last step, for the workers."""
        step, self._step = self._step, Step()
        return step

    def ended(self, sent: Any) -> None:
        """Note whose blocks the workers need no more."""
        self._offered.difference_update(sent or ())

    @property
    def busy(self) -> bool:
        """True if steps have to go on without requests that run."""
        return bool(self._offered or self._step.loads)
