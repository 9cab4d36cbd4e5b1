"""A finding: what was looked at, how it is, and what cures it; and the table of everything that can be found."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

__all__ = ["CODES", "LEVELS", "Finding", "as_json", "as_text", "finding", "merged", "ok", "status"]

LEVELS = ("ok", "warning", "error")

#: Every problem that can be found -> how bad it is. A test provokes each of them.
CODES = {
    # MPI
    "mpi-missing": "error",
    "mpi-mismatch": "error",
    # UCC and UCX
    "libraries-missing": "error",
    "ucx-foreign": "warning",
    "ucx-lacks-vendor": "error",
    "ucx-lacks-shm": "warning",
    "ucc-lacks-vendor": "error",
    "ucc-lacks-library": "warning",
    # GPUs
    "gpu-unusable": "error",
    "gpu-denied": "error",
    "bar-small": "warning",
    "peer-access": "warning",
    "iommu": "warning",
    # Networks
    "net-missing": "warning",
    "net-unknown": "error",
    "rdma-down": "warning",
    "roce-gid": "error",
    "mtu-small": "warning",
    "gpudirect": "warning",
    "memlock": "error",
    # The host
    "nofile": "warning",
    "shm-small": "warning",
    "ptrace": "warning",
    "cores-few": "warning",
    "numa-balancing": "warning",
    "clock": "warning",
    # Settings
    "env-unknown": "warning",
    "env-bad": "error",
    "tls-no-gpu": "error",
    "tls-no-wireup": "warning",
    "ucc-bridge": "warning",
    "cuda-lazy": "warning",
    "amd-host-waits": "warning",
    "amd-early-kernels": "warning",
    "amd-queues": "warning",
    "amd-fine-grain": "warning",
    "amd-dmabuf": "warning",
    "amd-ipc": "warning",
    # Between ranks
    "job-size": "error",
    "job-disagrees": "error",
    "job-namespaces": "error",
    "job-device-shared": "warning",
    "job-drivers": "warning",
    "job-processors": "warning",
    "job-mtu": "warning",
    "job-clock": "warning",
    "job-memory": "warning",
    "job-fp8": "warning",
    # Measured
    "run-failed": "error",
    "run-wrong": "error",
    "pair-slow": "warning",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``where`` is a host or ranks; empty on one host."""

    code: str
    level: str
    text: str
    cure: str = ""
    where: str = ""


def finding(code: str, text: str, cure: str) -> Finding:
    """A problem of the table."""
    return Finding(code, CODES[code], text, cure)


def ok(code: str, text: str) -> Finding:
    """Something that was looked at and is as it should be."""
    return Finding(code, "ok", text)


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def merged(by_rank: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Every rank's findings, said once each with the ranks and hosts that have it."""
    who: dict[Finding, list[int]] = {}
    for rank, found in enumerate(by_rank):
        for each in found:
            who.setdefault(each, []).append(rank)
    result = []
    for each, ranks in who.items():
        names = list(dict.fromkeys(hosts[rank] for rank in ranks))
        on = ", ".join(names[:3]) + (f" and {len(names) - 3} more hosts" if len(names) > 3 else "")
        plural = "s" if len(ranks) > 1 else ""
        everyone = len(ranks) == len(by_rank)
        result.append(replace(each, where="" if everyone else f"rank{plural} {_ranges(ranks)} on {on}"))
    return result


def status(findings: Iterable[Finding], strict: bool = False) -> int:
    """0 when the job can run, 1 when it cannot; ``strict`` counts warnings as well."""
    bad = {"error", "warning"} if strict else {"error"}
    return int(any(each.level in bad for each in findings))


def as_text(findings: Iterable[Finding]) -> str:
    """A line per finding, and one for its cure; the worst comes last, where a terminal shows it."""
    lines = []
    listed = sorted(findings, key=lambda each: LEVELS.index(each.level))
    for each in listed:
        first, *rest = each.text.splitlines()
        where = f" [{each.where}]" if each.where else ""
        lines.append(f"{each.level:<8} {each.code:<18} {first}{where}")
        lines += [f"{'':<28}{line}" for line in rest]
        lines += [f"{'':<28}cure: {each.cure}"] if each.cure else []
    counts = {level: sum(each.level == level for each in listed) for level in LEVELS}
    lines.append(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['error']} errors")
    return "\n".join(lines)


def as_json(findings: Iterable[Finding]) -> str:
    """The same as a JSON object with the list ``findings``."""
    return json.dumps({"findings": [asdict(each) for each in findings]}, indent=2)
