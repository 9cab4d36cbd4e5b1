"""A real Slurm on this machine: it accepts a script of a heterogeneous job, and srun starts its ranks."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from crews import alone
from processes import until

pytest.importorskip("yaml", reason="needs yaml: pip install '.[launch]'")


#: Slurm without keys or accounting, for three nodes that are this machine.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_min_interval=1
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
TmpFS={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
NodeName=nv[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{second}] CPUs=8
NodeName=am1 NodeHostname={host} NodeAddr=127.0.0.1 Port={third} CPUs=8
PartitionName=h200 Nodes=nv[1-2] Default=YES State=UP
PartitionName=mi300 Nodes=am1 State=UP
"""

SHOW = "import os; print(*(os.environ.get(n) for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'SLURMD_NODENAME', 'ONLY')))"

#: A job of two components, with the cluster file's settings for one of them.
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --partition=h200
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks-per-node=3 --partition=mi300
cat >{file} <<'END'
source: slurm
components: [nvidia, amd]
python: {python}
vendors: {{amd: {{env: {{ONLY: amd}}}}}}
END
{python} -m ucc_hetero.launch -c {file} {words}
"""


def script(folder, *words):
    return SCRIPT.format(file=folder / "cluster.yaml", python=sys.executable, words=shlex.join(words))


def program(name):
    """Find a program of Slurm under Debian's or the usual name."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    found = shutil.which(name, path=path) or shutil.which(f"{name}-wlm", path=path)
    if found is None:
        pytest.skip(f"no {name}: install slurmctld, slurmd and slurm-client")
    return found


def free_ports(count):
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("slurmd needs root")
    names = ("slurmctld", "slurmd", "sbatch", "sinfo", "srun")
    tools = {name: program(name) for name in names}
    plugins = next(Path("/usr").glob("lib/*/slurm*/auth_none.so"), None)
    folder = os.environ.get("SLURM_PLUGINS") or (plugins and str(plugins.parent))
    if folder is None:
        pytest.skip("no auth_none.so: install slurm-wlm-basic-plugins")
    port, first, third = free_ports(3)
    config = tmp_path / "slurm.conf"
    ports = {"port": port, "first": first, "second": first + 1, "third": third}
    config.write_text(CONFIG.format(host=socket.gethostname(), plugins=folder, folder=tmp_path, **ports))
    monkeypatch.setenv("SLURM_CONF", str(config))
    monkeypatch.delenv("MPIRUN", raising=False)
    for name in ("state", "nv1", "nv2", "am1"):
        (tmp_path / name).mkdir()
    commands = [[tools["slurmctld"], "-D", "-c"]]
    stepd = shutil.which(f"{tools['slurmd'].replace('slurmd', 'slurmstepd')}")
    commands += [
        [tools["slurmd"], "-D", "-N", node, *(["-d", stepd] if stepd else [])] for node in ("nv1", "nv2", "am1")
    ]
    with ExitStack() as running:
        for i, command in enumerate(commands):
            log = running.enter_context((tmp_path / f"daemon{i}.log").open("w"))
            daemon = running.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
            running.callback(daemon.terminate)
        states = [tools["sinfo"], "--noheader", "--format=%t", "--states=idle", "--Node"]
        idle = lambda: subprocess.run(states, capture_output=True, text=True, check=False).stdout.split()  # noqa: E731
        until(lambda: idle() == ["idle"] * 3, "the nodes did not come up")
        yield lambda script, *options: subprocess.run(
            [tools["sbatch"], *options], input=script, capture_output=True, text=True, timeout=240, check=False
        )


def test_heterogeneous_job(sbatch, tmp_path):
    # Slurm may lack its PMIx plugin, which this program does not need.
    text = script(tmp_path, "--emulate", "--mpi-args=--mpi=none", sys.executable, "-I", "-S", "-c", SHOW)
    tried = sbatch(text, "--test-only")
    assert tried.returncode == 0, tried.stderr
    assert "using 7 processors on am1,nv[1-2]" in tried.stderr
    out = tmp_path / "out.txt"
    assert sbatch(text, f"--output={out}", "--wait").returncode == 0, out.read_text()
    lines = sorted(line for line in out.read_text().splitlines() if not line.startswith("srun:"))
    nodes = ["nv1", "nv1", "nv2", "nv2", "am1", "am1", "am1"]
    local = [0, 1, 0, 1, 0, 1, 2]
    only = ["None"] * 4 + ["amd"] * 3
    assert lines == [f"{rank} 7 {local[rank]} {nodes[rank]} {only[rank]}" for rank in range(7)]


@pytest.mark.usefixtures("libraries")
def test_mpi_in_a_heterogeneous_job(sbatch, tmp_path, monkeypatch):
    """``srun --mpi=pmix``: the ranks of both components are one MPI job, and one communicator of two vendors."""
    monkeypatch.setenv("UCCH_TIMEOUT", "300")
    text = script(tmp_path, "--emulate", sys.executable, *alone("host_cases:placed", []))
    out = tmp_path / "out.txt"
    done = sbatch(text, f"--output={out}", "--wait")
    said = out.read_text()
    if "Invalid MPI type 'pmix'" in said:
        pytest.skip("this srun finds no PMIx: install libpmix-dev")
    assert done.returncode == 0, said
    assert "nvidia 4 amd 3\n" in said
