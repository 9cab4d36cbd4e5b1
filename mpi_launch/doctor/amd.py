"""``ucch-doctor amd``: on a machine with AMD GPUs, what AMD's sources leave open; a report to send.

Each question is a process of its own with a limit to its time, so that one that hangs is an answer, too, and leaves
nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...installed import module
from ...machine import vendors
from ..rank import ending_with_parent
from . import amd_probes

#: Variables that say how HIP and its relatives behave.
_TELLING = re.compile(r"^(HIP_|HSA_|GPU_|AMD_|ROC|CUDA_VISIBLE_DEVICES$|UCX_|UCC|NCCL_|RCCL_)")


@dataclass(frozen=True, slots=True)
class Question:
    """One thing to try. ``needed``: the library relies on a yes; otherwise it is good to know."""

    name: str
    probe: str
    text: str
    needed: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 40.0


QUESTIONS: tuple[Question, ...] = (
    Question("devices", "found", "which HIP and devices are here", seconds=90),
    Question("memory", "memory", "HIP tells kinds of memory apart, also freed and ordinary memory"),
    Question("copies", "copies", "copies carry what they should, also from shared pages and between two devices"),
    Question("compiler", "compiler", "hipRTC compiles the kernels for this device, and they compute right", seconds=90),
    Question("kernel-waits", "kernel_waits", "running kernels and the host see each other's words", seconds=60),
    Question("stream-waits", "stream_waits", "streams wait for signal memory that the host writes"),
    Question("stream-waits-cp", "stream_waits", "the same where the command processor waits, not a kernel", False,
             {"GPU_STREAMOPS_CP_WAIT": "1"}),
    Question("queues", "queues", "ten streams may wait while another gets through (UCCH_HOLD=y)", False, seconds=60),
    Question("queues-4", "queues", "the same with HIP's own number of queues", False, {"GPU_MAX_HW_QUEUES": "4"}, 60),
    Question("engines", "engines", "copies of other streams pass one that waits (UCCH_HOLD=y)", False),
    Question("calls", "calls", "no call but freeing waits for a stream that waits", seconds=60),
    Question("calls-early", "calls", "the same with all kernels loaded early", False,
             {"HIP_ENABLE_DEFERRED_LOADING": "0"}, 60),
    Question("ipc", "shared_memory", "another process sees at once what is written to fine-grained memory", seconds=60),
    Question("ipc-alone", "shared_memory", "the same where each process sees its own device alone", True,
             {"PROBE_ALONE": "1"}, 60),
    Question("ipc-dmabuf", "shared_memory", "the same by dmabuf", False, {"HSA_ENABLE_IPC_MODE_LEGACY": "0"}, 60),
    Question("ipc-plain", "shared_memory", "the same without HSA_FORCE_FINE_GRAIN_PCIE", False,
             {"HSA_FORCE_FINE_GRAIN_PCIE": "0"}, 60),
)  # fmt: skip
HOST = Question("host", "host", "what the ordinary doctor says of this host", seconds=90)

_INTERRUPT = {signal.SIGINT}


def _said(question: Question, verdict: str, text: str, **more: Any) -> dict[str, Any]:
    return {"question": question.name, "asks": question.text, "needed": question.needed, "verdict": verdict,
            "text": text, **more}  # fmt: skip


def _end(child: subprocess.Popen[bytes]) -> bool:
    """End a process and all that it has started; False where the kernel does not let go of it."""
    for kind, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # of those that outlive their parent
    return child.poll() is not None


def _start(words: Sequence[str], env: Mapping[str, str], out: Any, err: Any) -> subprocess.Popen[bytes]:
    """Start a session of its own, which ends with this process however that ends. Interrupts are blocked then,
    unless it fails: raised by what Python calls after a fork, as its logging does, one would be lost."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)
    before, streams = ending_with_parent(signal.SIGTERM, _INTERRUPT), {"stdin": subprocess.DEVNULL, "stdout": out}
    try:
        return subprocess.Popen(words, env=dict(env), **streams, stderr=err, start_new_session=True, preexec_fn=before)
    except BaseException:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPT)
        raise


