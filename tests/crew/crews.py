"""Crews: jobs whose ranks stay, and run the cases of many tests one after the other.

Starting a rank costs a second of a core; a case of a few calls costs a hundredth of that. A case that fails or hangs
ends its crew, and names the rank; the next case gets a new crew.
"""

import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import tempfile
import textwrap
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RANK = Path(__file__).with_name("crew_rank.py")
#: The program of a case in a job of its own.
CASE = RANK.with_name("case.py")
TESTS = RANK.parents[1]
#: Seconds for the other ranks to finish after one has failed; and to print their stacks.
MOMENT = 3.0


#: Variables that are read for every communicator or case, although libraries may have seen them before: a crew takes
#: cases with different values. Other variables make a crew of their own.
OF_A_CASE = (
    *("UCCH_CHANNELS", "UCCH_EMULATE", "UCCH_FABRIC", "UCCH_HOLD", "UCCH_STAGING", "UCCH_TIMEOUT", "UCCH_TUNE"),
    *("UCCH_TUNE_FILE", "UCCH_WIRES", "UCCH_WIRE_SLOT", "FAKEGPU_LAYOUT"),
    *("FAKEGPU_AHEAD", "FAKEGPU_CONNECTIONS", "FAKEGPU_DELAY_US", "HSA_ENABLE_SDMA", "DICE", "QUEUED"),
)


def of_case_and_job(env):
    """(variables that a case may set, variables that its job must have from the start)."""
    case = {name: value for name, value in env.items() if name in OF_A_CASE}
    return case, {name: value for name, value in env.items() if name not in case}


def located(case, test=None):
    """(file, function) of a case ``module:function``, whose module is beside the test or in any folder of tests; None
    for a program, given as a path or as source text."""
    if not (found := re.fullmatch(r"(\w+):(\w+)", str(case))):
        return None
    places = [*([test.parent] if test else []), *sorted(TESTS.iterdir())]
    return next(path for folder in places if (path := folder / f"{found[1]}.py").exists()), found[2]


def write_script(folder, script):
    """The path of a script, given as a path or as source text."""
    if isinstance(script, Path):
        return script
    if "\n" not in script and script.endswith(".py"):
        return TESTS.parent / script
    path = folder / "snippet.py"
    path.write_text(textwrap.dedent(script))
    return path


def in_crew(folder, script, args, test):
    """(file, function, arguments) of a case, or of a program, for ranks of a crew."""
    if place := located(script, test):
        return *place, args
    return RANK, "script", [str(write_script(folder, script)), *args]


def program(folder, script, args, test):
    """Words of a case, or of a program, for Python."""
    return alone(script, args, test) or [str(write_script(folder, script)), *args]


def alone(case, args, test=None):
    """Words of a case in a process of its own; None for a program."""
    place = located(case, test)
    return place and [str(CASE), *map(str, place), json.dumps(args)]


def vendors(layout):
    return [name for part in layout.split(",") for name, count in [part.split(":")] for _ in range(int(count))]


def chosen(pool, wanted):
    """Indices in a pool of the wanted items, in this order; each is used once."""
    left = [*pool]
    places = []
    for each in wanted:
        places.append(left.index(each))
        left[places[-1]] = None
    return places


#: Memory of a rank after which its crew ends: nine ranks with devices would need several GiB, beside three other lanes.
MOST_MEMORY = 1 << 30


class CaseFailed(Exception):
    """A case failed on some rank; the text has the output of every rank."""


@dataclass(frozen=True)
class MPIResult:
    """Result of a job: mpirun's exit status and the output of all ranks."""

    returncode: int
    stdout: str
    stderr: str
    ranks: int = 0

    def said(self, words):
        """Number of lines of standard output that begin with these words, such as a line per rank."""
        return len(re.findall(rf"^{re.escape(words)}\b", self.stdout, re.MULTILINE))

    @property
    def output(self):
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


class Rank:
    """A rank of a crew, seen from the tests: it gets a line per case, and answers with a line."""

    def __init__(self, talk):
        self.talk, self._said = talk, b""
        self.number = int(self.hear(None)["rank"])
        # The process id here; on an emulated host the rank has another one.
        self.pid, _, _ = struct.unpack("3i", talk.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))

    def hear(self, seconds):
        """The rank's next message; ``error`` if it has ended. Waits ``seconds`` for its beginning."""
        self.talk.settimeout(seconds)
        while b"\n" not in self._said:
            more = self.talk.recv(1 << 16)
            if not more:
                return {"error": "this rank has ended"}
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        told = json.loads(line)
        return told

    @property
    def memory(self):
        """Bytes of its own memory and of touched segments; 0 if it has ended."""
        lines = []
        with suppress(OSError):
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))

    def tell(self, **order):
        self.talk.sendall(json.dumps(order).encode() + b"\n")


