"""Every finding of the doctor, provoked on recorded hosts, or by changing one fact of a healthy host."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hosts import amd_host, nvidia_host

from ucc_hetero.errors import CollectiveTimeout
from ucc_hetero.launch.doctor import __main__ as tool
from ucc_hetero.launch.doctor import checks, facts, findings, job, measure
from ucc_hetero.launch.doctor.facts import Libraries
from ucc_hetero.machine.discover import replay
from ucc_hetero.machine.fabric import Fabric

LIBRARIES = Libraries(
    ucc="1.4.0", ucc_path="/lib/libucc.so.1", ucx="1.22.0", ucx_path="/lib/libucp.so.0",
    components=tuple("cl/basic ec/cpu ec/cuda ec/rocm mc/cpu mc/cuda mc/rocm tl/nccl tl/rccl tl/ucp".split()),
    memory_types=("host", "cuda", "rocm"), transports=("self", "tcp", "sysv", "posix", "cma", "rc_mlx5"),
    mpi="openmpi", mpi_text="Open MPI v5.0.11", mpirun="openmpi", mpirun_text="openmpi 5.0.11 at /bin/mpirun",
)  # fmt: skip

NETWORK = {
    "sys/class/net/lo/type": "772", "sys/class/net/lo/operstate": "unknown", "sys/class/net/eth0/type": "1",
    "sys/class/net/eth0/operstate": "up", "sys/class/net/eth0/speed": "100000", "sys/class/net/eth0/mtu": "9000",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "100 Gb/sec (4X EDR)",
    "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/0": "IB/RoCE v1",
    "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/1": "RoCE v2", "proc/sys/kernel/yama/ptrace_scope": "0",
    "proc/sys/kernel/numa_balancing": "0", "sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0",
    "dev/infiniband/uverbs0": "", "usr/lib/libibverbs.so.1": "",
}  # fmt: skip

#: Results of system calls, which no file records.
ANSWERS = {
    "kernel": "6.8.0-45-generic", "memlock": -1, "nofile": 1 << 20, "shm": 64 << 30, "cores": 16,
    "denied": (), "kernel_config": True,
}  # fmt: skip


def healthy(root, make=nvidia_host, files=None, **changes):
    """A healthy host with two GPUs and a RoCE port, except for the given files and facts."""
    found = facts.collect(replay(NETWORK | (files or {}), make(root)), {}, LIBRARIES)
    return replace(found, **{**ANSWERS, **changes})


def codes(found):
    return {each.code for each in found if each.level != "ok"}


def lib(**changes):
    return {"libraries": replace(LIBRARIES, **changes)}


def env(**variables):
    return {"env": tuple(sorted(variables.items()))}


TCP = {"ports": ()}


def windows(rmem):
    return {"sysctl": (("net.ipv4.tcp_rmem", rmem),)}


CLOUD = {"flow_limit": ("Amazon EC2", 5000)}
FOREIGN = "/x was not used: /usr/lib/libucp.so.0 was in the process first; import ucc_hetero before mpi4py.MPI"

PORT = "sys/class/infiniband/mlx5_0/ports/1"
DOWN = {"interfaces": (("lo", 0, 65536),)}

#: Code, or none -> the change of a healthy NVIDIA host that provokes it, and words of the text.
NVIDIA = [
    ("", {}), ("gpu-unusable", {"usable": ()}),
    ("gpu-unusable", {"usable": (), "drivers": ()}, "its driver is not loaded"), ("net-missing", TCP | DOWN),
    ("mtu-small", {"files": {"sys/class/net/eth0/mtu": "1500"}}),
    ("rdma-down", {"files": {f"{PORT}/state": "1: DOWN"}}),
    ("roce-gid", {"files": {f"{PORT}/gid_attrs/types/1": "IB/RoCE v1"}}),
    ("ptrace", {"files": {"proc/sys/kernel/yama/ptrace_scope": "1"}}),
    ("numa-balancing", {"files": {"proc/sys/kernel/numa_balancing": "1"}}),
    ("iommu", {"files": {"sys/kernel/iommu_groups/7/type": "DMA-FQ"}}),
    ("gpudirect", {"files": {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54"}}),
    ("", {"files": {"sys/module/nvidia_peermem/version": "1"}, "open_driver": False}),
    ("", TCP | windows("4096 131072 33554432")),
    ("", CLOUD | windows("4096 131072 212992")),  # RDMA carries the data
    ("", TCP | windows("4096 131072 212992") | {"interfaces": (("eth0", 1000, 1500),)}),
    ("", lib(torch="2.13.0+cu126", torch_for="cuda 12.6", ucc_cuda="12")),
    ("mpi-missing", lib(mpirun="", mpirun_text="no mpirun")),
    ("mpi-missing", lib(mpi="", mpi_text="mpi4py finds no MPI library")),
    ("mpi-mismatch", lib(mpirun="hydra", mpirun_text="hydra 5.0.2 at /bin/mpiexec")),
    ("libraries-missing", lib(error="libucc could not be loaded. Tried:\n  - the system: no such file")),
    ("ucx-foreign", lib(notes=(FOREIGN,))), ("ucx-lacks-vendor", lib(memory_types=("host",))),
    ("ucx-lacks-shm", lib(transports=("self", "tcp"))),
    ("ucc-lacks-vendor", lib(components=("ec/cpu", "mc/cpu", "tl/ucp"))),
    ("ucc-lacks-library", lib(components=("ec/cpu", "ec/cuda", "mc/cuda", "mc/cpu", "tl/ucp"))),
    ("gpu-denied", {"denied": ("/dev/nvidia0",)}), ("torch-lacks-vendor", lib(torch="2.13.0+cpu", torch_for="host")),
    ("torch-lacks-vendor", lib(torch="2.13.0+rocm7.0", torch_for="rocm 7.0.2")),
    ("torch-cuda", lib(torch="2.13.0", torch_for="cuda 13.0", ucc_cuda="12")),
    ("rdma-idle", lib(idle=("mlx5_0:1 (InfiniBand)",), transport=(("between hosts", "tcp"),), site_ucx="/opt/ucx/lib")),
    ("fabric-idle", {"fabrics": (("nvidia", Fabric("", "NCCL_IB_DISABLE=1")),)}),
    ("net-unknown", env(UCX_NET_DEVICES="mlx5_0:1,eth7")), ("memlock", {"memlock": 65536}),
    ("flow-limit", TCP | CLOUD), ("mtu-small", CLOUD | {"interfaces": (("ens5", 0, 1500),)}),
    ("tcp-window", TCP | windows("4096 131072 212992")), ("nofile", {"nofile": 1024}),
    ("shm-small", {"shm": 64 << 20}), ("shm-denied", {"shm": -1}), ("cores-few", {"ranks_here": 17}),
    (
        "sched-groups",
        {"ranks_here": 16, "kernel": "6.18.44", "files": {"proc/sys/kernel/sched_autogroup_enabled": "1"}},
    ),
    ("env-unknown", env(UCCH_TIMOUT="3")), ("env-bad", env(UCCH_TIMEOUT="soon")),
    ("tls-no-gpu", env(UCX_TLS="tcp,sm,self")), ("tls-no-wireup", env(UCX_TLS="rc_mlx5,cuda,self")),
    ("ucc-bridge", env(UCC_TLS="ucp,nccl")), ("ucc-bridge", env(UCCHB_UCC_TLS="ucp,nccl")),
    ("env-vendor", env(CUDA_MODULE_LOADING="LAZY")),
]  # fmt: skip

SMALL_BAR = {f"sys/bus/pci/devices/0000:{bus}:00.0/mem_info_vis_vram_total": str(256 << 20) for bus in ("03", "26")}
AMD = [
    ("", {}), ("gpudirect", {"kernel": "5.14.0-427.el9"}),
    ("bar-small", {"files": SMALL_BAR}, "0.25 GiB of 192 GiB of 2 GPUs"),
    ("env-vendor", env(AMD_DIRECT_DISPATCH="0")), ("env-vendor", env(ROC_CPU_WAIT_FOR_SIGNAL="1")),
    ("env-vendor", env(HIP_ENABLE_DEFERRED_LOADING="0")),
    ("env-vendor", env(HIP_ENABLE_DEFERRED_LOADING="no", HIP_VISIBLE_DEVICES="1,0")),
    ("", env(HIP_ENABLE_DEFERRED_LOADING="00", HIP_VISIBLE_DEVICES="1")),
    ("", env(AMD_DIRECT_DISPATCH="1", ROC_CPU_WAIT_FOR_SIGNAL="0", HIP_ENABLE_DEFERRED_LOADING="1")),
    ("env-vendor", env(GPU_MAX_HW_QUEUES="4")), ("", env(GPU_MAX_HW_QUEUES="16")),
    ("env-vendor", env(HSA_FORCE_FINE_GRAIN_PCIE="0")),
    ("", env(HSA_FORCE_FINE_GRAIN_PCIE="0") | {"linked": ("amd",)}), ("dmabuf", {"kernel_config": False}),
    ("dmabuf", env(UCX_ROCM_COPY_DMABUF="y") | {"kernel_config": False}),
    ("", lib(ucx="1.23.0") | {"kernel_config": False}), ("env-vendor", env(HSA_ENABLE_IPC_MODE_LEGACY="0")),
]  # fmt: skip


CASES = [(make, *case, "")[:4] for make, cases in ((nvidia_host, NVIDIA), (amd_host, AMD)) for case in cases]


@pytest.mark.parametrize(
    ("make", "code", "changes", "words"), CASES, ids=[f"{i}-{case[1]}" for i, case in enumerate(CASES)]
)
def test_what_provokes(tmp_path, make, code, changes, words):
    """Exactly the wrong things are found, each with a cure; correct things are reported as such."""
    found = checks.examine(healthy(tmp_path / "own", make, **changes))
    told = [each for each in found if each.level != "ok"]
    assert codes(found) == {code} - {""} and all(bool(each.cure) == (each in told) for each in found)
    assert all(words in each.text for each in told)
    if not changes:
        right = {"mpi", "ucx", "ucc", "gpu", "network", "rdma", "shm", "cores", "settings"}
        assert right <= {each.code for each in found}
    if make is amd_host:
        if code == "env-vendor":
            name, value = changes["env"][0]
            assert told[0].text.startswith(f"{name}={value}") and "unset it" in told[0].cure
        others = codes(checks.examine(healthy(tmp_path / "other", nvidia_host, **changes)))
        assert not others & {"env-vendor", "dmabuf"}


def compared(ranks, size=0):
    """Return the findings for a job of these ranks; MPI's size is correct unless given."""
    return job.compare(ranks, size or len(ranks))