def _run(words: Sequence[str], env: Mapping[str, str], seconds: float) -> tuple[int | None, str, str]:
    """(exit status, or None where time was up; standard output; standard error's end)."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = _start(words, env, out, err)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(seconds)
            status = child.poll()
        finally:
            gone = _end(child)
        out.seek(0)
        err.seek(0)
        text, said = out.read().decode(errors="replace"), err.read().decode(errors="replace")[-2000:].strip()
        return status, text, said if gone else f"{said}\nprocess {child.pid} cannot be ended"


def ask(question: Question, environ: Mapping[str, str]) -> dict[str, Any]:
    """The answer to one question: what its process says, or how that ended."""
    start = time.monotonic()
    words = [sys.executable, *module(amd_probes.MODULE), question.probe]
    status, out, err = _run(words, {**environ, **question.env}, question.seconds)
    took = round(time.monotonic() - start, 2)
    lines = [line for line in out.splitlines() if line.startswith(amd_probes.MARK)]
    if lines:
        found = json.loads(lines[-1][len(amd_probes.MARK) :])
        return _said(question, found.pop("verdict"), found.pop("text"), env=dict(question.env), took=took, data=found)
    if status is None:
        verdict, text = "hung", f"no answer in {question.seconds:g} s"
    else:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        verdict, text = "died", f"{how}: {err.splitlines()[-1]}" if err else how
    return _said(question, verdict, text, env=dict(question.env), took=took, error=err)


def _about(environ: Mapping[str, str]) -> dict[str, Any]:
    """The host, without its name; and what the ordinary doctor says of it."""
    said = ask(HOST, environ)
    failed = {"code": HOST.name, "level": "error", "text": f"{said['verdict']}: {said['text']}", "cure": ""}
    return {
        "ucc_hetero": __version__,
        "when": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "kernel": os.uname().release,
        "python": platform.python_version(),
        "container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        "env": {name: value for name, value in sorted(environ.items()) if _TELLING.match(name)},
        "processor": "",
        "gpus": [],
        "findings": [failed],
        **said.get("data", {}),
    }


def _line(each: Mapping[str, Any]) -> str:
    mark = "" if each["verdict"] == "yes" or not each["needed"] else "  <- the library relies on it"
    return f"{each['verdict']:<7} {each['question']:<16} {each['asks']}: {each['text']}{mark}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ucch-doctor amd",
        description="Try on this machine's AMD GPUs what only hardware can tell, and write a report to send; some ten "
        "minutes. Ranks together are what ucch-run … --check tries.",
    )
    parser.add_argument("--only", default="", metavar="NAME,…", help=f"of {', '.join(each.name for each in QUESTIONS)}")
    parser.add_argument("--output", default="ucch-amd.json", metavar="FILE", help="the report (default %(default)s)")
    return parser


def _chosen(parser: argparse.ArgumentParser, only: str) -> list[str]:
    known = [each.name for each in QUESTIONS]
    names = [name for name in only.split(",") if name] or known
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"--only: no question is called {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def _keep(report: Mapping[str, Any], output: str) -> None:
    """Write the report as it is now, whole or not at all."""
    new = Path(f"{output}.new")
    new.write_text(json.dumps(report, indent=2) + "\n")
    new.replace(output)


def _no_device(first: Mapping[str, Any]) -> str:
    seen = [device for device in vendors.devices() if device.vendor == "amd"]
    kernel = f"the kernel shows {len(seen)} AMD GPU(s) that this process may use: {', '.join(d.pci for d in seen)}"
    return f"No AMD GPU can be asked: {first['text']}\n{kernel if seen else 'The kernel shows none, either.'}"


def main(arguments: Sequence[str]) -> int:
    """The command line; the exit status is 1 where there is no device or the library would rely on what is not so.

    The report is written anew after each answer: where the doctor is ended, it has those that were there by then.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    names = _chosen(parser, options.only)
    if not os.access(Path(options.output).parent, os.W_OK):
        parser.error(f"--output {options.output}: no file can be written there")
    vendors.apply(environ := dict(os.environ))
    try:
        return _examined(options, names, environ)
    except KeyboardInterrupt:
        print(f"ended: {options.output} has what was answered by then, if anything was")
        return 128 + signal.SIGINT


def _examined(options: argparse.Namespace, names: Sequence[str], environ: Mapping[str, str]) -> int:
    first = ask(QUESTIONS[0], environ)
    if first["verdict"] != "yes":
        print(_no_device(first))
        return 1
    report: dict[str, Any] = {"about": _about(environ), "answers": []}
    asked = (ask(each, environ) for each in QUESTIONS[1:] if each.name in names)
    for answer in itertools.chain([first], asked):
        report["answers"].append(answer)
        _keep(report, options.output)
        print(_line(answer), flush=True)
    print(f"Please send {options.output}; it does not name this host.")
    return int(any(each["needed"] and each["verdict"] != "yes" for each in report["answers"]))
