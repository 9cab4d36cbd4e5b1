"""UCCH_CHECK=data: a bit that flips on the wire, or in a ring, is found, and so are its call and element."""

import importlib.util
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ucc_hetero.trace.dumps import CAUSES, parse

HERE = Path(__file__).parent
TORCH_NEEDED = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
#: Eight bytes that no other data has.
MAGIC = random.getrandbits(62) | 1 << 61

BEGIN = """
import os
import numpy as np
import ucc_hetero as u
from ucc_hetero.errors import DataError
MAGIC = np.array([int(os.environ["FLIP"], 16)], np.int64)
comm = u.Communicator()
r, p = comm.rank, comm.size
x, n = np.arange(50_000) * (r + 1), 50_000
if r == 1:
    x[12_345] = MAGIC[0]
"""
#: How a call is made -> its calls until the error comes out, at the latest in Free.
FORMS = {
    "allreduce": "comm.Allreduce(x, np.empty_like(x))",
    "in place": "comm.Allreduce(u.IN_PLACE, x.copy())",
    "bcast": "comm.Bcast(x.copy(), 1)",
    "allgather": "comm.Allgather(x, np.empty((p, n), np.int64))",
    "alltoall": "comm.Alltoall(np.tile(x, p), np.empty((p, n), np.int64))",
    "gatherv": "comm.Gatherv(x, [np.empty(p * n, np.int64), [n] * p] if r == 0 else None, 0)",
    "started": "comm.Iallgather(x, np.empty((p, n), np.int64)).Wait()",
    "dropped": "comm.Iallgather(x, np.empty((p, n), np.int64)).Free()",
    "persistent": "q = comm.Allgather_init(x, np.empty((p, n), np.int64)); q.Start(); q.Wait(); q.Free()",
}
END = """
said = ""
try:
    for _ in range(3):
        {call}
    comm.Free()
except u.CollectiveError as error:
    said = str(error)
print(f"rank {{r}} says: {{said}}", flush=True)
"""


@pytest.fixture
def flip(tmp_path: Path, compiled: Callable[..., Path]) -> dict[str, str]:
    """Environment of a job in which a bit flips on its way to rank 0."""
    made = compiled(tmp_path / "flip.so", "-O1", "-shared", "-fPIC", HERE / "flip.c", "-ldl")
    bit = random.randrange(60)
    return {"LD_PRELOAD": str(made), "FLIP": f"{MAGIC:x}", "FLIP_RANK": "0", "FLIP_BIT": str(bit)}


@pytest.mark.parametrize("form", FORMS)
def test_a_bit_flips(mpirun: Any, flip: dict[str, str], form: str) -> None:
    """All ranks say who, which element, and which call."""
    env = {**flip, "UCCH_CHECK": "data:1", "UCX_TLS": random.choice(["tcp,self", "all"]), "UCCH_TIMEOUT": "100"}
    job = mpirun(BEGIN + END.format(call=FORMS[form]), 3, env=env)
    assert "flipped on rank 0" in job.stderr, job.output
    said = dict(re.findall(r"rank (\d) says: (.*)", job.stdout))
    assert len(said) == 3
    if form == "dropped":  # nobody is there to hear it but whoever comes by: by a warning, and that a rank has left
        assert re.search(r"dropped failed: .*element 12345 |says: .*element 12345 ", job.output), job.output
        return
    for rank, text in said.items():
        assert f"rank {rank}: " in text and "element 12345 " in text and "(call " in text, job.output
        assert "algorithm" in text or form == "gatherv", job.output


AHEAD = """
import time
from ucc_hetero.calls import verification
if r == 2:
    verification._MOMENT = 1e-9
else:
    finish = verification._Sample.finish
    verification._Sample.finish = lambda *given: (time.sleep(0.3), finish(*given))
"""


@pytest.mark.parametrize("form", ["allgather", "started", "dropped", "persistent"])
def test_a_rank_that_is_ahead_takes_part(mpirun: Any, flip: dict[str, str], form: str) -> None:
    """A rank that waits in a later call, or in Free, before the others judge: all find the element together."""
    job = mpirun(BEGIN + AHEAD + END.format(call=FORMS[form]), 3, env={**flip, "UCCH_CHECK": "data:1"})
    told = re.findall(r"(?:dropped failed|says): rank (\d): .*element 12345 ", job.output)
    assert set(told) == set("012"), job.output


