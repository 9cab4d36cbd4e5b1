"""What the library is for: hosts of two vendors' devices, and a network between them; on the fake GPU library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import device_scripts
import pytest

from ucc_hetero.launch.emulate import Cluster

#: Each host has one vendor's devices, or each has both.
APART, MIXED = "nvidia:2,amd:2", "nvidia:1,amd:2,nvidia:1"


@pytest.mark.parametrize(
    "script, layout, path",
    [
        ("COLLECTIVES", APART, "direct"),
        ("COLLECTIVES", APART, "staged"),
        ("COLLECTIVES", MIXED, "staged"),
        ("MESSAGES", APART, "auto"),
        ("MESSAGES", MIXED, "staged"),
        ("STREAMS", APART, "staged"),
    ],
)
def test_devices_of_two_hosts(
    cluster: Cluster,
    fake_environment: Callable[[str], dict[str, str]],
    tmp_path: Path,
    script: str,
    layout: str,
    path: str,
) -> None:
    job = tmp_path / "job.py"
    job.write_text(getattr(device_scripts, script))
    env = fake_environment(layout) | {"UCCH_STAGING": path, "UCCH_TIMEOUT": "200"}
    env |= device_scripts.OWN_QUEUES if script == "STREAMS" else {}  # it holds streams in any order
    done = cluster.mpirun([sys.executable, str(job)], env=env, timeout=120)
    assert done.returncode == 0 and done.stdout.count("right") == 4, done.stdout + done.stderr
