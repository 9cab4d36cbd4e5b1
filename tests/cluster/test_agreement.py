"""Ranks of several hosts that refuse calls, or make different ones: all ranks get errors, and none gets another call's
data."""

import random
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("libraries")
CASES = Path(__file__).resolve().parents[1] / "mpi"


@pytest.mark.parametrize("islands", ["one", "three"])
def test_unlike_calls(host_crew, islands):
    # As on hosts with RDMA, so that calls of one island over several hosts are compared, too.
    one = random.choice([((1, 2), ""), ((1, 1, 1), "nvidia:3")])
    slots, vendors = one if islands == "one" else ((2, 2), "nvidia:1,amd:2,nvidia:1")
    env = {"UCCH_TIMEOUT": "300", "UCCH_EMULATE": vendors, "UCCH_FABRIC": "all"}
    done = host_crew("bad_input_cases:mismatches", slots, [False], **env)  # without long blocks
    assert "mismatches noticed" in done.stdout, done.output


@pytest.mark.parametrize(("script", "args", "said"), [
    (CASES / "refusal_cases.py", ["20"], "mistakes told"), ("bad_input_cases:given_up", [], ""),
], ids=["random", "given up"])  # fmt: skip
def test_refusals(host_crew, script, args, said):
    done = host_crew(script, (2, 2), args, UCCH_TIMEOUT="300")
    assert said in done.stdout, done.output


def test_communicators_in_another_order(host_crew):
    host_crew("bad_input_cases:order", (2, 2), [True], UCCH_EMULATE="nvidia:2,amd:2")
