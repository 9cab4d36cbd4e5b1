"""Golden command lines of each launcher, word by word."""

# Command lines are compared whole.
# ruff: noqa: E501

import os
import shlex
import sys
from dataclasses import replace

import pytest

from ucc_hetero.launch import command, emulate, emulated_net, emulated_node, launcher
from ucc_hetero.launch.cluster import Cluster, ClusterError, Host, VendorPart, local
from ucc_hetero.launch.command import Job, compile_job, parts
from ucc_hetero.launch.launcher import Launcher

OPENMPI4 = Launcher("openmpi", 4, "mpirun")
OPENMPI5 = Launcher("openmpi", 5, "mpirun")
HYDRA = Launcher("hydra", 5, "mpiexec")
SRUN = Launcher("srun", 23, "srun")

MIXED = Cluster(
    hosts=(Host("a", 4, "nvidia"), Host("b", 4, "nvidia"), Host("c", 2, "amd")),
    vendors={"amd": VendorPart(env={"HSA_X": "1 2"})},
    interfaces=("mlx5_0:1", "eth0"),
    env={"OMP_NUM_THREADS": "4"},
    python="python3",
)
JOB = Job(MIXED, ("python", "train.py", "--lr", "0.1"), 29500)
HET = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID": "1"}

_NICS = "--set GLOO_SOCKET_IFNAME=eth0"
_UCX = "--set OMP_NUM_THREADS=4 --set UCX_NET_DEVICES=mlx5_0:1,eth0"
_START = "python3 -I -S rank.py --vendor"
_N = f"{_START} nvidia --size 10 --master a:29500 {_NICS} --set NCCL_SOCKET_IFNAME=eth0 {_UCX} -- python train.py --lr 0.1"
_A = (
    f"{_START} amd --size 10 --master a:29500 {_NICS} --set 'HSA_X=1 2' --set NCCL_SOCKET_IFNAME=eth0 {_UCX} "
    "-- python train.py --lr 0.1"
)

GOLDEN = {
    "openmpi4": (OPENMPI4, f"""mpirun --bind-to none --map-by slot --mca pml ob1 --mca btl self,vader,tcp --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 -np 8 --host a:4,b:4 {_N} : -np 2 --host c:2 {_A}"""),
    "openmpi5": (OPENMPI5, f"""mpirun --bind-to none --map-by slot --mca pml ob1 --mca btl self,sm,tcp --mca btl_tcp_if_include eth0 --prtemca prte_if_include eth0 -np 8 --host a:4,b:4 {_N} : -np 2 --host c:2 {_A}"""),
    "hydra": (HYDRA, f"""mpiexec -hosts a:4,b:4,c:2 -launcher ssh -iface eth0 -n 8 {_N} : -n 2 {_A}"""),
    "srun": (SRUN, f"""srun --mpi=pmix --cpu-bind=none --kill-on-bad-exit=1 --quit-on-interrupt --het-group=0 --ntasks=8 --nodes=2 --distribution=block {_N} : --mpi=pmix --cpu-bind=none --kill-on-bad-exit=1 --quit-on-interrupt --het-group=1 --ntasks=2 --nodes=1 --distribution=block {_A}"""),
}  # fmt: skip


def shown(job, starter, environ):
    text = shlex.join(compile_job(job, starter, environ))
    return text.replace(str(command.RANK_WRAPPER), "rank.py")


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    starter, expected = GOLDEN[name]
    assert shown(JOB, starter, HET if name == "srun" else {}) == expected


def test_one_machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    job = Job(replace(local(4), python="py"), ("./a",), 1)
    wrapper = "py -I -S rank.py --vendor auto --size 4 --master 127.0.0.1:1 -- ./a"
    assert shown(job, OPENMPI5, {"UCX_TLS": "tcp"}) == (
        "mpirun --bind-to none --map-by slot --mca pml ob1 --mca btl self,sm,tcp --mca mpi_yield_when_idle 1 "
        f"-np 4 --host localhost:4 {wrapper}"
    ), "ranks inherit the environment of this machine"
    assert shown(job, HYDRA, {}) == f"mpiexec -n 4 {wrapper}"
    job = replace(JOB, mpi_args=("--mca", "pml", "ucx"))
    text = shown(job, OPENMPI5, {"OMPI_MCA_btl": "self,tcp"})
    assert "--mca pml ucx" in text
    assert "ob1" not in text and "--mca btl " not in text


