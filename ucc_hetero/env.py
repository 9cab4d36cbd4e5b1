"""All environment variables of ucc_hetero: one table with parser, default and documentation.

Names begin with ``UCCH_``. ``get("TIMEOUT")`` reads, parses and checks one. An unknown name that begins with ``UCCH_``
is a typing mistake, and gives one warning (``log.configure``).
"""

from __future__ import annotations

import difflib
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .machine import fabric
from .machine.vendors import VENDORS, Vendor

PREFIX = "UCCH_"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?")


def parse_size(text: str) -> float:
    """Parse ``4096``, ``4K``, ``1.5M``, ``2GiB`` (an ``int`` of bytes) or ``inf`` (``math.inf``). Else
    ``ValueError``."""
    word = text.strip().lower()
    if word == "inf":
        return math.inf
    match = _SIZE.fullmatch(word)
    if not match:
        raise ValueError(f"{text!r} is not a size such as 4096, 4K, 1M or inf")
    value = float(match[1]) * 1024 ** "kmgt".index(match[2]) * 1024 if match[2] else float(match[1])
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(value)


def parse_flag(text: str) -> bool:
    """Parse ``1 y yes on true`` or ``0 n no off false``, in any case."""
    word = text.strip().lower()
    if word in ("1", "y", "yes", "on", "true"):
        return True
    if word in ("0", "n", "no", "off", "false"):
        return False
    raise ValueError(f"{text!r} is neither yes (1, y, yes, on, true) nor no (0, n, no, off, false)")


@dataclass(frozen=True, slots=True)
class Sampling:
    """UCCH_CHECK=data:N: verify one call in N."""

    every: int = 100


def _check(text: str) -> bool | Sampling:
    word, colon, number = text.strip().lower().partition(":")
    if word == "data" and (not colon or (number.isdigit() and 0 < int(number) <= 1 << 32)):
        return Sampling(int(number)) if colon else Sampling()
    try:
        return parse_flag(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither yes nor no, nor data or data:N, N from 1 to 4G") from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of seconds, or inf") from None
    if not value > 0:
        raise ValueError(f"{text!r}: seconds must be more than 0; inf means never")
    return value


def _silence(text: str) -> float:
    value = 0.0 if text.strip() == "0" else _seconds(text)
    if value and not 1 <= value <= 3600:
        raise ValueError(f"{text!r} is neither 0 nor from 1 to 3600 seconds")
    return value


def _signal(text: str) -> int:
    word = text.strip().upper().removeprefix("SIG")
    match = re.fullmatch(r"(RTMIN\+)?(\d+)", word)
    number = int(getattr(signal, f"SIG{word}", 0))
    if match:
        number = int(match[2]) + (signal.SIGRTMIN if match[1] else 0)
    allowed = {*signal.Signals, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)} - {signal.SIGKILL, signal.SIGSTOP}
    if word != "NONE" and number not in allowed:
        raise ValueError(f"{text!r} is neither a signal that can be handled, such as USR2 or RTMIN+9, nor none")
    return number


