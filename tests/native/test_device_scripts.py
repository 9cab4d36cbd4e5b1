"""Calls, messages, one-sided transfers and pages on fake GPUs of one host: real UCC, UCX, plans and engine."""

import json
import os
import random
from pathlib import Path

import device_scripts as calls
import lane_scripts as lanes
import message_scripts as messages
import pages_scripts as pages
import pytest
import rma_scripts as rma
from device_scripts import FEW_QUEUES, OWN_QUEUES

FAKEGPU = Path(__file__).resolve().parents[1] / "fakegpu"

pytestmark = pytest.mark.mpi


BY_HOSTS = {"UCCH_CHANNELS": "n"}
WAYS = [("nvidia:2", {}), ("nvidia:1,amd:2", {}), ("nvidia:1,amd:2", BY_HOSTS)]
#: Through pinned memory. A job that waits for the calls' deadline is killed before it.
STAGED = {"UCCH_STAGING": "staged", "FAKEGPU_DELAY_US": "50", "UCCH_TIMEOUT": "1000"}
#: libucp decides, and streams do not pass messages to each other.
PLAIN = {**STAGED, "UCCH_STAGING": "auto", **BY_HOSTS}
LANES = {"FAKEGPU_DELAY_US": "20", "UCCH_TIMEOUT": "1000"}
#: Each of thousands of pieces is a separate copy.
SOON = {"FAKEGPU_DELAY_US": "20"}
QUICK = {"FAKEGPU_DELAY_US": "10"}
#: CUDA's own: eight queues, which go on behind a kernel that runs.
GOES_ON = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "GPU_MAX_HW_QUEUES": "99", "FAKEGPU_CONNECTIONS": ""}
GOES_ON |= {"FAKEGPU_GOES_ON": "1", "UCCH_WIRE_SLOT": "65536"}
#: HIP's default: streams wait only for work that was queued before.
CAREFUL = {**FEW_QUEUES, "UCCH_HOLD": "n"}
CROWDED = "COUNT = 40\n" + lanes.CROWDED
#: One of these is drawn.
OWN, FEW, EITHER, ANY = (OWN_QUEUES,), (FEW_QUEUES,), (OWN_QUEUES, FEW_QUEUES), (OWN_QUEUES, CAREFUL)
BIG_PAGES = pages.EVERY.replace("L, B, N, H, D = 2, 70", "L, B, N, H, D = 2, 600")

#: Refused calls among uneven ones keep their numbers: also in streams, and if ranks learn of the refusal before they
#: have begun.
UNEVEN = """
from ranks import *
first = Communicator()
stream = runtime().stream()
for into, make in (({"stream": stream}, Array), ({}, Array), ({}, lambda n: np.zeros(n, np.float32))):
    comm = Communicator()
    r, p = comm.rank, comm.size
    for turn in range(8):
        n, refuses = 3 + turn, turn % 3 == 0 and turn % p
        counts = [n + (r + q) % 2 for q in range(p)]
        x, y = make(sum(counts)), make(sum(counts))
        sent = np.repeat(100 * r + 10 * np.arange(p) + turn, counts)
        x.set(sent) if hasattr(x, "set") else np.copyto(x, sent)
        try:
            wrong = [10**6] * p if turn % 3 == 0 and r == refuses else counts
            request = comm.Ialltoallv([x, counts], [y, wrong], **into)
            request.Wait()
        except (RefusedError, ValueError) as error:
            assert turn % 3 == 0, (turn, error)
            comm.Free()
            comm = Communicator()
        else:
            assert turn % 3, turn
            found = y.copied(stream) if make is Array else y
            assert (found == np.repeat(100 * np.arange(p) + 10 * r + turn, counts)).all(), (turn, found)
    comm.Free()
"""
#: No rank waits for requests of calls by way of the host; streams wait for their ends, or hosts if streams must not.
IN_ORDER = """
from ranks import *
with Communicator() as comm:
    p, x, y = comm.size, Array(70000), [Array(70000) for _ in range(20)]
    stream = runtime().stream()
    for k, result in enumerate(y):
        x.fill(stream, float(k + comm.rank))
        comm.Iallreduce(x, result, stream=stream)
    for k, result in enumerate(y):
        assert (result.copied(stream) == p * k + sum(range(p))).all(), k
    assert "by way of the host" in comm.plan_summary(), comm.plan_summary()
"""
#: Streams that cannot be held.
AT_ONCE = """
from ranks import *
with Communicator() as comm:
    gpu, x, y = runtime(), Array(500), Array(500)
    stream = gpu.stream()
    x.fill(stream, 1.0)
    request = comm.Iallreduce(x, y, stream=stream)
    y.scale(stream, 2.0)
    assert request.finished, comm.plan_summary()
    assert (y.copied(stream) == 2 * comm.size).all()
"""
#: The doctor's measurements, as installed: only there is mpi_launch a part of the package.
DOCTOR = """
import arrays
from ucc_hetero import Communicator
from ucc_hetero.launch.doctor import measure
with Communicator() as comm:
    with measure._vectors([1.0]) as (vector,):
        assert vector.block is not None
    assert [found.code for found in measure.canaries(comm)] == ["collectives"]
    assert list(measure.pairs(comm, 20)) == [(0, 1)]
"""
INSTALLED = os.pathsep.join([str(FAKEGPU), *filter(None, [os.environ.get("PYTHONPATH")])])

