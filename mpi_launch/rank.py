"""Starts one rank: selects its device and cores, sets variables for torch and the libraries, and runs the program.

Run as a file by the interpreter alone (``python -I -S rank.py OPTIONS -- PROGRAM …``), under ``mpirun`` or ``srun``, on
the rank's host and before MPI starts, because MPI and UCX open every device that they see. With ``--report`` it stays
the program's parent, and sleeps while the program writes nothing; otherwise it becomes the program.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import resource
import selectors
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

#: First byte of a line for ucch-run, not for the user: ASCII's record separator, which does not occur in text.
MARK = b"\x1e"

#: Prefixes of variables that are passed into containers, beside the launcher's.
_INTO_CONTAINERS = (
    "UCCH", "UCX_", "UCC_", "NCCL_", "RCCL_", "GLOO_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "OMP_NUM_THREADS",
    "CUDA_", "HIP_", "ROCR_",
)  # fmt: skip

#: Bytes of the error stream that are kept for ucch-run's last message, and maximum number of lines of them.
KEPT_BYTES, KEPT_LINES = 1 << 14, 20

#: Signals that the wrapper forwards to the program.
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

PR_SET_PDEATHSIG = 1

#: Seconds between SIGTERM and SIGKILL for a program whose launcher has gone.
GRACE = 3.0


def load(name: str) -> Any:
    """A module of ``machine/``, loaded from its file without importing the package."""
    here = Path(__file__).resolve().parent
    for folder in (here.parent, here.parent / "ucc_hetero"):
        path = folder / "machine" / f"{name}.py"
        if path.exists():
            spec = importlib.util.spec_from_file_location(f"ucch_{name}", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            return module
    raise FileNotFoundError(f"{name}.py is not above {here}: install the same ucc-hetero on every host")


class Start:
    """This rank's facts, and the environment and cores that follow from them."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str], root: Path = Path("/")) -> None:
        self.options = options
        self.root = root
        self.vendors, self.launchers = load("vendors"), load("launchers")
        number = self.launchers.number
        self.rank = number("RANK", environ, 0)
        self.size = options.size or number("WORLD_SIZE", environ, 1)
        self.local_rank = number("LOCAL_RANK", environ, self.rank)
        self.local_size = number("LOCAL_WORLD_SIZE", environ, 1)
        self.devices = self.vendors.devices(root)
        self.vendor = options.vendor
        if self.vendor == "auto":
            self.vendor = self.vendors.native_vendor(self.devices)
        self.devices = [device for device in self.devices if device.vendor == self.vendor]
        self._check_devices()
        self.given = {name: value for name, _, value in (setting.partition("=") for setting in options.set)}
        self.env = {**environ, **self.given}
        there = self.vendors.seen(self.vendor, self.devices, self.env) or [("", None)]
        #: The word that selects this rank's device among the visible ones, and the device if it is known.
        self.chosen, self.device = there[(self.local_rank - options.first_local) % len(there)]
        self._complete_environment()

    def _check_devices(self) -> None:
        """``ValueError`` if devices of a vendor were asked for and there are none: the rank would silently use host
        memory."""
        row = self.vendors.VENDORS[self.vendor]
        if row.module and not self.devices:
            what = "no device of it" if (self.root / row.module).exists() else f"no driver (/{row.module})"
            raise ValueError(
                f"vendor {self.vendor} was asked for (vendor: in the cluster file, or --vendor), but this host has "
                f"{what} that this process may use: correct the vendor, write auto or host, or pretend with --emulate"
            )

    def _shows_all(self) -> bool:
        """True if the program should see all devices: scripts for torchrun select theirs by LOCAL_RANK."""
        if self.options.devices != "auto":
            return bool(self.options.devices == "all")
        if self.env.get("UCCH_TORCH_REPLACE", "").strip():
            return True
        script = next((Path(word) for word in self.options.program if word.endswith(".py")), None)
        with contextlib.suppress(OSError):
            text = script.read_text(errors="replace") if script else ""
            return "LOCAL_RANK" in text and "set_device" in text
        return False  # the program itself will report it

    def _complete_environment(self) -> None:
        env = self.env
        env |= {"RANK": str(self.rank), "WORLD_SIZE": str(self.size)}
        env |= {"LOCAL_RANK": str(self.local_rank), "LOCAL_WORLD_SIZE": str(self.local_size)}
        if self.options.master:
            env["MASTER_ADDR"], _, env["MASTER_PORT"] = self.options.master.rpartition(":")
        if self.chosen and not self._shows_all():
            env[self.vendors.VENDORS[self.vendor].visible] = self.chosen
        for each in self.vendors.settings(self.vendor, self.devices, environ=env):
            env.setdefault(each.name, each.value)

    def processors(self, allowed: set[int]) -> set[int]:
        """Cores to run on, a subset of ``allowed``: near the device, or a share of the NUMA nodes."""
        if self.options.numa == "off":
            return allowed
        if self.devices:
            near = self.vendors.cpus_of(self.device.cpus) if self.device else allowed
        else:
            nodes = [cpus & allowed for cpus in self.vendors.numa_nodes(self.root) if cpus & allowed]
            # Only if ranks divide evenly among the nodes: a node with more ranks than the others would slow all of them
            # down.
            spread = len(nodes) > 1 and self.local_size % len(nodes) == 0
            near = nodes[self.local_rank * len(nodes) // self.local_size] if spread else allowed
        return near & allowed or allowed

    def words(self, program: list[str]) -> list[str]:
        """The command: the program, or the container engine that runs it."""
        if not self.options.container:
            return program
        prefixes = (*self.launchers.PREFIXES, *_INTO_CONTAINERS)
        names = sorted(name for name in self.env if name in self.given or name.startswith(prefixes))
        words: list[str] = []
        for word in shlex.split(self.options.container):
            words += [flag for name in names for flag in ("--env", name)] if word == "{env}" else [word]
        return [*words, *program]


class Parent:
    """Runs the program as a child, and reports its end to ucch-run."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.told = False
        #: The last bytes of the program's error stream.
        self.last = b""

    def run(self, words: list[str]) -> int:
        """Return the program's exit status; -n if signal n has ended it."""
        launcher = [os.pidfd_open(parent)] if (parent := os.getppid()) else []  # 0: in an outer namespace
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is a child to forward them to
        try:
            child = subprocess.Popen(
                words,
                env=self.start.env,
                stderr=subprocess.PIPE,
                preexec_fn=ending_with_parent(signal.SIGKILL, PASSED_ON),
                close_fds=False,  # Hydra's ranks talk to it through an inherited descriptor
            )
        except OSError as error:
            return not_started(self.start, words, error)
        for kind in PASSED_ON:
            signal.signal(kind, lambda number, _frame: self.pass_on(child, number))
        # A launcher that ended before the pidfd was opened is not noticed by it, but the report then fails.
        is_heard = report(self.start.rank, event="started")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        assert child.stderr is not None
        if is_heard:
            relay([os.pidfd_open(child.pid), *launcher], child.stderr.fileno(), self.copy)
        if child.poll() is None:
            end_all(child)
        status = child.wait()
        if status and not self.told:
            lines = [line for line in self.last.decode(errors="replace").splitlines() if line.strip()]
            shown = "\n".join(lines[-KEPT_LINES:])
            report(self.start.rank, event="failed", status=status if status > 0 else 128 - status, lines=shown)
        if status:
            signal_group(child, signal.SIGTERM)  # also processes that the program left behind
        else:
            report(self.start.rank, event="ended")
        return status

    def pass_on(self, child: subprocess.Popen[bytes], number: int) -> None:
        """Forward a signal. A rank that was told to end has not failed."""
        self.told = self.told or number not in (signal.SIGUSR1, signal.SIGUSR2)
        child.send_signal(number)

    def copy(self, data: bytes) -> None:
        """Write output of the program, and keep the last of it."""
        tell(data)
        self.last = (self.last + data)[-KEPT_BYTES:]


def report(rank: int, **event: object) -> bool:
    """Report to ucch-run in one write, so that lines of several ranks do not mix. False if the pipe is closed."""
    text = json.dumps({"rank": rank, "host": socket.gethostname(), **event})
    try:
        os.write(2, MARK + text.encode() + b"\n")
    except OSError as error:
        return not isinstance(error, BrokenPipeError)
    return True


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Kill the whole process group if this process is killed: children of a shell would survive."""
    group = os.getpgrp()
    if group != os.getpid():
        yield
        return
    read, write = os.pipe()  # the program does not inherit it
    if not os.fork():
        os.setpgid(0, 0)
        os.close(write)
        if not os.read(read, 1):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        os._exit(0)
    os.close(read)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the guard was killed
            os.write(write, b".")


def signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    """Signal the program and its children: launchers give each rank a process group."""
    os.killpg(0, number) if os.getpgrp() == os.getpid() else child.send_signal(number)


def end_all(child: subprocess.Popen[bytes]) -> None:
    """End the program because its launcher has gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        signal_group(child, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)


def not_started(start: Start, words: list[str], error: OSError) -> int:
    """The exit status for a program that could not be started, as a shell's."""
    status = 127 if isinstance(error, FileNotFoundError) else 126
    hint = f": activate its environment, or name {sys.executable}" if Path(words[0]).name.startswith("python") else ""
    return failed(start.options, start.rank, status, f"{words[0]}: {error.strerror}{hint}")


def failed(options: argparse.Namespace, rank: int, status: int, text: str) -> int:
    """Report why a rank's program does not run, also to ucch-run if that listens. Returns the exit status."""
    print(f"ucch-run: rank {rank} on {socket.gethostname()}: {text}", file=sys.stderr, flush=True)
    if options.report:
        report(rank, event="failed", status=status, lines=text)
    return status


def ending_with_parent(number: int, blocked: Collection[signal.Signals] = ()) -> Callable[[], None]:
    """Make a ``preexec_fn`` with which the child gets signal ``number`` when its parent ends, in any way.

    ``blocked``: signals that the parent has blocked, and that the child must receive."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def before() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        if os.getppid() != parent:  # the parent has ended already
            os.kill(os.getpid(), number)

    return before


def relay(
    ended: Collection[int], fd: int, take: Callable[[bytes], None], often: Callable[[], None] | None = None
) -> None:
    """Pass on data of a stream to ``take`` until a process ends; the stream may stay open in processes that it left
    behind.

    ``ended``: pidfds; the function returns when one of the processes ends, and closes them. ``often`` is called ten
    times a second."""
    over, reads = False, True
    os.set_blocking(fd, False)
    with selectors.DefaultSelector() as waiting:
        for each in (*ended, fd):
            waiting.register(each, selectors.EVENT_READ)
        while not over:
            over = any(key.fd in ended for key, _ in waiting.select(0.1 if often else None))
            with contextlib.suppress(BlockingIOError):
                while reads and (data := os.read(fd, 1 << 16)):
                    take(data)
                if reads:  # end of file
                    waiting.unregister(fd)
                    reads = False
            if often:
                often()
    for each in ended:
        os.close(each)


def tell(data: bytes) -> None:
    """Write all data to stderr. A closed pipe is not an error of the rank."""
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(2, data) :]


def die_of(number: int) -> None:
    """End by the same signal as the program, so that mpirun reports it; without a second core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(number, signal.SIG_DFL) if number not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), number)