def two_hosts(root):
    files = {"proc/cpuinfo": "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143"}
    a = replace(healthy(root, files=files), host="a", boot_id="a", memory_domain=("a",))
    return a, replace(a, host="b", boot_id="b", memory_domain=("b",))


def test_ranks_that_provoke(tmp_path):
    a, b = two_hosts(tmp_path / "a")
    amd = replace(healthy(tmp_path / "amd", amd_host), host="b", boot_id="b")
    plain, other_cpu = replace(a, usable=(), interfaces=(("lo", 0, 65536),)), replace(b, processor="GenuineIntel 6 207")
    visible, new_ucc = replace(a, **env(CUDA_VISIBLE_DEVICES="1")), lib(ucc="1.9.0")
    cases = [
        ("", [a, b], ""),
        ("", [a, replace(a, **env(UCC_EC_ROCM_COPY_HOST_LIMIT="0"))], ""),  # it does not affect devices of one host
        ("job-namespaces", [a, replace(b, boot_id="a", host="c1")], ""),
        ("job-device-shared", [visible, visible], ""),
        # If only some ranks are compared, messages still use their numbers in the job.
        ("job-drivers", [plain, a, replace(a, drivers=(("nvidia", "535.1"),))], "535.1: rank 2"),
        ("job-mtu", [plain, a, replace(a, interfaces=(("eth0", 100000, 1500),))], "1500: rank 2"),
        # Processors matter if one library's ranks run on different ones, and only for some versions of UCC.
        ("job-processors", [a, other_cpu], "GenuineIntel 6 143: rank 0\nGenuineIntel 6 207: rank 1"),
        ("", [replace(each, usable=()) for each in (a, other_cpu)], ""),
        ("", [replace(each, **new_ucc) for each in (a, other_cpu)], ""),
        ("job-memory", [a, replace(b, usable=(), **lib(memory_types=("host",)))], ""), ("job-fp8", [a, amd], ""),
    ]  # fmt: skip
    found = [(code, compared(ranks), words) for code, ranks, words in cases]
    found += [("job-size", compared([replace(a, **env(WORLD_SIZE="2"))], 1), "")]
    for code, each, words in found:
        assert codes(each) == {code} - {""} and words in "\n".join(one.text for one in each), (code, words)
        assert all(bool(one.cure) == (one.level != "ok") for one in each)


