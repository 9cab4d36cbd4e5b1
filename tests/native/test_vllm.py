"""The connector for vLLM: engines that are started separately, on two (fake) vendors, give the tokens of one engine;
they abort, die, restart and refuse each other. If vLLM is installed its scheduler is tested, too."""

import contextlib
import functools
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace as Facts

import pytest
from processes import until
from vllm_engines import PATIENCE, USUAL, Engine, free_port, one_engine, prompts

from ucc_hetero.errors import UCCHError
from ucc_hetero.machine import nics
from ucc_hetero.rma import Agent, ChannelError
from ucc_hetero.vllm import UccHeteroConnector
from ucc_hetero.vllm.contract import Cache, Contract, ContractError
from ucc_hetero.vllm.interface import KVConnectorRole
from ucc_hetero.vllm.messages import Load, Part, Place, Remote, Step
from ucc_hetero.vllm.settings import Settings

torch = pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")
import vllm_engine  # noqa: E402

NO_VLLM = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")
SCHEDULERS = ["own", pytest.param("vllm", marks=NO_VLLM)]
#: vLLM's scheduler, with one group of caches, and with layers that see a window of some tokens.
WITH_VLLM = [pytest.param("vllm", window, marks=NO_VLLM) for window in (0, 20)]


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(os.urandom(32))
    return str(path)


@pytest.fixture
def start(secret, tmp_path, fake_environment, pythons, request):
    engines = []
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **vllm_engine.SHAPE})
    )

    def run(role, port=0, extra=(), **told):
        usual = {**USUAL, "folder": str(tmp_path)}
        own = {"secret_file": secret, "host": "127.0.0.1", "timeout": 20, "lease": 60, **dict(extra)}
        env = fake_environment(f"{told.get('vendor') or 'host'}:1") if told.get("vendor") else {}
        popen = functools.partial(subprocess.Popen, env={**os.environ, **env})
        python = pythons.of(request.path, env)
        engine = Engine({**usual, "role": role, "port": port, "extra": own, **told}, popen, python)
        engines.append(engine)
        engine.pid = engine.hear("ready")["ready"]
        return engine

    yield run
    for engine in engines:
        engine.end(signal.SIGKILL)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_aborted_requests_leave_nothing(start, scheduler):
    port = free_port()
    prefill = start("kv_producer", port, scheduler=scheduler)
    decode = start("kv_consumer", scheduler=scheduler)
    before = prefill.free(0)["free"], decode.free(0)["free"]
    asked = prompts(110, *[110] * 4)
    for i, (name, prompt) in enumerate(asked.items()):
        params = prefill.prefilled(name, prompt)
        decode.add(f"d{name}", prompt, 40, params)
        if i % 2:
            time.sleep(random.random() * 0.02)
        decode.tell(abort=f"d{name}")  # before it is scheduled, during its load, or later
    prefill.add("long", [7] * 200, 1, {"do_remote_decode": True})
    prefill.tell(abort="long")
    decode.free(before[1])
    prefill.free(before[0])


@pytest.mark.parametrize(("scheduler", "window"), [("own", 0), *WITH_VLLM])
def test_prefill_that_is_gone_is_computed_again(start, scheduler, window):
    """Killed before any request, and before the request of a connected engine; restarted; stopped."""
    asked, port = prompts(110, 110), free_port()
    right = one_engine(start, asked, 6, window=window)
    name, prompt = "r4", asked["r4"]
    prefill = start("kv_producer", port, scheduler=scheduler, window=window)
    decode = start("kv_consumer", scheduler=scheduler, window=window, extra={"timeout": 3})
    before = decode.free(0)["free"]

    def check(name, params, loaded):
        decode.add(f"d{name}", asked[name], 6, params)
        said = decode.done(f"d{name}")
        assert said["tokens"] == right[name]
        assert (said["computed"] == 6) == loaded or len(asked[name]) == 1

    check("r2", prefill.prefilled("r2", asked["r2"]), loaded=True)
    params = prefill.prefilled(name, prompt)
    prefill.end(signal.SIGKILL)
    check(name, params, loaded=False)
    prefill = start("kv_producer", port, scheduler=scheduler, window=window)
    check("r3", {**params, "remote_num_tokens": len(asked["r3"])}, loaded=False)  # of the killed engine
    check("r1", prefill.prefilled("r1", asked["r1"]), loaded=True)
    params = prefill.prefilled(name, prompt)
    os.kill(prefill.pid, signal.SIGSTOP)
    decode.add("stopped", prompt, 6, params)
    assert decode.done("stopped")["tokens"] == right[name]
    os.kill(prefill.pid, signal.SIGCONT)
    check("r2", prefill.prefilled("again", asked["r2"]), loaded=True)
    decode.free(before)


