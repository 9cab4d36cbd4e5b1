"""vLLM's connector class. Its methods call the scheduler's or the worker's side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

from ..log import log
from .interface import PEER, KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from .links import Links
from .messages import Load, Part, Place, Remote, Step
from .receiver import Receiver
from .sender import Sender
from .settings import Settings
from .stats import Stats, metrics

#: Final states of a request that has all its tokens.
_COMPLETE = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}
#: vLLM's block without tokens, in place of those before a window; and its number in offers, which no sender accepts.
_NULL, _DROPPED = 0, -1
#: Key of a request's ``kv_transfer_params`` once its blocks have been asked for.
_ASKED = "is_asked"


def _shorten(request: Any, count: int) -> None:
    """Leave the last tokens of a prompt out, once."""
    params = request.kv_transfer_params
    if request.prompt_token_ids is None or request.num_prompt_tokens <= count or params.get("is_shortened"):
        return
    params["is_shortened"] = True
    del request.prompt_token_ids[-count:], request._all_token_ids[-count:]
    request.num_prompt_tokens -= count
    request.max_tokens = 1


class SchedulerSide:
    """The scheduler's side of the connector. Public methods are vLLM's."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.hosts: tuple[str, ...] = (settings.host,)
        self._step = Step()
        self._offered: set[str] = set()
        #: Requests of which the workers know that they have not been scheduled yet.
        self._waiting: set[str] = set()

    def _remote(self, request: Any) -> tuple[Remote, int] | None:
        """(the remote request that a request continues, number of its tokens); None once it was asked for, or without
        one. A prefill engine loads what the decoding engine has of a conversation, and offers the whole prompt."""
        params = request.kv_transfer_params
        if not self.settings.receives or not params or params.get(_ASKED):
            return None
        is_next_turn = params.get("do_remote_decode") and params.get("remote_request_id")
        if not params.get("do_remote_prefill") and not is_next_turn:
            return None
        try:
            remote = Remote.of(params)
        except ValueError as error:
            log("net").error("request %s is computed here: %s", request.request_id, error)
            params[_ASKED] = True
            return None
        return remote, max(0, min(remote.tokens, request.num_prompt_tokens - self.settings.own_tokens))

    def on_new_request(self, request: Any) -> None:
        """Have the blocks kept that a new request waits for, or leave its last tokens to the decoding engine."""
        if (found := self._remote(request)) is not None:
            self._step.waiting[request.request_id] = found[0]
        if self.settings.own_tokens and self._is_offered(request):
            _shorten(request, self.settings.own_tokens)

    def _taken(self, request: Any) -> tuple[Remote, int] | None:
        """The same as ``_remote``, once."""
        if (found := self._remote(request)) is not None:
            request.kv_transfer_params[_ASKED] = True  # after a failure the prompt is computed here
        if self._step.waiting.pop(request.request_id, None) is None and request.request_id in self._waiting:
            self._waiting.remove(request.request_id)
            self._step.scheduled.append(request.request_id)
        return found

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the number of tokens, beyond those computed here, that another engine has; and True if they are loaded
        between steps."""
        found = self._remote(request)
        count = found[1] - num_computed_tokens if found else 0
        return (count, True) if count > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load this many tokens, the last ones of the remote request, into a request's blocks."""
        if (found := self._taken(request)) is None:
            return
        (remote, total), tokens = found, num_external_tokens
        parts, ids = [], blocks.get_block_ids()
        for group in self.settings.groups:
            first, last = (total - tokens) // group.block, -(-total // group.block)
            mine = list(ids[group.number][first:last]) if tokens > 0 else []
            dropped = next((i for i, block in enumerate(mine) if block != _NULL), len(mine)) if group.windowed else 0
            parts.append(Part(first + dropped, mine[dropped:]))
        self._step.loads.append(Load(request.request_id, remote, parts))

    def _is_offered(self, request: Any) -> bool:
        params = request.kv_transfer_params
        return bool(self.settings.sends and params and params.get("do_remote_decode"))

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the blocks of a finished request, in each group of caches, to the engine that decodes.

        Returns True if the blocks are kept until ``get_finished`` names the request, and the ``kv_transfer_params`` for
        that engine.
        """
        if (found := self._taken(request)) is not None:  # the request ends before its load has started
            self._step.loads.append(Load(request.request_id, found[0], [Part(0, [])] * len(self.settings.groups)))
            return False, None
        own, is_offered, params = self.settings, self._is_offered(request), request.kv_transfer_params
        is_kept = own.keep > 0 and bool(params and params.get("do_remote_prefill"))
        if not (is_offered or is_kept) or request.status.name not in _COMPLETE or not any(block_ids):
            return False, None
        tokens, kept = request.num_computed_tokens, []
        if is_offered:
            tokens = min(tokens, request.num_prompt_tokens)
        for group in own.groups:
            each = block_ids[group.number][: -(-tokens // group.block)]
            kept.append([_DROPPED if group.windowed and block == _NULL else block for block in each])
        self._step.offers[request.request_id] = kept
        self._offered.add(request.request_id)
        remote = Remote(request.request_id, own.engine, self.hosts, own.port, own.world, tokens)
        if is_offered:
            return True, remote.params()
        self._step.kept.add(request.request_id)
        return True, remote.params() | {"do_remote_prefill": False, "do_remote_decode": True}

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """Return the loads and offers of this step, for the workers."""
        step, self._step = self._step, Step()
        self._waiting.update(step.waiting)
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        """Forget requests whose blocks the workers need no more."""
        self._offered.difference_update(connector_output.finished_sending or ())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Place]) -> None:
        """Record on which hosts the workers are; each key is a worker's pipeline stage and its rank there."""
        hosts = tuple(metadata[where].host for where in sorted(metadata))
        if len(hosts) == self.settings.world and len(set(hosts)) > 1:
            self.hosts = hosts

    def has_pending_push_work(self) -> bool:
        """True if steps must go on although no request is running."""
        return bool(self._offered or self._step.loads)


