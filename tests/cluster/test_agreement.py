"""Ranks of several hosts that refuse calls, or make different ones: all ranks get errors, and none gets another call's
data."""

import random

import pytest

pytestmark = pytest.mark.usefixtures("libraries")


@pytest.mark.parametrize("islands", ["one", "three"])
def test_unlike_calls(host_crew, islands):
    # As on hosts with RDMA, so that calls of one island over several hosts are compared, too.
    one = random.choice([((1, 2), ""), ((1, 1, 1), "nvidia:3")])
    slots, vendors = one if islands == "one" else ((2, 2), "nvidia:1,amd:2,nvidia:1")
    env = {"UCCH_TIMEOUT": "300", "UCCH_EMULATE": vendors, "UCCH_FABRIC": "all"}
    done = host_crew("bad_input_cases:mismatches", slots, [False], **env)
    assert "mismatches noticed" in done.stdout, done.output


@pytest.mark.parametrize(("case", "args", "env"), [
    ("refusal_cases:main", [20], {}), ("bad_input_cases:given_up", [], {}),
    ("bad_input_cases:order", [True], {"UCCH_EMULATE": "nvidia:2,amd:2"}),
], ids=["random mistakes", "given up", "communicators in another order"])  # fmt: skip
def test_refusals(host_crew, case, args, env):
    host_crew(case, (2, 2), args, UCCH_TIMEOUT="300", **env)
