"""Shared by the torch jobs: runs every case of a job on all ranks, prints failures, and sets the exit status."""

import faulthandler
import os
import sys
import traceback
import warnings

import torch
import torch.distributed as dist

#: Device of the tensors of all cases; jobs on GPUs are started by tests/gpu.
DEVICE = os.environ.get("CASES_DEVICE", "cpu")
if hip := os.environ.get("CASES_HIP"):  # the second half of the ranks uses this runtime (tests/hipcuda)
    last = 2 * int(os.environ["OMPI_COMM_WORLD_RANK"]) >= int(os.environ["OMPI_COMM_WORLD_SIZE"])
    os.environ |= (
        {"UCCH_CUDA_LIB": "none", "UCCH_HIP_LIB": hip, "HIP_ENABLE_DEFERRED_LOADING": "0", "UCCH_HOLD": "y"}
        if last
        else {"UCCH_HIP_LIB": "none"}
    )
TWO_VENDORS = bool(hip)
if DEVICE != "cpu":
    torch.cuda.set_device(int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.set_default_device(DEVICE)

CASES = []


def case(function):
    CASES.append(function)
    return function


def data(rank, shape, dtype=torch.float32, scale=5):
    generator = torch.Generator("cpu").manual_seed(1000 + rank)
    whole = torch.randint(1, scale, tuple(shape), generator=generator, device="cpu").to(DEVICE)
    return whole.bool() ^ (whole > 2) if dtype == torch.bool else whole.to(dtype)


#: Types that torch itself cannot compare.
_UNCOMPARABLE = {torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32}


def same(got, want, what=""):
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{what}: {got.dtype}{got.shape} {want.dtype}{want.shape}"
    )
    if got.dtype in _UNCOMPARABLE:
        got, want = (t.contiguous().reshape(-1).view(torch.uint8) for t in (got, want))
    got, want = got.cpu(), want.cpu()  # where every type can be compared
    assert torch.equal(got, want), f"{what}: got {got.flatten()[:8]}, want {want.flatten()[:8]}"


def close(got, want, tolerance, what):
    assert abs(got - want) <= tolerance * max(abs(want), 1e-30), f"{what}: {got!r}, want {want!r}"


def main(job=None):
    """Run the cases named on the command line, or all. Rank 0 prints a line for each."""
    faulthandler.dump_traceback_later(float(os.environ.get("CASES_LIMIT", "560")), exit=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = [each for each in CASES if not sys.argv[1:] or each.__name__ in sys.argv[1:]]
    bad = 0
    for each in chosen:
        failure = ""
        try:
            each()
        except Exception:
            failure = traceback.format_exc()
            # At once: other ranks may wait for this one, so there may be no summary.
            print(f"rank {dist.get_rank()}, {each.__name__}: {failure}", file=sys.stderr, flush=True)
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        found = [f"rank {r}: {text}" for r, text in enumerate(failures) if text]
        bad += bool(found)
        if dist.get_rank() == 0:
            print("FAILED" if found else "ok", each.__name__, *found[:1], flush=True)
        if found:
            break  # unfinished calls of a failed case would disturb later ones
    dist.destroy_process_group()
    if bad:
        sys.exit(1)
