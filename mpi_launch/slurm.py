"""``ucch-run slurm``: the cluster file as a job script, with a component per vendor where there are several."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace

from . import cluster as cluster_file
from .cluster import Cluster, ClusterError, VendorPart
from .command import Part, checked, parts, program_of, renderer


def _component(cluster: Cluster, part: Part) -> list[str]:
    """The options of one component; all its hosts have as many slots as the first."""
    counts = {host.slots for host in part.hosts}
    if len(counts) > 1:
        raise ClusterError(
            f"slots: hosts of one component must have the same number, not {' and '.join(map(str, sorted(counts)))}: "
            "list hosts with other slots apart"
        )
    slots = counts.pop()
    special: VendorPart = cluster.part(part.vendor)
    words = [f"--nodes={len(part.hosts)}", f"--ntasks-per-node={slots}"]
    asked = " ".join(special.sbatch)
    if part.vendor not in ("host", "auto") and not any(word in asked for word in ("--gres", "--gpus")):
        words.append(f"--gpus-per-node={slots}")
    return [*words, *special.sbatch]


def script(cluster: Cluster, program: Sequence[str], minutes: float, run_options: Sequence[str] = ()) -> str:
    """The text of a job script. Host names are not kept: Slurm chooses hosts, by partition, features or devices.

    ``run_options`` are ucch-run's. Raises ``ClusterError`` for what Slurm cannot express.
    """
    checked(program, "slurm -c cluster.yaml")
    found = parts(_without_names(cluster))
    whole = math.ceil(minutes)
    lines = ["#!/bin/bash", f"#SBATCH --job-name={cluster.name}", f"#SBATCH --time={whole // 60:02}:{whole % 60:02}:00"]
    for i, part in enumerate(found):
        lines += ["#SBATCH hetjob"] if i else []
        lines += [f"#SBATCH {word}" for word in _component(cluster, part)]
    # The file says which environment and interfaces; inside the job the hosts are those that Slurm gave.
    lines += ["", "set -euo pipefail", "file=$(mktemp)", "trap 'rm -f \"$file\"' EXIT", "cat >\"$file\" <<'END'"]
    lines += [_inner_file(cluster, found).rstrip(), "END"]
    lines += [f'MPIRUN=srun {shlex.join(["ucch-run", *run_options])} -c "$file" -- {shlex.join(program)}']
    return "\n".join(lines) + "\n"


def _without_names(cluster: Cluster) -> Cluster:
    """Hosts under names of their own: one that is named twice, with two vendors, is two nodes to Slurm."""
    return replace(cluster, hosts=tuple(replace(host, name=f"n{i}") for i, host in enumerate(cluster.hosts)))


def _inner_file(cluster: Cluster, found: Sequence[Part]) -> str:
    import yaml

    inner = cluster_file.as_document(cluster)
    inner["source"] = "slurm"
    if len(found) == 1:
        inner["vendor"] = found[0].vendor
    else:
        inner["components"] = [part.vendor for part in found]
    return str(yaml.safe_dump(inner, sort_keys=False))


def main(arguments: Sequence[str]) -> int:
    """The command line: prints the script."""
    parser = renderer("slurm", "Print a Slurm job script for a cluster file; submit it with sbatch.")
    parser.add_argument("--minutes", type=float, default=60, help="time limit of the job (default %(default)g)")
    parser.add_argument("--run", default="", metavar="WORDS", help="options for ucch-run inside the job, as one word")
    options = parser.parse_args(arguments)
    cluster, program = cluster_file.load(options.cluster), program_of(options.program)
    print(script(cluster, program, options.minutes, shlex.split(options.run)), end="")
    return 0
