"""Modules and functions of cases, with their numbers of ranks and layouts of vendors, on one host.

Random calls are in test_collectives.py; tests/cluster runs the same cases between hosts.
"""

import importlib.util
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from ucc_hetero.native.libraries import lib
from ucc_hetero.planner.algorithms import ranking

HERE = Path(__file__).parent
#: A job that waits for a deadline is killed before that.
NEVER, SOON = {"UCCH_TIMEOUT": "1000"}, {"UCCH_TIMEOUT": "0.5"}
MIXED, IN_TURN = (4, "nvidia:2,amd:2"), (4, "nvidia:1,amd:1,nvidia:1,host:1")


class Cases(NamedTuple):
    """A function of a module, and layouts of ranks, one of which is drawn."""

    case: str
    layouts: Sequence[tuple[int, str]]
    args: Sequence[str] = ()
    env: Mapping[str, str] = NEVER
    job: Mapping[str, str] = {}


def of(module, *layouts, **more):
    return Cases("cases:run_module", layouts, [f"{module}_cases"], **more)


CASES = {
    "communicators": of("communicator", (3, ""), IN_TURN), "neighbourhoods": of("neighbour", (3, ""), MIXED),
    "requests": of("request", (3, ""), IN_TURN), "messages, by shared memory": of("message", (2, "")),
    "messages, mixed": of("message", MIXED),
    # Other protocols with other thresholds.
    "messages, by sockets": of("message", (3, "nvidia:1,amd:2"), job={"UCX_TLS": "tcp,self"}),
    "one-sided, alone": Cases("rma_cases:main", [(1, "")]), "one-sided": Cases("rma_cases:main", [(3, "")]),
    # Without copies between processes by the kernel.
    "one-sided, without cma": Cases("rma_cases:main", [(2, "")], env=NEVER | {"UCX_TLS": "^cma"}),
    **{f"thin bindings, {case}": Cases(f"bindings_cases:{case}", [(3, "")])
       for case in ("calls", "number_of_teams", "messages")},
    # Repeated with a single call into C, and carried by the arrival board within a host.
    **{f"short calls, {case}": Cases(f"short_cases:{case}", [(2, "")])
       for case in ("known", "few_files", "few_frames", "own_operations")},
    "short calls, few_frames, mixed": Cases("short_cases:few_frames", [MIXED]),
    "short calls, ahead": Cases("short_cases:ahead", [(3, "")]),
    **{f"mistakes, {what}": Cases(f"bad_input_cases:{what}", [(4, ""), MIXED])
       for what in ("arguments", "order", "mismatches", "given_up", "absent")},
    **{f"failures, {case}": Cases(f"p2p_cases:{case}", [(2, "")], env={"UCCH_TIMEOUT": "200"})
       for case in ("what_never_comes", "freed_by_the_receiver", "received_by_the_wrong_method", "interrupts",
                    "handlers")},
    **{f"processes, {case}": Cases(f"ends_cases:{case}", [(2, "")]) for case in ("forked_child_is_refused", "deaf")},
    "a call that failed is no call that a rank is in": Cases("bad_input_cases:in_no_other_call", [(2, "")], env=SOON),
    # A mistake of one rank ends the communicator on all; a mistake of all ranks ends nothing.
    **{f"random mistakes, {layout or 'one vendor'}": Cases("refusal_cases:main", [(ranks, layout)], [25])
       for ranks, layout in ((2, ""), (3, "nvidia:2,amd:1"))},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases(crew, name):
    """The case succeeds, and UCX logs no complaint."""
    cases = CASES[name]
    ranks, layout = random.choice(cases.layouts)
    done = crew(cases.case, ranks, args=cases.args, layout=layout, env=cases.env, job=cases.job, timeout=150)
    assert not name.startswith(("communicators", "neighbour", "requests", "messages")) or not re.search(
        "WARN|ERROR", done.stderr
    ), done.output


EXAMPLES = re.findall(r"^```python\n(.*?)^```", (HERE.parents[1] / "docs/bindings.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("code", EXAMPLES, ids=["ucc", "ucx"])
def test_example_of_the_thin_bindings(crew, code):
    crew(code, 3, timeout=90)


def test_planner_and_engine_mean_the_same_short_calls():
    limits = int(lib.UCCH_PARCEL_BYTES), int(lib.UCCH_PARCEL_RANKS)
    assert limits == (ranking.PARCEL_LIMIT, ranking.MOST_WITH_PARCELS)


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX: pip install jax")
def test_sent_from_jax(mpirun):
    mpirun("script_cases:jax_arrays", 3, env={"UCCH_EMULATE": "nvidia:2,amd:1"}, timeout=120)
