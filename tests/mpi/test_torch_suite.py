"""A sample of torch's own ``DistributedTest``; ``make suites`` runs all of it."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "suites"))
import torch_suite

pytestmark = pytest.mark.timeout(1300)

#: A method of each kind: collectives with the profiler's events, messages, objects, groups, time limits, DDP.
SAMPLE = [
    "test_all_gather_coalesced_with_empty", "test_all_reduce_coalesced_sum", "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_sum_async", "test_all_to_all_single_unequal_split", "test_barrier_timeout_global",
    "test_ddp_logging_data_cpu", "test_gather_object", "test_isend_torch_profiler", "test_get_rank_size_group",
    "test_scatter_group", "test_send_recv_any_source_autograd_profiler", "test_sparse_all_reduce_sum",
]  # fmt: skip


def test_a_sample_of_torchs_own_tests(pythons, request):
    names = random.sample(SAMPLE, 5)
    results = torch_suite.run_all(torch_suite.Way("ucch", "nvidia:2,amd:2"), names, 4, pythons.of(request.path, {}))
    assert {name: (each.outcome, each.text) for name, each in results.items()} == dict.fromkeys(names, ("passed", ""))