#: Name of a case -> its script, its layout, its environment, and queues to draw from.
CASES = [
    *(("random mistakes", calls.MISTAKES, layout, {"UCCH_TIMEOUT": "300", **env}, OWN) for layout, env in WAYS),
    # There, threads with one communicator each hold streams in any order.
    *(("streams", calls.STREAMS, layout, env, OWN) for layout, env in WAYS),
    *(("uneven calls", UNEVEN, layout, env, ()) for layout, env in WAYS),
    ("order in streams", IN_ORDER, "nvidia:1,amd:2", BY_HOSTS, OWN),
    ("order by hosts", IN_ORDER, "nvidia:1,amd:2", BY_HOSTS, FEW),
    ("refusals", calls.REFUSALS, "nvidia:1,amd:1", {}, ()),
    ("a timeout", calls.TIMEOUT, "nvidia:1,amd:1", BY_HOSTS, ()),
    ("a driver that fails", calls.DRIVER, "nvidia:1,amd:1", {"FAILING": "cuEventRecord cuStreamWaitEvent"}, OWN),
    ("a driver that fails, by hosts", calls.DRIVER, "nvidia:1,amd:1", {**BY_HOSTS, "FAILING": "cuStreamSynchronize"},
     OWN),
    ("no flags", AT_ONCE, "nvidia:1,amd:1", {"FAKEGPU_NO_FLAGS": "1"}, ()),
    ("the doctor", DOCTOR, "nvidia:1,amd:1", {"PYTHONPATH": INSTALLED}, ()),
    ("matching", messages.MATCHING, "nvidia:1,amd:1", STAGED, FEW),
    ("matching by libucp alone", messages.MATCHING, "nvidia:2,amd:1", {"UCCH_STAGING": "direct"}, OWN),
    # Streams are held until hosts have received the data that others were to carry.
    ("begun in streams", messages.STREAMS, "nvidia:2,amd:1", {**STAGED, **BY_HOSTS}, OWN),
    ("begun in streams by libucp", messages.STREAMS, "nvidia:1,amd:1", PLAIN, OWN),
    ("begun in streams of AMD's", messages.STREAMS, "amd:2", {**STAGED, "UCCH_STAGING": "auto"}, OWN),
    ("matching with few queues or own", messages.MATCHING, "nvidia:2,amd:2", {**STAGED, **QUICK}, EITHER),
    ("matching by hosts", messages.MATCHING, "nvidia:1,amd:1", {**STAGED, **QUICK, **BY_HOSTS}, OWN),
    ("pinned memory", messages.PINS, "nvidia:1,amd:1", STAGED, EITHER),
    ("by copies", messages.COPIES, "nvidia:1,amd:1", STAGED, EITHER),
    ("behind a slow stream", messages.EARLY, "nvidia:1,amd:1", STAGED, ()),
    ("on its way", messages.ON_ITS_WAY, "nvidia:1,amd:1", {**STAGED, "FAKEGPU_DELAY_US": "10000"}, ()),
    ("given up", messages.GIVEN_UP, "nvidia:1,amd:1", STAGED, ()),
    ("given up in one vendor", messages.GIVEN_UP, "nvidia:2", STAGED, ()),
    ("lanes: random", lanes.RANDOM, "nvidia:2,amd:2", LANES, ANY),
    ("lanes: held", lanes.HELD, "nvidia:2,amd:1", LANES, OWN),
    ("lanes: by copies", lanes.COPIES, "nvidia:2,amd:1", LANES, ANY),
    ("lanes: mistakes", lanes.MISTAKES, "nvidia:1,amd:1", LANES, ANY),
    ("lanes: late", lanes.LATE, "nvidia:1,amd:1", LANES, ANY),
    ("lanes: more streams than queues", CROWDED, "nvidia:1,amd:1", {**LANES, **GOES_ON}, ()),
    ("lanes: after many groups", lanes.GROUPS, "nvidia:1,amd:1", {**LANES, "FAKEGPU_AHEAD": "150"}, OWN),
    ("rma: places of pieces", rma.EVERY, "amd:2", SOON, ()),
    ("rma: places on three kinds", rma.EVERY, "nvidia:1,host:1,amd:1", SOON, OWN),
    ("rma: straight into opened memory", rma.EVERY, "nvidia:2", {}, OWN),
    ("rma: opening is refused", rma.EVERY, "nvidia:2", {"FAKEGPU_NO_PEERS": "1"}, ()),
    ("rma: opened memory is given back", rma.OPENED, "nvidia:3", {}, OWN),
    ("rma: while the driver gives memory back", rma.CLOSING, "nvidia:2", {}, OWN),
    ("rma: slots that nobody else can open", rma.APART, "nvidia:1,amd:2", {}, ()),
    ("rma: by wires to another host", rma.FAR, "nvidia:1,host:1,amd:1", SOON, ()),
    ("rma: late by wires", rma.LATE, "nvidia:1,amd:1", {}, ()),
    ("rma: beside one that is stopped", rma.STOPPED, "nvidia:1,amd:2", {"UCCH_TIMEOUT": "20"}, ()),
    ("rma: given up", rma.GIVEN_UP, "nvidia:1,amd:1", {"FAKEGPU_DELAY_US": "2000"}, ()),
    ("rma: a driver that fails", rma.FAILS, "nvidia:1,amd:1", {"UCCH_TIMEOUT": "20"}, OWN),
    ("rma: a driver that fails, by wires", rma.far(rma.FAILS), "nvidia:1,amd:1", {"UCCH_TIMEOUT": "20"}, OWN),
    ("rma: memory of all kinds", rma.MEMORY, "nvidia:1,amd:1", {}, ()),
    ("rma: memory of all kinds, a host's", rma.MEMORY, "nvidia:1,host:1", {}, ()),
    ("rma: peers that come and go", rma.LEAVING, "nvidia:2", {}, ()),
    ("rma: between three devices", rma.EVERY, "nvidia:2,amd:1", {}, OWN),
    *(("pages", pages.EVERY, layout, {}, ())
      for layout in ("nvidia:1,amd:1", "amd:1,nvidia:1", "nvidia:1,host:1", "amd:2")),
    ("pages: opened memory", BIG_PAGES, "nvidia:2", {}, ()),
    ("pages: no compiler", pages.NO_COMPILER, "nvidia:1,amd:1", {"UCCH_RTC_LIB": "none"}, ()),
    ("pages: started by streams", pages.STREAMS, "nvidia:1,amd:1", {}, OWN),
    ("pages: started by AMD's streams", pages.STREAMS, "amd:1,nvidia:1", {}, OWN),
]  # fmt: skip
#: The output of one rank.
SAID = {calls.MISTAKES: "15 mistakes told", calls.TIMEOUT: "right: rank 0: allreduce float32[64] SUM"}
#: Cases for ranks that have pinned no memory before, or with another environment.
FRESH = AT_ONCE, DOCTOR, messages.PINS, pages.NO_COMPILER, CROWDED


