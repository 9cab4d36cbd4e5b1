"""Collectives and messages of a torch group on device memory, over the fake GPU library."""

import random

import pytest
from settings import FEW_QUEUES, OWN_QUEUES

JOB = "tests/fakegpu/torch_calls_job.py"


pytestmark = pytest.mark.usefixtures("with_torch")
PAIR, BY_HOSTS = "nvidia:1,amd:1", {"UCCH_CHANNELS": "n"}
CASES = [
    (JOB, "nvidia:1,amd:2", {"QUEUED": "y", **OWN_QUEUES}), (JOB, "nvidia:2", OWN_QUEUES),
    (JOB, PAIR, {**BY_HOSTS, **FEW_QUEUES}), ("torch_device_cases:repeated", "nvidia:2", {}),
    *(("torch_device_cases:repeated", PAIR, env) for env in (OWN_QUEUES, FEW_QUEUES, BY_HOSTS)),
    ("torch_device_cases:captured", "nvidia:1,amd:2", OWN_QUEUES), ("torch_device_cases:nested", PAIR, OWN_QUEUES),
    ("torch_device_cases:beside", PAIR, OWN_QUEUES), ("torch_device_cases:mistakes", PAIR, OWN_QUEUES),
    # In a group of two vendors: which path is taken, and errors.
    *(("torch_device_cases:fabric", "nvidia:3,amd:1", {"UCCH_TORCH_VENDOR": own, **OWN_QUEUES}) for own in "yn"),
]  # fmt: skip


#: The first ones end their processes, and the last one uses a torch backend that other groups must not have.
OF_ITS_OWN = JOB, "torch_device_cases:nested", "torch_device_cases:fabric"


@pytest.mark.parametrize(("script", "layout", "env"), CASES, ids=[f"{each[0]}, {each[1]}" for each in CASES])
def test_every_rank_is_right(fakes, fake_crew, script, layout, env):
    env = {"DICE": str(random.randrange(1000)), **env}
    if script in OF_ITS_OWN:
        job = fakes(script, layout, mpi={"check": script is not JOB}, **env)
    else:
        job = fake_crew(script, layout, **env)
    assert script is not JOB or job.said("right") == job.ranks, job.output
