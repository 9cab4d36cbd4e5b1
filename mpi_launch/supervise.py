"""ucch-run while the job runs: passes output on, reports the first failure last, and ends all processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .command import is_here
from .rank import MARK, ending_with_parent, relay, tell

#: Seconds between SIGTERM and SIGKILL for the launcher.
GRACE = 10.0

#: Seconds that a launcher gets to end the job after a rank has failed. Hydra does so only for ranks that use MPI.
AFTER_FAILURE = 3.0

#: Bytes of the launcher's output that are kept, to find host names in it.
SAID = 1 << 14

#: Exit status if the job did not start in time, as of timeout(1).
LATE = 124

#: Prefixes that launchers can put before output lines: [1,0]<stderr>:, [0], or 0:.
_TAG = re.compile(rb"^(\[[^]\n]*\](<stderr>)?:? ?|\d+: )\Z", re.M)

_SI_KERNEL = 0x80
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Reports:
    """The ranks' reports, extracted from a byte stream in any pieces.

    The first failure counts, but a rank that was killed comes first: other hosts may notice its death, fail and report
    before its own report arrives.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.started: dict[int, str] = {}
        self.ended: set[int] = set()
        self.failure: dict[str, Any] | None = None
        self.held = b""

    def _take(self, line: bytes) -> bool:
        """Process a rank's report. False if the line is not one."""
        try:
            event = json.loads(line)
            rank, host, kind = int(event["rank"]), str(event["host"]), event["event"]
        except (ValueError, KeyError, TypeError):
            return False
        if kind == "started":
            self.started[rank] = host
        elif kind == "ended":
            self.ended.add(rank)
        elif kind == "failed" and (self.failure is None or (_killed(event) and not _killed(self.failure))):
            self.failure = event
        return True

    def missing(self, hosts: Sequence[tuple[str, int]]) -> list[str]:
        """Hosts on which not every rank has started, in rank order."""
        found, first = [], 0
        for name, slots in hosts:
            if any(rank not in self.started for rank in range(first, first + slots)):
                found.append(name)
            first += slots
        return list(dict.fromkeys(found))

    def lost(self) -> list[str]:
        """Hosts of ranks that have started but did not report their end."""
        return list(dict.fromkeys(host for rank, host in self.started.items() if rank not in self.ended))

    def feed(self, data: bytes) -> bytes:
        """The output without reports. An incomplete report is kept for the next call."""
        data, self.held = self.held + data.replace(b"\0", b""), b""  # Open MPI's own lines may contain NUL bytes
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
            if self._take(line):
                shown[-1] = _TAG.sub(b"", text)
            else:
                shown.append(mark + line + newline)
        return b"".join(shown)


def _killed(failure: Mapping[str, Any]) -> bool:
    """True for a rank killed by a signal; false for one that failed and then ended itself by a signal
    (base/progress.c)."""
    return int(failure["status"]) > 128 and "has failed (status" not in str(failure.get("lines", ""))


