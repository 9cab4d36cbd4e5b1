"""An engine that serves a small model through the connector in vLLM's order, as a process that reads commands as
lines of JSON. Its scheduler is the one below, or vLLM's own if it is installed.

    python vllm_engine.py '{"role": "kv_producer", "port": 7000, ...}'

Commands: {"add": id, "prompt": [...], "tokens": n, "params": {...}}, {"abort": id} and {"free": null}. Answers:
{"ready": ...}, {"done": id, "tokens": [...], "params": ..., "computed": n}, {"free": blocks}, or {"error": text}.
"""

import json
import os
import queue
import sys
import threading
from enum import Enum
from types import SimpleNamespace as Facts

import torch
from vllm_model import Decoder

BLOCK, BUDGET, LAYERS, HEADS, DIM, VOCABULARY, LONGEST = 16, 32, 3, 2, 16, 256, 256
SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": HEADS, "head_dim": DIM, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
}  # fmt: skip


class Status(Enum):
    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1
    RUNNING = 2
    FINISHED_LENGTH_CAPPED = 3
    FINISHED_ABORTED = 4


class Request:
    def __init__(self, name, prompt, most, params):
        self.request_id, self.all_token_ids, self.num_prompt_tokens = name, list(prompt), len(prompt)
        self.most, self.kv_transfer_params = most, params
        self.status, self.num_computed_tokens, self.blocks = Status.WAITING, 0, []

    @property
    def tables(self):
        return self.blocks, self.blocks


