"""The random calls and messages of tests/mpi on real GPUs: one vendor, two vendors, and two ranks on one device."""

import secrets
from pathlib import Path

import pytest
from array_kinds import gpus

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.mpi, pytest.mark.timeout(700)]

#: Messages in streams follow NCCL's rules only between two vendors.
MESSAGES = """
import os
from random_messages import by_rules_of_mpi, main
from ucc_hetero import Communicator
with Communicator() as comm:
    by_rules_of_mpi(comm)
print("right", flush=True) if "amd" not in os.environ["FAKEGPU_LAYOUT"] else main()
"""


@pytest.mark.parametrize("program", ["collective_cases:on_devices", MESSAGES], ids=["calls", "messages"])
@pytest.mark.parametrize(("layout", "devices"), [
    ("nvidia:2", 2), ("nvidia:2", 1), ("nvidia:1,amd:1", 1), ("nvidia:1,amd:2", 1),
    ("nvidia:4", 4), ("nvidia:2,amd:2", 4), ("amd:1,nvidia:2,amd:1", 4),
])  # fmt: skip
def test_random(mpirun, hip_over_cuda, layout, devices, program):
    if gpus() < devices:
        pytest.skip(f"needs {devices} NVIDIA GPUs and torch")
    ranks = sum(int(part[-1]) for part in layout.split(","))
    env = {"FAKEGPU_LAYOUT": layout, "CASES_HIP": str(hip_over_cuda), "CASES": "60"}
    env |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))), "UCCH_HOLD": secrets.choice("yn")}
    if devices > 1:  # devices without peer access use host memory
        env |= secrets.choice([{}, {"UCX_TLS": "^cuda_ipc", "NCCL_P2P_DISABLE": "1"}])
    env |= {"MORE_COUNTS": "100001 1000003"}  # long ones, copied by copy engines in several pieces
    env |= {"PYTHONPATH": ":".join(map(str, (*(ROOT / "tests" / each for each in ("gpu", "fakegpu", "mpi")), ROOT)))}
    job = mpirun(program, ranks, env=env, timeout=120, cold=True)
    assert job.said("right") == ranks, (env, job.output)


def test_more_streams_than_queues(mpirun, hip_over_cuda):
    if gpus() < 2:
        pytest.skip("needs 2 NVIDIA GPUs and torch")
    env = {"FAKEGPU_LAYOUT": "nvidia:1,amd:1", "CASES_HIP": str(hip_over_cuda), "UCCH_HOLD": "y"}
    env |= {"UCCH_WIRE_SLOT": "65536", "UCCH_TIMEOUT": "30"}  # messages longer than a ring
    env |= {"PYTHONPATH": ":".join(map(str, (*(ROOT / "tests" / each for each in ("gpu", "fakegpu")), ROOT)))}
    job = mpirun("lane_cases:crowded", 2, args=[40], env=env, timeout=120, cold=True)
    assert job.said("right") == 2, job.output