def test_options_of_the_wrapper():
    job = replace(JOB, devices="all", numa=False, report=True, emulate=True, env={"A": "b"})
    words = compile_job(job, OPENMPI5, {"UCX_TLS": "tcp", "HOME": "/"})
    for word in ("--devices", "all", "--numa", "off", "--report", "A=b", "UCX_TLS=tcp"):
        assert word in words
    assert "UCCH_EMULATE=nvidia:8,amd:2" in words
    assert words[words.index("--vendor") + 1] == "host", "pretended devices are not bound"
    assert not [word for word in words if word.startswith("HOME=")]


def test_priority_of_variables():
    cluster = replace(
        MIXED, env={"A": "file", "UCX_NET_DEVICES": "file"}, vendors={"nvidia": VendorPart(env={"A": "part"})}
    )
    for given, expected in (({}, "part"), ({"A": "line"}, "line")):
        words = compile_job(Job(cluster, ("x",), 1, env=given), OPENMPI5, {"UCX_NET_DEVICES": "here"})
        assert f"A={expected}" in words and "UCX_NET_DEVICES=file" in words


def test_ssh():
    job = replace(JOB, cluster=replace(MIXED, ssh="ssh -F f"))
    assert "--mca plm_rsh_agent 'ssh -F f'" in shown(job, OPENMPI4, {})
    assert "--prtemca plm_ssh_agent 'ssh -F f'" in shown(job, OPENMPI5, {})
    with pytest.raises(ClusterError, match="ssh: .*write a script"):
        compile_job(job, HYDRA, {})
    assert "-launcher-exec /bin/myssh" in shown(replace(JOB, cluster=replace(MIXED, ssh="/bin/myssh")), HYDRA, {})


def test_two_vendors_on_one_host():
    hosts = (Host("a", 2, "nvidia"), Host("b", 2, "nvidia"), Host("a", 2, "amd"), Host("b", 2, "amd"))
    cluster = Cluster(hosts, python="p")
    assert [(part.vendor, part.size, part.first_local) for part in parts(cluster)] == [("nvidia", 4, 0), ("amd", 4, 2)]
    text = shown(Job(cluster, ("x",), 1), OPENMPI5, {})
    # All slots of one host each: Open MPI 4 fills hosts one after the other.
    assert [text.count(f"-np 2 --host {name}:4 ") for name in "ab"] == [2, 2]
    assert text.count("--vendor amd --size 8 --master a:1 --first-local 2") == 2


def test_open_mpi_in_a_folder_with_a_space():
    """A shell starts its helper on other hosts; on this host no helper is needed."""
    elsewhere = Launcher("openmpi", 5, "/opt/my env/bin/mpirun")
    with pytest.raises(
        ClusterError, match="/opt/my env/bin/mpirun: Open MPI starts its helper on other hosts by this path"
    ):
        compile_job(JOB, elsewhere, {})
    assert compile_job(replace(JOB, cluster=local(2)), elsewhere, {})[0] == elsewhere.path


def test_srun_needs_a_component_per_part():
    with pytest.raises(ClusterError, match="2 parts .* 1 component: .*docs/slurm.md"):
        compile_job(JOB, SRUN, {})
    same = replace(JOB, cluster=replace(MIXED, hosts=MIXED.hosts[:2]))
    assert "het-group" not in shown(same, SRUN, {})
    halves = (replace(MIXED.hosts[0], component=0), replace(MIXED.hosts[1], component=1))
    assert "--het-group=1" in shown(replace(JOB, cluster=replace(MIXED, hosts=halves)), SRUN, HET)


_SHARED = "run --rm --network=host --ipc=host --pid=host --ulimit=memlock=-1:-1 --cap-add=SYS_PTRACE"
_MOUNTS = "--volume=/tmp:/tmp --volume=/w:/w --workdir=/w {env} -v /data:/data img:1"
_AMD = "--device /dev/kfd --device /dev/dri --group-add video --group-add render"
ENGINES = {
    "docker nvidia": f"docker {_SHARED} --gpus all --user=7:8 {_MOUNTS}",
    "docker amd": f"docker {_SHARED} {_AMD} --user=7:8 {_MOUNTS}",
    "podman nvidia": f"podman {_SHARED} --device nvidia.com/gpu=all --userns=keep-id --group-add=keep-groups {_MOUNTS}",
    "apptainer amd": "apptainer exec --rocm --bind /w --pwd /w -v /data:/data img:1",
    "apptainer host": "apptainer exec --bind /w --pwd /w -v /data:/data img:1",
}


