"""Shared by modules of torch cases: the process group of all ranks, and what runs the cases."""

import faulthandler
import importlib
import os
import random
import warnings
from datetime import timedelta

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

if os.environ.get("CASES_REHEARSE"):
    import torch_rehearsal  # noqa: F401  groups of one emulated vendor are torch's own


def join():
    """Make the process group of all ranks, unless a module of cases has done so."""
    if not dist.is_initialized():
        import ucc_hetero.torch  # noqa: F401  registers the backend, for the device chosen above

        dist.init_process_group("ucch", timeout=timedelta(seconds=100))


join()
R, N = dist.get_rank(), dist.get_world_size()


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


def run(modules, names=(), without=(), seed=None):
    """Run the cases of modules: functions named ``case_…``. Rank 0 prints each that has passed.

    Args:
        names: Which, in this order; all by default.
        without: Those that are left out.
        seed: If not None, half of them are drawn.
    """
    faulthandler.dump_traceback_later(float(os.environ.get("CASES_LIMIT", "560")), exit=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    join()
    known = {name: case for module in modules for name, case in vars(importlib.import_module(module)).items()}
    chosen = names or [name for name in known if name.startswith("case_") and name not in without]
    for name in chosen if seed is None else random.Random(seed).sample(chosen, (len(chosen) + 1) // 2):
        known[name]()
        if R == 0:
            print(name, flush=True)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