@pytest.mark.parametrize(
    ("script", "layout", "env", "queues"), [each[1:] for each in CASES], ids=[f"{each[0]}, {each[2]}" for each in CASES]
)
def test_every_rank_is_right(fakes, fake_crew, script, layout, env, queues):
    env = {**env, **random.choice(queues or ({},))}
    job = (fakes if script in FRESH else fake_crew)(script, layout, **env)
    assert script not in SAID or job.said(SAID[script]) == 1, (env, job.output)
    assert script != calls.REFUSALS or "mismatch" in job.stdout


@pytest.mark.parametrize("layout, env", [
    ("nvidia:2", calls.OWN_QUEUES), ("amd:1,nvidia:2,amd:1", {}), ("nvidia:1,host:2,amd:1", {}),
    ("nvidia:1,amd:2", {**BY_HOSTS, **calls.FEW_QUEUES}),
    ("nvidia:1,amd:2", {"FAKEGPU_DEVICES": "1", **calls.FEW_QUEUES}),  # two ranks of one vendor share it
])  # fmt: skip
def test_collectives(fake_crew, layout, env):
    """In a vendor's library, queued in streams, and by way of host memory: with one vendor, with two, and without
    GPUs."""
    result = fake_crew(calls.COLLECTIVES, layout, **env)
    by_hosts = "host" in layout or {"UCCH_CHANNELS", "FAKEGPU_DEVICES"} & env.keys()
    queued = result.ranks if "amd" in layout and not by_hosts else 0
    assert (result.said("right"), result.said("right queued")) == (result.ranks, queued)


