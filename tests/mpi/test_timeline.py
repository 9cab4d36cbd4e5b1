"""UCCH_TRACE under a real mpirun: one file of all ranks, which shows the phases and the late rank."""

import json
import random

from ucc_hetero.__main__ import main

FOUR = {"UCCH_EMULATE": "nvidia:2,amd:2", "UCCH_TUNE": "allreduce:0-inf:@split_rail:fragments=4"}


def spans(path):
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def judge(events):
    """Check the phases of the first call, communicators, and the last rank; for two hosts see
    tests/cluster/test_jobs.py."""
    first = [e for e in events if e["args"]["call"] == 1 and e["args"].get("of", "").startswith("allreduce")]
    for rank in range(4):
        mine = {
            (e["cat"], e["args"]["fragment"], e["args"]["stage"])
            for e in first
            if e["pid"] == rank and "with" in e["args"]
        }
        assert mine == {(cat, f, s) for f in range(4) for s, cat in enumerate(("island", "bridge", "island"))}
    assert {tuple(e["args"]["with"]) for e in first if e["cat"] == "bridge"} == {(0, 2), (1, 3)}
    assert {e["args"]["comm"].partition(" ")[2] for e in events if e["name"].startswith("bcast float")} == {
        "of ranks 0-1", "of ranks 2-3"
    }  # fmt: skip
    late = {e["args"]["call"] for e in events if e["cat"] == "wait" and e["name"] == "for rank 1"}
    assert late >= set(range(2, 7)), "rank 1 came last"
    assert not [e["name"] for e in events if e["name"].endswith((" (not finished)", " (failed)"))]


def test_a_job_that_was_killed(mpirun, tmp_path):
    path = tmp_path / "t.json"
    env = FOUR | {"UCCH_TRACE": str(path), "UCCH_TRACE_EVENTS": "1K"}
    done = mpirun("script_cases:recorded", n=4, args=[True], env=env, check=False, timeout=120)
    assert done.returncode != 0
    assert not path.exists()
    assert main(["trace", str(path)]) == 0
    assert {e["pid"] for e in spans(path)} == {0, 1, 2, 3}
    hanging = {e["args"]["call"] for e in spans(path) if e["name"].startswith("allreduce float32[262144] SUM (")}
    assert hanging == {10}


def test_where_nothing_can_be_written_the_job_goes_on(mpirun, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "t.json").mkdir(parents=True)
    done = mpirun(
        "script_cases:recorded",
        n=4,
        args=[False],
        env=FOUR | {"UCCH_TRACE": str(tmp_path / random.choice(["file", "folder"]) / "t.json")},
        timeout=120,
    )
    assert "recording in memory only" in done.stderr
    assert "t.json could not be written" in done.stderr
    assert "own files" not in done.stderr and not any((tmp_path / "folder").glob("*t.json.*")), "there are none"
