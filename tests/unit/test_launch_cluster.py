"""The cluster file and schedulers' variables: what is read, and the messages for invalid input."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ucc_hetero.launch import __main__ as tool
from ucc_hetero.launch import sources
from ucc_hetero.launch.cluster import ClusterError, limited, load, parse
from ucc_hetero.launch.sources import Host, expand

yaml = pytest.importorskip("yaml", reason="needs yaml: pip install '.[launch]'")

FULL = """
hosts:
  - {name: "gpu[01-02]", slots: 8, vendor: nvidia}
  - {name: mi, slots: 4, vendor: amd}
interfaces: [mlx5_0:1, eth0]
env: {UCCH_TIMEOUT: 60, NCCL_DEBUG: warn, FLAG: on}
ssh: ssh -o BatchMode=yes
python: /opt/venv/bin/python
vendors:
  nvidia: {image: "example/cuda:1", runtime: docker, runtime_args: [--volume=/data:/data]}
  amd:
    image: example/rocm:1
    runtime: podman
    env: {HSA_OVERRIDE: 1}
    interfaces: eth1
"""


def test_everything(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(FULL)
    cluster = load(path)
    assert cluster.hosts == (Host("gpu01", 8, "nvidia"), Host("gpu02", 8, "nvidia"), Host("mi", 4, "amd"))
    assert cluster.size == 20
    assert cluster.env == {"UCCH_TIMEOUT": "60", "NCCL_DEBUG": "warn", "FLAG": "true"}
    assert cluster.part("amd").interfaces == ("eth1",)
    assert cluster.part("nvidia").runtime_args == ("--volume=/data:/data",)
    assert cluster.part("host").image == ""
    short = parse({"hosts": ["a", {"name": "b", "slots": 1}], "slots": 3, "vendor": "amd"})
    assert short.hosts == (Host("a", 3, "amd"), Host("b", 1, "amd"))


MISTAKES = [
    (None, "must have fields such as"), ({}, "hosts: give one of hosts, hostfile and source, not none"),
    ({"hosts": []}, "hosts: must be a list of hosts"), ({"hosts": ""}, "hosts: must be a list of hosts"),
    ({"hosts": ["a[3-1]"]}, r"hosts\[0\].name: 'a\[3-1\]': '3-1' is not a range such as 01-03"),
    ({"hosts": "a[-3]"}, "'-3' is not a range"), ({"hosts": "a[1-2-3]"}, "'1-2-3' is not a range"),
    ({"hosts": [{"slots": 2}]}, r"hosts\[0\].name: is missing"),
    ({"hosts": [{"name": "a b"}]}, r"hosts\[0\].name: must be a name without blanks"),
    ({"hosts": [{"name": "b", "slots": True}]}, r"hosts\[0\].slots: .* not True"),
    ({"hosts": [{"name": "b", "slot": 1}]}, r"hosts\[0\].slot: is not a field; did you mean slots\?"),
    ({"hosts": ["a"], "slots": -1}, "slots: must be a whole number"),
    ({"hosts": ["a"], "env": ["A=1"]}, "env: must map names to values"),
    ({"hosts": ["a"], "env": {"A=B": 1}}, "env: 'A=B' is not a name"),
    ({"hosts": ["a"], "interfaces": {"eth0": 1}}, "interfaces: must be a list"),
    ({"hosts": ["a"], "interfaces": [["eth0"]]}, r"interfaces\[0\]: must be text"),
    ({"hosts": ["a"], "vendors": {"intel": {}}}, "vendors.intel: is not a field; known are host, nvidia, amd"),
    ({"hosts": ["a"], "vendors": {"amd": {"image": "x"}}}, "vendors: images are chosen by .* give the vendor of a"),
    ({"hostfile": "nothing"}, "hostfile .*nothing: No such file"),
    ({"hosts": ["a"], "components": ["amd"]}, "need source: slurm"),
    ({"source": "slurm", "components": None}, "components: must be a list, not None"),
    ({"source": "slurm", "components": "amd,arm"}, r"components\[1\]: must be one of auto, .*, not 'arm'"),
    ({"source": "pbs"}, "source: must be one of slurm, not 'pbs'"),
    ({"source": "slurm"}, "source: no hosts found in this environment's SLURM_ variables"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "message"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_mistakes_are_named(document, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        parse(document, tmp_path, {})


def test_file_is_named(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("hosts: [a\n")
    with pytest.raises(ClusterError, match="c.yaml: is not YAML"):
        load(path)
    path.write_bytes(b"hosts: [\xff]\n")
    with pytest.raises(ClusterError, match="c.yaml: is not text"):
        load(path)
    path.write_text("hosts: [{name: a, slots: 0}]\n")
    assert tool.main(["-c", str(path), "true"]) == 2
    assert f"ucch-run: {path}: hosts[0].slots: must be" in capsys.readouterr().err
    assert tool.main(["-c", str(tmp_path / "no.yaml"), "true"]) == 2
    assert tool.main(["true"]) == 2
    assert "-np: say how many ranks" in capsys.readouterr().err
    for word in ("--master-port 65536", "--master-port -1", "-x =1", "--start-timeout nan", "--mpi-args 'x"):
        assert tool.main([*word.split(), "--dry-run", "-np", "1", "true"]) == 2
        assert f"ucch-run: {word}: " in capsys.readouterr().err


def test_fewer_ranks_than_slots():
    cluster = parse({"hosts": ["a", "b", "c"], "slots": 2})
    assert [host.slots for host in limited(cluster, 3).hosts] == [2, 1]
    with pytest.raises(ClusterError, match="-np 7: the hosts have 6 slots in all"):
        limited(cluster, 7)


def test_lists_of_hosts():
    assert expand("a") == ["a"]
    assert expand("a,b3") == ["a", "b3"]
    assert expand("gpu[08-10,3],login") == ["gpu08", "gpu09", "gpu10", "gpu3", "login"]
    assert expand("r[1-2]n[1-2]-ib") == ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]
    for bad in ("a[1-", "a]", "a[x]"):
        with pytest.raises(ValueError, match="is not a list of hosts"):
            expand(bad)


def test_hostfiles(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# comment\nnode0 slots=4 vendor=amd # more\n\nnode1:2\nnode2\n")
    assert sources.hostfile(path) == [Host("node0", 4, "amd"), Host("node1", 2, ""), Host("node2", 0, "")]
    cluster = parse({"hostfile": "hostfile", "slots": 3, "vendor": "host"}, tmp_path)
    assert cluster.hosts == (Host("node0", 4, "amd"), Host("node1", 2, "host"), Host("node2", 3, "host"))
    more = ("[::1] slots=2", "node0 slots=0", "node0 slots=²", "node0 slots=9999999")
    for bad in ("node0 slots=x", "node0 4", ":3", "node0 solts=2", *more):
        path.write_text("ok\n" + bad + "\n")
        with pytest.raises(ValueError, match="line 2: .* is not of the form: host slots=2"):
            sources.hostfile(path)
    path.write_text("node0 vendor=nvdia\n")
    with pytest.raises(ClusterError, match="hostfile: vendor of node0: must be one of auto, .*, not 'nvdia'"):
        parse({"hostfile": "hostfile"}, tmp_path)


HET = {
    "SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "h[1-2]",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "8(x2)",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "m1", "SLURM_TASKS_PER_NODE_HET_GROUP_1": "4",
}  # fmt: skip


def test_slurm():
    plain = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert sources.slurm(plain) == [Host("n1", 2, ""), Host("n2", 2, ""), Host("n3", 1, "")]
    assert sources.in_slurm(plain) and sources.in_slurm(HET) and not sources.in_slurm({})
    first = [Host(name, 8, "auto", 0) for name in ("h1", "h2")]
    assert parse({"source": "slurm"}, Path(), HET).hosts == (*first, Host("m1", 4, "auto", 1))
    with pytest.raises(ClusterError, match="components: the job has 2, not 1"):
        parse({"source": "slurm", "components": ["amd"]}, Path(), HET)
    with pytest.raises(ValueError, match="SLURM_TASKS_PER_NODE='many'"):
        sources.slurm({**plain, "SLURM_TASKS_PER_NODE": "many"})


def test_in_a_heterogeneous_allocation(tmp_path):
    """With an srun that only prints its arguments: components get the cluster file's settings of their vendors."""
    srun, file = tmp_path / "srun", tmp_path / "cluster.yaml"
    srun.write_text('#!/bin/sh\n[ "$1" = --version ] && echo slurm 23.02.1 || printf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    file.write_text("source: slurm\ncomponents: [nvidia, amd]\nvendors: {amd: {env: {A: 1}}}\n")
    env = {**os.environ, **HET, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env.pop("MPIRUN", None)
    program = ["python", "train.py", "--note", "a b"]
    command = [sys.executable, "-m", "ucc_hetero.launch", "-c", str(file), *program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    words = done.stdout.splitlines()
    first, second = words[: words.index(":")], words[words.index(":") + 1 :]
    assert {"--het-group=0", "--ntasks=16", "--nodes=2", "nvidia"} <= set(first) and "A=1" not in first
    assert {"--het-group=1", "--ntasks=4", "--nodes=1", "amd", "A=1"} <= set(second)
    assert words[-4:] == program