class _Watch:
    """Signals, time limits and error stream of one run."""

    def __init__(self, process: subprocess.Popen[bytes], reports: Reports, start_timeout: float) -> None:
        self.process, self.reports, self.start_timeout = process, reports, start_timeout
        #: When and why the job will be ended: not all ranks have started, or a rank has failed.
        self.end_at, self.reason = time.monotonic() + start_timeout if start_timeout else float("inf"), "start"
        self.kill_at = float("inf")
        #: The last bytes that the launcher and its ssh wrote.
        self.said = b""
        #: Why the job was ended: a signal's number, "start" or "failure"; 0 if it was not.
        self.why: int | str = 0

    def signalled(self, number: int, code: int) -> None:
        """Forward a signal, unless the terminal sent it to the whole foreground group. A second signal kills."""
        if isinstance(self.why, int) and self.why:
            self._kill()
        elif not (number == signal.SIGINT and code == _SI_KERNEL):
            self.process.send_signal(number)
        self.why, self.kill_at = self.why or number, min(self.kill_at, time.monotonic() + GRACE)

    def copy(self, data: bytes) -> None:
        """Pass on the launcher's error stream without the reports."""
        text = self.reports.feed(data)
        self.said = (self.said + text)[-SAID:]
        tell(text)

    def check(self) -> None:
        """Process signals, failures and time limits since the last call."""
        while (info := signal.sigtimedwait(_SIGNALS, 0)) is not None:
            self.signalled(info.si_signo, info.si_code)
        now = time.monotonic()
        if self.reports.failure is not None and self.reason != "failure":
            self.end_at, self.reason = now + AFTER_FAILURE, "failure"
        elif self.reason == "start" and len(self.reports.started) == self.reports.size:
            self.end_at = float("inf")
        if now > self.end_at and not self.why:
            self.why, self.kill_at = self.reason, now + GRACE
            self.process.terminate()
        if now > self.kill_at:
            self._kill()

    def _kill(self) -> None:
        """Kill the launcher and its local children: an ssh to a host that does not answer would stay, and hold our
        streams open."""
        lists = Path("/proc", str(self.process.pid), "task").glob("*/children")
        children = [int(pid) for each in lists for pid in each.read_text().split()]
        self.process.kill()
        self.kill_at = float("inf")
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def supervise(
    words: Sequence[str], hosts: Sequence[tuple[str, int]], start_timeout: float = 0, ssh: str = "ssh"
) -> int:
    """Run the launcher's command and return the job's exit status: the first failing rank's, else the launcher's.

    ``hosts``: names and slots, in rank order, to name those that did not come up within ``start_timeout`` seconds (0:
    no limit). ``ssh``: how the launcher reaches a host."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        before_start = ending_with_parent(signal.SIGTERM, _SIGNALS)
        process = subprocess.Popen(words, stderr=subprocess.PIPE, preexec_fn=before_start)
        watch = _Watch(process, Reports(sum(slots for _, slots in hosts)), start_timeout)
        with process:  # closes its stream, and waits
            assert process.stderr is not None
            relay([os.pidfd_open(process.pid)], process.stderr.fileno(), watch.copy, watch.check)
        status = process.returncode
        while signal.sigtimedwait(_SIGNALS, 0):
            pass  # what came while the job was ending is about the job
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _conclude(words[0], watch, status, hosts, ssh)


def _conclude(launcher: str, watch: _Watch, status: int, hosts: Sequence[tuple[str, int]], ssh: str) -> int:
    """Say last what matters most, and return the exit status."""
    reports, why = watch.reports, watch.why
    missing = reports.missing(hosts)
    code = status if status >= 0 else 128 - status
    if reports.failure is not None:
        return _tell_failure(reports.failure)
    if isinstance(why, int) and why:
        _say(f"ended by {signal.Signals(why).name}")
        return 128 + why
    if why == "start" or (code and missing):
        late = f" within {watch.start_timeout:g} s (--start-timeout)" if why == "start" else ""
        _say(f"not every rank started{late}: none or too few on {_names(missing)}")
        others = [name for name in missing if not is_here(name)]
        if others:
            # The host that the launcher names last: while one does not come up, none of the others starts ranks.
            said = watch.said.decode(errors="replace")
            suspect = max(others, key=lambda name: (said.rfind(name), len(name)))
            _say(
                f"try: {ssh} {suspect} hostname; it must work without a password, the program and this Python must be "
                "there too, and the interfaces must reach this host (interfaces: in the cluster file)"
            )
        return LATE if why else code
    if not code and (lost := reports.lost()):  # Open MPI 5 ends well where a host's daemon has died
        _say(f"not every rank ended: {os.path.basename(launcher)} has lost those on {_names(lost)}")
        return 1
    if code and not why:
        _say(f"{os.path.basename(launcher)} ended with status {code}, and no rank told why: see its messages above")
    return code


def _names(hosts: Collection[str]) -> str:
    shown = list(hosts)[:8]
    return ", ".join(shown) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")


def _tell_failure(failure: Mapping[str, Any]) -> int:
    status = int(failure["status"])
    names = {each.value: each.name for each in signal.Signals}
    killer = names.get(status - 128, f"signal {status - 128}")
    how = f"was killed by {killer}" if status > 128 else f"ended with status {status}"
    hint = ": dmesg there says if memory ran out" if status == 128 + signal.SIGKILL else ""
    _say(f"rank {failure['rank']} on {failure['host']} {how}, the first to fail{hint}")
    lines = str(failure.get("lines", "")).splitlines()
    if lines:
        _say("its last lines were:\n" + "\n".join(f"    {line}" for line in lines))
        missing = re.search(r"No module named '(\w+)", lines[-1])
        if missing and find_spec(missing[1]) is not None:
            _say(f"another Python has run it than ucch-run's: activate that environment, or name {sys.executable}")
    return status


def _say(text: str) -> None:
    print(f"ucch-run: {text}", file=sys.stderr, flush=True)
