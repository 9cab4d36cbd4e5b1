"""A rank's start on recorded hosts: device, processors, variables, container; and its parent's report of its end."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hosts import amd_host, nvidia_host
from processes import is_free, until

from ucc_hetero.launch import rank
from ucc_hetero.launch.supervise import LATE, Reports, supervise
from ucc_hetero.machine import launchers, vendors

MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def options(*words):
    return rank.parser().parse_args([*words, "--", "program"])


def start(root, *words, env=None):
    return rank.Start(options(*words), MPI if env is None else env, root)


def test_a_process_of_torchrun_has_torchruns_numbers():
    """srun and mpirun may have started one torchrun per host: their variables count torchruns."""
    outer = {"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "LOCAL_RANK": "3"}
    assert launchers.number("LOCAL_RANK", outer, 9) == 0  # set from these by a script, or by this package
    assert launchers.number("LOCAL_RANK", {**outer, "TORCHELASTIC_RUN_ID": "none"}, 9) == 3


def test_devices_of_recorded_hosts(tmp_path):
    root = nvidia_host(tmp_path / "n", gpus=4)
    found = vendors.devices(root)
    assert [(d.vendor, d.pci, d.node, d.numa) for d in found[:2]] == [
        ("nvidia", "0000:18:00.0", "/dev/nvidia0", 0), ("nvidia", "0000:2a:00.0", "/dev/nvidia1", 0),
    ]  # fmt: skip
    for other in (0, 1, 3):  # as in a container with one of the devices
        (root / f"dev/nvidia{other}").unlink()
    assert vendors.devices(root) == [found[2]]
    assert [(d.vendor, d.pci, d.node, d.small_bar) for d in vendors.devices(amd_host(tmp_path / "a", gpus=2))] == [
        ("amd", f"0000:{bus}:00.0", f"/dev/dri/renderD{128 + i}", False) for i, bus in enumerate(("03", "26"))
    ]
    assert vendors.devices(tmp_path) == []


def test_vendor_asked_of_the_host(tmp_path):
    assert start(nvidia_host(tmp_path / "n")).vendor == "nvidia"
    assert start(amd_host(tmp_path / "a")).vendor == "amd"
    assert start(tmp_path).vendor == "host"
    both = amd_host(nvidia_host(tmp_path / "b"))
    with pytest.raises(ValueError, match="GPUs of amd and nvidia: say which"):
        start(both)
    assert start(both, "--vendor", "amd").env["HIP_VISIBLE_DEVICES"] == "1"


def test_a_device_for_each_local_rank(tmp_path):
    root = nvidia_host(tmp_path, gpus=4)
    for local, expected in (("0", "0"), ("3", "3"), ("5", "1")):
        env = {**MPI, "OMPI_COMM_WORLD_LOCAL_RANK": local}
        assert start(root, env=env).env["CUDA_VISIBLE_DEVICES"] == expected
    # Devices given by a scheduler, under any variable's name.
    assert start(root, env={**MPI, "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}).env["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert "CUDA_VISIBLE_DEVICES" not in start(root, "--devices", "all").env
    # Ranks of a host's second vendor begin with its first device.
    assert start(root, "--first-local", "1").env["CUDA_VISIBLE_DEVICES"] == "0"
    assert start(root).env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, ["0", "1"]), ({"ROCR_VISIBLE_DEVICES": "1"}, ["0"]), ({"ROCR_VISIBLE_DEVICES": "1,0"}, ["0", "1"]),
    ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1"}, ["1"]), ({"ROCR_VISIBLE_DEVICES": ""}, []),
    ({"HIP_VISIBLE_DEVICES": "1,0,1"}, ["1", "0"]), ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, ["1"]),
    ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, ["0"]), ({"HIP_VISIBLE_DEVICES": "1,7,0"}, ["1"]),
    ({"HIP_VISIBLE_DEVICES": "7,0"}, []), ({"HIP_VISIBLE_DEVICES": "1, 0"}, ["1"]),
    ({"HIP_VISIBLE_DEVICES": "GPU-5d3a,0"}, ["GPU-5d3a", "0"]),
])  # fmt: skip
def test_devices_that_amds_runtime_sees(tmp_path, environ, expected):
    """HIP counts within ROCR's list, falls back to CUDA's variable, and ends a list at the first invalid number."""
    root = amd_host(tmp_path, gpus=2)
    there = vendors.seen("amd", vendors.devices(root), environ)
    assert [word for word, _ in there] == expected
    buses = {"1,0": ["26", "03"], "1": ["26"]}.get(environ.get("ROCR_VISIBLE_DEVICES", ""), ["03", "26"])
    for word, device in there:
        assert device.pci[5:7] == buses[int(word)] if word.isdigit() else device is None
    for local in range(3):
        found = start(root, env={**MPI, **environ, "OMPI_COMM_WORLD_LOCAL_RANK": str(local)})
        if expected:
            assert found.env["HIP_VISIBLE_DEVICES"] == expected[local % len(expected)]
            device = there[local % len(there)][1]
            assert (found.device and found.device.pci) == (device and device.pci)
        else:
            assert found.env.get("HIP_VISIBLE_DEVICES") == environ.get("HIP_VISIBLE_DEVICES")


@pytest.mark.parametrize("vendor, other", [("nvidia", amd_host), ("amd", nvidia_host)])
def test_a_vendor_that_the_host_has_not_is_refused(tmp_path, vendor, other):
    """Otherwise the job would silently run on host memory."""
    for root in (tmp_path, other(tmp_path / "other")):
        with pytest.raises(ValueError, match=f"vendor {vendor} was asked for .* has no driver"):
            start(root, "--vendor", vendor)
    assert start(tmp_path, "--vendor", "host").vendor == "host"
    done = run_wrapper("--vendor", vendor, "--report", script="print('ran')")
    if not vendors.VENDORS[vendor].find(vendors.ROOT):
        assert (done.returncode, done.stdout) == (1, "")
        assert f"vendor {vendor} was asked for" in str(events(done.stderr)[0]["lines"])


def test_all_devices_for_scripts_written_for_torchrun(tmp_path):
    root, script = nvidia_host(tmp_path, gpus=4), tmp_path / "train.py"
    script.write_text('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))')

    def shown(*words, program="train.py", **env):
        given = rank.parser().parse_args([*words, "--", "python", str(tmp_path / program), "x.py"])
        made = rank.Start(given, {**MPI, **env}, root)
        assert made.device is not None and made.device.node == "/dev/nvidia1", "processors follow the rank's own device"
        return made.env.get("CUDA_VISIBLE_DEVICES")

    assert shown() is None
    assert shown("--devices", "one") == "1"
    script.write_text('if os.environ["LOCAL_RANK"] == "0": print()')
    assert shown() == "1"
    assert shown("--devices", "all") is None
    assert shown(program="missing.py") == "1"
    assert shown(UCCH_TORCH_REPLACE="nccl") is None
    assert shown("--set", "UCCH_TORCH_REPLACE=nccl", program="missing.py") is None
    assert shown("--devices", "one", UCCH_TORCH_REPLACE="nccl") == "1"


@pytest.mark.parametrize("location", [0x2600 | 3, 0x30002600])
def test_partitions_of_a_device(tmp_path, location):
    """The partition is in the first or last bits of an address; its folder is the whole device's."""
    root = amd_host(tmp_path, gpus=2)
    node = root / "sys/class/kfd/kfd/topology/nodes/2/properties"
    node.write_text(node.read_text().replace(f"location_id {0x2600}", f"location_id {location}"))
    found = vendors.devices(root)[1]
    assert (found.pci, found.numa, found.memory, found.arch) == ("0000:26:00.0", 1, 192 << 30, "gfx942")


