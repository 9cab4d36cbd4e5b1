"""``ucch-doctor amd`` on a fake HIP: healthy, with several faults, hanging, dying, and without a device."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from processes import LONG, python, until

from ucc_hetero.launch.doctor import amd

#: For a process of the doctor: settings that no test process sees.
MINE = "UCCH_TEST_DOCTOR"


def environ_of(fakegpu, **more):
    path = str(fakegpu["amd"])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UCCH_", "HIP_", "FAKEGPU_"))}
    mine = {"UCCH_HIP_LIB": path, "UCCH_RTC_LIB": path, "UCCH_CUDA_LIB": "none"}
    mine |= {"PROBE_BYTES": str(1 << 20), "PROBE_ROOM": "15"}
    return {**kept, **mine, "FAKEGPU_DEVICES": "2", "FAKEGPU_DELAY_US": "50", "FAKEGPU_XGMI": "1", **more}


def answers(fakegpu, names, **more):
    environ = environ_of(fakegpu, **more)
    return {each.name: amd.ask(each, environ) for each in amd.QUESTIONS if each.name in names.split()}


HEALTHY = "devices copies compiler kernel-waits stream-waits queues"


def test_healthy(fakegpu):
    """Every answer is from this run: it contains measured values."""
    found = answers(fakegpu, HEALTHY, GPU_MAX_HW_QUEUES="16", FAKEGPU_CONNECTIONS="0")
    assert {name: each["verdict"] for name, each in found.items()} == dict.fromkeys(HEALTHY.split(), "yes"), found
    assert found["devices"]["data"]["devices"] == ["0000:01:00.0", "0000:02:00.0"]
    rates = found["copies"]["data"]["rates"]
    assert "device to device" in rates and all(rate > 0 for rate in rates.values())
    assert found["queues"]["data"]["most"] == 24 and found["kernel-waits"]["data"]["us"] > 0
    assert all(each["took"] > 0 for each in found.values())


#: Fault of a device -> the questions that reveal it, and a word of the answer.
UNHEALTHY = [
    ({"FAKEGPU_NO_FLAGS": "1"}, {"stream-waits": "801"}),
    ({"UCCH_RTC_LIB": "none"}, {"compiler": "no run-time compiler", "kernel-waits": "no run-time compiler"}),
    ({"FAKEGPU_CONNECTIONS": "4", "PROBE_ROOM": "1"}, {"queues": "3 streams"}),
    ({"FAKEGPU_DEVICES": "0"}, {"devices": "(100)"}),
]


@pytest.mark.parametrize(("wrong", "told"), UNHEALTHY, ids=["-".join(told) for _, told in UNHEALTHY])
def test_unhealthy(fakegpu, wrong, told):
    found = answers(fakegpu, " ".join(told), **wrong)
    assert {name: each["verdict"] for name, each in found.items()} == dict.fromkeys(told, "no")
    for name, word in told.items():
        assert word in found[name]["text"]


def processes(mark):
    """Processes with the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def test_hangs_leave_nothing(fakegpu, tmp_path):
    """A question that does not end is answered as such, and its processes are killed."""
    mark = f"{MINE}={tmp_path}"
    environ = environ_of(fakegpu, FAKEGPU_DELAY_US="100000000", **{MINE: str(tmp_path)})
    question = next(each for each in amd.QUESTIONS if each.name == "copies")
    found = amd.ask(replace(question, seconds=1), environ)
    assert found["verdict"] == "hung" and "no answer in 1 s" in found["text"]
    until(lambda: not processes(mark))


def run(environ, folder, *words):
    command = [sys.executable, "-m", "ucc_hetero.launch.doctor", "amd", *words]
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=LONG, check=False)


def test_a_report(fakegpu, tmp_path):
    """It has every answer, this host's data and settings, and not its name."""
    environ = environ_of(fakegpu, HSA_XNACK="1", FAKEGPU_NO_FLAGS="1")
    done = run(environ, tmp_path, "--only", "host", "copies", "stream-waits", "--output", "r.json")
    text = (tmp_path / "r.json").read_text()
    report = json.loads(text)
    assert [each["question"] for each in report["answers"]] == ["devices", "host", "copies", "stream-waits"]
    assert [each["verdict"] for each in report["answers"]] == ["yes", "yes", "yes", "no"] and done.returncode == 1, done
    assert (
        "GB/s" in done.stdout and "<- the library relies on it" in done.stdout and "Please send r.json" in done.stdout
    )
    host = report["answers"][1]["data"]
    assert host["env"]["HSA_XNACK"] == "1" and {"code", "level"} <= host["findings"][0].keys()
    assert os.uname().nodename not in text.replace(os.uname().release, "")


#: Answers every question; the second question ends the doctor, but not itself.
SHELL = """#!/bin/sh
[ "$3" = copies ] && kill -s INT "$DOCTOR" && exec sleep 1000
echo 'ucch-answer {"verdict": "yes", "text": "", "devices": ["one"]}'
"""

PROGRAM = """
import os, sys
from ucc_hetero.launch.doctor import amd
sys.executable, os.environ["DOCTOR"] = sys.argv[1], str(os.getpid())
sys.exit(amd.main(["--only", "copies", "--output", "r.json"]))
"""


def listening():
    """Let a child receive Ctrl-C, also if everything runs in the background of a shell."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ended_during_a_question(tmp_path):
    """Its process is ended, and the report has the answers before it."""
    shell = tmp_path / "shell"
    shell.write_text(SHELL)
    shell.chmod(0o700)
    done = python(PROGRAM, shell, env={MINE: str(tmp_path)}, check=False, cwd=tmp_path, preexec_fn=listening)
    assert done.returncode == 128 + signal.SIGINT and not done.stderr, done
    assert "ended: r.json has all answers so far" in done.stdout
    assert [each["question"] for each in json.loads((tmp_path / "r.json").read_text())["answers"]] == ["devices"]
    until(lambda: not processes(f"{MINE}={tmp_path}"))


def test_no_device(tmp_path):
    done = run({**os.environ, "UCCH_HIP_LIB": "none", "UCCH_CUDA_LIB": "none"}, tmp_path)
    assert done.returncode == 1 and "No AMD GPU can be asked" in done.stdout and not list(tmp_path.iterdir())


def test_a_runtime_that_ends_the_process(tmp_path, compiled):
    """Like HIP's for kernels without code for a device, while a library is loaded."""
    source = tmp_path / "dies.c"
    source.write_text("#include <stdlib.h>\n__attribute__((constructor)) static void load(void) { abort(); }\n")
    library = compiled(tmp_path / "dies.so", "-shared", "-fPIC", source)
    found = amd.ask(amd.QUESTIONS[0], {**os.environ, "UCCH_HIP_LIB": str(library), "UCCH_CUDA_LIB": "none"})
    assert found["verdict"] == "died" and "signal 6" in found["text"]


@pytest.mark.parametrize(("words", "told"), [
    (["--only", "quenes"], "invalid choice: 'quenes'"),
    (["--output", "/nowhere/r"], "no file can be written there"),
])  # fmt: skip
def test_words_that_cannot_be(words, told, capsys):
    with pytest.raises(SystemExit):
        amd.main(words)
    assert told in capsys.readouterr().err
