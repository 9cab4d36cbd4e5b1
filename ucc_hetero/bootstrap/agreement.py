"""Comparison of all ranks' facts before the first collective: accepted, repaired, or refused with a table of each
rank's values.

libucc hangs in context creation if versions differ, and gives wrong data if settings that steer its choice of
algorithms do (docs/bridge.md). Every rank judges the same facts, so all come to the same result.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from .. import env
from ..device import DeviceRuntime
from ..errors import AgreementError, counted, ranks_text
from ..machine.facts import Facts
from ..machine.ucx_transports import tcp_connections, within_host
from ..planner.topology import Topology, numbered, ranks_by
from ..transport import channels

#: Prefixes of environment variables of the two UCC libraries: native reads ``UCCHN_UCC_*``, the bridge ``UCCHB_UCC_*``.
NATIVE_PREFIX, BRIDGE_PREFIX = "UCCHN", "UCCHB"

#: Forced on a bridge, equal on every rank: the choice of algorithms must not depend on a local fact. By default UCC
#: chooses by this rank's memory type, CPU model and topology (docs/bridge.md).
BRIDGE_SETTINGS = {
    "UCC_CLS": "basic",
    "UCC_TLS": "ucp,self",
    "UCC_CL_BASIC_TLS": "ucp,self",
    "UCC_CONFIG_FILE": "",
    "UCC_TL_UCP_USE_TOPO": "n",
    "UCC_TL_UCP_RANKS_REORDERING": "n",
    "UCC_TL_UCP_KN_RADIX": "2",
    # The setting above does not affect allreduce; 2 for the reason given below.
    "UCC_TL_UCP_ALLREDUCE_KN_RADIX": "2",
    "UCC_TL_UCP_ALLREDUCE_SRA_KN_PIPELINE": "n",
    "UCC_TL_UCP_REDUCE_SRG_KN_PIPELINE": "n",
    "UCC_TL_UCP_TUNE": (
        "allgather:0-4k:@knomial#allgather:4k-inf:@ring#alltoall:0-inf:@pairwise#alltoallv:0-inf:@pairwise"
    ),
    "UCC_CHECK_ASYMMETRIC_DT": "n",
}

#: Defaults inside an island; ``UCC_*`` settings of the user take precedence. mlx5 and sharp make out-of-band rounds
#: that ranks without the hardware never join. TL/CUDA takes reduce_scatter and allgather from NCCL and is several times
#: slower (seen on H200s). With radix 2 every rank of a recursive exchange adds in the same order, so results are
#: bit-identical on all ranks. TL/SHM takes longer to set up a small collective than TL/UCP to run it, and up to four
#: ranks of a host exchange whole vectors faster than halves (seen: 64 KiB on two ranks 12 instead of 27 us). A short
#: reduce_scatter takes a step for each doubling of the ranks, not one for each rank (seen: 256 bytes for each of 16
#: ranks 21 instead of 72 us). Completion by a word written behind each of the vendor's kernels delays the next kernel
#: by some microseconds; completion by an event does not.
NATIVE_SETTINGS = {
    "UCC_TLS": "^mlx5,sharp,cuda,shm",
    "UCC_TL_UCP_ALLREDUCE_KN_RADIX": "2",
    "UCC_TL_UCP_TUNE": "allreduce:0-256k:host:[2-4]:@knomial#reduce_scatter:0-64k:host:[3-inf]:@knomial",
    "UCC_TL_NCCL_SYNC": "event",
    "UCC_TL_RCCL_SYNC": "event",
}

#: Settings that name the components that libucc may use.
_COMPONENTS = ("UCC_TLS", "UCC_CL_BASIC_TLS")

#: Components with which each rank makes a team with a given number by itself (seen with UCC 1.4).
_ALONE = ("ucp", "self")

#: Segments of TCP for libucc's transport, unless set by the user. UCX's default segments of 8 and 64 KiB are copied
#: more often: an allreduce of 64 MiB between two hosts took 22 ms instead of 18. UCX reads these variables without a
#: library's prefix.
TCP_SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "256K", "UCX_TCP_RX_SEG_SIZE": "256K"}

#: Settings that must be equal on all ranks: a difference is refused, unless the setting is one that we force.
STEERING_PREFIXES = (
    "UCC_", "UCX_PROTO_ENABLE", "UCX_UNIFIED_MODE", *TCP_SEGMENTS, "UCCH_TUNE", "UCCH_EMULATE", "UCCH_STAGING",
)  # fmt: skip
#: Settings that may differ between ranks.
LOCAL = ("UCC_LOG", "UCCH_LOG", "UCC_PROFILE", "UCC_CONFIG_FILE", "UCC_EC_", "UCC_MC_")


def steering(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The settings of a process that steer the choice of algorithms, sorted. An empty ``UCCH_*`` variable counts as
    unset."""
    found = ((k, v) for k, v in environ.items() if k.startswith(STEERING_PREFIXES) and not k.startswith(LOCAL))
    return tuple(sorted((k, v) for k, v in found if v.strip() or not k.startswith(env.PREFIX)))


