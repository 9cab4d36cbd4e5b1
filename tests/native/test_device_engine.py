"""Collectives on device memory, over the fake GPU library: real UCC, UCX, plans and engine; asynchronous devices."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import device_scripts
import pytest

FAKEGPU = Path(__file__).resolve().parents[1] / "fakegpu"

pytestmark = pytest.mark.mpi


BY_HOSTS = {"UCCH_CHANNELS": "n"}


@pytest.mark.parametrize("layout, env", [
    ("nvidia:2", device_scripts.OWN_QUEUES),
    ("amd:1,nvidia:2,amd:1", {}),
    ("nvidia:1,host:2,amd:1", {}),
    ("nvidia:1,amd:2", {**BY_HOSTS, **device_scripts.FEW_QUEUES}),
    ("nvidia:1,amd:2", {"FAKEGPU_DEVICES": "1", **device_scripts.FEW_QUEUES}),  # two ranks of one vendor share it
])  # fmt: skip
def test_collectives(fake_crew: Callable[..., Any], layout: str, env: dict[str, str]) -> None:
    """In a vendor's library, queued in streams, and by way of host memory: for one vendor, for two, and without any."""
    result = fake_crew(device_scripts.COLLECTIVES, layout, **env)
    by_hosts = "host" in layout or {"UCCH_CHANNELS", "FAKEGPU_DEVICES"} & env.keys()
    queued = result.ranks if "amd" in layout and not by_hosts else 0
    assert (result.said("right"), result.said("right queued")) == (result.ranks, queued)


#: Refused calls among uneven ones keep their numbers: in streams, too, and where ranks hear of the refusal before they
#: have begun.
UNEVEN = """
import numpy as np
from arrays import Array, runtime
from ucc_hetero import Communicator, RefusedError
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
print("right", flush=True)
"""
#: Nobody waits for requests of calls by way of the host; streams wait for their ends, or hosts where streams must not.
IN_ORDER = """
from arrays import Array, runtime
from ucc_hetero import Communicator
with Communicator() as comm:
    p, x, y = comm.size, Array(70000), [Array(70000) for _ in range(20)]
    stream = runtime().stream()
    for k, result in enumerate(y):
        x.fill(stream, float(k + comm.rank))
        comm.Iallreduce(x, result, stream=stream)
    for k, result in enumerate(y):
        assert (result.copied(stream) == p * k + sum(range(p))).all(), k
    assert "by way of the host" in comm.plan_summary(), comm.plan_summary()
print("right")
"""
#: Streams that cannot be held.
AT_ONCE = """
from arrays import Array, runtime
from ucc_hetero import Communicator
with Communicator() as comm:
    gpu, x, y = runtime(), Array(500), Array(500)
    stream = gpu.stream()
    x.fill(stream, 1.0)
    request = comm.Iallreduce(x, y, stream=stream)
    y.scale(stream, 2.0)
    assert request.finished, comm.plan_summary()
    assert (y.copied(stream) == 2 * comm.size).all()
print("right")
"""
#: The doctor's measurements, as installed: mpi_launch is a part of the package only there.
DOCTOR = """
import arrays
from ucc_hetero import Communicator
from ucc_hetero.launch.doctor import measure
with Communicator() as comm:
    with measure._vectors([1.0]) as (vector,):
        assert vector.block is not None
    assert [found.code for found in measure.canaries(comm)] == ["collectives"]
    assert list(measure.pairs(comm, 20)) == [(0, 1)]
print("right")
"""

