"""The connector for vLLM between two hosts: one vendor computes prompts, the other decodes."""

import functools
import os
import random
import re
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm_engines import PATIENCE, USUAL, Engine, prompts

from ucc_hetero.launch import emulated_host

from .test_hosts_lost import hole
from .test_jobs import INSIDE

NO_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
pytestmark = [pytest.mark.usefixtures("libraries"), NO_TORCH]
PORT = 14579
VENDORS = "nvidia", "amd"


class Pair:
    """Two hosts for engines: ``start(host, role, **settings)``; the first host computes prompts."""

    def __init__(self, cluster, folder, environment):
        self.cluster, self.folder, self._environment = cluster, folder, environment
        self.engines = []
        for name in ("secret", "another"):
            (folder / name).write_bytes(os.urandom(32))

    def start(self, host, extra=(), env=(), **told):
        role = ("kv_producer", "kv_consumer")[host]
        own = {"secret_file": str(self.folder / "secret"), "timeout": 600, "lease": 600, **dict(extra)}
        if not host:
            own.setdefault("host", self.cluster.hosts[host].address)
        popen = self.cluster.hosts[host].popen
        usual = {**USUAL, "role": role, "port": PORT, "vendor": VENDORS[host], "extra": own, "folder": ""}
        more = {**self._environment(f"{VENDORS[host]}:1"), **dict(env)}
        with self.log(host).open("ab") as log:
            popen = functools.partial(popen, env=more, stderr=log)
            self.engines.append(Engine({**usual, **told}, popen, self.cluster.python(more)))
        return self.engines[-1]

    def log(self, host):
        return self.folder / f"log{host}"


def until_received(cluster, host, least):
    """Wait until a host has received so many bytes by its first link."""
    until, counts = time.monotonic() + PATIENCE, Path(f"/proc/{cluster.hosts[host].pid}/net/dev")
    while int(re.search(r"eth0: *(\d+)", counts.read_text())[1]) < least:
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.fixture
def pair(emulate, fake_environment, tmp_path):
    """Call with arguments of `Cluster` -> a :class:`Pair`."""
    made = []

    def make(**options):
        made.append(Pair(emulate(hosts=2, slots=1, **options), tmp_path, fake_environment))
        return made[-1]

    yield make
    for each in made:
        for engine in each.engines:
            engine.end(signal.SIGKILL)
        for host in (0, 1):
            print(each.log(host).read_text() if each.log(host).exists() else "")


def computed_by(engine, asked, tokens):
    for name, prompt in asked.items():
        engine.add(f"alone {name}", prompt, tokens)
    return {name: engine.done(f"alone {name}")["tokens"] for name in asked}


def test_tokens_are_those_of_one_engine(pair):
    """Several requests at once, in chunks, into a cache with another layout that is too small for all of them; hosts
    have several interfaces, of which the producer names one."""
    # The prompts take 15 to 18 blocks of 19, and 27 to 36 with the generated tokens.
    two, asked = pair(rate="4gbit", links=2), prompts(random.randint(60, 110), *[16] * 6)
    link, env = two.cluster.layout[0].links[-1], {"UCX_NET_DEVICES": "all"}
    for host in two.cluster.hosts:
        emulated_host.configure(host.pid, INSIDE, "")
    prefill, decode = two.start(0, {"host": link.name}, env), two.start(1, (), env, layout="HND", blocks=20)
    for engine in (prefill, decode):
        engine.hear("ready")
    right = computed_by(prefill, asked, 24)
    before = prefill.free(0)["free"], decode.free(0)["free"]
    params = {name: prefill.prefilled(name, prompt) for name, prompt in asked.items()}
    assert {each["remote_host"] for each in params.values()} == {link.address}
    for name, prompt in asked.items():
        decode.add(name, prompt, 24, params[name])
    found = {name: decode.done(name) for name in asked}
    assert {name: said["tokens"] for name, said in found.items()} == right
    assert decode.free(before[1])["preemptions"], "the cache was to be too small"
    assert sum(said["computed"] == 24 for said in found.values()) >= 3, "of a prompt only the last token is computed"
    prefill.free(before[0])
    for engine in (prefill, decode):
        engine.end()
        assert engine.process.returncode == 0