def parser() -> argparse.ArgumentParser:
    """The options that ucch-run passes. Those that ucch-run has too mean the same."""
    found = argparse.ArgumentParser(prog="rank.py", description="Bind a rank's device and run its program.")
    found.add_argument("--vendor", default="auto")
    found.add_argument("--devices", choices=("auto", "one", "all"), default="auto")
    found.add_argument("--numa", choices=("on", "off"), default="on")
    found.add_argument("--size", type=int, default=0, help="ranks of the job")
    found.add_argument("--first-local", type=int, default=0, help="local rank that gets the first device")
    found.add_argument("--master", default="", help="host:port of rank 0's rendezvous")
    found.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="environment variable")
    found.add_argument("--container", default="", help="command of the container engine, {env} where variables go")
    found.add_argument("--report", action="store_true", help="tell ucch-run of start and failure")
    found.add_argument("program", nargs=argparse.REMAINDER)
    return found


def main() -> int:
    """Become the program, or its parent. The exit status is the program's."""
    options = parser().parse_args()
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    try:
        start = Start(options, os.environ)
    except (OSError, ValueError) as error:
        rank = load("launchers").number("RANK", os.environ, 0)
        return failed(options, rank, 1, str(error))
    allowed = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, start.processors(allowed))
    words = start.words(program)
    if options.report:
        with guarded():
            status = Parent(start).run(words)
        if status < 0:
            die_of(-status)
        return status
    try:
        os.execvpe(words[0], words, start.env)
    except OSError as error:
        return not_started(start, words, error)


if __name__ == "__main__":
    sys.exit(main())