@pytest.mark.parametrize("name", ENGINES)
def test_container_engines(name):
    runtime, vendor = name.split()
    part = VendorPart(image="img:1", runtime=runtime, runtime_args=("-v", "/data:/data"))
    assert command.container(part, vendor, "/w", (7, 8)) == ENGINES[name]


def test_images_by_vendor():
    cluster = replace(MIXED, vendors={"amd": VendorPart(image="rocm:1", runtime="podman")})
    words = compile_job(Job(cluster, ("x",), 1), OPENMPI5, {})
    assert words.count("--container") == 1
    assert "rocm:1" in words[words.index("--container") + 1]


BANNERS = {
    "mpirun (Open MPI) 5.0.11\n": ("openmpi", 5, "5.0.11"),
    "mpirun (Open MPI) 4.1.4\n\nReport bugs": ("openmpi", 4, "4.1.4"),
    "HYDRA build details:\n    Version:                                 5.0.2\n": ("hydra", 5, "5.0.2"),
    "slurm-wlm 22.05.8\n": ("srun", 22, "22.05.8"),
    "slurm 23.11.4": ("srun", 23, "23.11.4"),
}


@pytest.mark.parametrize("banner", BANNERS)
def test_launchers_are_recognised(banner):
    assert (found := launcher.identify("x", banner)) and (found.kind, found.major, found.version) == BANNERS[banner]


def test_launchers_that_are_none(tmp_path, monkeypatch):
    assert launcher.identify("x", "GNU bash 5") is None
    odd = tmp_path / "mpirun"
    odd.write_text("#!/bin/sh\necho hello\n")
    odd.chmod(0o755)
    with pytest.raises(
        launcher.LauncherError, match="mpirun is not a launcher that ucch-run knows: name another mpirun or srun"
    ):
        launcher.find({"MPIRUN": str(odd)})
    with pytest.raises(launcher.LauncherError, match="MPIRUN=/no/mpirun: /no/mpirun is not a program"):
        launcher.find({"MPIRUN": "/no/mpirun"})
    odd.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(launcher.LauncherError, match=r"none on the PATH.*\.\[mpi\].*name it in MPIRUN"):
        launcher.find({})


# --- the layout of emulated clusters; needs neither root nor a network ------------------------------------------------


def test_rates():
    for text, bits in (("800 Mbit/s", 8 * 10**8), ("2.5gbit", 25 * 10**8), ("none", 0)):
        assert emulated_net.parse_rate(text) == bits
    for text in ("4", "4gb", "-1gbit", "1kbit", "0", "nan"):
        with pytest.raises(ValueError, match=f"rate '{text}': "):
            emulated_net.parse_rate(text)


@pytest.mark.parametrize(("arguments", "message"), [
    ((0, 2, "1gbit", 1), "hosts=0"), ((2, 0, "1gbit", 1), "slots=0"), ((2, [1], "1gbit", 1), r"slots=\[1\]"),
    ((2, 1, "1gbit", 9), "links=9"), ((2, 1, "1gbit,1gbit,1gbit", 1), "3 rates for 2 hosts"),
    ((2, 1, "1gbit+1gbit", 3), "2 rates for 3 links"),
])  # fmt: skip
def test_layout_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        emulated_net.layout(*arguments)


def test_shapes():
    """Links are shaped at both ends; links without a rate are not shaped."""
    hosts = emulated_net.layout(2, 1, "4gbit,none", 1)
    ip, tc = emulated_net.switch_batches(hosts, [10, 20], 1500)
    assert "link add name port1.0 mtu 1500 master br0 up type veth peer name eth0 mtu 1500 netns 20" in ip
    shaped = [*tc.splitlines(), *(line for host in hosts for line in emulated_net.host_batches(host)[1].splitlines())]
    assert [line.split("root ")[0] for line in shaped] == ["qdisc replace dev port0.0 ", "qdisc replace dev eth0 "]
    assert all("tbf rate 4000000000bit burst 500000" in line for line in shaped)


def test_mistakes_on_the_command_line(capsys):
    for words in (["--rate", "fast"], ["--hosts", "0"], ["--slots", "two"]):
        with pytest.raises(SystemExit) as caught:
            emulate.main([*words, "--", "true"])
        assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "rate 'fast'" in said and "--slots: 'two': one number" in said


def test_ssh_command_line():
    words = ["-x", "-o", "BatchMode=yes", "-p22", "me@node1", "A=1;", "prted", "--x"]
    assert emulated_node.parse_ssh(words) == ("node1", "A=1; prted --x")