def bridge_settings(ucc: str) -> dict[str, str]:
    """The bridge's settings for a version of libucc, which all ranks share.

    From 1.8 on ``allgatherv`` takes the order of its ring from the topology, and crashes without one (seen with 1.10: a
    null pointer in ``ucc_tl_ucp_allgatherv_ring_progress``). So the topology is enabled; the radix that would be chosen
    by it is set, and the ring is only used if displacements have gaps.
    """
    if tuple(map(int, re.findall(r"\d+", ucc)[:2])) < (1, 8):
        return BRIDGE_SETTINGS
    tune = BRIDGE_SETTINGS["UCC_TL_UCP_TUNE"] + "#allgatherv:0-inf:@knomial"
    return BRIDGE_SETTINGS | {"UCC_TL_UCP_TUNE": tune, "UCC_TL_UCP_USE_TOPO": "y"}


def apply_settings(ucc: str, environ: MutableMapping[str, str]) -> None:
    """Write the settings of both libraries for UCC version ``ucc`` to the variables with their prefixes."""
    for name, value in bridge_settings(ucc).items():
        environ[f"{BRIDGE_PREFIX}_{name}"] = value
    users = {k: v for k, v in environ.items() if k.startswith("UCC_")}
    for name, value in {**NATIVE_SETTINGS, **users}.items():
        environ.setdefault(f"{NATIVE_PREFIX}_{name}", value)


def keep_to_host_memory(environ: MutableMapping[str, str]) -> None:
    """Let a rank without a device use only components for host memory, unless the user names others: these need no
    other rank."""
    if "UCC_TLS" not in environ:
        environ.setdefault(f"{NATIVE_PREFIX}_UCC_TLS", ",".join(_ALONE))


def native_makes_teams_alone(environ: Mapping[str, str]) -> bool:
    """True if no component that the native library may use communicates with other ranks while a team is made."""
    return set(environ.get(f"{NATIVE_PREFIX}_UCC_TLS", "").split(",")) <= {*_ALONE}


def leave_broadcasts(memory: str, environ: MutableMapping[str, str]) -> None:
    """Let native teams that are made from now on leave broadcasts on this memory (``cuda``, ``rocm``) to the vendor's
    library.

    The vendor's library has all of them. If it cannot start, libucc silently uses TL/UCP for other calls, but refuses
    this broadcast, which shows the failure. Settings of the user are not changed.
    """
    for name in ("UCC_TL_UCP_TUNE", "UCC_TL_CUDA_TUNE"):
        ours = NATIVE_SETTINGS.get(name, "")
        if environ.get(f"{NATIVE_PREFIX}_{name}", ours) == ours:
            environ[f"{NATIVE_PREFIX}_{name}"] = "#".join(filter(None, (ours, f"bcast:{memory}:0")))