def test_prefill_that_is_lost_on_the_way_is_computed_again(pair):
    """Long before the timeout of loads, whether the host's link is cut or drops packets; when it is back, the prefill
    engine is asked again. The test of blocks below kills one during a transfer, tests/native/test_vllm.py before it.
    """
    two = pair(rate="100mbit")
    asked = {f"r{i}": [random.randrange(256) for _ in range(240)] for i in range(3)}
    prefill, decode = two.start(0, dim=1024), two.start(1, layout="HND", dim=1024)
    for engine in (prefill, decode):
        engine.hear("ready")
    right = computed_by(prefill, asked, 4)
    before = prefill.free(0)["free"], decode.free(0)["free"]
    params = {name: prefill.prefilled(name, prompt) for name, prompt in asked.items()}
    for name, prompt in asked.items():
        decode.add(name, prompt, 4, params[name])
    until_received(two.cluster, 1, 4 << 20)  # of 34
    silent = random.random() < 0.5
    hole(two.cluster, 0) if silent else two.cluster.set_link(0, up=False)
    found = {name: decode.done(name) for name in asked}
    assert {name: said["tokens"] for name, said in found.items()} == right
    assert any(said["computed"] > 4 for said in found.values()), "all has come"
    decode.free(before[1])
    heal(two.cluster, 0) if silent else two.cluster.set_link(0, up=True)
    prefill.free(before[0])
    # An error of the connection from before the cut may still be under way to either side.
    for number in range(5):
        decode.add(f"again{number}", asked["r0"], 4, prefill.prefilled(f"again{number}", asked["r0"]))
        said = decode.done(f"again{number}")
        assert said["tokens"] == right["r0"]
        if said["computed"] == 4:
            break
    assert said["computed"] == 4, "it is not asked again"


def test_prefill_that_cannot_be_asked_is_computed(pair):
    """With a wrong secret, without a listening engine, and without a host: each time with a message, and soon."""
    two, asked = pair(), prompts(40)
    place = f"{two.cluster.hosts[0].address}:{PORT}"
    prefill = two.start(0)
    prefill.hear("ready")
    decode = two.start(1, {"secret_file": str(two.folder / "another"), "prefill": [place]})
    decode.hear("ready")
    right = computed_by(prefill, asked, 4)
    others = {"r1": {}, "r2": {"remote_port": PORT + 1}, "r3": {"remote_host": "10.10.0.99"}}
    for name, other in others.items():
        decode.add(name, asked[name], 4, prefill.prefilled(name, asked[name]) | other)
    for name in others:
        said = decode.done(name)
        assert said["tokens"] == right[name] and said["computed"] == len(asked[name]) + 3
    log = two.log(1).read_text()
    for word in (f"{place} cannot be asked yet", "has another secret", "Connection refused", "10.10.0.99"):
        assert word in log


def heal(cluster, host):
    link = cluster.layout[host].links[0]
    emulated_host.configure(cluster._switch_pid(), f"link set dev {link.port} master {link.bridge}\n", "")


JOB = [sys.executable, str(Path(__file__).with_name("vllm_job.py"))]


@pytest.mark.parametrize(("fault", "memory"), [("kill", "host"), ("hole", "device")])
def test_nothing_is_written_to_blocks_that_have_been_given_back(
    emulate, launch, appear, fake_environment, tmp_path, room, fault, memory
):
    """Nor by data in flight: in a device's queue, the kernel's buffers of both hosts, or the network."""
    cluster = emulate(hosts=2, slots=1, rate="100mbit")
    (tmp_path / "secret").write_bytes(os.urandom(32))
    ends = []
    for host, what in enumerate(("send", "load")):
        env = fake_environment(f"{VENDORS[host]}:1") if memory == "device" else {}
        env |= {"UCCH_HEARTBEAT": "1", **({"FAKEGPU_DELAY_US": "300000"} if what == "load" else {})}
        ends.append(launch(cluster, host, [*JOB, what, str(tmp_path), cluster.hosts[0].address], env=env))
        if what == "send":
            appear([tmp_path / "ready"], ends)
    until_received(cluster, 1, 4 << 20)  # of 32
    cluster.hosts[0].kill_all() if fault == "kill" else hole(cluster, 0)
    appear([tmp_path / "failed"], ends[1:])
    if fault == "hole":
        heal(cluster, 0)
    time.sleep(2)  # time for data in flight to arrive; with less time the test finds less, and passes
    (tmp_path / "over").touch()
    out = ends[1].communicate(timeout=60 * room)[0]
    assert "right" in out, out