def _scheduling(method: Any) -> Any:
    """The same method of a connector in the scheduler's process."""

    @wraps(method)
    def call(self: UccHeteroConnector, *args: Any, **more: Any) -> Any:
        return method(self.scheduler, *args, **more)

    return call


class WorkerSide:
    """The worker's side of the connector."""

    def __init__(self, settings: Settings, caches: dict[str, Any]) -> None:
        self.links = Links(settings, caches)
        self.sender, self.receiver = Sender(self.links), Receiver(self.links)
        try:
            self.links.start()
        except BaseException:
            self.close()
            raise

    def begin(self, step: Step) -> None:
        """Start what the scheduler asks for in this step."""
        for request, blocks in step.offers.items():
            self.sender.offer(request, blocks, request in step.kept)
        for load in step.loads:
            self.receiver.load(load)
        if self.links.settings.rank == 0:  # one worker is enough
            self.receiver.wait_for(step.waiting, step.scheduled)

    def close(self) -> None:
        """Abort all transfers and close the links."""
        self.links.close()


class UccHeteroConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A KV connector for vLLM: blocks of finished prefills are sent to the engines that decode.

    Loads are asynchronous, between steps, and not layer by layer. vLLM calls the methods, which are those of its
    ``KVConnectorBase_V1``.

    Args:
        vllm_config: vLLM's configuration, with ``kv_connector_extra_config``.
        role: Process of the connector: scheduler or worker.
        kv_cache_config: vLLM's configuration of caches.

    Raises:
        ValueError: A cache is not one of attention, or a setting is wrong.
    """

    _cache_hit_source = PEER

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = Settings(vllm_config, kv_cache_config)
        self.scheduler = SchedulerSide(self.settings) if role == KVConnectorRole.SCHEDULER else None
        self.worker: WorkerSide | None = None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        """Ask vLLM for separate layers, each in blocks of tokens, which pages need."""
        return "NHD"

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return the groups of caches that a load writes: vLLM must not zero their blocks, which a kernel would do
        meanwhile."""
        return tuple(group.number for group in self.settings.groups)

    on_new_request = _scheduling(SchedulerSide.on_new_request)
    get_num_new_matched_tokens = _scheduling(SchedulerSide.get_num_new_matched_tokens)
    update_state_after_alloc = _scheduling(SchedulerSide.update_state_after_alloc)
    build_connector_meta = _scheduling(SchedulerSide.build_connector_meta)
    update_connector_output = _scheduling(SchedulerSide.update_connector_output)
    request_finished_all_groups = _scheduling(SchedulerSide.request_finished_all_groups)
    set_xfer_handshake_metadata_pp_aware = _scheduling(SchedulerSide.set_xfer_handshake_metadata_pp_aware)
    has_pending_push_work = _scheduling(SchedulerSide.has_pending_push_work)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished_all_groups``, with one group of caches."""
        return self.request_finished_all_groups(request, (block_ids,))  # type: ignore[no-any-return]

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the cache and listen for other engines. ``ContractError`` if it cannot be exchanged with any
        engine."""
        self.unregister_kv_caches()
        self.worker = WorkerSide(self.settings, kv_caches)
        self._caches = kv_caches

    def unregister_kv_caches(self) -> None:
        """Withdraw the cache, as vLLM does before it sleeps."""
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.close()

    def restore_kv_caches(self) -> None:
        """Register the cache again."""
        if self.worker is None:
            self.worker = WorkerSide(self.settings, self._caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads and offers that the scheduler has bound to this step."""
        if self.worker is not None:
            self.worker.begin(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests wait between steps, not between layers."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are sent when their request has finished."""

    def wait_for_save(self) -> None:
        """Do nothing: blocks are sent when their request has finished."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose blocks have been sent since the last call, and those whose loads have ended or
        failed; None for an empty set."""
        if self.worker is None:
            return None, None
        return self.worker.sender.ended() or None, self.worker.receiver.ended() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the same as :meth:`get_finished`, and requests whose loads have failed, if there are several groups of
        caches. With one group their blocks are reported, so that earlier blocks of the request remain."""
        results = super().get_transfer_results(finished_req_ids)
        if len(self.settings.groups) > 1 and self.worker is not None:
            results.failed_recving = {load.request for load in self.worker.receiver.failed()}
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks whose loads have failed. vLLM computes them, or ends the request, by its policy."""
        if len(self.settings.groups) > 1 or self.worker is None:
            return set()
        return {block for load in self.worker.receiver.failed() for part in load.parts for block in part.blocks}

    def get_handshake_metadata(self) -> Place | None:
        """Return this worker's host, for the scheduler."""
        return Place(self.settings.host) if self.settings.sends else None

    def get_kv_connector_stats(self) -> Stats | None:
        """Return the numbers of transfers since the last call; None if there were none."""
        return self.worker.links.stats.take() if self.worker is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Return numbers that have come from another process, for vLLM's log."""
        return Stats(data)

    @classmethod
    def build_prom_metrics(cls, *described: Any) -> Any:
        """Return the numbers as metrics of Prometheus, described by vLLM's arguments."""
        return metrics(*described)

    def shutdown(self) -> None:
        """Disconnect from all other engines."""
        self.unregister_kv_caches()