def native_uses(component: str, environ: Mapping[str, str]) -> bool:
    """True if its settings let the native library use a component of libucc, such as ``nccl``."""
    for name in _COMPONENTS:
        text = environ.get(f"{NATIVE_PREFIX}_{name}", "")
        names = text.lstrip("^").split(",")
        if text and "all" not in names and (component in names) == text.startswith("^"):
            return False
    return True


def segments(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables to set while libucc's contexts are made, and for no other library."""
    found = {name: environ.get(name, value) for name, value in TCP_SEGMENTS.items()}
    return found | tcp_connections(environ)


#: Facts that must be equal on all ranks of a job, and the cure if they differ; settings are named by themselves.
_MUST_AGREE = {
    "package": "install the same ucc-hetero on every host",
    "ucc": "UCC contexts of different versions hang: use the same libucc everywhere (UCCH_UCC_LIB names one)",
    "ucx": "use the same UCX minor version everywhere (UCCH_UCX_DIR names one): others may not understand each other",
    "byteorder": "ranks of different byte order cannot exchange numbers",
    "algorithms": "register the same algorithms on every rank, before its first communicator",
    "vendors": "register the same vendors on every rank, before its first communicator",
}
_SETTING = "export the same values on every rank (mpirun or ucch-run: -x NAME=value), or unset them"


def _must_agree(facts: Facts) -> dict[str, str]:
    """A rank's values of everything that must be equal; of UCX's version only major and minor."""
    own = {name: str(getattr(facts, name)) for name in _MUST_AGREE}
    return {**own, "ucx": ".".join(facts.ucx.split(".")[:2]), **dict(facts.settings)}


def _table(what: str, values: Sequence[str], cure: str) -> str:
    """A table of each rank's value, one line per value, and the cure."""
    ranks = {value: ranks_text(some) for value, some in ranks_by(values).items()}
    width = max(map(len, ranks.values()))
    lines = [f"    {each:<{width}}  {value or '(unset)'}" for value, each in ranks.items()]
    return "\n".join([f"  {what}:", *lines, f"    cure: {cure}"])


def _unreachable(everyone: list[Facts]) -> list[str]:
    """Problem if ranks on several nodes have no common transport between nodes; empty if they have."""
    if len({f.host.node for f in everyone}) < 2 or not all(f.transports for f in everyone):
        return []
    near = within_host()
    networks = [tuple(t for t in f.transports if t not in near) for f in everyone]
    if set.intersection(*map(set, networks)):
        return []
    cure = "let UCX_TLS and UCX_NET_DEVICES leave every rank one network that the others have too, such as tcp"
    return [_table("network transports", [", ".join(n) or "none" for n in networks], cure)]


def judge(everyone: list[Facts]) -> None:
    """Raise :class:`AgreementError` with a table if ranks differ in a fact that must be equal and cannot be forced."""
    found = [_must_agree(facts) for facts in everyone]
    names = [*_MUST_AGREE, *sorted({name for each in found for name in each} - _MUST_AGREE.keys())]
    values = {name: [each.get(name, "") for each in found] for name in names}
    problems = [_table(name, v, _MUST_AGREE.get(name, _SETTING)) for name, v in values.items() if len(set(v)) > 1]
    problems += _unreachable(everyone)
    without_host = [rank for rank, f in enumerate(everyone) if "host" not in f.memory_types]
    if without_host:
        problems.append(f"  memory: UCX of {ranks_text(without_host)} cannot move host memory")
    if problems:
        raise AgreementError("the ranks of this job cannot work together:\n" + "\n".join(problems))


def judge_contexts(everyone: Sequence[Mapping[str, bool]]) -> None:
    """Raise :class:`AgreementError` if only some ranks have connections in a context (True by name) that libucc has
    made."""
    lines = []
    for name in sorted({name for each in everyone for name in each}):
        without = [rank for rank, each in enumerate(everyone) if each.get(name) is False]
        if without and any(each.get(name) for each in everyone):
            lines.append(f"  {ranks_text(without)}: libucc has made the {name} context without connections (TL/UCP)")
    if lines:
        raise AgreementError(
            "some ranks of this job cannot take part:\n" + "\n".join(lines) + "\n    cure: what libucc and UCX "
            "print there says why; most often memory, segments or descriptors are short (ulimit -v, -n; /dev/shm)"
        )


# --- islands of a job by fabric: which ranks of a vendor its own library joins; all ranks derive the same ---------


#: Most sockets per rank on another host: two for each wire, and those of libucp.
_SOCKETS = 16


class Split(NamedTuple):
    """The fabric of each rank as a number, equal for ranks of one island, and the reason; no reason if hosts do not
    matter."""

    numbers: tuple[int, ...]
    why: str


def split(mpi: Any, everyone: Sequence[Facts], runtime: DeviceRuntime | None, library: Callable[[], bool]) -> Split:
    """Split ranks into islands by fabric; collective over ``mpi``, and the same on all ranks.

    UCCH_FABRIC decides, else the hosts' RDMA. Calls between devices of several islands must be queued in streams:
    otherwise they are slower than the vendor's library over sockets. So if UCCH_FABRIC is not set and some rank cannot
    queue calls, vendors are not split. ``library`` tells whether the vendor's collective library is available, for the
    stages inside an island.
    """
    whole = numbered([(f.vendor, f.host.node if f.vendor == "host" else ()) for f in everyone])
    spread = _spread(everyone)
    decided = any(f.fabric.wanted != "auto" for f in everyone)
    by_fabric = numbered([facts.joined for facts in everyone])
    why = "; ".join(_describe(vendor, ranks, everyone) for vendor, ranks in spread.items())
    devices = any(f.device_memory for f in everyone)
    if by_fabric == whole or not devices or decided:
        return Split(by_fabric, why)
    hosts = numbered([f.host.node for f in everyone])
    several = not channels.alone(Topology.group([f.vendor for f in everyone], hosts, fabrics=by_fabric))
    rank = int(mpi.Get_rank())
    far = len(hosts) - hosts.count(hosts[rank])
    obstacle = channels.obstacle(everyone[rank], runtime, lazy=not several) or few_files(far)
    if several and not obstacle and not library():
        obstacle = "no library of collectives for a host's devices"
    obstacles = channels.by_rank(mpi.allgather(obstacle))
    if not obstacles:
        return Split(by_fabric, why)
    return Split(whole, f"{', '.join(spread)}: all hosts, as streams cannot do calls between them ({obstacles})")


def few_files(far: int) -> str:
    """Why wires cannot reach ``far`` ranks of other hosts: the limit on open files; empty if they can."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or far * _SOCKETS <= most:
        return ""
    return f"{far * _SOCKETS} sockets for {counted(far, 'rank')} on other hosts, and ulimit -n is {most}"


def _spread(everyone: Sequence[Facts]) -> dict[str, list[int]]:
    """Vendors with ranks on several hosts, and these ranks."""
    ranks = ranks_by(facts.vendor for facts in everyone)
    ranks.pop("host", None)
    return {vendor: some for vendor, some in ranks.items() if len({everyone[r].host.node for r in some}) > 1}


def _describe(vendor: str, ranks: Sequence[int], everyone: Sequence[Facts]) -> str:
    """The fabric of a vendor's ranks on several hosts, and why."""
    reasons = ranks_by(((everyone[rank].fabric.kind, everyone[rank].fabric.why) for rank in ranks), ranks)
    joined = len({everyone[rank].joined for rank in ranks}) == 1
    first = everyone[ranks[0]].fabric
    if joined and first.kind != "all":
        return f"{vendor}: all hosts ({first.kind})"
    if len(reasons) == 1:
        return f"{vendor}: {first.describe()}"
    each = (f"{ranks_text(some)}: {kind or why}" for (kind, why), some in reasons.items())
    return f"{vendor}: hosts apart ({'; '.join(each)})"
