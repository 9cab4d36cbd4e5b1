"""The launcher's process while the job runs: output passed on, the first failure said last, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from .rank import MARK, ending_with_parent, relay, write_all

#: Seconds between asking the launcher to end and killing it.
GRACE = 10.0

#: Seconds that a launcher has for ending a job after a rank has failed. Hydra only ends it for ranks that use MPI.
AFTER_FAILURE = 3.0

#: Bytes of the launcher's messages that are kept, to look for names of hosts in.
SAID = 1 << 14

#: Exit status of a job that did not start or end in time, as of timeout(1).
LATE = 124

_SI_KERNEL = 0x80
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Outcome:
    """Reports of ranks on themselves."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.started: dict[int, str] = {}
        self.failure: dict[str, Any] | None = None

    def take(self, line: bytes) -> bool:
        """Note a rank's report; the first failure is the one that counts. False for a line that is none."""
        try:
            event = json.loads(line)
            rank, host, kind = int(event["rank"]), str(event["host"]), event["event"]
        except (ValueError, KeyError, TypeError):
            return False
        if kind == "started":
            self.started[rank] = host
        elif kind == "failed" and self.failure is None:
            self.failure = event
        return True

    def missing(self, hosts: Sequence[tuple[str, int]]) -> list[str]:
        """Hosts of which not every rank has started, in rank order."""
        found, first = [], 0
        for name, slots in hosts:
            if any(rank not in self.started for rank in range(first, first + slots)):
                found.append(name)
            first += slots
        return list(dict.fromkeys(found))


class Filter:
    """Takes ranks' reports out of a stream of text, whatever pieces it comes in."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.held = b""

    def feed(self, data: bytes) -> bytes:
        """Text for people; the rest of a report that is not complete is held back."""
        data, self.held = self.held + data.replace(b"\0", b""), b""  # Open MPI's own lines may bring some
        shown = []
        while data:
            text, mark, rest = data.partition(MARK)
            shown.append(text)
            if not mark:
                break
            line, newline, data = rest.partition(b"\n")
            if not newline:
                self.held = mark + line
                break
            if not self.outcome.take(line):
                shown.append(mark + line + newline)
        return b"".join(shown)


class _Watch:
    """Signals, time limits and the stream of one run."""

    def __init__(
        self, process: subprocess.Popen[bytes], outcome: Outcome, timeout: float | None, start_timeout: float | None
    ) -> None:
        self.process, self.outcome = process, outcome
        self.timeout, self.start_timeout = timeout, start_timeout
        now = time.monotonic()
        self.deadline = now + timeout if timeout else None
        self.start_deadline = now + start_timeout if start_timeout else None
        self.kill_at: float | None = None
        self.asked = 0
        self.failed_at: float | None = None
        #: The end of what the launcher and its ssh have said.
        self.said = b""
        #: Why the job was ended: a signal's number, "late", "start" or "failure".
        self.why: int | str = 0

    def signalled(self, number: int, code: int) -> None:
        """Pass a signal on, unless the terminal has sent it to the whole foreground group already."""
        self.why = self.why or number
        if self.asked:
            self._kill()
        elif not (number == signal.SIGINT and code == _SI_KERNEL):
            self.process.send_signal(number)
        self.asked += 1
        self.kill_at = self.kill_at or time.monotonic() + GRACE

    def check_time(self) -> None:
        now = time.monotonic()
        if self.kill_at and now > self.kill_at:
            self._kill()
            self.kill_at = None
        if self.outcome.failure is not None:
            self.failed_at = self.failed_at or now
            if now > self.failed_at + AFTER_FAILURE and not self.why:
                self._end("failure", now)
        late = self.deadline is not None and now > self.deadline
        unstarted = (
            self.start_deadline is not None
            and now > self.start_deadline
            and len(self.outcome.started) < self.outcome.size
            and self.outcome.failure is None
        )
        if (late or unstarted) and not self.why:
            self._end("late" if late else "start", now)

    def _end(self, why: str, now: float) -> None:
        self.why = why
        self.process.terminate()
        self.kill_at = now + GRACE

    def _kill(self) -> None:
        """Kill the launcher, and end what it has started here: an ssh that a host does not answer would stay for good,
        with our streams open."""
        lists = Path("/proc", str(self.process.pid), "task").glob("*/children")
        children = [int(pid) for each in lists for pid in each.read_text().split()]
        self.process.kill()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def supervise(
    words: Sequence[str],
    hosts: Sequence[tuple[str, int]],
    *,
    timeout: float | None = None,
    start_timeout: float | None = None,
) -> int:
    """Run the launcher's command and return the job's exit status: the first failing rank's, else the launcher's.

    Args:
        hosts: names and slots, in rank order, to name those that did not come up.
        timeout: seconds for the whole job.
        start_timeout: seconds within which all ranks must have started.
    """
    outcome = Outcome(sum(slots for _, slots in hosts))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        before_start = ending_with_parent(signal.SIGTERM, _SIGNALS)
        process = subprocess.Popen(words, stderr=subprocess.PIPE, preexec_fn=before_start)
        watch = _Watch(process, outcome, timeout, start_timeout)
        with process:  # closes its stream, and waits
            _pass_on(process, Filter(outcome), watch)
        status = process.returncode
        while signal.sigtimedwait(_SIGNALS, 0):
            pass  # what came while the job was ending is about the job
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _conclude(words[0], watch, status, hosts)


def _pass_on(process: subprocess.Popen[bytes], stream: Filter, watch: _Watch) -> None:
    """Copy the launcher's error stream until the launcher ends; wake up for signals and time limits."""
    assert process.stderr is not None

    def copy(data: bytes) -> None:
        text = stream.feed(data)
        watch.said = (watch.said + text)[-SAID:]
        write_all(2, text)

    def look() -> None:
        while (info := signal.sigtimedwait(_SIGNALS, 0)) is not None:
            watch.signalled(info.si_signo, info.si_code)
        watch.check_time()

    relay(process.pid, {process.stderr.fileno(): copy}, look)


