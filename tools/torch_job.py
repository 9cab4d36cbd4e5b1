"""Jobs of the torch benchmarks: starts mpirun, and prepares ranks that use their GPU through HIP.

A benchmark's script is also the program of its jobs; ``--child`` names the file into which rank 0 writes its results.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)

#: Runs as root, on few cores, without binding: threads of torch, autograd and this package need cores. Open MPI's
#: names.
_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
#: Prefixes of the variables that are recorded with results.
_SETTINGS = ("UCC", "UCX_", "NCCL_", "CUDA_MOD", "CUDA_DEV")


def mpirun() -> str:
    """Return the program that starts jobs."""
    beside = Path(sys.executable).parent / "mpirun"
    found = os.environ.get("MPIRUN") or (str(beside) if beside.exists() else shutil.which("mpirun"))
    if found is None:
        sys.exit("no mpirun: install the extra 'mpi', or an MPI, or set MPIRUN")
    return found


def job(
    script: str, ranks: int, arguments: Sequence[str], environment: Mapping[str, str], seconds: float
) -> dict[str, Any]:
    """Run a script as a separate job; return what rank 0 wrote, with ``error`` if the job failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [mpirun(), "-n", str(ranks), sys.executable, script, "--child", str(out), *arguments]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {"OMP_NUM_THREADS": "1", **os.environ, **_MPI, "PYTHONPATH": path, **environment}
        start = time.monotonic()
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(command, env=env, stdout=sink, stderr=subprocess.STDOUT)
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.terminate()  # mpirun then ends its ranks
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()
                status = None
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        found["wall"] = round(time.monotonic() - start, 1)
        if status != 0:
            ended = f"not done after {seconds:g} s" if status is None else f"status {status}"
            found["error"] = f"{ended}: " + "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        return found


def parser(about: str | None, ranks: int, limit: int, backends: str = "") -> argparse.ArgumentParser:
    """Command line that these programs share; ``ranks`` is 0 if mpirun starts them, ``backends`` are the jobs."""
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if ranks:
        found.add_argument("--ranks", type=int, default=ranks, help=f"(default: {ranks})")
    found.add_argument("--amd", default="", help="ranks that use the HIP runtime, in the mixed job, such as 2,3")
    found.add_argument("--hip", default="", help="the HIP runtime library of those ranks")
    found.add_argument("--limit", type=float, default=limit, help=f"seconds that a job may take (default: {limit})")
    found.add_argument("--json", default="", help="write the results here")
    found.add_argument("--child", default="", help=argparse.SUPPRESS)
    found.set_defaults(backend="mixed")
    if backends:
        found.add_argument("--backends", default="", help=f"some of {backends} (default: all that can run)")
        found.add_argument("--backend", default="", help=argparse.SUPPRESS)
    return found


def one_job(script: str, options: argparse.Namespace, names: str, table: Callable[[list[dict[str, Any]]], str]) -> int:
    """Run a script as one job, print ``table`` of its rows, and write ``--json``; return 1 if it failed.

    ``names``: options that the job gets beside the shared ones."""
    words = words_of(options, f"ranks amd hip limit {names}")
    found = job(script, options.ranks, words, {}, options.limit)
    print(table(found.get("rows", [])), found.get("error", ""), sep="\n")
    if options.json:
        write(options.json, {"command": sys.argv, **found})
    return int("error" in found)


def every_backend(script: str, options: argparse.Namespace, usual: Sequence[str], names: str) -> dict[str, Any]:
    """Run one job for each requested backend, and write results after each; ``names`` are options passed to jobs."""
    words = words_of(options, f"ranks amd hip limit {names}")
    found: dict[str, Any] = {}
    for backend in options.backends.split(",") if options.backends else usual:
        print(f"# {backend}", file=sys.stderr, flush=True)
        environment = mixed_environment(options.ranks, options.amd) if backend == "mixed" else {}
        found[backend] = job(script, options.ranks, [*words, "--backend", backend], environment, options.limit)
        if options.json:
            write(options.json, {"command": sys.argv, "backends": found})
    return found


def status(found: Mapping[str, Any]) -> int:
    """Print which backends failed; return 1 if a ucch job did."""
    for name, each in found.items():
        if "error" in each:
            print(f"{name}: {each['error']}")
    return int(any("error" in found.get(name, {}) for name in ("ucch", "mixed")))


def words_of(options: argparse.Namespace, names: str) -> list[str]:
    """Return the options of these names as words of a command line."""
    return [word for name in names.split() for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]


def mixed_environment(ranks: int, amd: str) -> dict[str, str]:
    """Return the environment of a job of two vendors: :func:`begin` prepares GPUs; without GPUs vendors are
    emulated."""
    half = ranks // 2
    return {} if amd else {"UCCH_EMULATE": f"nvidia:{ranks - half},amd:{half}"}


def find_examples() -> None:
    """Make the modules of examples/ importable, and this package if it is not installed."""
    examples = ROOT / "examples"
    if not examples.exists():
        sys.exit(f"{sys.argv[0]} trains the models of examples/ and needs a clone of the repository")
    sys.path += [str(examples), str(ROOT)]


def begin(amd: str, hip: str, seconds: float) -> Any:
    """Prepare a rank before this package is loaded; returns torch.

    ``amd``: the ranks, such as "2,3", that use their GPU through the HIP runtime library ``hip`` (tests/hipcuda).
    After ``seconds`` the rank prints its stacks and ends.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    find_examples()
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # torch initialises CUDA before the backend can set these
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    sides = {int(rank) for rank in amd.split(",") if rank}
    if sides:
        os.environ["UCCH_CUDA_LIB" if RANK in sides else "UCCH_HIP_LIB"] = "none"
        if RANK in sides:
            os.environ["UCCH_HIP_LIB"] = hip
            os.environ.setdefault("HIP_ENABLE_DEFERRED_LOADING", "0")  # the rank sees several devices
            os.environ.setdefault("UCCH_HOLD", "y")  # its streams are CUDA streams (docs/gpu.md)
    from ucc_hetero.native.libraries import load

    load()  # before MPI and torch, which load their own libraries
    import torch

    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(RANK % torch.cuda.device_count())
    return torch


def join(options: argparse.Namespace, seconds: float = 30) -> Any:
    """Initialise a rank of its backend's job, in a process group with this timeout; return torch."""
    torch = begin(options.amd if options.backend == "mixed" else "", options.hip, options.limit - 5)
    import ucc_hetero.torch  # noqa: F401  registers

    if torch.cuda.is_available() and torch.cuda.device_count() < options.ranks:
        os.environ["NCCL_HOSTID"] = f"host-of-{RANK}"  # NCCL refuses two ranks of a host on one device
    ours = options.backend in ("ucch", "mixed")
    torch.distributed.init_process_group("ucch" if ours else options.backend, timeout=timedelta(seconds=seconds))
    return torch


def about(torch: Any, ranks: int) -> dict[str, Any]:
    """Return where results come from: machine, versions, settings."""
    out: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "ranks": ranks, "processors": os.cpu_count(),
        "torch": torch.__version__, "python": platform.python_version(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_SETTINGS)},
    }  # fmt: skip
    if torch.cuda.is_available():
        out |= {"gpu": torch.cuda.get_device_name(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return out


def ratio(one: float | None, two: float | None) -> str:
    """Format ``one`` as a share of ``two`` for a table."""
    return f"{one / two:8.1%}" if one and two else "       -"


def write(path: str, data: Mapping[str, Any]) -> None:
    """Write results into a file atomically."""
    part = Path(f"{path}.part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(path)
