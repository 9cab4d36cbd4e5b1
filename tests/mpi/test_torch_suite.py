"""A sample of torch's own ``DistributedTest``; ``make suites`` runs all of it."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1300)

SUITE = Path(__file__).parents[1] / "suites" / "torch_suite.py"

#: A method of each kind: collectives with the profiler's events, messages, objects, groups, time limits, DDP.
SAMPLE = [
    "test_all_gather_coalesced_with_empty", "test_all_reduce_coalesced_sum", "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_sum_async", "test_all_to_all_single_unequal_split", "test_barrier_timeout_global",
    "test_ddp_logging_data_cpu", "test_gather_object", "test_isend_torch_profiler", "test_get_rank_size_group",
    "test_scatter_group", "test_send_recv_any_source_autograd_profiler", "test_sparse_all_reduce_sum",
]  # fmt: skip


def test_a_sample_of_torchs_own_tests(program) -> None:
    command = [sys.executable, str(SUITE), *SAMPLE, "--no-control", "--emulate", "nvidia:2,amd:2"]
    job = program(command, 1200)
    assert job.returncode == 0, job.stdout + job.stderr
    assert f"{len(SAMPLE)} passed, 0 failed, 0 skipped" in job.stdout
