"""``ucch-doctor amd``: on a machine with AMD GPUs, what AMD's sources leave open; a report to send.

Each question is a process of its own with a limit to its time, so that one that hangs is an answer, too, and leaves
nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...installed import module
from ...machine import vendors
from ..rank import ending_with_parent
from . import amd_probes

#: Verdicts that are as good as the library needs.
GOOD = ("yes", "absent")
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
    Question("copies", "copies", "copies carry what they should, also from pages that processes share"),
    Question("peers", "peers", "copies between two devices do so"),
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
    Question("depth", "depth", "a thousand kernels can be given to a stream that waits", False),
    Question("ipc", "shared_memory", "another process sees at once what is written to fine-grained memory", seconds=60),
    Question("ipc-alone", "shared_memory", "the same where each process sees its own device alone", True,
             {"PROBE_ALONE": "1"}, 60),
    Question("ipc-dmabuf", "shared_memory", "the same by dmabuf", False, {"HSA_ENABLE_IPC_MODE_LEGACY": "0"}, 60),
    Question("ipc-plain", "shared_memory", "the same without HSA_FORCE_FINE_GRAIN_PCIE", False,
             {"HSA_FORCE_FINE_GRAIN_PCIE": "0"}, 60),
    Question("rccl", "rccl", "RCCL sums", seconds=90),
)  # fmt: skip
JOB = Question("job", "", "ranks of a job sum, gather and send to each other", seconds=180)
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


def ask(question: Question, environ: Mapping[str, str], limit: float = 1e9) -> dict[str, Any]:
    """The answer to one question: what its process says, or how that ended."""
    seconds, start = min(question.seconds, limit), time.monotonic()
    words = [sys.executable, *module(amd_probes.MODULE), question.probe]
    status, out, err = _run(words, {**environ, **question.env}, seconds)
    took = round(time.monotonic() - start, 2)
    lines = [line for line in out.splitlines() if line.startswith(amd_probes.MARK)]
    if lines:
        found = json.loads(lines[-1][len(amd_probes.MARK) :])
        return _said(question, found.pop("verdict"), found.pop("text"), env=dict(question.env), took=took, data=found)
    return _unanswered(question, status, err, seconds, env=dict(question.env), took=took)


def _unanswered(question: Question, status: int | None, err: str, seconds: float, **more: Any) -> dict[str, Any]:
    """The verdict on a process that said nothing: how it ended, or was ended."""
    if status is None:
        verdict, text = "hung", f"no answer in {seconds:g} s"
    else:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        verdict, text = "died", f"{how}: {err.splitlines()[-1]}" if err else how
    return _said(question, verdict, text, **more, error=err)


def _job(command: Sequence[str], environ: Mapping[str, str], limit: float) -> dict[str, Any]:
    """Findings of ``ucch-doctor --job`` on ranks that ``command`` starts."""
    words = [*command, sys.executable, *module("ucc_hetero.launch.doctor"), "--job", "--json", "--seconds", "30"]
    status, out, err = _run(words, environ, min(JOB.seconds, limit))
    with contextlib.suppress(ValueError):
        found = json.loads(out[out.index("{") :])["findings"]
        bad = [each for each in found if each["level"] == "error"]
        speed = "; ".join(each["text"] for each in found if each["code"] in ("pairs", "collectives"))
        text = "; ".join(f"{each['code']}: {each['text']}" for each in bad) or speed
        return _said(JOB, "no" if bad else "yes", text, command=shlex.join(command), data={"findings": found})
    return _unanswered(JOB, status, err, min(JOB.seconds, limit), command=shlex.join(command))


def jobs(options: argparse.Namespace, devices: int) -> list[list[str]]:
    """Command that starts ranks: as asked for, else on this host's devices where there are two."""
    if options.job:
        return [shlex.split(each) for each in options.job]
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    return [[program, "-np", str(min(devices, 4))]] if program and devices > 1 else []


def _about(environ: Mapping[str, str], limit: float) -> dict[str, Any]:
    """The host, without its name; and what the ordinary doctor says of it."""
    said = ask(HOST, environ, limit)
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
    mark = "" if each["verdict"] in GOOD or not each["needed"] else "  <- the library relies on it"
    return f"{each['verdict']:<7} {each['question']:<16} {each['asks']}: {each['text']}{mark}"


def _text(report: Mapping[str, Any]) -> str:
    """The report for people."""
    about = report["about"]
    lines = [f"ucch-doctor amd of ucc_hetero {about['ucc_hetero']}, {about['when']}"]
    lines += [f"kernel {about['kernel']}, {about['processor'] or 'processor unknown'}, Python {about['python']}"
              f"{', in a container' if about['container'] else ''}"]  # fmt: skip
    lines += [f"device {each}" for each in about["gpus"]]
    lines += [f"{name}={value}" for name, value in about["env"].items()]
    lines += [f"{each['level']:<7} {each['code']:<16} {each['text']}" for each in about["findings"]]
    return "\n".join([*lines, "", *(_line(each) for each in report["answers"])])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ucch-doctor amd",
        description="Try on this machine's AMD GPUs what only hardware can tell, and write a report to send; some ten "
        "minutes. With two GPUs there are more questions, and with --job ranks of several hosts.",
    )
    parser.add_argument(
        "--only", default="", metavar="NAME,…", help=f"of {', '.join(each.name for each in QUESTIONS)}, job"
    )
    parser.add_argument("--output", default="ucch-amd", metavar="PREFIX", help="of the report: PREFIX.txt, PREFIX.json")
    parser.add_argument("--limit", type=float, default=1e9, metavar="S", help="seconds for one question at most")
    starts = "what starts ranks: 'mpirun -np 2 --host a,b'; again for more"
    parser.add_argument("--job", action="append", metavar="COMMAND", help=starts)
    return parser


def _chosen(parser: argparse.ArgumentParser, only: str) -> list[str]:
    known = [*(each.name for each in QUESTIONS), JOB.name]
    names = [name for name in only.split(",") if name] or known
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"--only: no question is called {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def _keep(report: Mapping[str, Any], output: str) -> None:
    """Write the report as it is now, whole or not at all."""
    for kind, text in (("txt", _text(report)), ("json", json.dumps(report, indent=2))):
        new = Path(f"{output}.{kind}.new")
        new.write_text(text + "\n")
        new.replace(f"{output}.{kind}")


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
        print(f"ended: {options.output}.txt has what was answered by then, if anything was")
        return 128 + signal.SIGINT


def _examined(options: argparse.Namespace, names: Sequence[str], environ: Mapping[str, str]) -> int:
    first = ask(QUESTIONS[0], environ, options.limit)
    if first["verdict"] != "yes":
        print(_no_device(first))
        return 1
    report: dict[str, Any] = {"about": _about(environ, options.limit), "answers": []}
    for answer in _answers(first, names, options, environ):
        report["answers"].append(answer)
        _keep(report, options.output)
        print(_line(answer), flush=True)
    print(f"Please send {options.output}.txt and {options.output}.json; they do not name this host.")
    return int(any(each["needed"] and each["verdict"] not in GOOD for each in report["answers"]))


def _answers(
    first: dict[str, Any], names: Sequence[str], options: argparse.Namespace, environ: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Ask what was chosen, one after the other."""
    yield first
    for question in QUESTIONS[1:]:
        if question.name in names:
            yield ask(question, environ, options.limit)
    for command in jobs(options, len(first["data"]["devices"])) if JOB.name in names else ():
        yield _job(command, environ, options.limit)