#: For one vendor, for two, and by way of host memory.
WAYS: list[tuple[str, dict[str, str]]] = [("nvidia:2", {}), ("nvidia:1,amd:2", {}), ("nvidia:1,amd:2", BY_HOSTS)]
OWN, FEW = device_scripts.OWN_QUEUES, device_scripts.FEW_QUEUES
#: A case by its name, its script, its layout, its environment, and what is said; by how many ranks, if not by all.
CASES: list[tuple[str, str, str, dict[str, str], str, int]] = [
    *(("random mistakes", device_scripts.MISTAKES, layout, {"UCCH_TIMEOUT": "300", **env, **OWN}, "15 mistakes told", 1)
      for layout, env in WAYS),
    # Streams are held in any order there, by threads that use a communicator each.
    *(("streams", device_scripts.STREAMS, layout, {**env, **OWN}, "right", 0) for layout, env in WAYS),
    *(("uneven calls", UNEVEN, layout, env, "right", 0) for layout, env in WAYS),
    ("order in streams", IN_ORDER, "nvidia:1,amd:2", {**BY_HOSTS, **OWN}, "right", 0),
    ("order by hosts", IN_ORDER, "nvidia:1,amd:2", {**BY_HOSTS, **FEW}, "right", 0),
    ("refusals", device_scripts.REFUSALS, "nvidia:1,amd:1", {}, "right", 0),
    ("mismatches", device_scripts.REFUSALS, "nvidia:1,amd:1", {}, "mismatch", 0),
    ("a timeout", device_scripts.TIMEOUT, "nvidia:1,amd:1", BY_HOSTS, "right: rank 0: allreduce float32[64] SUM", 1),
    ("no flags", AT_ONCE, "nvidia:1,amd:1", {"FAKEGPU_NO_FLAGS": "1"}, "right", 0),
    ("the doctor", DOCTOR, "nvidia:1,amd:1", {"PYTHONPATH": str(FAKEGPU)}, "right", 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "script", "layout", "env", "words", "ranks"),
    CASES,
    ids=[f"{name}, {layout}" for name, _, layout, *_ in CASES],
)
def test_ranks_say_so(
    fakes: Callable[..., Any], fake_crew: Callable[..., Any], name: str, script: str, layout: str, env: dict[str, str],
    words: str, ranks: int,
) -> None:  # fmt: skip
    job = (fakes if script in (AT_ONCE, DOCTOR) else fake_crew)(script, layout, **env)
    assert job.said(words) == (ranks or job.ranks), job.output


def test_a_setting_that_is_about_messages_says_so(fakes: Callable[..., Any]) -> None:
    script = """
import arrays
from ucc_hetero import Communicator
with Communicator() as comm, Communicator(comm) as other:
    pass
"""
    told = fakes(script, "nvidia:1,amd:1", UCCH_STAGING="direct").stderr
    assert told.count("UCCH_STAGING=direct is about messages alone") == 1
    assert "messages alone" not in fakes(script, "nvidia:2", UCCH_STAGING="direct").stderr


def test_tuning_measures_on_devices(fake_crew: Callable[..., Any], tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    script = f"""
import arrays
from ucc_hetero.__main__ import main
assert main(["tune", "--file", {str(table)!r}, "--collective", "allreduce", "--sizes", "512K:512K"]) == 0
"""
    for env in ({}, BY_HOSTS):
        out = fake_crew(script, "nvidia:1,amd:1", **env).stdout
        (measured,) = (line for line in out.splitlines() if line.startswith("allreduce"))
        assert "split_rail" in measured and "tree" in measured, out
        (entry,) = json.loads(table.read_text())["topologies"].values()
        assert all("path" not in rule for rule in entry["rules"])


def test_messages_take_the_way_that_was_measured(fake_crew: Callable[..., Any], tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    tune = f"""
import arrays
from ucc_hetero.__main__ import main
assert main(["tune", "--file", {str(table)!r}, "--collective", "barrier", "--sizes", "1K:512K"]) == 0
"""
    out = fake_crew(tune, "nvidia:2").stdout
    lines = [line for line in out.splitlines() if line.startswith("nvidia-nvidia, one host")]
    assert len(lines) == 4 and all("direct" in line and "staged" in line for line in lines), out
    (entry,) = json.loads(table.read_text())["topologies"].values()
    # Whatever was faster on this machine: from here on a rule of our own.
    entry["messages"] = [{"between": ["nvidia", "nvidia"], "near": True, "from": 4096, "to": 65536, "path": "staged"}]
    data = json.loads(table.read_text())
    data["topologies"] = {next(iter(data["topologies"])): entry}
    table.write_text(json.dumps(data))
    out = fake_crew(device_scripts.WAYS, "nvidia:2", UCCH_TUNE_FILE=str(table)).stdout
    assert out.count(f"staged: [{1 << 14}]") == 2, out
    assert fake_crew(device_scripts.WAYS, "nvidia:2").stdout.count("staged: []") == 2