def test_blocks_that_nobody_wants_are_freed(start):
    """After the lease, and at once when the engine that wanted them dies."""
    port = free_port()
    prefill = start("kv_producer", port, extra={"lease": 2})
    before, prompt = prefill.free(0)["free"], [5] * 100
    params = prefill.prefilled("late", prompt)
    assert prefill.free(0)["free"] < before
    prefill.free(before)
    decode = start("kv_consumer")
    decode.add("late", prompt, 3, params)
    assert decode.done("late")["computed"] == 102
    params = prefill.prefilled("b", prompt)
    decode.add("b", prompt, 100, params)
    decode.end(signal.SIGKILL)
    prefill.free(before)


def test_next_turns_of_conversations_are_loaded_back(start):
    """The prefill engine loads what the decoding engine has kept, in partly filled blocks, and computes what is new."""
    both = {"extra": {"keep": 60}}
    prefill, decode = start("kv_both", free_port()), start("kv_both", free_port(), **both)
    before, prompt = (prefill.free(0)["free"], decode.free(0)["free"]), prompts(60)["r3"]
    right, params = one_engine(start, {"one": prompt}, 6)["one"], prefill.prefilled("one", prompt)
    decode.add("one", prompt, 6, params)
    first = decode.done("one")
    assert first["tokens"] == right and first["params"]["remote_num_tokens"] == len(prompt) + 5
    longer = prompt + right + [random.randrange(256) for _ in range(random.randint(1, 40))]
    prefill.add("two", longer, 1, {**first["params"]})
    second = prefill.done("two")
    assert second["computed"] == len(longer) - len(prompt) - 5
    decode.add("two", longer, 6, second["params"])
    third = decode.done("two")
    assert third["tokens"] == one_engine(start, {"two": longer}, 6)["two"] and third["computed"] == 6
    decode.add("end", [1], 1, {**third["params"], "do_remote_prefill": True, "remote_num_tokens": 0})
    prefill.free(before[0])
    short = start("kv_both", free_port(), extra={"keep": 0.1})
    short.add("one", prompt, 6, prefill.prefilled("three", prompt))
    assert short.done("one")["tokens"] == right
    short.free(before[1])  # nobody has asked for them


def contract(**other):
    usual = {"layers": ["a", "b"], "elements": "float16", "scales": []}
    cache = Cache(0, *(other.pop(name, value) for name, value in usual.items()))
    usual = {"model": "m", "blocks": [16], "heads": 8, "backend": "TRITON_ATTN", "stages": 1, "caches": [cache]}
    return Contract(**{**usual, "vllm": "1", **other})


@pytest.mark.parametrize(("other", "words"), [
    ({}, ""), ({"elements": "bfloat16", "vllm": "2"}, ""), ({"model": "n"}, "models: m here and n there"),
    ({"layers": ["a", "c", "d"]}, r"layers with a cache: 2 \(a \.\.\.\) here and 3 \(a"),
    ({"blocks": [32]}, r"tokens a block in .*: \[16\] here and \[32\] there; give both one --block-size"),
    ({"caches": [Cache(1, ["a", "b"], "float16", [])]}, "--disable-hybrid-kv-cache-manager"),
    ({"heads": 4}, "heads of keys and values"), ({"backend": "FLASH_ATTN"}, "attention backends"),
    ({"elements": "float8_e4m3fn", "scales": [1.0] * 4}, "--kv-cache-dtype: float16 here and float8_e4m3fn"),
])  # fmt: skip
def test_differences_have_words(other, words):
    found = "; ".join(contract().differences(contract(**other)))
    assert bool(found) == bool(words)
    assert not words or re.search(words, found)