class Scheduler:
    """Chunked prefill, preemption and loads between steps, with a connector's calls at the same places as in vLLM."""

    def __init__(self, connector, blocks):
        self.connector, self.free = connector, list(range(1, blocks))
        self.requests = {}
        self.waiting = []
        self.running = []
        self.loaded = set()
        self.ended = set()
        self.preemptions = 0

    def add(self, name, prompt, most, params):
        self.requests[name] = request = Request(name, prompt, most, params)
        self.waiting.append(request)
        if self.connector:
            self.connector.on_new_request(request)

    def abort(self, name):
        request = self.requests.get(name)
        if request is None or request.status.name.startswith("FINISHED"):
            return
        loading = request.status == Status.WAITING_FOR_REMOTE_KVS and name not in self.loaded
        self._finish(request, Status.FINISHED_ABORTED, loading)

    def busy(self):
        return bool(self.requests or self.ended or (self.connector and self.connector.has_pending_push_work()))

    def spare(self):
        return len(self.free)

    def _room(self, request, tokens):
        need = -(-tokens // BLOCK) - len(request.blocks)
        if need > len(self.free):
            return False
        request.blocks += [self.free.pop() for _ in range(need)]
        return True

    def _release(self, request):
        self.free += request.blocks
        request.blocks = []

    def schedule(self):
        plan, budget = {}, BUDGET
        for request in list(self.running):
            count = min(budget, len(request.all_token_ids) - request.num_computed_tokens)
            while request in self.running and not self._room(request, request.num_computed_tokens + count):
                victim = self.running.pop()
                plan.pop(victim.request_id, None)
                self._release(victim)
                victim.status, victim.num_computed_tokens = Status.WAITING, 0
                self.waiting.insert(0, victim)
                self.preemptions += 1
            if request in self.running and count:
                plan[request.request_id] = request, request.num_computed_tokens, count
                budget -= count
        full = False
        for request in list(self.waiting):
            if full and not request.blocks:
                continue  # later requests whose loads are done continue, as only they can free blocks
            if request.status == Status.WAITING_FOR_REMOTE_KVS:
                if request.request_id not in self.loaded:
                    continue
                self.loaded.remove(request.request_id)
                request.status = Status.WAITING
                if not request.num_computed_tokens:
                    self._release(request)
                elif request.num_computed_tokens == len(request.all_token_ids):
                    request.num_computed_tokens -= 1
            external, later = 0, False
            if self.connector and not request.num_computed_tokens:
                external, later = self.connector.get_num_new_matched_tokens(request, 0)
            count = 0 if later else min(budget, len(request.all_token_ids) - request.num_computed_tokens)
            if not (count or later) or not self._room(request, request.num_computed_tokens + external + count):
                full = True
                continue
            if self.connector:
                blocks = Facts(get_block_ids=lambda request=request: (list(request.blocks),))
                self.connector.update_state_after_alloc(request, blocks, external)
            if later:
                request.status, request.num_computed_tokens = Status.WAITING_FOR_REMOTE_KVS, external
                continue
            self.waiting.remove(request)
            self.running.append(request)
            request.status = Status.RUNNING
            plan[request.request_id] = request, request.num_computed_tokens, count
            budget -= count
        for request, begin, count in plan.values():
            request.num_computed_tokens = begin + count
        return plan, self.connector.build_connector_meta(plan) if self.connector else None

    def finished_ids(self):
        ended, self.ended = self.ended, set()
        return ended

    def update(self, plan, sampled, output):
        for block in output.invalid_block_ids if output else ():
            for request in self.waiting:
                if request.status == Status.WAITING_FOR_REMOTE_KVS and block in request.blocks:
                    at = request.blocks.index(block) * BLOCK
                    request.num_computed_tokens = min(request.num_computed_tokens, at)
        out = []
        for name, token in sampled.items():
            request = self.requests[name]
            if request.status != Status.RUNNING:
                continue
            request.all_token_ids.append(token)
            over = len(request.all_token_ids) - request.num_prompt_tokens == request.most
            params = self._finish(request, Status.FINISHED_LENGTH_CAPPED, False) if over else None
            out.append((name, [token], over, params))
        if output:
            self.connector.update_connector_output(output)
            for name in output.finished_recving or ():
                if self.requests[name].status == Status.WAITING_FOR_REMOTE_KVS:
                    self.loaded.add(name)
                else:
                    self._release(self.requests.pop(name))
            for name in output.finished_sending or ():
                self._release(self.requests.pop(name))
        return out

    def _finish(self, request, status, loading):
        for each in (self.waiting, self.running):
            if request in each:
                each.remove(request)
        request.status = status
        used = request.blocks[: -(-request.num_computed_tokens // BLOCK)]
        keep, params = self.connector.request_finished(request, used) if self.connector else (False, None)
        self.ended.add(request.request_id)
        if not keep and not loading:
            self._release(self.requests.pop(request.request_id))
        return params


class Theirs:
    def __init__(self, config, cache_config):
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler as Real
        from vllm.v1.structured_output import StructuredOutputManager

        self.real = Real(config, cache_config, StructuredOutputManager(config), BLOCK, log_stats=False)
        self.connector = self.real.connector
        hashes = get_hash_fn_by_name("sha256")
        init_none_hash(hashes)
        self.hasher = get_request_block_hasher(BLOCK, hashes)
        self.preemptions = 0

    def add(self, name, prompt, most, params):
        from vllm import SamplingParams
        from vllm.v1.request import Request as Real

        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True, extra_args=extra)
        sampling.update_from_generation_config({}, -1)
        self.real.add_request(Real(name, prompt, sampling, None, block_hasher=self.hasher))

    def abort(self, name):
        from vllm.v1.request import RequestStatus

        self.real.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def busy(self):
        return bool(self.real.has_requests())

    def spare(self):
        return int(self.real.kv_cache_manager.block_pool.get_num_free_blocks())

    def schedule(self):
        self.output = self.real.schedule()
        self.preemptions += len(self.output.preempted_req_ids or ())
        plan = {}
        for name, count in self.output.num_scheduled_tokens.items():
            request = self.real.requests[name]
            request.tables = self.real.kv_cache_manager.get_block_ids(name)
            plan[name] = request, request.num_computed_tokens - count, count
        return plan, self.output.kv_connector_metadata

    def finished_ids(self):
        return set(self.output.finished_req_ids)

    def update(self, plan, sampled, output):
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(plan)
        tokens = [[sampled[name]] if name in sampled else [] for name in names]
        told = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, tokens, kv_connector_output=output)
        out = []
        for outputs in self.real.update_from_output(self.output, told).values():
            for each in outputs.outputs:
                over = each.finish_reason is not None
                out.append((each.request_id, list(each.new_token_ids), over, each.kv_transfer_params))
        return out


class OnDevice:
    """A tensor in (fake) device memory, as a connector sees it."""

    def __init__(self, tensor):
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def dim(self):
        return self.tensor.dim()

    def data_ptr(self):
        return self.tensor.data_ptr()

    def stride(self):
        return self.tensor.stride()

    def permute(self, order):
        return OnDevice(self.tensor.permute(order))

    @property
    def __cuda_array_interface__(self):
        kind = {torch.float32: "<f4", torch.float16: "<f2"}[self.dtype]
        assert self.tensor.is_contiguous()
        return {"shape": self.shape, "typestr": kind, "data": (self.data_ptr(), False), "version": 3, "strides": None}


class Runner:
    """The model, its cache in pages, and a worker's calls of the connector."""

    def __init__(self, connector, blocks, layout, vendor, dim, window, shared):
        torch.manual_seed(1)
        torch.set_num_threads(1)
        self.model = Decoder([0] * (LAYERS - 1) + [window], HEADS, dim, VOCABULARY, LONGEST)
        self.connector = connector
        sizes = {"H": HEADS, "N": BLOCK}
        shape = [blocks, *(sizes[axis] for axis in layout[:2]), 2 * dim]
        count = blocks * HEADS * BLOCK * 2 * dim
        parts = [self.memory(count, vendor).fill_(float("nan")) for _ in range(LAYERS)]
        if shared:  # as vLLM does: a block belongs to one group of layers
            parts[-1] = parts[0]
        views = [part.view(shape) for part in parts]
        self.cache = [view if layout == "HND" else view.transpose(1, 2) for view in views]  # [B, H, N, C]
        if connector is not None:
            wrap = OnDevice if vendor else lambda tensor: tensor
            connector.register_kv_caches({f"layers.{i}.attn": wrap(each) for i, each in enumerate(self.cache)})

    @staticmethod
    def memory(count, vendor):
        if not vendor:
            return torch.empty(count)
        from arrays import Array

        array = Array(count)
        tensor = torch.from_numpy(array.peek)
        _kept.append(array)
        return tensor

    def forward(self, request, begin, count):
        """Compute the token after the scheduled ones, writing their keys and values to pages, and reading earlier ones
        there."""
        places, past = torch.arange(begin + count), []
        tables = [torch.tensor(request.tables[bool(window)]) for window in self.model.windows]
        for i, (layer, table) in enumerate(zip(self.cache, tables, strict=True)):
            seen = places[self.model.seen(i, begin)]
            past.append(layer[table[seen // BLOCK], :, seen % BLOCK].transpose(0, 1))
        logits, made = self.model(torch.tensor(list(request.all_token_ids)[begin : begin + count]), begin, past)
        new = places[begin:]
        for layer, table, each in zip(self.cache, tables, made, strict=True):
            layer[table[new // BLOCK], :, new % BLOCK] = each.transpose(0, 1)
        assert not logits.isnan().any(), f"{request.request_id} reads what nobody has written"
        return int(logits.argmax())

    def step(self, plan, meta, finished, made):
        """Return (tokens, the connector's output), in the order of vLLM's model runner."""
        if self.connector is not None:
            self.connector.bind_connector_metadata(meta)
        sampled = {}
        for name, (request, begin, count) in plan.items():
            token = self.forward(request, begin, count)
            if begin + count == len(request.all_token_ids):
                sampled[name] = token
        if self.connector is None:
            return sampled, None
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        results = self.connector.get_transfer_results(finished)
        failed = self.connector.get_block_ids_with_load_errors()
        self.connector.clear_connector_metadata()
        return sampled, made(invalid_block_ids=failed, **vars(results))


_kept = []


def facts(told):
    transfer = Facts(
        kv_connector_extra_config=told["extra"], is_kv_producer=told["role"] != "kv_consumer",
        is_kv_consumer=told["role"] != "kv_producer", engine_id=f"{told['role']}-{os.getpid()}", kv_port=told["port"],
    )  # fmt: skip
    return Facts(
        kv_transfer_config=transfer,
        parallel_config=Facts(tensor_parallel_size=1, rank=0),
        model_config=Facts(model=told.get("model", "small"), get_total_num_kv_heads=lambda: HEADS),
        cache_config=Facts(block_size=BLOCK, cache_dtype="auto"),
        compilation_config=Facts(),
        attention_config=Facts(backend=told.get("backend", "TRITON_ATTN")),
    )


def real_config(told):
    """Return (vLLM's configuration, its cache's configuration)."""
    from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    model = ModelConfig(model=told["folder"], skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST)
    lengths = {"max_num_batched_tokens": BUDGET, "max_model_len": LONGEST, "max_num_seqs": 8}
    transfer = None
    if told["role"]:
        transfer = KVTransferConfig(
            kv_connector="UccHeteroConnector", kv_connector_module_path="ucc_hetero.vllm", kv_role=told["role"],
            kv_port=told["port"], kv_connector_extra_config=told["extra"], kv_load_failure_policy="recompute",
        )  # fmt: skip
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(**lengths, is_encoder_decoder=False, async_scheduling=False),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )
    config.attention_config.backend = AttentionBackendEnum[told.get("backend", "TRITON_ATTN")]
    config.cache_config.num_gpu_blocks = told["blocks"]
    shape = {"num_kv_heads": HEADS, "head_size": told.get("dim", DIM), "dtype": torch.float32}
    spec = FullAttentionSpec(BLOCK, **shape)
    names = [f"layers.{i}.attn" for i in range(LAYERS)]
    if not told.get("window"):
        return config, KVCacheConfig(told["blocks"], [], [KVCacheGroupSpec(names, spec)])
    sliding = SlidingWindowSpec(BLOCK, **shape, sliding_window=told["window"])
    groups = [KVCacheGroupSpec(names[:-1], spec), KVCacheGroupSpec(names[-1:], sliding)]
    return config, KVCacheConfig(told["blocks"], [], groups)


def build(told):
    """Return (scheduler, worker, class of the worker's output about transfers)."""
    place = told["blocks"], told["layout"], told["vendor"], told.get("dim", DIM), told.get("window", 0)
    if told["scheduler"] == "vllm":
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.v1.outputs import KVConnectorOutput

        config, cache_config = real_config(told)
        theirs = Theirs(config, cache_config)
        worker = None
        if told["role"]:
            worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config)
        return theirs, Runner(worker, *place, bool(told.get("window"))), KVConnectorOutput
    if not told["role"]:
        return Scheduler(None, told["blocks"]), Runner(None, *place, False), Facts
    from ucc_hetero.vllm import UccHeteroConnector
    from ucc_hetero.vllm.interface import KVConnectorRole

    config = facts(told)
    ours = (UccHeteroConnector(config, role, None) for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER))
    return Scheduler(next(ours), told["blocks"]), Runner(next(ours), *place, False), Facts


def serve(told):
    scheduler, runner, made = build(told)
    lines = queue.Queue()
    threading.Thread(target=read, args=(lines,), daemon=True).start()
    say(ready=os.getpid())
    tokens = {}
    computed = {}
    while True:
        try:
            line = lines.get(timeout=None if not scheduler.busy() else 0.001)
        except queue.Empty:
            line = ""
        if line is None:
            break
        if line:
            obey(json.loads(line), scheduler)
            continue
        plan, meta = scheduler.schedule()
        sampled, output = runner.step(plan, meta, scheduler.finished_ids(), made)
        for name, (_, _, count) in plan.items():
            computed[name] = computed.get(name, 0) + count
        for name, new, over, params in scheduler.update(plan, sampled, output):
            tokens.setdefault(name, []).extend(new)
            if over:
                say(done=name, tokens=tokens.pop(name), params=params, computed=computed.pop(name, 0))
    if runner.connector is not None:
        runner.connector.shutdown()


def read(lines):
    """Pass on lines as they arrive, and None at the end."""
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)


def obey(order, scheduler):
    if "add" in order:
        scheduler.add(order["add"], order["prompt"], order["tokens"], order["params"])
    elif "abort" in order:
        scheduler.abort(order["abort"])
    else:
        say(free=scheduler.spare(), preemptions=scheduler.preemptions)


def say(**words):
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    if arguments["vendor"]:
        os.environ["FAKEGPU_LAYOUT"] = f"{arguments['vendor']}:1"
        import arrays  # noqa: F401  it chooses the vendor

        from ucc_hetero import device

        device.bind(device.place_of())
    try:
        serve(arguments)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
        raise
