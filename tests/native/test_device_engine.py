"""Collectives on device memory, over the fake GPU library: real UCC, UCX, plans and engine; asynchronous devices."""

import json
import os
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


@pytest.mark.parametrize("layout, env", [
    ("nvidia:2", {}), ("nvidia:1,amd:2", {}), ("nvidia:1,amd:2", BY_HOSTS),
])  # fmt: skip
def test_random_mistakes(fake_crew: Callable[..., Any], layout: str, env: dict[str, str]) -> None:
    """Of one rank, or of all: all say who has refused what."""
    env = {"UCCH_TIMEOUT": "300", **env, **device_scripts.OWN_QUEUES}
    assert fake_crew(device_scripts.MISTAKES, layout, **env).said("15 mistakes told") == 1


@pytest.mark.parametrize("layout, env", [
    ("nvidia:2", {}), ("nvidia:1,amd:2", {}), ("nvidia:1,amd:2", BY_HOSTS),
])  # fmt: skip
def test_streams(fake_crew: Callable[..., Any], layout: str, env: dict[str, str]) -> None:
    # Streams are held in any order there, by threads that use a communicator each.
    result = fake_crew(device_scripts.STREAMS, layout, **env, **device_scripts.OWN_QUEUES)
    assert "right" in result.stdout


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


@pytest.mark.parametrize("layout, env", [("nvidia:2", {}), ("nvidia:1,amd:2", {}), ("nvidia:1,amd:2", BY_HOSTS)])
def test_counts_of_uneven_calls_keep_step_with_refusals(
    fake_crew: Callable[..., Any], layout: str, env: dict[str, str]
) -> None:
    """In streams, too, and where ranks hear of the refusal before they have begun."""
    script = """
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
    ranks = 3 if "amd" in layout else 2
    assert fake_crew(script, layout, **env).said("right") == ranks


@pytest.mark.parametrize("env", [device_scripts.OWN_QUEUES, device_scripts.FEW_QUEUES], ids=["streams", "hosts"])
def test_calls_by_way_of_the_host_keep_their_order_in_a_stream(
    fake_crew: Callable[..., Any], env: dict[str, str]
) -> None:
    """Nobody waits for their requests; streams wait for their ends, or hosts where streams must not."""
    script = """
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
    assert fake_crew(script, "nvidia:1,amd:2", **BY_HOSTS, **env).said("right") == 3


def test_refusals(fake_crew: Callable[..., Any]) -> None:
    result = fake_crew(device_scripts.REFUSALS, "nvidia:1,amd:1")
    assert result.said("right") == 2
    assert "mismatch" in result.stdout


def test_a_timeout_lets_the_stream_go(fake_crew: Callable[..., Any]) -> None:
    result = fake_crew(device_scripts.TIMEOUT, "nvidia:1,amd:1", **BY_HOSTS)
    assert "right: rank 0: allreduce float32[64] SUM" in result.stdout


def test_streams_that_cannot_be_held(fakes: Callable[..., Any]) -> None:
    script = """
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
    done = fakes(script, "nvidia:1,amd:1", FAKEGPU_NO_FLAGS="1")
    assert done.said("right") == 2


def test_the_doctor_measures_in_device_memory(fakes: Callable[..., Any]) -> None:
    """As installed: mpi_launch is a part of the package only there."""
    script = """
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
    folders = [str(FAKEGPU), *filter(None, [os.environ.get("PYTHONPATH")])]
    assert fakes(script, "nvidia:1,amd:1", PYTHONPATH=os.pathsep.join(folders)).said("right") == 2


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