@pytest.mark.parametrize(("env", "expected"), [
    (MPI, ("5", "8", "1")), ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}, ("2", "4", "0")),
    ({"SLURM_PROCID": "1", "PMIX_RANK": "3", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}, ("3", "2", "1")),
    ({}, ("0", "1", "0")),
])  # fmt: skip
def test_variables_of_torch(tmp_path, env, expected):
    found = start(tmp_path, "--master", "a:29500", "--set", "A=b=c", env=env).env
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == expected
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["A"]) == ("a", "29500", "b=c")
    assert start(tmp_path, "--size", "9", env=env).env["WORLD_SIZE"] == "9"


SMALL_BAR = (
    *("UCX_ROCM_COPY_D2H_THRESH", "UCX_ROCM_COPY_H2D_THRESH"),
    *("UCC_EC_ROCM_REDUCE_HOST_LIMIT", "UCC_EC_ROCM_COPY_HOST_LIMIT"),
)


def test_settings_only_where_needed(tmp_path):
    large, small = amd_host(tmp_path / "l"), amd_host(tmp_path / "s", window=256 << 20)
    assert not set(SMALL_BAR) & set(start(large).env)
    assert [start(small).env[name] for name in SMALL_BAR] == ["0"] * 4
    assert not set(SMALL_BAR) & set(start(nvidia_host(tmp_path / "n")).env)
    chosen = start(small, "--set", "UCX_ROCM_COPY_D2H_THRESH=64").env
    assert chosen["UCX_ROCM_COPY_D2H_THRESH"] == "64", "the user knows better"
    found = vendors.devices(large)
    dmabuf = "UCX_ROCM_COPY_DMABUF"
    assert {s.name for s in vendors.settings("amd", found, "6.8.0")} == {dmabuf, *always("amd")}
    assert {s.name for s in vendors.settings("amd", found, "5.14.0-427.el9")} == set(always("amd"))
    assert start(large).env["HIP_ENABLE_DEFERRED_LOADING"] == "0", "the launcher gives a rank one device"
    needed = {"GPU_MAX_HW_QUEUES": "16", "HSA_FORCE_FINE_GRAIN_PCIE": "1", "NCCL_RUNTIME_CONNECT": "0"}
    assert needed.items() <= always("amd").items()
    (setting,) = (s for s in vendors.settings("amd", found, "6.8.0") if s.name == dmabuf)
    assert setting.value == "try", "containers do not show whether the kernel can: UCX would know no ROCm memory"