def _conclude(launcher: str, watch: _Watch, status: int, hosts: Sequence[tuple[str, int]]) -> int:
    """Say last what matters most, and return the exit status."""
    outcome, why = watch.outcome, watch.why
    missing = outcome.missing(hosts)
    code = status if status >= 0 else 128 - status
    if outcome.failure is not None:
        return _tell_failure(outcome.failure)
    if isinstance(why, int) and why:
        _say(f"ended by {signal.Signals(why).name}")
        return 128 + why
    if why == "start" or (code and missing):
        late = f" within {watch.start_timeout:g} s (--start-timeout)" if why == "start" else ""
        _say(f"not every rank started{late}: none or too few on {_names(missing)}")
        others = [name for name in missing if name not in ("localhost", "127.0.0.1")]
        if others:
            suspect = _blamed(others, watch.said.decode(errors="replace"))
            _say(
                f"try: ssh {suspect} hostname; it must work without a password, the program and this Python must be "
                "there too, and the interfaces must reach this host (interfaces: in the cluster file)"
            )
        return LATE if why else code
    if code and not why:
        _say(f"{os.path.basename(launcher)} ended with status {code}, and no rank told why: see its messages above")
    if why == "late":
        _say(f"the job took longer than {watch.timeout:g} s (--timeout) and was ended")
        return LATE
    return code


def _blamed(hosts: Sequence[str], said: str) -> str:
    """The host that the launcher's messages name last. While one does not come up, none of the others starts ranks."""
    return max(hosts, key=lambda name: (said.rfind(name), len(name)))


def _names(hosts: Collection[str]) -> str:
    shown = list(hosts)[:8]
    return ", ".join(shown) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")


def _tell_failure(failure: Mapping[str, Any]) -> int:
    status = int(failure["status"])
    how = f"was killed by {_signal_name(status)}" if status > 128 else f"ended with status {status}"
    hint = ": dmesg says if memory had run out there" if status == 128 + signal.SIGKILL else ""
    _say(f"rank {failure['rank']} on {failure['host']} {how}, the first to fail{hint}")
    lines = str(failure.get("lines", "")).splitlines()
    if lines:
        _say("its last lines were:\n" + "\n".join(f"    {line}" for line in lines))
    return status


def _signal_name(status: int) -> str:
    try:
        return signal.Signals(status - 128).name
    except ValueError:
        return f"signal {status - 128}"


def _say(text: str) -> None:
    print(f"ucch-run: {text}", file=sys.stderr, flush=True)
