"""Hosts from a hostfile, or from Slurm's variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Host:
    """A host and its slots; 0 slots and no vendor if the source does not tell.

    ``vendor``: whose memory the ranks' buffers are in, or ``auto``.
    """

    name: str
    slots: int = 1
    vendor: str = "auto"
    #: Component of a heterogeneous Slurm job.
    component: int = 0


def expand(text: str) -> list[str]:
    """Host names of a list such as ``gpu[01-03,7],login``. ``ValueError`` for unbalanced brackets."""
    names = []
    for part in filter(None, re.split(r",(?![^\[]*\])", text.strip())):  # at commas that are not in brackets
        match = re.fullmatch(r"([^\[\]]*)(?:\[([0-9,-]+)\](.*))?", part)
        if not match:
            raise ValueError(f"{text!r} is not a list of hosts such as node[0-3],login")
        head, numbers, tail = match.groups()
        if numbers is None:
            names.append(head)
            continue
        for piece in numbers.split(","):
            first, _, last = piece.partition("-")
            if not re.fullmatch(r"\d+(-\d+)?", piece) or int(last or first) < int(first):
                raise ValueError(f"{text!r}: {piece!r} is not a range such as 01-03")
            for i in range(int(first), int(last or first) + 1):
                names += [f"{head}{i:0{len(first)}}{rest}" for rest in (expand(tail) if tail else [""])]
    return names


def hostfile(path: Path) -> list[Host]:
    """Read a hostfile of Open MPI (``host slots=2``) or Hydra (``host:2``), with an optional ``vendor=amd``.

    ``ValueError`` names an invalid line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"hostfile {path}: {getattr(error, 'strerror', 'is not text')}") from None
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        first = re.fullmatch(r"([^\[\]:]+)(?::(.*))?", words[0])
        given = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        slots = given.get("slots", first[2] if first else None)
        unknown = given.keys() - {"slots", "max_slots", "max-slots", "vendor"}
        is_known = slots is None or re.fullmatch("[1-9][0-9]{0,5}", slots)
        if not first or not is_known or len(given) < len(words) - 1 or unknown:
            raise ValueError(
                f"hostfile {path}, line {number}: {line.strip()!r} is not of the form: host slots=2 vendor=amd"
            )
        found.append(Host(first[1], int(slots or 0), given.get("vendor", "")))
    return found


def _repeated(text: str) -> list[int]:
    """Slurm's counts, ``2(x3),1``."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ValueError(f"SLURM_TASKS_PER_NODE={text!r} is not of the form 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def slurm(environ: Mapping[str, str]) -> list[Host]:
    """The hosts of a Slurm allocation; of all components if the job is heterogeneous."""
    components = int(environ.get("SLURM_HET_SIZE", "0"))
    found = []
    for i, suffix in enumerate([f"_HET_GROUP_{i}" for i in range(components)] or [""]):
        names = expand(environ.get(f"SLURM_JOB_NODELIST{suffix}", environ.get(f"SLURM_NODELIST{suffix}", "")))
        counts = _repeated(environ.get(f"SLURM_TASKS_PER_NODE{suffix}", ""))
        counts += [0] * (len(names) - len(counts))
        found += [Host(name, slots, "", i) for name, slots in zip(names, counts, strict=False)]
    return found


def in_slurm(environ: Mapping[str, str]) -> bool:
    """True inside a Slurm allocation whose variables name its hosts."""
    return bool(environ.get("SLURM_JOB_ID") and (environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_HET_SIZE")))
