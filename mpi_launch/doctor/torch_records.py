"""Flight records in the format of torch's flight recorder, which its ``torchfrtrace`` reads: pickles, one of a rank."""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...native.libraries import lib
from ...trace.dumps import Comm, Dump
from .findings import Finding, ok

#: Version of the format.
_VERSION = "2.10"
#: torch's names, with which its tool compares: how many of a rank's counts go in and come out, in counts and in ranks.
_NAMES = {
    "allreduce": ("all_reduce", 0, 0),
    "bcast": ("broadcast", 0, 0),
    "reduce": ("reduce", 0, 0),
    "allgather": ("all_gather", 0, 1),
    "allgatherv": ("all_gather_v", 0, 0),
    "reduce_scatter_block": ("_reduce_scatter_base", 1, 0),
    "reduce_scatter": ("reduce_scatter_v", 0, 0),
    "alltoall": ("all_to_all_single", 1, 1),
    "alltoallv": ("all_to_all_v_single", 0, 0),
    "alltoallw": ("all_to_all_v_single", 0, 0),
    "gather": ("gather", 0, 1),
    "gatherv": ("gather", 0, 0),
    "scatter": ("scatter", 1, 0),
    "scatterv": ("scatter", 0, 0),
    "barrier": ("barrier", 0, 0),
}
#: Others, such as scans, have no name there.
_OTHER = ("reduce", 0, 0)
_TYPES = {"float16": "Half", "bfloat16": "BFloat16", "float32": "Float", "float64": "Double", "int8": "Char",
          "uint8": "Byte", "int16": "Short", "int32": "Int", "int64": "Long", "bool": "Bool"}  # fmt: skip
_LABEL = re.compile(r"(\w+)(?: (\w+)(?:\[([\d,]*)\]?)?)?")


def write(dumps: Sequence[Dump], folder: Path) -> Finding:
    """Write a file of each rank into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    everyone = frozenset(rank for dump in dumps for comm in dump.comms.values() for rank in comm.ranks)
    for dump in dumps:
        (folder / f"ucch_rank_{dump.rank}").write_bytes(pickle.dumps(document(dump, everyone)))
    return ok("torch", f"{len(dumps)} files in {folder}: torchfrtrace {folder}")


def document(dump: Dump, everyone: frozenset[int]) -> dict[str, Any]:
    """The content of a rank's file; ``everyone``: the ranks of the job."""
    names = {number: (_name(comm), _described(comm, everyone)) for number, comm in dump.comms.items()}
    config = {
        name: {"name": name, "desc": desc, "ranks": str(list(dump.comms[number].ranks))}
        for number, (name, desc) in names.items()
    }
    return {
        "version": _VERSION,
        "pg_config": config,
        "pg_status": {name: _progress(dump, number) for number, (name, _) in names.items()},
        "rank": dump.rank,
        "entries": entries(dump, names),
    }


def _name(comm: Comm) -> str:
    return f"{comm.number}.{comm.time}"


def _described(comm: Comm, everyone: frozenset[int]) -> str:
    first = comm.time == 1 and comm.number == 0
    return "default_pg" if first and set(comm.ranks) == everyone else "undefined"


def _progress(dump: Dump, number: int) -> dict[str, int]:
    calls = dump.records[(dump.records["comm"] == number) & (dump.records["kind"] < lib.UCCH_RECORD_SEND)]
    ended = calls[(calls["ended"] > 0) & (calls["status"] == 0)]
    started = calls[(calls["started"] > 0) | (calls["ended"] > 0)]
    last = [int(each["seq"].max(initial=0)) for each in (calls, started, ended)]
    return {f"last_{how}_collective": seq for how, seq in zip(("enqueued", "started", "completed"), last, strict=True)}


def entries(dump: Dump, names: dict[int, tuple[str, str]]) -> list[dict[str, Any]]:
    """A rank's calls, and its callers' messages, as torch has them."""
    found: list[dict[str, Any]] = []
    messages: dict[int, int] = defaultdict(int)
    for place, record in enumerate(dump.records):
        comm, group = dump.comms.get(int(record["comm"])), names.get(int(record["comm"]))
        if comm is None or group is None or record["own"] or record["kind"] == lib.UCCH_RECORD_REFUSED:
            continue
        is_message = record["kind"] >= lib.UCCH_RECORD_SEND
        if is_message and record["peer"] < 0:
            continue  # torch's tool needs the sender
        if is_message:
            messages[int(record["comm"])] += 1
        seq = messages[int(record["comm"])] if is_message else 0
        found.append(
            _entry(record, comm)
            | {
                "record_id": dump.lost + place,
                "pg_id": int(record["comm"]) - 1,
                "process_group": group,
                "collective_seq_id": 0 if is_message else int(record["seq"]),
                "p2p_seq_id": seq,
                "op_id": dump.lost + place,
                "is_p2p": is_message,
                "frames": [],
                "retired": bool(record["ended"]),
                "timeout_ms": 0,
                **_times(dump, record),
            }
        )
    return found


def _times(dump: Dump, record: Any) -> dict[str, Any]:
    called, started, ended = (int(record[name]) for name in ("called", "started", "ended"))
    done = ended and record["status"] == 0
    shift = dump.wall - dump.now
    return {
        "time_created_ns": called + shift,
        "time_discovered_started_ns": started + shift if started else None,
        "time_discovered_completed_ns": ended + shift if done else None,
        "duration_ms": (ended - called) / 1e6 if done else None,
        "state": "completed" if done else "started" if started else "scheduled",
    }


def _entry(record: Any, comm: Comm) -> dict[str, Any]:
    """Name, sizes and types of an operation."""
    if record["kind"] >= lib.UCCH_RECORD_SEND:
        way = f"send {comm.mine}->" if record["kind"] == lib.UCCH_RECORD_SEND else f"recv {comm.mine}<-"
        return _shaped(f"{way}{record['peer']}", [int(record["bytes"])], [int(record["bytes"])], "Byte")
    match = _LABEL.match(bytes(record["label"]).decode(errors="replace"))
    name, dtype, counts = match.groups() if match else ("", None, None)
    torch_name, goes_in, comes_out = _NAMES.get(name, _OTHER)
    total, size = sum(int(each) for each in (counts or "").split(",") if each), len(comm.ranks)
    sent, received = [total * size**goes_in], [total * size**comes_out]
    return _shaped(torch_name, sent, received, _TYPES.get(dtype or "", "Byte"))


def _shaped(name: str, sent: list[int], received: list[int], dtype: str) -> dict[str, Any]:
    return {
        "profiling_name": f"nccl:{name}",
        "input_sizes": [sent],
        "output_sizes": [received],
        "input_dtypes": [dtype],
        "output_dtypes": [dtype],
    }
