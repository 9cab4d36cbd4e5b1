"""UCCH_CHECK=data finds a bit that flips on the network or in a ring, with the call and the element."""

import importlib.util
import random
import re
from pathlib import Path

import pytest

from ucc_hetero.trace.flight_files import CAUSES, parse

HERE = Path(__file__).parent
TORCH_NEEDED = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
#: How data moves between ranks: by sockets, or by reading the peer's memory.
TLS = random.choice(["tcp,self", "all"])


@pytest.fixture(scope="session")
def flipping(tmp_path_factory, compiled):
    """The library that flips bits."""
    made = tmp_path_factory.mktemp("flip") / "flip.so"
    return str(compiled(made, "-O1", "-shared", "-fPIC", HERE / "flip.c", "-ldl"))


@pytest.fixture
def flip():
    """Environment of a case: a bit flips on its way to rank 0, in eight bytes that no other data has."""
    bit, magic = random.randrange(60), random.getrandbits(62) | 1 << 61
    return {"FLIP": f"{magic:x}", "FLIP_RANK": "0", "FLIP_BIT": str(bit)}


@pytest.fixture
def calls(crew, flipping, flip):
    """Call as ``calls(case, form, ranks=3, **env)``: verifies all calls of a crew on whose network a bit flips."""
    job = {"LD_PRELOAD": flipping, "UCX_TLS": TLS}
    return lambda case, form, ranks=3, **env: crew(
        f"verification_cases:{case}", ranks, of=3, args=[form], job=job,
        env={**flip, "UCCH_CHECK": "data:1", "UCCH_TIMEOUT": "100", **env},
    )  # fmt: skip


def test_first_used_by_one_rank(crew):
    crew("verification_cases:first_used_by_one_rank", 2, env={"UCCH_CHECK": "data:1", "UCCH_TIMEOUT": "30"})


FORMS = ("allreduce", "in place", "bcast", "allgather", "alltoall", "gatherv", "started", "dropped", "persistent")


@pytest.mark.parametrize("form", FORMS)
def test_a_bit_flips(calls, tmp_path, form):
    """All ranks name the rank, the element and the call, and write records of it to the file that the error names."""
    job = calls("flipped", form, UCCH_FLIGHT=str(tmp_path / "flight"))
    assert "flipped on rank 0" in job.stderr, job.output
    said = dict(re.findall(r"rank (\d) says: (.*)", job.stdout))
    assert len(said) == 3
    if form == "dropped":  # nobody waits for the call: a warning, and the rank that left
        assert re.search(r"dropped failed: .*element 12345 |says: .*element 12345 ", job.output), job.output
        return
    for rank, text in said.items():
        assert f"rank {rank}: " in text and "element 12345 " in text and "(call " in text, job.output
        assert "algorithm" in text or form == "gatherv", job.output
        left = parse(Path(re.search(r"the last calls are in (\S+\.flight) ", text)[1]).read_bytes())
        assert left.rank == int(rank) and CAUSES[left.cause] == "because a call failed"
        assert form != "allgather" or any(label.startswith(b"allgather") for label in left.records["label"])


@pytest.mark.parametrize("form", ["allgather", "started", "dropped", "persistent"])
def test_a_rank_that_is_ahead_takes_part(calls, form):
    """A rank that waits in a later call, or in Free, before the others check: all find the element together."""
    job = calls("ahead", form)
    told = re.findall(r"(?:dropped failed|says): rank (\d): .*element 12345 ", job.output)
    assert set(told) == set("012"), job.output


@pytest.mark.parametrize("check", ["n", "data:1000000"])
def test_nobody_knows_without(calls, check):
    """The bit does flip in the result; with one call in N verified only those raise."""
    job = calls("flipped", "unseen", 2, UCCH_CHECK=check)
    assert [job.said(word) for word in ("flipped", "right")] == [1, 2], job.output
    assert job.stdout.count("says: \n") == 2, job.output


@TORCH_NEEDED
def test_through_torch(calls):
    asynchronous = random.choice([True, False])
    job = calls("torch_group", asynchronous, 2)
    said = re.findall(r"rank (\d) says: .*element 777 of the data from rank 1 to rank 0", job.stdout)
    assert len(said) == 2, (asynchronous, job.output)


@pytest.mark.parametrize("streamed", [False, True])
def test_in_a_ring_of_devices(crew, fake_environment, flip, streamed):
    """The bit flips in a device's copy, in a call that is queued in streams."""
    job, env = fake_environment("nvidia:1,amd:1"), flip | {"UCCH_CHECK": "data:1", "FAKEGPU_DELAY_US": "20"}
    job = crew("verification_cases:on_devices", 2, args=[streamed], job=job, env=env)
    assert "flipped on rank 0" in job.stderr
    assert len(re.findall(r"says: .*element 4321 of the data from rank 1 to rank 0", job.stdout)) == 2, job.output


def test_right_data_passes(crew):
    """Random calls of all kinds, all verified: none is reported as wrong."""
    (ranks, layout), seed = random.choice([(3, ""), (4, "nvidia:2,amd:2")]), random.randrange(10**6)
    env = {"UCCH_CHECK": "data:1", "UCCH_LOG_LEVEL": "info", "UCCH_LOG_SUBSYS": "coll"}
    job = crew("verification_cases:right", ranks, args=[seed], layout=layout, env=env, timeout=170)
    assert f"calls right on {ranks} ranks (seed {seed})" in job.stdout
    counts = re.findall(r"(\d+) calls of (\d+) were verified", job.stderr)
    one, all_ = (sum(map(int, column)) for column in zip(*counts, strict=True))
    assert one > 0.8 * all_ > 0, counts  # the random calls decide how many cannot be verified
