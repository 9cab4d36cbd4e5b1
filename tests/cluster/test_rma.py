"""Put, get and notify between hosts: between ranks, and between agents one of which is lost."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .test_hosts_lost import OUTSIDE

HERE = Path(__file__).parent
JOB = [sys.executable, str(HERE / "agent_job.py")]


@pytest.mark.usefixtures("libraries")
def test_everybody_reaches_everybody(host_crew):
    host_crew("rma_cases:main", (2, 2))


@pytest.mark.usefixtures("libraries")
def test_nothing_grows(host_crew):
    """Workers that are closed leave nothing; between the same two processes the next ones use the same connections."""
    counts = {"collectives": 2000, "communicators": 20, "transfers": 12, "groups": 0, "refusals": 0, "failures": 0}
    job = host_crew("tools/soak.py", (1, 1), args=[f"--{kind}={count}" for kind, count in counts.items()])
    assert job.stdout.count("more rounds") == 3 and "grown" not in job.stdout, job.output


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("device_page_cases:all_kinds 70", "nvidia:1,amd:1"), ("device_page_cases:all_kinds 70", "host:1,nvidia:1"),
        ("device_rma_cases:everything", "nvidia:1,amd:1"),
    ],
    ids=["pages", "pages of the host", "pieces"],
)  # fmt: skip
def test_pages_between_hosts(on_crew, case, layout):
    """Pieces, and all layouts, types and heads of tests/native, from one vendor's host to the other's."""
    name, *args = case.split()
    on_crew(name, layout, 2, 1, args)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("fault", ["kill", "outside"])
def test_an_agent_is_lost(emulate, launch, appear, tmp_path, room, fault):
    """Only transfers with it fail. `test_hosts_lost` tests external faults."""
    fault = random.choice([*OUTSIDE]) if fault == "outside" else fault
    cluster = emulate(hosts=3, slots=1, rate="none")
    dead, _ = (launch(cluster, host, [*JOB, "serve"]) for host in (1, 2))
    user = launch(cluster, 0, [*JOB, "use", str(tmp_path)])
    appear([tmp_path / "ready"], [user], 100)
    (tmp_path / "fault").write_text(repr(time.time()))
    OUTSIDE[fault](cluster, 1) if fault in OUTSIDE else dead.kill()
    out = user.communicate(timeout=100 * room)[0]
    assert "lost: " in out and "right" in out, out


@pytest.mark.usefixtures("libraries")
def test_a_host_that_is_gone_does_not_stop_who_connects(emulate, launch, appear, tmp_path, room):
    """The transfer fails by its own deadline, long before TCP gives up."""
    cluster = emulate(hosts=2, slots=1, rate="none")
    roles = [launch(cluster, host, [*JOB, what, str(tmp_path)]) for host, what in enumerate(("meet", "be"))]
    appear([tmp_path / "ready", tmp_path / "address"], roles)
    OUTSIDE["hole"](cluster, 1)
    (tmp_path / "fault").touch()
    out = roles[0].communicate(timeout=60 * room)[0]
    assert "right: " in out, out


@pytest.mark.usefixtures("libraries")
def test_agents_of_one_host_are_lost_in_puts(tmp_path, room):
    """An agent that closes its worker just then continues: unsent data of libucp ended it in one death of twenty."""
    done = subprocess.run(
        [*JOB, "outlive", str(tmp_path)], capture_output=True, text=True, timeout=100 * room, check=False
    )
    assert done.returncode == 0 and "right" in done.stdout, done.stdout + done.stderr