def test_scales_of_two_float8_have_to_differ_by_two():
    mine, other = {"elements": "float8_e4m3fnuz"}, {"elements": "float8_e4m3fn"}
    decode = contract(**mine, scales=[1.0, 0.5])
    assert not decode.differences(contract(**other, scales=[0.5, 0.25]))
    assert "have to take them from the checkpoint" in decode.differences(contract(**other, scales=[1.0, 0.5]))[0]
    assert "scales" in decode.differences(contract(**mine, scales=[1.0, 0.25]))[0]


@pytest.mark.parametrize("said", [None, [], {}, {"protocol": 3}, {"protocol": 2, "model": 5}])
def test_contracts_that_are_none(said):
    with pytest.raises(ContractError):
        Contract.heard(said)
    assert Contract.heard(json.loads(json.dumps(contract().told()))) == contract()


@pytest.mark.parametrize(("name", "value"), [
    ("remote_port", "80"), ("remote_port", 0), ("remote_workers", 10**9), ("remote_host", None),
    ("remote_num_tokens", -1),
])  # fmt: skip
def test_parameters_of_requests_are_not_trusted(name, value):
    params = Remote("r", "e", ("host",), 1, 1, 5).params()
    assert Remote.of(params).addresses == ("tcp://host:1",)
    with pytest.raises(ValueError, match="kv_transfer_params"):
        Remote.of(params | {name: value})


LAYERS = 4
#: Two groups of layers, which share memory: as in vLLM a block belongs to one group.
GROUPS = Facts(kv_cache_groups=[
    Facts(layer_names=["layer0", "layer1"], kv_cache_spec=type("FullAttentionSpec", (), {"block_size": 16})()),
    Facts(
        layer_names=["layer2", "layer3"],
        kv_cache_spec=type("SlidingWindowSpec", (), {"block_size": 16, "sliding_window": 20})(),
    ),
])  # fmt: skip


