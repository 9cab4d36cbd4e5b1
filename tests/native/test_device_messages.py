"""Messages, one-sided transfers and pages between devices of one host, over the fake GPU library: real libucp."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import lane_scripts as lanes
import message_scripts as messages
import pages_scripts as pages
import pytest
import rma_scripts as rma
from device_scripts import FEW_QUEUES, OWN_QUEUES

pytestmark = pytest.mark.mpi

#: By pinned memory. A job that waits for the deadline of calls is killed before that.
STAGED = {"UCCH_STAGING": "staged", "FAKEGPU_DELAY_US": "50", "UCCH_TIMEOUT": "1000"}
#: Where libucp decides, and streams do not hand each other messages.
PLAIN = {**STAGED, "UCCH_STAGING": "auto", "UCCH_CHANNELS": "n"}
#: Handed from stream to stream.
LANES = {"FAKEGPU_DELAY_US": "20", "UCCH_TIMEOUT": "1000"}
#: Of lists of thousands of pieces each is a copy of its own.
SOON = {"FAKEGPU_DELAY_US": "20"}
QUICK = {"FAKEGPU_DELAY_US": "10"}
#: As HIP comes: streams wait for what has been queued before, and for no more.
CAREFUL = {**FEW_QUEUES, "UCCH_HOLD": "n"}
#: Of these one is drawn.
EITHER, ANY = (OWN_QUEUES, FEW_QUEUES), (OWN_QUEUES, CAREFUL)
BIG_PAGES = pages.EVERY.replace("L, B, N, H, D = 2, 70", "L, B, N, H, D = 2, 600")

Env = Mapping[str, str]

#: A case by its name; its script, its layout, its environment, and queues to draw from.
CASES: list[tuple[str, str, str, Env, tuple[Env, ...]]] = [
    ("matching", messages.MATCHING, "nvidia:1,amd:1", STAGED, (FEW_QUEUES,)),
    ("matching by libucp alone", messages.MATCHING, "nvidia:2,amd:1", {"UCCH_STAGING": "direct"}, ()),
    # Streams are held until hosts have received what others were to carry.
    ("begun in streams", messages.STREAMS, "nvidia:2,amd:1", {**STAGED, "UCCH_CHANNELS": "n"}, (OWN_QUEUES,)),
    ("begun in streams by libucp", messages.STREAMS, "nvidia:1,amd:1", PLAIN, (OWN_QUEUES,)),
    ("begun in streams of AMD's", messages.STREAMS, "amd:2", {**STAGED, "UCCH_STAGING": "auto"}, (OWN_QUEUES,)),
    ("matching with few queues or own", messages.MATCHING, "nvidia:2,amd:2", {**STAGED, **QUICK}, EITHER),
    ("matching by hosts", messages.MATCHING, "nvidia:1,amd:1", {**STAGED, **QUICK, "UCCH_CHANNELS": "n"}, ()),
    ("pinned memory", messages.PINS, "nvidia:1,amd:1", STAGED, EITHER),
    ("by copies", messages.COPIES, "nvidia:1,amd:1", STAGED, EITHER),
    ("behind a slow stream", messages.EARLY, "nvidia:1,amd:1", STAGED, ()),
    ("on its way", messages.ON_ITS_WAY, "nvidia:1,amd:1", {**STAGED, "FAKEGPU_DELAY_US": "10000"}, ()),
    ("given up", messages.GIVEN_UP, "nvidia:1,amd:1", STAGED, ()),
    ("given up in one vendor", messages.GIVEN_UP, "nvidia:2", STAGED, ()),
    ("lanes: random", lanes.RANDOM, "nvidia:2,amd:2", LANES, ANY),
    ("lanes: held", lanes.HELD, "nvidia:2,amd:1", LANES, (OWN_QUEUES,)),
    ("lanes: by copies", lanes.COPIES, "nvidia:2,amd:1", LANES, ANY),
    ("lanes: mistakes", lanes.MISTAKES, "nvidia:1,amd:1", LANES, ANY),
    ("lanes: late", lanes.LATE, "nvidia:1,amd:1", LANES, ANY),
    ("lanes: after many groups", lanes.GROUPS, "nvidia:1,amd:1", {**LANES, "FAKEGPU_AHEAD": "150"}, (OWN_QUEUES,)),
    ("rma: places of pieces", rma.EVERY, "amd:2", SOON, ()),
    ("rma: places on three kinds", rma.EVERY, "nvidia:1,host:1,amd:1", SOON, ()),
    ("rma: straight into opened memory", rma.EVERY, "nvidia:2", {}, ()),
    ("rma: opening is refused", rma.EVERY, "nvidia:2", {"FAKEGPU_NO_PEERS": "1"}, ()),
    ("rma: opened memory is given back", rma.OPENED, "nvidia:3", {}, (OWN_QUEUES,)),
    ("rma: while the driver gives memory back", rma.CLOSING, "nvidia:2", {}, (OWN_QUEUES,)),
    ("rma: slots that nobody else can open", rma.APART, "nvidia:1,amd:2", {}, ()),
    ("rma: by wires to another host", rma.FAR, "nvidia:1,host:1,amd:1", SOON, ()),
    ("rma: started by streams", rma.STREAMS, "nvidia:1,amd:1", {}, (OWN_QUEUES,)),
    ("rma: started by streams of one vendor", rma.STREAMS, "nvidia:2", {}, (OWN_QUEUES,)),
    ("rma: memory of all kinds", rma.MEMORY, "nvidia:1,amd:1", {}, ()),
    ("rma: memory of all kinds, a host's", rma.MEMORY, "nvidia:1,host:1", {}, ()),
    ("rma: beside an allreduce", rma.CROWD, "nvidia:2,amd:1", {}, ()),
    *((f"pages, {layout}", pages.EVERY, layout, {}, ())
      for layout in ("nvidia:1,amd:1", "amd:1,nvidia:1", "nvidia:1,host:1", "amd:2")),
    ("pages: opened memory", BIG_PAGES, "nvidia:2", {}, ()),
    ("pages: no compiler", pages.NO_COMPILER, "nvidia:1,amd:1", {"UCCH_RTC_LIB": "none"}, ()),
    ("pages: started by streams", pages.STREAMS, "nvidia:1,amd:1", {}, (OWN_QUEUES,)),
    ("pages: started by AMD's streams", pages.STREAMS, "amd:1,nvidia:1", {}, (OWN_QUEUES,)),
]  # fmt: skip
#: Those of ranks that have no pinned memory and no kernels yet, or a device of their own.
FRESH = (
    *(messages.STREAMS, messages.PINS, messages.EARLY, lanes.HELD, rma.OPENED, rma.CLOSING, rma.STREAMS),
    *(BIG_PAGES, pages.NO_COMPILER, pages.STREAMS),
)


@pytest.mark.parametrize(("script", "layout", "env", "queues"), [each[1:] for each in CASES], ids=[c[0] for c in CASES])
def test_every_rank_is_right(
    fakes: Callable[..., Any],
    fake_crew: Callable[..., Any],
    script: str,
    layout: str,
    env: Env,
    queues: tuple[Env, ...],
) -> None:
    env = {**env, **random.choice(queues or ({},))}
    job = (fakes if script in FRESH else fake_crew)(script, layout, **env)
    assert job.said("right") == job.ranks, (env, job.output)


@pytest.fixture
def dying(fakes: Callable[..., Any], recovery: list[str]) -> Callable[..., Any]:
    """Run a script of two vendors' ranks of which one dies; skip where no other rank can tell."""

    def run(script: str, layout: str, words: str, **env: str) -> Any:
        job = fakes(script, layout, mpi={"check": False, "mpi_args": recovery}, UCCH_TIMEOUT="200", **env)
        if not recovery and words not in job.stdout:
            pytest.skip("this launcher ends every rank when one dies")
        return job

    return run


