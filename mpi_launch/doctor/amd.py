"""``ucch-doctor amd``: tests on a machine with AMD GPUs what AMD's sources leave open, and writes a report to send.

Each question runs in a process of its own under timeout(1): a hang is an answer too, and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
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
from . import amd_probes


@dataclass(frozen=True, slots=True)
class Question:
    """A question. ``needed``: the library depends on a yes; otherwise the answer is informative."""

    name: str
    probe: str
    text: str
    needed: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 40.0


QUESTIONS: tuple[Question, ...] = (
    Question("devices", "found", "which HIP and devices are here", seconds=90),
    Question("host", "host", "what this host has and the ordinary doctor says of it", False, seconds=90),
    Question("memory", "memory", "HIP tells kinds of memory apart, also freed and ordinary memory"),
    Question("copies", "copies", "copies carry what they should, also from shared pages and between two devices"),
    Question("compiler", "compiler", "hipRTC compiles the kernels for this device, and they compute right", seconds=90),
    Question("kernel-waits", "kernel_waits", "running kernels and the host see each other's words", seconds=60),
    Question("stream-waits", "stream_waits", "streams wait for signal memory that the host writes"),
    Question("stream-waits-cp", "stream_waits", "the same where the command processor waits, not a kernel", False,
             {"GPU_STREAMOPS_CP_WAIT": "1"}),
    Question("queues", "queues", "ten streams may wait while another gets through (UCCH_HOLD=y)", False, seconds=60),
    Question("engines", "engines", "copies of other streams pass one that waits (UCCH_HOLD=y)", False),
    Question("calls", "calls", "no call but freeing waits for a stream that waits", seconds=60),
    Question("calls-early", "calls", "the same with all kernels loaded early", False,
             {"HIP_ENABLE_DEFERRED_LOADING": "0"}, 60),
)  # fmt: skip
#: Exit status of timeout(1) after a timeout, and after it had to kill.
_LATE = (124, -signal.SIGKILL)


def _run(words: Sequence[str], env: Mapping[str, str], seconds: float) -> tuple[int, str, str]:
    """Run a process: (exit status, standard output, end of standard error). Its children are ended with it."""
    limited = ["timeout", "--kill-after=3", str(seconds), *words]
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        with subprocess.Popen(limited, env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=err) as child:
            try:
                child.wait()
            finally:
                child.terminate()
        out.seek(0)
        err.seek(0)
        return child.returncode, out.read(), err.read()[-2000:].strip()


def ask(question: Question, environ: Mapping[str, str]) -> dict[str, Any]:
    """The answer to a question: what its process printed, or how it ended."""
    start = time.monotonic()
    words = [sys.executable, *module(amd_probes.MODULE), question.probe]
    status, out, err = _run(words, {**environ, **question.env}, question.seconds)
    took = round(time.monotonic() - start, 2)
    said = {"question": question.name, "asks": question.text, "needed": question.needed, "env": dict(question.env)}
    said["took"] = took
    lines = [line for line in out.splitlines() if line.startswith(amd_probes.MARK)]
    if lines:
        found = json.loads(lines[-1][len(amd_probes.MARK) :])
        return {**said, "verdict": found.pop("verdict"), "text": found.pop("text"), "data": found}
    if status in _LATE and took >= question.seconds:
        return {**said, "verdict": "hung", "text": f"no answer in {question.seconds:g} s", "error": err}
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return {**said, "verdict": "died", "text": f"{how}: {err.splitlines()[-1]}" if err else how, "error": err}


def _line(each: Mapping[str, Any]) -> str:
    mark = "" if each["verdict"] == "yes" or not each["needed"] else "  <- the library relies on it"
    return f"{each['verdict']:<7} {each['question']:<16} {each['asks']}: {each['text']}{mark}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ucch-doctor amd",
        description="Try on this machine's AMD GPUs what only hardware can tell, and write a report to send; some ten "
        "minutes. Ranks together are what ucch-run … --check tries.",
    )
    names = [each.name for each in QUESTIONS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--output", default="ucch-amd.json", metavar="FILE", help="the report (default %(default)s)")
    return parser


def _no_device(first: Mapping[str, Any]) -> str:
    seen = [device.pci for device in vendors.devices() if device.vendor == "amd"]
    kernel = f"the kernel shows {len(seen)} AMD GPU(s) that this process may use: {', '.join(seen)}"
    return f"No AMD GPU can be asked: {first['text']}\n{kernel if seen else 'The kernel shows none, either.'}"


def main(arguments: Sequence[str]) -> int:
    """Run the command line. The exit status is 1 without a device, or if a needed answer is no.

    The report is written after each answer, so that it has all answers so far if the doctor is ended.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if not os.access(Path(options.output).parent, os.W_OK):
        parser.error(f"--output {options.output}: no file can be written there")
    vendors.apply(environ := dict(os.environ))
    try:
        return _examined(options, environ)
    except KeyboardInterrupt:
        print(f"ended: {options.output} has what was answered by then, if anything was")
        return 128 + signal.SIGINT


def _examined(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    first = ask(QUESTIONS[0], environ)
    if first["verdict"] != "yes":
        print(_no_device(first))
        return 1
    about = {"ucc_hetero": __version__, "when": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())}
    answers: list[dict[str, Any]] = []
    for answer in itertools.chain([first], (ask(each, environ) for each in QUESTIONS[1:] if each.name in options.only)):
        answers.append(answer)
        Path(options.output).write_text(json.dumps({"about": about, "answers": answers}, indent=2) + "\n")
        print(_line(answer), flush=True)
    print(f"Please send {options.output}; it does not name this host.")
    return int(any(each["needed"] and each["verdict"] != "yes" for each in answers))
