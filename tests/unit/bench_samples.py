"""One small result file of each kind, as the programs write them."""

from typing import Any

from ucc_hetero.bench.result_file import FORMAT

_HEAD = {
    "format": FORMAT,
    "command": ["python", "-m", "ucc_hetero.bench", "x", "--json", "a b.json"],
    "date": "2026-01-02T03:04:05+00:00",
    "machine": {"cpu": "A CPU", "cores": 4, "load": 0.5},
    "versions": {"python": "3.12.1", "libucx-cu12": "1.22.0", "mpi": "Open MPI v5.0.11, package: someone's"},
    "source": {"commit": "0123456789abcdef", "changed": True},
    "settings": {"UCCH_EMULATE": "nvidia:2,amd:2", "OMPI_MCA_btl": "self,sm"},
    "job": {"ranks": 4, "nodes": 1, "memory": ["host"] * 4},
}
_RATIO = {"value": 1.5, "low": 1.4, "high": 1.6}


def _osu() -> dict[str, Any]:
    rows = [
        {
            "dtype": "int8", "size": 8 << (5 * k), "value": 10.0 * 4**k, "percentiles": [],
            "plan": ("tree", "split_rail")[k] + " (default)",
            "peers": {"mpi4py": {"value": 15.0 * 4**k, "ratio": _RATIO, "verdict": "faster"}},
            "limit": 2.0 * 4**k, "of_limit": 0.2,
        }
        for k in range(2)
    ]  # fmt: skip
    more = {"family": "blocking", "unit": "us", "backend": "ours", "percentiles": [], "plans": "nvidia[0-1]@0\nx: tree"}
    return {**_HEAD, "benchmark": "osu_allreduce", **more, "rows": rows}


def _overlap() -> dict[str, Any]:
    rows = [{"dtype": "int8", "size": 8, "value": 30.0, "overlap": {"pure": 12.0, "percent": 75.0}}]
    more = {"family": "nonblocking", "unit": "us", "backend": "ours"}
    return {**_HEAD, "benchmark": "osu_iallreduce", **more, "rows": rows}


def _compare() -> dict[str, Any]:
    series = [
        {"peer": name, "form": form, "us": us, "spread": 0.1, "rounds": [us, us]}
        for name, form, us in (("ours", "blocking", 2.0), ("ours", "persistent", 1.0), ("mpi4py", "blocking", 3.0))
    ]
    ratios = [{"of": "mpi4py", "to": "ours", **_RATIO, "verdict": "too noisy"}]
    figures = {"import_ms": [130.0], "creation_ms": {"ours": [50.0, 2.0], "mpi4py": [0.1]}}
    rows = [{"size": size, "series": series, "ratios": ratios} for size in (8, 4096)]
    more = {"collective": "allreduce", "dtype": "float32", "unit": "us"}
    return {**_HEAD, "benchmark": "compare", **more, "rows": rows, "figures": figures, "rounds": 2}


def _cluster() -> dict[str, Any]:
    rows = [
        {
            "collective": "allreduce", "nbytes": 64 << 20, "limit": 0.134, "target": target,
            "median": {"ours": 0.14, "mpi4py": 0.3}, "least": {"ours": 0.137, "mpi4py": 0.29},
        }
        for target in (1.05, 0.0)
    ]  # fmt: skip
    cases = [{"case": "2x2", "rows": rows, "goodput": [5e8, 5e8]}]
    return {**_HEAD, "benchmark": "cluster", "job": {}, "unit": "s", "cases": cases}


def _gpu() -> dict[str, Any]:
    row = {"bytes": 65536, "blocking": 120.0, "stream": 100.0, "issue": 90.0, "nccl": 50.0, "busbw GB/s": 0.8}
    rows = [row, {"collective": "bcast", **row, "gloo": 400.0, "of nccl": 0.5, "of gloo": 4.0}]
    about = {"date": "2026-01-02", "gpu": "GPU 1", "ranks": 4, "ucc": "1.4.0", "ucx": "1.22.0", "torch": "2.11.0"}
    environment = {"UCCH_STAGING": "staged", "UCX_MODULE_DIR": "/x", "UCCHB_UCC_CLS": "basic", "UCCH_CUDA_LIB": ""}
    more = {"command": ["./gpu_allreduce.py", "--amd", "2,3"], "environment": environment, "wrong": []}
    return {**about, **more, "topology": "nvidia[0-1]@0 amd[2,5-6]@0", "rows": rows}


def _kv_transfer() -> dict[str, Any]:
    row = {"way": "layout", "block_size": 16, "pages": 64, "concurrency": 4, "bytes": 1 << 26}
    more = {
        "unit": "GB/s",
        "layers": 4,
        "heads": 8,
        "dim": 128,
        "rows": [{**row, "gbs": 2.5, "best": 3.125, "ms": 1.75}],
    }
    return {**_HEAD, "benchmark": "kv_transfer", **more}


_COSTS = {"ours": {"issue": 1.5, "time": 2.0}, "mpi4py": {"issue": 3.0, "time": 4.0}}
#: kind -> data of a file
SAMPLES: dict[str, dict[str, Any]] = {
    "osu": _osu(), "overlap": _overlap(), "compare": _compare(),
    "kv_transfer": _kv_transfer(),
    "cluster": _cluster(), "gpu": _gpu(),
    "call_cost": {"about": {"ranks": 2}, "rows": [{"call": "Bcast", "bytes": 8, "through": "", **_COSTS}]},
    "unknown": {"command": ["x.py"], "rows": [{"a": 1, "b": {"c": 2}}], "total": 3},
}  # fmt: skip
