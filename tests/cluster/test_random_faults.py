"""A sample of the random faults of tests/faults, which can run many (docs/faults.md)."""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.faults.__main__ import line
from tests.faults.judge import run
from tests.faults.menu import draw


@pytest.mark.usefixtures("libraries", "hosts", "ulfm")
def test_all_who_live_have_an_answer(room, pythons, fakegpu, request):
    """Correct, or an error in time: four jobs with different shapes, faults and moments, new ones in every run."""
    seed = random.randrange(10**6)  # follows TESTS_DRAW, like all random choices of tests
    trial = partial(run, fakes=fakegpu, room=room, python=pythons.of(request.path, {}))
    with ThreadPoolExecutor(3) as pool:
        verdicts = list(pool.map(trial, map(draw, range(seed, seed + 4))))
    said = [f"{line(each)}\n{each.output * bool(each.failures)}" for each in verdicts]
    assert not any(each.failures for each in verdicts), "\n".join(said)