@pytest.mark.parametrize(
    ("devices", "visible", "alone"), [(1, "", True), (2, "", False), (2, "1", True), (2, "0,1", False)]
)
def test_all_kernels_are_loaded_for_one_device_only(devices, visible, alone):
    """A library without code for one of several devices would end the process while it is loaded."""
    found = [vendors.Device("amd", f"0000:0{n}:00.0", f"/dev/dri/renderD{n}", 0, 0, 0, "") for n in range(devices)]
    names = {s.name for s in vendors.settings("amd", found, environ={"HIP_VISIBLE_DEVICES": visible})}
    assert ("HIP_ENABLE_DEFERRED_LOADING" in names) is alone


def test_what_has_been_read_or_is_the_users_is_left_alone(monkeypatch):
    vendors.prepare("amd", env := {}, ("load", "start"))
    assert env == {"NCCL_RUNTIME_CONNECT": "0"}, "what UCX and UCC read is for devices that are there"
    vendors.prepare("amd", env := {}, ("load",))
    assert {"GPU_MAX_HW_QUEUES", "HSA_FORCE_FINE_GRAIN_PCIE"} <= set(env)
    monkeypatch.setattr(vendors, "_prepared", set())
    env = {"CUDA_MODULE_LOADING": "EAGER"}
    vendors.prepare("nvidia", env)
    assert env["NCCL_RUNTIME_CONNECT"] == "0"
    vendors.leave_alone("nvidia", env)
    assert "NCCL_RUNTIME_CONNECT" not in env and env["CUDA_MODULE_LOADING"] == "EAGER"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in env  # read by now, as far as is known


def always(vendor):
    return {s.name: s.value for s in vendors.VENDORS[vendor].settings if s.when == "always"}


