"""A random sample of mpi4py's own tests and types through this package; ``make suites`` runs all of them."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import mpi4py_suite
from mpi4py_suite import SourceMissing, judge, refusals

SAMPLE = (
    "test_p2p_buf.*WorldDup.testPro*", "test_p2p_buf.*WorldDup.test[SC]*", "test_p2p_buf_matched.*World.*",
    "test_p2p_buf_part.*World.testRing", "test_cco_ngh_buf.*Self.*", "test_cco_pr_ngh_buf.*WorldDup.*",
    "test_cco_vec.*World.*v2", "test_cco_nb_buf.*InplaceWorld.*Scatter*", "test_msgzero.*",
)  # fmt: skip


@pytest.mark.mpi
@pytest.mark.usefixtures("hooked")
def test_sample():
    layout, listed, seed = "3 of two vendors", refusals(), str(random.randrange(10**6))
    try:
        results = mpi4py_suite.run(layout, listed, random.sample(SAMPLE, 4), call=60, types=seed)
    except SourceMissing as error:
        pytest.skip(f"needs mpi4py's source distribution from a package index: {error}")
    verdict = judge(layout, results, listed)
    assert not verdict.wrong, "\n".join([f"types by the seed {seed}", *verdict.wrong])
    assert verdict.counts["passed"] > 3, verdict.counts