def _mbit(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number of Mbit/s, such as 25000")
    return int(text)


def _count(text: str) -> int:
    value = parse_size(text)
    if not 1 <= value <= 64 << 20:
        raise ValueError(f"{text!r} is not a number from 1 to 64M")
    return int(value)


def _wires(text: str) -> int | str:
    if text.strip().lower() == "auto":
        return "auto"
    if not text.strip().isdigit() or int(text) > 16:
        raise ValueError(f"{text!r} is neither auto nor from 0 to 16")
    return int(text)


def _slot(text: str) -> int | str:
    if text.strip().lower() == "auto":
        return "auto"
    value = parse_size(text)
    if not 16 << 10 <= value <= 16 << 20 or value % 4096:
        raise ValueError(f"{text!r} is not a multiple of 4K from 16K to 16M")
    return int(value)


def _choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(f"{text!r} is not one of {', '.join(words)}")
        return word

    return parse


def _words(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word.strip().lower() for word in text.split(",") if word.strip())
        bad = [word for word in words if word not in allowed]
        if bad:
            raise ValueError(f"{bad[0]!r} is not one of {', '.join(allowed)}")
        return words

    return parse


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable: name without prefix, parser, default, documentation, and form of its values."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    doc: str
    form: str


def library(row: Vendor) -> Variable:
    doc = f"Runtime library of {row.name} devices to load ({row.library.name}), or none: do not use them."
    return Variable(row.setting, str, "", doc, "path|none")


_LEVELS = ("error", "warn", "info", "debug", "trace")
_SUBSYSTEMS = tuple("all init lib topo plan coll p2p mem net device stream tune live torch".split())

_VARIABLES = (
    Variable("LOG_LEVEL", _choice(*_LEVELS), "warn", "Lowest severity that is logged.", "|".join(_LEVELS)),
    Variable("LOG_SUBSYS", _words(*_SUBSYSTEMS), ("all",), "Parts of the package that log.", ",".join(_SUBSYSTEMS)),
    Variable("LOG_FILE", str, "", "Log to this file, not to stderr; %h is the host, %p the process, %r the rank.",
        "path"),
    Variable("TUNE", str, "", "Choice of algorithms, in the grammar of UCC's TUNE.", "coll:0-64k:@flat#…"),
    Variable("TUNE_FILE", str, "", "Table of measured choices, written by `python -m ucc_hetero tune`.", "path"),
    Variable("LINK_SPEED", _mbit, 0,
        "Total Mbit/s of this host's links to other hosts; the kernel's values if unset.", "Mbit/s"),
    Variable("GROUP", str, "",
        "Place of this host in the network, outermost first: hosts whose places have a common beginning exchange data "
        "among themselves before they do with other hosts.", "site/rack"),
    Variable("FABRIC", _choice(*fabric.WORDS), "auto",
        "Where the vendor's library joins a vendor's ranks into one island; auto: on all hosts with RDMA that it "
        "will use; host: on each host; all: on all hosts.", "auto|host|all"),
    Variable("EMULATE", str, "", "Emulate these vendors, assigned to the ranks in order.", "nvidia:2,amd:2"),
    Variable("CHECK", _check, False,
        "y: compare the arguments of every collective between the ranks before it starts; slow. data: verify the "
        "results of one collective in 100 (data:N: one in N) (docs/native.md).", "y|n|data|data:N"),
    Variable("TIMEOUT", _seconds, 300.0, "Seconds after which an unfinished collective or message fails.",
        "seconds|inf"),
    Variable("HEARTBEAT", _silence, 1.5,
        "Seconds of silence after which another host counts as dead; a process of a host that answers counts as dead "
        "after five times as many, and one of several links between two hosts as cut. 0: never.", "seconds|0"),
    Variable("FLIGHT", str, "",
        "Folder for records of a rank's last calls, written when a call fails and by signal (ucch-flight-UID in the "
        "temporary folder if unset; none: no files).", "folder|none"),
    Variable("FLIGHT_SIGNAL", _signal, _signal("RTMIN+9"),
        "Signal that makes a rank write these records, unless the program handles it.", "name|number|none"),
    Variable("STAGING", _choice("auto", "direct", "staged"), "auto",
        "Path of messages on device memory. direct: by UCX itself; staged: through pinned host buffers; auto: direct "
        "where UCX can, but long ones to other hosts by rings.", "auto|direct|staged"),
    Variable("CHANNELS", parse_flag, True,
        "y: queue calls and messages among devices of several islands in streams; n: run them by way of the host.",
        "y|n"),
    Variable("WIRES", _wires, "auto",
        "Network threads of a rank between devices of several hosts, in pairs, one that sends and one that receives; "
        "short calls take three quarters of them, 6 at most. auto: 4; for a rank alone on its host one for "
        "each 4 cores, up to 12 (8 where a cloud limits connections, 2 with RDMA); fewer if cores are "
        "lacking. 0: such calls go by way of the host.", "auto|0..16"),
    Variable("WIRE_SLOT", _slot, "auto",
        "Largest slot in bytes of the rings between devices of several hosts (auto: 2M, or slightly more so that all "
        "wires carry equal parts); twice as large on one host and for the longest messages.", "auto|bytes"),
    Variable("HOLD", _choice("auto", "y", "n"), "auto",
        "y: streams may wait for work that other ranks have not begun; n: the host waits; auto: y if streams share no "
        "hardware queues (docs/gpu-inside.md), else n.", "auto|y|n"),
    Variable("UCC_LIB", str, "", "The libucc.so.1 to load.", "path"),
    Variable("UCX_DIR", str, "", "The directory whose libucp.so.0 and its family are loaded.", "path"),
    *(library(row) for row in VENDORS.values() if row.setting),
    Variable("RTC_LIB", str, "", "The libnvrtc or libhiprtc that compiles kernels, or none: compute on the host.",
        "path|none"),
    Variable("TORCH_REPLACE", _words("nccl", "gloo", "mpi", "ucc", "xccl"), (),
        "Backends that `ucch` replaces in torch scripts.", "nccl,gloo"),
    Variable("TORCH_VENDOR", parse_flag, True,
        "y: torch groups of one vendor's devices on one fabric use NCCL or RCCL; n: ucch.", "y|n"),
    Variable("TRACE", str, "", "Record the phases of every collective into this Chrome trace.", "path"),
    Variable("TRACE_EVENTS", _count, 1 << 18, "Number of latest events of each rank that the trace keeps.", "number"),
)  # fmt: skip

#: Variables by name without prefix.
TABLE: dict[str, Variable] = {variable.name: variable for variable in _VARIABLES}


def get(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Return the parsed value of ``UCCH_<name>``, or the default if it is unset or empty.

    ``KeyError`` for an unknown name. ``ValueError`` that names the variable for an invalid value.
    """
    variable = TABLE[name]
    text = (os.environ if environ is None else environ).get(PREFIX + name, "")
    if not text.strip():
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ValueError(f"{PREFIX}{name}: {error}") from None


def settings(*prefixes: str) -> dict[str, str]:
    """The variables that are set and begin with one of these prefixes."""
    # Compare bytes: each new communicator checks all variables, and decoding them takes longer.
    begins = tuple(map(os.fsencode, prefixes))
    return {name: os.environ[name] for name in [os.fsdecode(n) for n in os.environb if n.startswith(begins)]}


def unknown(environ: Iterable[str] | None = None) -> list[str]:
    names = os.environ if environ is None else environ
    return sorted(name for name in names if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in TABLE)


def check() -> None:
    """Read every variable that is set. ``ValueError`` names all with invalid values."""
    mistakes = []
    for name in TABLE:
        try:
            get(name)
        except ValueError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ValueError("; ".join(mistakes))


def meant(name: str) -> str:
    """Advice for an unknown variable: the most similar known name, or where all are listed."""
    near = difflib.get_close_matches(name.removeprefix(PREFIX).upper(), TABLE, 1)
    return f"did you mean {PREFIX}{near[0]}?" if near else "python -m ucc_hetero env lists all variables"


#: Variable set by :func:`meanwhile` -> (value before, number of threads that have set it).
_lent: dict[str, tuple[str | None, int]] = {}
_setting = threading.Lock()


@contextmanager
def meanwhile(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables while a library that reads them is initialised. The last of several threads restores them."""
    with _setting:
        for name in values:
            before, users = _lent.get(name, (os.environ.get(name), 0))
            _lent[name] = before, users + 1
        os.environ.update(values)
    try:
        yield
    finally:
        with _setting:
            for name in values:
                before, users = _lent.pop(name)
                if users > 1:
                    _lent[name] = before, users - 1
                elif before is None:
                    del os.environ[name]
                else:
                    os.environ[name] = before


def describe() -> str:
    """All variables as a text table: name, form, default and meaning."""
    lines = []
    for variable in TABLE.values():
        default = ",".join(variable.default) if isinstance(variable.default, tuple) else variable.default
        lines.append(f"{PREFIX}{variable.name}={variable.form}\n    {variable.doc} Default: {default!r}.")
    return "\n".join(lines)