def test_a_rank_without_the_launcher(tmp_path):
    env = {"UCX_ROCM_COPY_H2D_THRESH": "9"}
    vendors.apply(env, amd_host(tmp_path / "s", window=256 << 20))
    assert (env["UCX_ROCM_COPY_H2D_THRESH"], env["UCX_ROCM_COPY_D2H_THRESH"]) == ("9", "0")
    none = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    vendors.apply(env := {**none}, nvidia_host(tmp_path / "n"))
    assert env == none | always("nvidia") | {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    (tmp_path / "control").touch()
    vendors.apply(env := {**none}, nvidia_host(tmp_path / "n"))
    assert env == none | always("nvidia"), "clients of the multi-process service share the connections"


#: GPUs of a host and its vendor, the rank's words and variables -> the variables that set the processors.
PROCESSORS = [
    (4, nvidia_host, [], {"LOCAL_RANK": "0"}, range(16), range(8)),
    (4, nvidia_host, [], {"LOCAL_RANK": "3"}, range(16), range(8, 16)),
    (4, nvidia_host, [], {"LOCAL_RANK": "3"}, (0, 1), (0, 1)),  # never more processors than allowed
    (4, nvidia_host, ["--numa", "off"], {"LOCAL_RANK": "3"}, (0, 9), (0, 9)),
    (2, amd_host, [], {"LOCAL_RANK": "0"}, range(16), range(8)),
    (2, amd_host, [], {"LOCAL_RANK": "0", "ROCR_VISIBLE_DEVICES": "1"}, range(16), range(8, 16)),
    # Without devices ranks are divided evenly among NUMA nodes.
    (0, nvidia_host, [], {"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "2"}, range(16), range(8, 16)),
    (0, nvidia_host, [], {"MPI_LOCALNRANKS": "3", "MPI_LOCALRANKID": "2"}, range(16), range(16)),
]


@pytest.mark.parametrize("gpus, host, words, env, allowed, expected", PROCESSORS)
def test_processors(tmp_path, gpus, host, words, env, allowed, expected):
    assert start(host(tmp_path, gpus=gpus), *words, env=env).processors(set(allowed)) == set(expected)


def run_wrapper(*words, script="", program="/no/such/program", timeout=400):
    command = [sys.executable, "-I", "-S", rank.__file__, "--vendor", "host", *words, "--"]
    program = [sys.executable, "-I", "-S", "-c", script] if script else [program]
    return subprocess.run([*command, *program], capture_output=True, text=True, timeout=timeout, check=False)


def events(stderr):
    mark = rank.MARK.decode()
    return [json.loads(line.partition(mark)[2]) for line in stderr.split("\n") if mark in line]


def test_reports():
    script = "import sys; print('out'); sys.stderr.write('one\\n\\ntwo\\nhalf'); sys.exit(7)"
    done = run_wrapper("--report", script=script)
    assert (done.returncode, done.stdout) == (7, "out\n")
    started, failed = events(done.stderr)
    assert (started["event"], failed["status"], failed["lines"]) == ("started", 7, "one\ntwo\nhalf")
    assert [event["event"] for event in events(run_wrapper("--report", script="0").stderr)] == ["started", "ended"]
    done = run_wrapper("--report")
    assert done.returncode == 127
    assert events(done.stderr)[0]["lines"] == "/no/such/program: No such file or directory"
    lines = events(run_wrapper("--report", program="/no/python").stderr)[0]["lines"]
    assert lines == f"/no/python: No such file or directory: activate its environment, or name {sys.executable}"


def test_a_stray_process_does_not_hold_the_rank():
    script = "import subprocess; subprocess.Popen(['sleep', '500']); print('done')"
    done = subprocess.run(
        [sys.executable, "-I", "-S", rank.__file__, "--report", "--", sys.executable, "-c", script],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0


def test_what_a_program_that_failed_leaves_ends_with_it(tmp_path):
    """Processes of the rank's process group, which launchers create for each rank."""
    script = "import fcntl, subprocess, sys; lock = open(sys.argv[1]); fcntl.flock(lock, fcntl.LOCK_SH)"
    script += "; subprocess.Popen(['sleep', '500'], pass_fds=[lock.fileno()]); sys.exit(3)"
    path = tmp_path / "locked"
    path.touch()
    words = [sys.executable, "-I", "-S", rank.__file__, "--report", "--", sys.executable, "-c", script, str(path)]
    done = subprocess.run(words, stderr=subprocess.DEVNULL, start_new_session=True, timeout=400, check=False)
    assert done.returncode == 3
    with path.open() as lock:
        until(lambda: is_free(lock))


def test_a_wrapper_that_is_killed_alone_leaves_nothing(tmp_path):
    """Nor do processes that a shell has started, to which no signal would be sent."""
    path = tmp_path / "locked"
    path.touch()
    script = "import fcntl, sys, time; fcntl.flock(f := open(sys.argv[1]), 2); print(1, flush=True); time.sleep(1000)"
    words = ["sh", "-c", f"{sys.executable} -c '{script}' {path}; true"]
    wrapper = [sys.executable, "-I", "-S", rank.__file__, "--report", "--", *words]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen(wrapper, **how) as process, path.open() as lock:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        process.kill()
        until(lambda: is_free(lock))  # before the pipe is closed, which may end a program that is still writing


def test_reports_are_taken_out_of_the_stream():
    stream = Reports(2)
    text = b'hello\n\x1e{"event": "started", "rank": 1, "host": "b"}\nrest\x1enot ours\nend'
    for cut in range(len(text) + 1):
        stream.started.clear()
        assert stream.feed(text[:cut]) + stream.feed(text[cut:]) == b"hello\nrest\x1enot ours\nend"
        assert stream.started == {1: "b"}
    assert stream.missing([("a", 1), ("b", 1)]) == ["a"]
    assert stream.feed(b'aborted\n\0\x1e\0{"event": "started", "rank": 0, "host": "a"}\n') == b"aborted\n"
    assert stream.started == {0: "a", 1: "b"} and stream.lost() == ["b", "a"]
    stream.feed(b'\x1e{"event": "ended", "rank": 1, "host": "b"}\n')
    assert stream.lost() == ["a"]


@pytest.mark.parametrize("tag", [b"[1,0]<stderr>: ", b"[1,0]<stderr>:", b"[0] ", b"0: "])
def test_tags_of_launchers_go_with_the_reports_behind_them(tag):
    stream = Reports(1)
    report = b'\x1e{"event": "started", "rank": 0, "host": "a"}\n'
    assert stream.feed(tag + b"said\n" + tag + report + tag + b"more\n") == tag + b"said\n" + tag + b"more\n"
    assert stream.feed(b"half of a line" + report) == b"half of a line" and stream.started == {0: "a"}


@pytest.mark.parametrize("later, named", [
    ({"status": 137}, 2), ({"status": 137, "lines": "ucc_hetero: rank 2 has failed (status 1) and ends the job"}, 0),
    ({"status": 1}, 0),
], ids=["a rank that was killed", "one that ended itself", "one that failed as well"])  # fmt: skip
def test_the_failure_that_counts(later, named):
    reports = Reports(3)
    for event in ({"rank": 0, "status": 1}, {"rank": 2, **later}):
        reports.feed(b"\x1e" + json.dumps({"event": "failed", "host": "a", **event}).encode() + b"\n")
    assert reports.failure is not None and reports.failure["rank"] == named


def test_a_container_engine_runs_the_program(tmp_path, monkeypatch):
    """A fake engine, which passes exactly the requested variables to the program."""
    engine = tmp_path / "engine"
    engine.write_text(
        "#!/bin/bash\nkeep=()\nwhile [ \"$1\" = --env ]; do keep+=(\"$2=${!2}\"); shift 2; done\n"
        'echo "$1"; shift; exec env -i "${keep[@]}" "$@"\n'
    )  # fmt: skip
    engine.chmod(0o755)
    monkeypatch.setenv("PMIX_NAMESPACE", "n")
    words = ["--container", f"{engine} {{env}} 'an image'", "--set", "DATA=/a b", "--size", "3"]
    names = "['DATA', 'WORLD_SIZE', 'PMIX_NAMESPACE', 'HOME', 'MASTER_ADDR']"
    done = run_wrapper(*words, script=f"import os; print([os.environ.get(each) for each in {names}])")
    assert done.stdout == "an image\n['/a b', '3', 'n', None, None]\n", done.stderr


STARTED = '{"rank": 0, "host": "a", "event": "started"}'


@pytest.mark.parametrize("script, status, hosts, said", [
    ("echo told >&2; exit 3", 3, "localhost elsewhere", [
        "ucch-run: not every rank started: none or too few on localhost, elsewhere",
        "ucch-run: try: ssh -F keys elsewhere hostname;",  # this machine needs no ssh
    ]),
    ("exit 3", 3, f"{socket.gethostname()}.site elsewhere", [
        "ucch-run: try: ssh -F keys elsewhere hostname;",
    ]),
    ("echo 'HNP daemon: on node a1; Remote daemon: on node a10' >&2; exit 3", 3, "a1 a10 a2", [
        "ucch-run: try: ssh -F keys a10 hostname;",
    ]),
    # As Slurm after MPI_Abort, which kills ranks before they can report.
    (f"printf '\\036%s\\n' '{STARTED}' >&2; exit 137", 137, "a", [
        "ucch-run: sh ended with status 137, and no rank told why",
    ]),
], ids=["before ranks start", "under its own name", "a host is suspected", "no rank tells"])  # fmt: skip
def test_a_launcher_that_ends(capfd, script, status, hosts, said):
    assert supervise(("sh", "-c", script), [(name, 1) for name in hosts.split()], ssh="ssh -F keys") == status
    last = capfd.readouterr().err.splitlines()[-len(said) :]
    assert all(line.startswith(words) for line, words in zip(last, said, strict=True)), last


def test_a_launcher_that_has_to_be_killed_leaves_no_ssh(tmp_path, monkeypatch):
    """Such as an ssh to a host that never answers, which would block readers of the job's output."""
    monkeypatch.setattr("ucc_hetero.launch.supervise.GRACE", 0.1)
    os.mkfifo(tmp_path / "held")
    script = f"trap '' TERM; (trap - TERM; exec sleep 1000) 3> {tmp_path}/held & wait; wait"
    with ThreadPoolExecutor() as reader:
        said = reader.submit((tmp_path / "held").read_bytes)  # until the last process that could write has ended
        assert supervise(("bash", "-c", script), [("a", 1)], 0.5) == LATE
        assert said.result(timeout=300) == b""