class Crew:
    """A job of ranks that take cases.

    Args:
        start: starts a command, as `subprocess.Popen` does.
        command: words that start the ranks, up to their program.
        ranks: how many.
        env: variables of the job.
        limit: seconds in which all ranks have to have started.
        kill: ends the job whose first process has this number, at once.
        after: called when the job has ended.
    """

    def __init__(self, start, command, ranks, env, limit, kill, after=lambda: None):
        self._folder = tempfile.TemporaryDirectory(prefix="crew", ignore_cleanup_errors=True)
        self.folder, self._kill, self._after, self._cases = Path(self._folder.name), kill, after, 0
        self._log = (self.folder / "log").open("wb")
        self.ranks = []
        words = [*command, str(RANK), str(self.folder / "door")]
        options = {"env": {"UCCH_FLIGHT": str(self.folder), **env}, "cwd": self.folder, "start_new_session": True}
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(self.folder / "door"))
            door.listen(ranks)
            door.settimeout(0.5)
            self._job = start(words, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, **options)
            if not self._met(door, ranks, limit):
                said = self.log()
                self.kill()
                raise CaseFailed(f"{len(self.ranks)} of {ranks} ranks have started\n{said}")
        self.ranks.sort(key=lambda rank: rank.number)

    def _met(self, door, ranks, limit):
        """Accept the ranks' connections. False if the job has ended, or takes too long."""
        until = time.monotonic() + limit
        while len(self.ranks) < ranks:
            with suppress(TimeoutError):
                self.ranks.append(Rank(door.accept()[0]))
                continue
            if self._job.poll() is not None or time.monotonic() > until:
                return False
        return True

    def log(self):
        return (self.folder / "log").read_text(errors="replace")

    def run(self, world, path, case, args, env, limit):
        """Run a case: (its ranks' standard output, their errors), one rank's after the other's.

        Args:
            world: the crew's ranks that take part, in the order of their numbers in the case.
            path: module with the case.
            case: function of it, which every rank calls with ``args``.
            args: whatever JSON can hold.
            env: variables that are set meanwhile.
            limit: seconds after which the case counts as hanging.

        Raises:
            CaseFailed: a rank has raised, ended, or did not come to the end; the crew is over.
        """
        self._cases += 1
        ranks = {number: self.ranks[each] for number, each in enumerate(world)}
        outs = [self.folder / f"{self._cases}.{number}" for number in ranks]
        for rank, out in zip(ranks.values(), outs, strict=True):
            rank.tell(world=list(world), path=str(path), case=case, args=list(args), env=dict(env), out=str(out))
        wrong = self._await(ranks, limit)
        texts = [[Path(f"{out}.{end}").read_text(errors="replace") for out in outs] for end in ("out", "err")]
        if wrong:
            said = self.log()
            self.kill()
            shown = [f"--- rank {r}\n{out}{err}" for r, (out, err) in enumerate(zip(*texts, strict=True))]
            raise CaseFailed("\n".join([f"{path.name}: {case}{tuple(args)}", *wrong, *shown, said]))
        for out in outs:
            for end in ("out", "err"):
                Path(f"{out}.{end}").unlink()
        return "".join(texts[0]), "".join(texts[1])

    def _await(self, ranks, limit):
        """Wait until ranks, by their numbers in the case, finish it. Returns the error."""
        waiting, wrong = {rank.talk: (number, rank) for number, rank in ranks.items()}, []
        until = time.monotonic() + limit
        while waiting:
            ready = select.select([*waiting], [], [], max(0.0, until - time.monotonic()))[0]
            if not ready:
                break
            for talk in ready:
                number, rank = waiting.pop(talk)
                if error := rank.hear(10.0).get("error"):
                    wrong.append(f"rank {number}: {error}")
                    until = min(until, time.monotonic() + MOMENT)
        for number, rank in waiting.values():
            wrong.append(f"rank {number} did not come to the end of the case")
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR2)  # the rank writes its stack
        if waiting:
            time.sleep(1.0)
        return wrong

    def kill(self):
        self._kill(self._job.pid)
        self._close()

    @property
    def is_large(self):
        """True if a rank has so much memory that others should begin anew: rings stay pinned for later communicators,
        and what a failed call has left stays, too."""
        return max(rank.memory for rank in self.ranks) > MOST_MEMORY

    def tell_end(self):
        """Let the ranks end as those of a program end."""
        for rank in self.ranks:
            with suppress(OSError):
                rank.tell(end=True)

    def end(self, limit):
        """Wait for the ranks' ends.

        Raises:
            CaseFailed: A rank does not end, fails, or a library complains.
        """
        self.tell_end()
        try:
            status = self._job.wait(limit)
        except subprocess.TimeoutExpired:
            status = f"none within {limit:g} s"
        said = self.log()
        self.kill()
        if status != 0 or "UCX  ERROR" in said or "UCX  WARN" in said:
            raise CaseFailed(f"a crew of {len(self.ranks)} ranks ended with status {status}\n{said}")

    def _close(self):
        self._job.wait(10)
        for rank in self.ranks:
            rank.talk.close()
        self._log.close()
        self._folder.cleanup()
        self._after()