@pytest.mark.parametrize("before", [True, False])
def test_a_sender_that_dies(dying: Callable[..., Any], before: bool) -> None:
    env = {name: value for name, value in STAGED.items() if name != "UCCH_TIMEOUT"}
    job = dying(f"WAIT = {before}\n" + messages.DEATH, "nvidia:1,amd:1", "Error", **env)
    said = [line for line in job.stdout.splitlines() if line in ("whole", "PeerError", "CollectiveError")]
    assert said[1:] == ["PeerError"] and said[0] in ("PeerError", "" if before else "whole"), job.output


def test_a_sender_in_a_lane_that_dies(dying: Callable[..., Any]) -> None:
    job = dying(lanes.DEATH, "nvidia:1,amd:1", "PeerError", **OWN_QUEUES)
    assert "PeerError" in job.stdout and "went on" in job.stdout, job.output


@pytest.mark.parametrize(
    ("layout", "by_wires"), [("nvidia:1,amd:2", False), ("nvidia:3", False), ("nvidia:1,amd:2", True), ("host:3", True)]
)
def test_a_dead_peer_fails_its_transfers_alone(fakes: Callable[..., Any], layout: str, by_wires: bool) -> None:
    script = rma.far(rma.DEATH) if by_wires else rma.DEATH
    done = fakes(script, layout, mpi={"check": False, "mpi_args": ("--continuous",)})
    assert done.said("right") == 2, done.output