def test_the_last_calls_are_written(mpirun: Any, flip: dict[str, str], tmp_path: Path) -> None:
    """All ranks leave their records where the error says, with the call that went wrong."""
    env = {**flip, "UCCH_CHECK": "data:1", "UCCH_FLIGHT": str(tmp_path / "flight")}
    job = mpirun(BEGIN + END.format(call=FORMS["allgather"]), 3, env=env)
    named = re.findall(r"rank (\d) says: .*the last calls are in (\S+\.flight) ", job.stdout)
    assert len(named) == 3, job.output
    for rank, path in named:
        left = parse(Path(path).read_bytes())
        assert left.rank == int(rank) and CAUSES[left.cause] == "because a call failed"
        assert any(label.startswith(b"allgather") for label in left.records["label"])


def test_nobody_knows_without(mpirun: Any, flip: dict[str, str]) -> None:
    """The bit really flips in the result; and with one call in many verified only those are."""
    for check in ("n", "data:1000000"):
        call = "comm.Allgather(x, y := np.empty((p, n), np.int64))\n        if r == 0: print((y[1] == MAGIC[0]).sum())"
        job = mpirun(BEGIN + END.format(call=call), 2, env={**flip, "UCCH_CHECK": check})
        assert sorted(re.findall(r"^\d$", job.stdout, re.M)) == ["0", "1", "1"], job.output
        assert job.stdout.count("says: \n") == 2, job.output


TORCH = """
import os
import torch
import torch.distributed as dist
import ucc_hetero.torch
dist.init_process_group("ucch")
r = dist.get_rank()
t = torch.arange(30_000) * (r + 1)
if r == 1:
    t[777] = int(os.environ["FLIP"], 16)
try:
    for _ in range(3):
        work = dist.all_gather_into_tensor(torch.empty(60_000, dtype=torch.int64), t, async_op={asynchronous})
        work and work.wait()
    dist.destroy_process_group()
except Exception as error:
    print(f"rank {{r}} says: {{error}}", flush=True)
"""


@TORCH_NEEDED
@pytest.mark.parametrize("asynchronous", [False, True])
def test_through_torch(mpirun: Any, flip: dict[str, str], asynchronous: bool) -> None:
    job = mpirun(TORCH.format(asynchronous=asynchronous), 2, env={**flip, "UCCH_CHECK": "data:1"})
    assert len(re.findall(r"rank (\d) says: .*element 777 of what rank 1 sent to rank 0", job.stdout)) == 2, job.output


DEVICE = """
from arrays import Array, runtime
import os
import numpy as np
import ucc_hetero as u
comm = u.Communicator()
r, p = comm.rank, comm.size
gpu = runtime()
gpu.use(comm._run.members.place.device)
stream = gpu.stream() if {streamed} else None
n = 30_000
x, y = Array(n, np.int64), Array(p * n, np.int64)
x.peek[:] = np.arange(n) * (r + 1)
if r == 1:
    x.peek[4321] = int(os.environ["FLIP"], 16)
said = ""
try:
    for _ in range(3):
        y.peek[:] = -1
        comm.Allgather(x, y, stream=stream and stream.handle)
    comm.Free()
except u.CollectiveError as error:
    said = str(error)
print(f"rank {{r}} says: {{said}}", flush=True)
"""


@pytest.mark.parametrize("streamed", [False, True])
def test_in_a_ring_of_devices(mpirun: Any, fake_environment: Any, flip: dict[str, str], streamed: bool) -> None:
    """The bit flips in a copy that a device does, of a call that is queued in streams."""
    env = (
        fake_environment("nvidia:1,amd:1") | flip | {"UCCH_CHECK": "data:1", "FAKEGPU_DELAY_US": "20", "LD_PRELOAD": ""}
    )
    job = mpirun(DEVICE.format(streamed=streamed), 2, env=env)
    assert "flipped on rank 0" in job.stderr
    assert len(re.findall(r"says: .*element 4321 of what rank 1 sent to rank 0", job.stdout)) == 2, job.output


@pytest.mark.parametrize(("ranks", "layout"), [(3, ""), (4, "nvidia:2,amd:2")])
def test_right_data_passes(mpirun: Any, ranks: int, layout: str) -> None:
    """Random calls of all kinds, all of them verified: none is taken for wrong."""
    seed = random.randrange(10**6)
    env = {"UCCH_CHECK": "data:1", "UCCH_LOG_LEVEL": "info", "UCCH_LOG_SUBSYS": "coll", "UCCH_EMULATE": layout}
    job = mpirun("tests/mpi/collective_cases.py", ranks, args=[str(seed), "30"], env=env, timeout=170)
    assert f"calls right on {ranks} ranks (seed {seed})" in job.stdout
    counts = re.findall(r"(\d+) calls of (\d+) were verified", job.stderr)
    assert counts and all(int(one) > 0.9 * int(all_) for one, all_ in counts), counts