def failing(comm):
    raise CollectiveTimeout("allreduce: rank 3 had not arrived")


def test_canaries():
    world = SimpleNamespace(rank=0, size=1, mpi=SimpleNamespace(allgather=lambda value: [value]))
    assert codes(measure.canaries(world, (("a", lambda comm: True),))) == set()
    wrong = measure.canaries(world, (("allreduce of 8 MiB in place", lambda comm: False), ("b", failing)))
    assert codes(wrong) == {"run-wrong"} and "8 MiB in place gave wrong numbers on ranks 0" in wrong[0].text
    failed = measure.canaries(world, (("a", failing), ("b", lambda comm: True)))
    assert codes(failed) == {"run-failed"} and "rank 3 had not arrived" in failed[0].text


@pytest.mark.parametrize("answers, others, same", [
    ([b"abcd", b"abcd"], b"abcd", True),
    ([b"abcd", b"abcd"], b"abce", False),  # the other rank's replica differs in a bit
    ([b"abcd", b"abce"], b"abcd", False),  # the repeated call gives another result
    ([b"abcd", b"abce"], b"abce", False),
])  # fmt: skip
def test_replicas_differ_in_a_bit(monkeypatch, answers, others, same):
    """Each answer gives the last bits of the sums; another rank has got ``others``."""
    left = iter(answers)

    def allreduce(send, receive):
        receive.view("u1")[:] = np.frombuffer(next(left) * send.size, "u1")

    monkeypatch.setattr(measure, "runtime_of", lambda vendor: None)
    mpi = SimpleNamespace(allgather=lambda value: [value, others * (len(value) // 4)])
    world = SimpleNamespace(rank=0, size=2, mpi=mpi, Allreduce=allreduce)
    assert measure._replicas(world, 5) is same


def test_slow_pairs():
    hosts = ["a", "b", "c", "d"]
    every = [pair for matches in measure.rounds(4) for pair in matches]
    even = dict.fromkeys(every, (1e-5, 1e9))
    assert codes(measure.slow_pairs(even, hosts)) == set()
    lame = {pair: (1e-5, 1e8 if 3 in pair else 1e9) for pair in every}
    found = measure.slow_pairs(lame, hosts)
    assert codes(found) == {"pair-slow"}
    assert "0-3 (0.10 GB/s)" in found[0].text and "hosts: a, b, c, d" in found[0].text
    assert codes(measure.slow_pairs(lame, ["a", "a", "a", "b"])) == set(), "kinds are not compared with each other"


@pytest.mark.parametrize("size", range(1, 9))
def test_every_pair_once(size):
    met = [pair for matches in measure.rounds(size) for pair in matches]
    assert sorted(met) == [(a, b) for a in range(size) for b in range(a + 1, size)]
    for matches in measure.rounds(size):
        busy = [rank for pair in matches for rank in pair]
        assert len(busy) == len(set(busy))


def test_text_and_json(tmp_path):
    found = checks.examine(healthy(tmp_path, nofile=1024, memlock=65536))
    text = findings.as_text(found).splitlines()
    assert text[-1] == f"{len(found) - 2} ok, 1 warning, 1 error"
    assert text[-3].startswith("error    memlock            only 64 KiB of memory may be pinned")
    assert text[-2].strip().startswith("cure: ulimit -l unlimited")
    assert {each["code"] for each in json.loads(findings.as_json(found))["findings"]} >= {"memlock", "nofile", "mpi"}
    assert findings.status(found) == 1
    warned = [each for each in found if each.level != "error"]
    assert findings.status(warned) == 0


def test_this_machine(capsys):
    """Any machine gets an answer, in both formats, with the matching status."""
    status = tool.main(["--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert status == any(each["level"] == "error" for each in found)
    assert all(each["level"] == "ok" or each["cure"] for each in found)


def test_a_command_that_is_none(capsys):
    with pytest.raises(SystemExit):
        tool.main(["hanng"])
    assert "'hanng' is not a command: hang, amd" in capsys.readouterr().err


def test_builds_of_torch(tmp_path):
    (tmp_path / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.13.0'\ndebug = False\ncuda: Optional[str] = '13.0'\n"
        "hip: Optional[str] = None\n"
    )
    assert facts.torch_build([tmp_path / "none", tmp_path]) == {"torch": "2.13.0", "torch_for": "cuda 13.0"}
    (tmp_path / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    assert facts.torch_build([tmp_path]) == {"torch": "2.13.0+cpu", "torch_for": "host"}
    assert facts.torch_build([]) == {}