class Workers:
    """The workers of an engine with tensor and pipeline parallelism, in this process. ``part``: tokens of a block
    in memory; ``caches``: of each worker, by the layer's number."""

    def __init__(
        self,
        role,
        port,
        ranks,
        heads,
        layout,
        secret,
        stages=1,
        groups=None,
        lease=60,
        part=16,
        index=False,
        timeout=20,
    ):
        self.each, self.caches, self.heard, self.failed = [], [], (Counter(), Counter()), set()
        extra = {"secret_file": secret, "host": "127.0.0.1", "timeout": timeout, "lease": lease}
        for rank in range(ranks * stages):
            config = vllm_engine.facts({"role": role, "port": port, "extra": extra})
            config.parallel_config = Facts(tensor_parallel_size=ranks, rank=rank, pipeline_parallel_size=stages)
            config.model_config.get_total_num_kv_heads = lambda: heads
            config.kv_transfer_config.engine_id = role
            sizes = {"H": max(1, heads // ranks), "N": part}
            stage, own = rank // ranks, {}
            for layer in range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages):
                cache = torch.rand([10 * 16 // part, *(sizes[axis] for axis in layout), 8]).half()
                own[layer] = cache if layout == "HN" else cache.transpose(1, 2)
                if groups and layer - 2 in own:
                    own[layer] = own[layer - 2]
            if index:  # alike on all ranks
                own["index"] = torch.randint(256, [10, 16, 12], dtype=torch.uint8)
            self.caches.append(own)
            self.each.append(UccHeteroConnector(config, KVConnectorRole.WORKER, groups))
            self.each[-1].register_kv_caches({f"layer{i}": cache for i, cache in own.items()})

    def step(self, step):
        out = []
        for worker in self.each:
            worker.bind_connector_metadata(step)
            worker.start_load_kv(None)
            results = worker.get_transfer_results(set())
            failed = worker.get_block_ids_with_load_errors() | results.failed_recving
            out.append((results.finished_sending, results.finished_recving, failed))
        return out

    def until(self, which, name):
        """Step until all workers have reported that a request is sent (0) or received (1); return what has failed
        since the last call."""

        def all_have():
            for *ended, failed in self.step(Step()):
                for heard, names in zip(self.heard, ended, strict=True):
                    heard.update(names)
                self.failed |= failed
            return self.heard[which][name] >= len(self.each)

        until(all_have)
        assert self.heard[which][name] == len(self.each)
        out, self.failed = self.failed, set()
        return out


@pytest.fixture
def workers(secret):
    """Make workers: ``workers(role, port, ranks, heads, layout, ...)``."""
    made = []

    def make(role, port=0, ranks=1, heads=2, layout="NH", **more):
        made.append(Workers(role, port, ranks, heads, layout, secret, **more))
        return made[-1]

    yield make
    for worker in (worker for each in reversed(made) for worker in each.each):
        worker.shutdown()


@pytest.fixture
def two(workers):
    """Return a worker that sends, one that receives, and the first one's port."""
    port = free_port()
    return workers("kv_producer", port), workers("kv_consumer"), port


@pytest.mark.parametrize(("sends", "receives", "heads"), [
    ((1, 1), (2, 1), 4), ((2, 1), (1, 1), 4), ((4, 1), (2, 1), 2), ((2, 1), (4, 1), 2),
    ((1, 2), (1, 1), 2), ((1, 1), (1, 4), 2), ((2, 2), (1, 4), 2), ((1, 4), (2, 2), 4),
])  # fmt: skip
def test_degrees_of_parallelism_may_differ(workers, sends, receives, heads):
    """Numbers of ranks of tensor parallelism, and of pipeline stages."""
    while True:  # until consecutive ports are found
        port = free_port()
        with contextlib.suppress(ValueError):
            prefill = workers("kv_producer", port, sends[0], heads, "HN", stages=sends[1])
            break
    decode = workers("kv_consumer", 0, receives[0], heads, stages=receives[1])
    remote = Remote("p", "kv_producer", ("127.0.0.1",), port, sends[0] * sends[1], 40)
    prefill.step(Step(offers={"p": [[3, 1, 4]]}))
    decode.step(Step(loads=[Load("d", remote, [Part(1, [9, 2])])]))
    assert not decode.until(1, "d")
    prefill.until(0, "p")
    for i, cache in enumerate(decode.caches):
        head = i % receives[0] * heads // receives[0]
        for layer, mine in cache.items():
            for own in range(mine.shape[1]):
                rank, there = divmod(head + own, max(1, heads // sends[0]))
                rank = rank * max(1, sends[0] // heads) + layer * sends[1] // LAYERS * sends[0]
                assert (mine[[9, 2], own] == prefill.caches[rank][layer][[1, 4], there]).all()
    before = [layer.clone() for cache in decode.caches for layer in cache.values()]
    decode.step(Step(loads=[Load("e", remote._replace(request="unknown", engine="before"), [Part(0, [5, 6])])]))
    assert decode.until(1, "e") == {5, 6}
    decode.step(Step(loads=[Load("f", remote, [Part(2, [7])])]))
    assert decode.until(1, "f") == {7}, "its blocks are no longer kept"
    assert all(map(torch.equal, before, [layer for cache in decode.caches for layer in cache.values()]))


def test_groups_of_caches_have_blocks_of_their_own(workers):
    """Of a window the last blocks come; requests whose loads fail are named, as blocks belong to several groups."""
    prefill = workers("kv_producer", port := free_port(), groups=GROUPS)
    decode = workers("kv_consumer", groups=GROUPS, layout="HN")
    remote = Remote("p", "kv_producer", ("127.0.0.1",), port, 1, 60)
    prefill.step(Step(offers={"p": [[3, 1, 4, 5], [-1, -1, 6, 2]]}))
    before = [cache.clone() for cache in decode.caches[0].values()]
    decode.step(Step(loads=[Load("d", remote, [Part(1, [9, 2, 7]), Part(2, [5, 8])])]))
    decode.step(Step(loads=[Load("dropped", remote, [Part(3, [1]), Part(1, [3, 4, 6])])]))
    assert decode.until(1, "dropped") == {"dropped"}, "a block before the window is not kept"
    assert not decode.until(1, "d")
    (mine,), (theirs,) = decode.caches, prefill.caches
    for layer, (here, there) in enumerate([([9, 2, 7], [1, 4, 5])] * 2 + [([5, 8], [6, 2])] * 2):
        assert (mine[layer][here] == theirs[layer][there]).all()
        others = [block for block in range(10) if block not in {9, 2, 7, 5, 8, 1, 3, 4, 6}]
        assert (mine[layer][others] == before[layer][others]).all()


def test_caches_of_several_forms_in_a_group(workers):
    """As the indexes of sparse attention beside keys and values; they are not divided by heads."""
    prefill, decode = (
        workers("kv_producer", port := free_port(), index=True),
        workers("kv_consumer", ranks=2, index=True),
    )
    prefill.step(Step(offers={"p": [[3, 1]]}))
    remote = Remote("p", "kv_producer", ("127.0.0.1",), port, 1, 32)
    decode.step(Step(loads=[Load("d", remote, [Part(0, [2, 9])])]))
    assert not decode.until(1, "d")
    (theirs,) = prefill.caches
    for head, mine in enumerate(decode.caches):
        assert (mine["index"][[2, 9]] == theirs["index"][[3, 1]]).all()
        assert (mine[3][[2, 9], 0] == theirs[3][[3, 1], head]).all()


def test_a_stage_without_blocks_of_a_load(workers):
    """The window, which only layers of the second stage have, begins behind the loaded tokens."""
    while True:  # until consecutive ports are found
        with contextlib.suppress(ValueError):
            prefill = workers("kv_producer", port := free_port(), groups=GROUPS, stages=2)
            break
    decode = workers("kv_consumer", groups=GROUPS, stages=2)
    prefill.step(Step(offers={"p": [[3], [-1]]}))
    remote = Remote("p", "kv_producer", ("127.0.0.1",), port, 2, 16)
    decode.step(Step(loads=[Load("d", remote, [Part(0, [9]), Part(1, [])])]))
    assert not decode.until(1, "d")
    prefill.until(0, "p")
    assert (decode.caches[0][1][9] == prefill.caches[0][1][3]).all()


def test_blocks_that_a_backend_divides(workers):
    """In parts of 8 tokens here, of blocks of 16."""
    prefill, decode = workers("kv_producer", port := free_port(), part=8), workers("kv_consumer", part=8)
    prefill.step(Step(offers={"p": [[3, 1]]}))
    decode.step(Step(loads=[Load("d", Remote("p", "kv_producer", ("127.0.0.1",), port, 1, 32), [Part(0, [2, 9])])]))
    assert not decode.until(1, "d")
    for layer, mine in decode.caches[0].items():
        assert (mine[[4, 5, 18, 19]] == prefill.caches[0][layer][[6, 7, 2, 3]]).all()


def test_leases_of_requests_that_wait_are_renewed(workers):
    """Others offered at the same time end twice meanwhile."""
    prefill, decode = workers("kv_producer", port := free_port(), lease=1), workers("kv_consumer", lease=1)
    remote = Remote("kept", "kv_producer", ("127.0.0.1",), port, 1, 32)
    decode.step(Step(waiting={"d": remote}))
    prefill.step(Step(offers={"kept": [[3, 1]], "lost0": [[4, 5]]}))
    for i in range(1, 4):
        prefill.until(0, f"lost{i - 1}")
        prefill.step(Step(offers={f"lost{i}": [[4, 5]]}))
    decode.step(Step(loads=[Load("d", remote, [Part(0, [2, 9])])], scheduled=["d"]))
    assert not decode.until(1, "d"), "its blocks were not kept"
    prefill.until(0, "kept")


class FakeRequest(Facts):
    """A request as vLLM's scheduler has it."""

    def __init__(self, name, prompt, params):
        told = {"num_prompt_tokens": len(prompt), "num_computed_tokens": len(prompt), "max_tokens": 9}
        super().__init__(request_id=name, prompt_token_ids=list(prompt), _all_token_ids=list(prompt), **told)
        self.kv_transfer_params, self.status = params, Facts(name="FINISHED_LENGTH_CAPPED")


def test_schedulers_of_windows(secret):
    """The last token of a prompt is the decoding engine's: its window begins before that of the next token. Blocks
    before the window are neither offered nor loaded."""
    extra, where = {"secret_file": secret, "host": "127.0.0.1"}, KVConnectorRole.SCHEDULER
    prefill, decode = (
        UccHeteroConnector(vllm_engine.facts({"role": role, "port": 7, "extra": extra}), where, GROUPS)
        for role in ("kv_producer", "kv_consumer")
    )
    first = FakeRequest("p", range(60), {"do_remote_decode": True})
    for _ in range(2):  # once, also if it is preempted
        prefill.on_new_request(first)
    assert len(first.prompt_token_ids) == len(first._all_token_ids) == first.num_prompt_tokens == 59
    first.num_computed_tokens = 59
    keep, params = prefill.request_finished_all_groups(first, ([3, 1, 4, 5], [0, 0, 6, 2]))
    assert keep and prefill.build_connector_meta(None).offers == {"p": [[3, 1, 4, 5], [-1, -1, 6, 2]]}
    second = FakeRequest("d", range(60), {**params})
    decode.on_new_request(second)
    remote = Remote.of(params)
    assert decode.build_connector_meta(None).waiting == {"d": remote} and remote.tokens == 59
    assert decode.build_connector_meta(None) == Step(), "nothing has changed"
    assert decode.get_num_new_matched_tokens(second, 16) == (43, True)
    decode.update_state_after_alloc(second, Facts(get_block_ids=lambda: ([8, 9, 2, 7], [0, 0, 5, 1])), 43)
    step = decode.build_connector_meta(None)
    assert step.loads == [Load("d", remote, [Part(1, [9, 2, 7]), Part(2, [5, 1])])] and step.scheduled == ["d"]
    third = FakeRequest("e", range(60), {**params})
    decode.on_new_request(third)
    assert decode.request_finished_all_groups(third, ([], [])) == (False, None)  # aborted before it was scheduled
    step = decode.build_connector_meta(None)
    assert step.loads == [Load("e", remote, [Part(0, [])] * 2)] and not step.waiting and not step.scheduled
    assert decode.get_loaded_kv_cache_group_ids(None) == (0, 1)
    state = type("MambaSpec", (), {"block_size": 16})
    with pytest.raises(ValueError, match="MambaSpec: states of layers other than attention"):
        Settings(vllm_engine.facts({"role": "kv_consumer", "port": 7, "extra": extra}), Facts(kv_cache_groups=[
            Facts(layer_names=[], kv_cache_spec=state())
        ]))  # fmt: skip


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_caches_that_are_divided_by_tokens_are_refused(secret, name, role):
    config = vllm_engine.facts({"role": "kv_consumer", "port": 7, "extra": {"secret_file": secret}})
    config.parallel_config = Facts(tensor_parallel_size=2, rank=0, **{name: 2})
    with pytest.raises(ValueError, match=f"{name}: 2: caches that are divided by tokens"):
        UccHeteroConnector(config, role, None)


def test_workers_of_several_hosts(secret):
    extra = {"secret_file": secret, "host": "10.0.0.1"}
    config = vllm_engine.facts({"role": "kv_producer", "port": 7, "extra": extra})
    config.parallel_config = Facts(tensor_parallel_size=2, rank=0, pipeline_parallel_size=2)
    hosts = "10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"
    prefill = UccHeteroConnector(config, KVConnectorRole.SCHEDULER, None)
    prefill.set_xfer_handshake_metadata_pp_aware(
        {
            where: Place(host)
            for where, host in zip([(1, 1), (0, 1), (0, 0), (1, 0)], [hosts[i] for i in (3, 1, 0, 2)], strict=True)
        }
    )
    _, params = prefill.request_finished(FakeRequest("p", range(16), {"do_remote_decode": True}), [1])
    remote = Remote.of(json.loads(json.dumps(params)))
    assert remote.addresses == tuple(f"tcp://{host}:{7 + i}" for i, host in enumerate(hosts))
    with pytest.raises(ValueError, match="remote_hosts"):
        Remote.of({**params, "remote_hosts": ["a"] * 3})


def test_garbage_of_a_peer_ends_its_link_alone(two):
    prefill, decode, port = two
    agent = decode.each[0].worker.links.agent
    good = {"request": "p", "engine": "kv_producer", "first": 0, "ticket": "", "ranks": 1, "to": "d"}
    place = f"tcp://127.0.0.1:{port}"
    for said in (5, [], {}, {"op": "fly"}, {"op": "want"}, {"op": "hello"}, {"op": "want", **good, "ticket": "xy"}):
        link = decode.each[0].worker.links.to(place).result()
        link.peer.send(said)
        until(lambda peer=link.peer: not peer.alive, said)
    assert agent.peers == []
    remote = Remote("p", "kv_producer", ("127.0.0.1",), port, 1, 32)
    prefill.step(Step(offers={"p": [[1]]}))
    decode.step(Step(loads=[Load("d", remote, [Part(0, [1, 2])])]))
    assert decode.until(1, "d") == {1, 2}, "two blocks are not there"
    prefill.until(0, "p")


def test_a_peer_that_ends_before_it_answers(workers, secret, caplog):
    """A load fails at once, not after its timeout."""
    decode = workers("kv_consumer", timeout=1000)
    with Agent(f"tcp://127.0.0.1:{free_port()}", Path(secret).read_bytes()) as agent:
        port = int(agent.address.rpartition(":")[2])
        remote = Remote("p", "kv_producer", ("127.0.0.1",), port, 1, 16)
        decode.step(Step(loads=[Load("d", remote, [Part(0, [2])])]))
        peer, said = agent.receive(PATIENCE)
        assert said["op"] == "hello"
        peer.leave()
        assert decode.until(1, "d") == {2}
    assert "its worker has ended" in caplog.text


def test_requests_of_one_prefill_fail_each_for_itself(two):
    """For example n answers for one prompt: if one request is refused or given up, the others are not affected."""
    (prefill, decode, port), worker = two, two[1].each[0]
    remote, receiver = Remote("p", "kv_producer", ("127.0.0.1",), port, 1, 48), worker.worker.receiver
    worker.bind_connector_metadata(
        Step(loads=[Load("good", remote, [Part(0, [2, 4])]), Load("bad", remote, [Part(2, [6, 8])])])
    )
    worker.start_load_kv(None)
    prefill.step(Step(offers={"p": [[1, 3, 5]]}))  # "bad" wants a fourth block
    until(lambda: receiver._loading["bad"].why)
    come, failed = set(), set()

    def both_ended():
        for _, names, blocks in decode.step(Step()):
            come.update(names)
            failed.update(blocks)
        return come == {"good", "bad"}

    until(both_ended)
    assert failed == {6, 8}
    for layer, mine in decode.caches[0].items():
        assert (mine[[2, 4]] == prefill.caches[0][layer][[1, 3]]).all()


def test_transfers_are_counted(two):
    prefill, decode, port = two
    remote = Remote("p", "kv_producer", ("127.0.0.1",), port, 1, 48)
    decode.step(
        Step(loads=[Load("d", remote, [Part(1, [2, 4])]), Load("e", remote._replace(engine="before"), [Part(0, [6])])])
    )
    decode.until(1, "e")
    prefill.step(Step(offers={"p": [[1, 3, 5]]}))
    assert not decode.until(1, "d")
    (connector,), block = decode.each, LAYERS * 16 * 2 * 8 * 2
    found = connector.get_kv_connector_stats()
    assert found.data["failed"] == 1 and found.data["bytes"] == [2 * block] and found.data["seconds"][0] > 0
    assert connector.get_kv_connector_stats() is None
    told = json.loads(json.dumps(found.data))
    both = connector.build_kv_connector_stats(told).aggregate(connector.build_kv_connector_stats(told))
    assert both.reduce()["Num loads"] == 2 and both.reduce()["Num failed loads"] == 2
    assert both.reduce()["Avg MB per load"] == round(2 * block / 2**20, 3)
    assert connector.build_kv_connector_stats().is_empty()
    assert connector.get_loaded_kv_cache_group_ids(None) == (0,)  # also of a group without prefix caching


def test_metrics_of_prometheus():
    pytest.importorskip("vllm", reason="needs vLLM")
    client = pytest.importorskip("prometheus_client")
    config = Facts(kv_transfer_config=None)
    kinds = {kind: kind for kind in (client.Gauge, client.Counter, client.Histogram)}
    made = UccHeteroConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    made.observe({"seconds": [0.5, 0.25], "bytes": [1000, 24], "failed": 2, "expired": 1})
    values = {each.name: each.value for kind in client.REGISTRY.collect() for each in kind.samples}
    assert values["vllm:ucc_hetero_load_seconds_sum"] == 0.75 and values["vllm:ucc_hetero_load_bytes_sum"] == 1024
    assert values["vllm:ucc_hetero_failed_loads_total"] == 2 and values["vllm:ucc_hetero_expired_requests_total"] == 1


@pytest.mark.parametrize("side", ["asks", "sends"])
def test_a_connection_for_data_that_breaks_is_made_anew(two, side):
    """As libucp reports a broken connection on one side, while messages continue: later requests are loaded."""
    prefill, decode, port = two
    link = decode.each[0].worker.links.to(f"tcp://127.0.0.1:{port}").result()
    if side == "asks":
        link.peer.endpoint.lose()
    else:
        prefill.each[0].worker.links.agent.peers[0].endpoint.lose()
        until(lambda: not link.peer.alive)
    prefill.step(Step(offers={"p": [[1]]}))
    decode.step(Step(loads=[Load("d", Remote("p", "kv_producer", ("127.0.0.1",), port, 1, 16), [Part(0, [2])])]))
    assert not decode.until(1, "d"), "the block has not come"


def test_a_host_that_does_not_answer_keeps_nobody_from_others(two, monkeypatch):
    """It is called once for all requests that wait for it, and all of them learn the result."""
    (prefill, decode, port), called, over = two, [], threading.Event()
    agent, remote = decode.each[0].worker.links.agent, Remote("p", "kv_producer", ("127.0.0.1",), port, 1, 16)
    connect = agent.connect

    def silent(place, timeout):
        if place != "tcp://192.0.2.1:7":
            return connect(place, timeout)
        called.append(timeout)
        assert over.wait(PATIENCE)
        raise ChannelError("it does not answer")

    monkeypatch.setattr(agent, "connect", silent)
    dead = Remote("q", "off", ("192.0.2.1",), 7, 1, 16)
    decode.step(Step(loads=[Load(f"d{i}", dead, [Part(0, [9])]) for i in range(200)]))
    prefill.step(Step(offers={"p": [[1]]}))
    decode.step(Step(loads=[Load("e", remote, [Part(0, [2])])]))
    assert not decode.until(1, "e"), "blocks have not come"
    assert called == [5.0]
    over.set()
    assert decode.until(1, "d199") == {9}
    assert called == [5.0]


def settings(role, **extra):
    return Settings(vllm_engine.facts({"role": role, "port": 1, "extra": extra}))


def test_addresses_that_engines_announce(monkeypatch):
    """A producer's address must be reachable from other hosts: an address, a name, or an interface."""
    monkeypatch.setattr(nics, "addresses", lambda: (("10.10.0.1", "x"), ("192.0.2.7", "y")))
    for host in (None, "0.0.0.0", "::"):
        with pytest.raises(ValueError, match=r'"host", .* reach this one: this host has 10\.10\.0\.1, 192\.0\.2\.7'):
            settings("kv_both", host=host)
    assert settings("kv_producer", host="lo").host == "127.0.0.1"
    assert settings("kv_producer", host="here.example").host == "here.example"
    assert settings("kv_consumer").listens == "tcp://127.0.0.1:0"
    for host, alone in (("localhost", True), ("::1", True), ("192.0.2.1", False)):
        assert bool(settings("kv_producer", host=host).alone) == alone
    assert not settings("kv_consumer").alone


@pytest.mark.parametrize(("told", "words"), [
    ({"model": "another"}, "it refuses: models: small here and another there|models: another here and small there"),
    ({"backend": "FLASH_ATTN"}, "attention backend FLASH_ATTN: both sides have to have TRITON_ATTN"),
    ({"extra": {"speed": 1}}, r"\['speed'\] are not among"), ({"extra": {"secret_file": ""}}, "secret_file"),
    ({"extra": {"prefill": ["here"]}}, "prefill"),
    ({"extra": {"keep": 5}}, '"keep" needs "kv_role"'), ({"role": "kv_both"}, '"host"'),
])  # fmt: skip
def test_engines_that_do_not_fit_are_refused_at_start(workers, told, words, secret):
    workers("kv_producer", port := free_port(), heads=vllm_engine.HEADS)
    extra = {"secret_file": secret, "prefill": [f"127.0.0.1:{port}"], **told.pop("extra", {})}
    config = vllm_engine.facts({"role": "kv_consumer", "port": 0, "extra": extra, **told})
    caches = {f"layer{i}": torch.zeros(4, 16, vllm_engine.HEADS, 8).half().transpose(1, 2) for i in range(LAYERS)}
    with pytest.raises((ValueError, UCCHError), match=words):
        UccHeteroConnector(config, KVConnectorRole.WORKER).register_kv_caches(caches)


def test_methods_of_vllm():
    base = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM")
    assert issubclass(UccHeteroConnector, base.KVConnectorBase_V1)
    assert not UccHeteroConnector.__abstractmethods__
    own = {name for name, value in vars(UccHeteroConnector).items() if callable(value) and not name.startswith("_")}
    assert own <= set(dir(base.KVConnectorBase_V1)), "methods that vLLM does not call"