def test_a_setting_that_is_about_messages_says_so(fakes, fake_crew):
    script = """
import arrays
from ucc_hetero import Communicator
with Communicator() as comm, Communicator(comm) as other:
    pass
"""
    told = fakes(script, "nvidia:1,amd:1", UCCH_STAGING="direct").stderr
    assert told.count("UCCH_STAGING=direct is about messages alone") == 1
    assert "messages alone" not in fake_crew(script, "nvidia:2", UCCH_STAGING="direct").stderr


def test_tuning_measures_on_devices(fake_crew, tmp_path):
    table = tmp_path / "table.json"
    script = f"""
import arrays
from ucc_hetero.__main__ import main
assert main(["tune", "--file", {str(table)!r}, "--collective", "allreduce", "--sizes", "512K:512K"]) == 0
assert main(["topo"]) == 0
"""
    for env, rings in ({}, "shared"), (BY_HOSTS, "none (ranks 0, 1: UCCH_CHANNELS=n)"):
        out = fake_crew(script, "nvidia:1,amd:1", **env).stdout
        assert out.rpartition("rings between devices")[2].count(rings) == 2, out
        (measured,) = (line for line in out.splitlines() if line.startswith("allreduce"))
        assert "split_rail" in measured and "tree" in measured, out
        assert len(json.loads(table.read_text())["topologies"]) == 1


@pytest.fixture
def dying(fakes, recovery):
    """Run a script of two vendors' ranks of which one dies; skip if the other ranks cannot notice."""

    def run(script, layout, words, **env):
        job = fakes(script, layout, mpi={"check": False, "mpi_args": recovery}, UCCH_TIMEOUT="200", **env)
        if not recovery and words not in job.stdout:
            pytest.skip("this launcher ends every rank when one dies")
        return job

    return run


@pytest.mark.parametrize("before", [True, False])
def test_a_sender_that_dies(dying, before):
    env = {name: value for name, value in STAGED.items() if name != "UCCH_TIMEOUT"}
    job = dying(f"WAIT = {before}\n" + messages.DEATH, "nvidia:1,amd:1", "Error", **env)
    said = [line for line in job.stdout.splitlines() if line in ("whole", "PeerError", "CollectiveError")]
    assert said[1:] == ["PeerError"] and said[0] in ("PeerError", "" if before else "whole"), job.output


def test_a_sender_in_a_lane_that_dies(dying):
    job = dying(lanes.DEATH, "nvidia:1,amd:1", "PeerError", **OWN_QUEUES)
    assert "PeerError" in job.stdout and "went on" in job.stdout, job.output


#: Jobs of three ranks in one job. MPI's own libucp may end a process that copies to one that is killed.
IN_THREES = """
import ucc_hetero
from mpi4py import MPI
MPI.COMM_WORLD = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank // 3)
"""


@pytest.mark.parametrize("script", [rma.DEATH, rma.far(rma.DEATH)], ids=["on one host", "by wires"])
def test_a_dead_peer_fails_its_transfers_alone(fakes, script):
    layout, mpi = "nvidia:1,amd:2,nvidia:3,host:3", {"check": False, "mpi_args": ("--continuous",)}
    done = fakes(IN_THREES + script, layout, mpi=mpi)
    assert done.said("right") == 6, done.output
