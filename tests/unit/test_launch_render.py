"""Job scripts and manifests rendered from the cluster file."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ucc_hetero.launch import __main__ as tool
from ucc_hetero.launch import k8s, slurm
from ucc_hetero.launch.cluster import Cluster, ClusterError, Host, VendorPart, parse

yaml = pytest.importorskip("yaml", reason="needs yaml: pip install '.[launch]'")

MIXED = Cluster(
    hosts=(Host("h1", 8, "nvidia"), Host("h2", 8, "nvidia"), Host("m1", 4, "amd")),
    vendors={
        "nvidia": VendorPart(image="cuda:1", sbatch=("--partition=h200",)),
        "amd": VendorPart(
            image="rocm:1", sbatch=("--gres=gpu:mi300:4",), env={"A": "1"}, node_selector={"gpu": "mi300"}
        ),
    },
    interfaces=("eth0",), env={"UCCH_TIMEOUT": "60"}, name="training",
)  # fmt: skip
PROGRAM = ["python", "train.py", "--note", "a b"]


def documents(cluster: Cluster) -> list[Any]:
    return list(yaml.safe_load_all(k8s.manifest(cluster, PROGRAM)))


def test_kubernetes() -> None:
    config, job = documents(MIXED)
    assert job["spec"]["minAvailable"] == 4, "all pods or none"
    assert set(job["spec"]["plugins"]) == {"env", "svc", "ssh"}
    master, nvidia, amd = job["spec"]["tasks"]
    assert master["policies"] == [{"event": "TaskCompleted", "action": "CompleteJob"}]
    assert master["template"]["spec"]["containers"][0]["command"][-5:] == ["--", *PROGRAM]
    assert (nvidia["name"], nvidia["replicas"], amd["name"], amd["replicas"]) == ("nvidia", 2, "amd", 1)
    limits = [task["template"]["spec"]["containers"][0]["resources"]["limits"] for task in (nvidia, amd)]
    assert limits == [{"nvidia.com/gpu": 8}, {"amd.com/gpu": 4}]
    assert amd["template"]["spec"]["nodeSelector"] == {"gpu": "mi300"}
    inner = parse(yaml.safe_load(config["data"]["cluster.yaml"]))
    assert inner.hosts[2] == Host("training-amd-0.training", 4, "amd")
    assert "\n    hosts:\n" in k8s.manifest(MIXED, PROGRAM), "people can read the file inside the manifest"
    assert (inner.env, inner.interfaces, inner.part("amd").env, inner.part("amd").image) == (
        {"UCCH_TIMEOUT": "60"}, ("eth0",), {"A": "1"}, "",
    )  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), [
    ({"hosts": (Host("a", 1, "auto"),)}, "give the vendor of a"),
    ({"vendors": {}}, "vendors.nvidia.image: is missing"),
    ({"name": "My_Job"}, "name: 'My_Job' cannot be the name of pods"),
])  # fmt: skip
def test_what_kubernetes_must_know(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        k8s.manifest(replace(MIXED, **changes), PROGRAM)


def test_hosts_with_different_slots_are_different_tasks() -> None:
    hosts = (Host("a", 8, "nvidia"), Host("b", 4, "nvidia"), Host("c", 8, "nvidia"))
    job = documents(replace(MIXED, hosts=hosts))[1]
    found = [(task["name"], task["replicas"]) for task in job["spec"]["tasks"]]
    assert found == [("master", 1), ("nvidia", 2), ("nvidia2", 1)]


SCRIPT = """#!/bin/bash
#SBATCH --job-name=training
#SBATCH --time=01:30:00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --partition=h200
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:mi300:4

set -euo pipefail
file=$(mktemp)
trap 'rm -f "$file"' EXIT
cat >"$file" <<'END'
interfaces:
- eth0
env:
  UCCH_TIMEOUT: '60'
vendors:
  nvidia: {}
  amd:
    env:
      A: '1'
source: slurm
components:
- nvidia
- amd
END
MPIRUN=srun ucch-run --tag -c "$file" -- python train.py --note 'a b'
"""


def test_slurm() -> None:
    assert slurm.script(MIXED, PROGRAM, 90, ["--tag"]) == SCRIPT
    subprocess.run(["bash", "-n"], input=SCRIPT, text=True, check=True)
    plain = slurm.script(replace(MIXED, hosts=MIXED.hosts[:2]), PROGRAM, 1)
    assert "hetjob" not in plain and "vendor: nvidia\n" in plain
    uneven = replace(MIXED, hosts=(Host("a", 8, "nvidia"), Host("b", 4, "nvidia")))
    with pytest.raises(ClusterError, match="must have the same number, not 4 and 8"):
        slurm.script(uneven, PROGRAM, 1)


ALLOCATION = {
    "SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "x[1-2]",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "8(x2)", "SLURM_JOB_NODELIST_HET_GROUP_1": "y",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "4",
}  # fmt: skip


def test_the_script_runs(tmp_path: Path) -> None:
    """Inside the allocation that it asked for, with an srun that only says what it was told."""
    srun, run = tmp_path / "srun", tmp_path / "ucch-run"
    srun.write_text('#!/bin/sh\n[ "$1" = --version ] && echo slurm 23.02.1 || printf "%s\\n" "$@"\n')
    run.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ucc_hetero.launch "$@"\n')
    for program in (srun, run):
        program.chmod(0o755)
    env = {**os.environ, **ALLOCATION, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env.pop("MPIRUN", None)
    text = slurm.script(MIXED, PROGRAM, 90)
    done = subprocess.run(["bash"], input=text, env=env, capture_output=True, text=True, timeout=240, check=False)
    words = done.stdout.splitlines()
    first, second = words[: words.index(":")], words[words.index(":") + 1 :]
    assert {"--het-group=0", "--ntasks=16", "--nodes=2", "nvidia"} <= set(first)
    assert {"--het-group=1", "--ntasks=4", "--nodes=1", "amd", "A=1"} <= set(second)
    assert words[-4:] == PROGRAM


def test_components_need_slurm() -> None:
    with pytest.raises(ClusterError, match="need source: slurm"):
        parse({"hosts": ["a"], "components": ["amd"]})
    with pytest.raises(ClusterError, match="components: the job has 2, not 1"):
        parse({"source": "slurm", "components": ["amd"]}, Path(), ALLOCATION)


def test_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("hosts: [{name: a, vendor: amd}]\nvendors: {amd: {image: i}}\n")
    assert tool.main(["k8s", "-c", str(path), "--", "python", "x.py"]) == 0
    kinds = [document["kind"] for document in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds == ["ConfigMap", "Job"]
    assert tool.main(["slurm", "-c", str(path), "python", "x.py"]) == 0
    assert "#SBATCH --gpus-per-node=1" in capsys.readouterr().out
    assert tool.main(["slurm", "-c", str(path)]) == 2
    assert "no program" in capsys.readouterr().err
