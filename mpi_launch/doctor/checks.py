"""Checks of one host. Each yields at least one finding. They are pure functions of the facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ... import env as variables
from ...errors import counted
from ...machine.ucx_transports import RDMA, SHARED_MEMORY, WIRE_UP
from ...machine.vendors import VENDORS, seen
from .facts import Facts
from .findings import Finding, finding, ok

MIN_SHM = 1 << 30
MIN_NOFILE = 4096
#: Mbit/s from which an MTU of 1500 bytes costs throughput.
FAST = 10_000
JUMBO = 4200
#: Bytes that a TCP connection must be able to have in flight: a fast network's half millisecond.
MIN_WINDOW = 4 << 20


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.3g} GiB"


def mpi(facts: Facts) -> Iterator[Finding]:
    """mpirun and the MPI library of mpi4py belong together."""
    libs = facts.libraries
    if not libs.mpirun or not libs.mpi:
        yield finding("mpi-missing", "no mpirun or srun was found" if libs.mpi else libs.mpi_text)
    elif libs.mpirun != libs.mpi and libs.mpirun != "srun" and libs.mpi != "other":
        text = f"mpirun is {libs.mpirun_text}, but mpi4py uses {libs.mpi_text}: every rank would be a job of its own"
        yield finding("mpi-mismatch", text)
    else:
        yield ok("mpi", f"{libs.mpi_text}; started by {libs.mpirun_text}")


def libraries(facts: Facts) -> Iterator[Finding]:
    """UCC and UCX load, are the intended files, and support this host's GPUs."""
    libs = facts.libraries
    if libs.error:
        yield finding("libraries-missing", libs.error)
        return
    knows = f"transports {', '.join(libs.transports)}; memory {', '.join(libs.memory_types)}"
    yield ok("ucx", f"UCX {libs.ucx} from {libs.ucx_path}; {knows}")
    yield ok("ucc", f"UCC {libs.ucc} from {libs.ucc_path}; components {', '.join(libs.components) or 'built in'}")
    for note in libs.notes:
        if "was in the process first" in note:
            yield finding("ucx-foreign", note)
    for vendor in facts.vendors:
        yield from _knows(facts, vendor)


def _knows(facts: Facts, vendor: str) -> Iterator[Finding]:
    libs = facts.libraries
    row = VENDORS[vendor]
    kind, library = row.memory, next(iter(row.collectives), "").removeprefix("libucc_").replace("_", "/")
    if kind not in libs.memory_types:
        text = f"UCX {libs.ucx} from {libs.ucx_path} cannot move {kind} memory, and this host has {vendor} GPUs"
        yield finding("ucx-lacks-vendor", text, kind)
    missing = [name for name in (f"mc/{kind}", f"ec/{kind}") if name not in libs.components]
    if libs.components and missing:
        text = f"UCC {libs.ucc} has no {' and '.join(missing)}: it cannot reduce in this host's GPUs"
        yield finding("ucc-lacks-vendor", text, vendor)
    elif libs.components and library and library not in libs.components:
        text = f"UCC {libs.ucc} has no {library}: collectives inside an island cannot use the vendor's library"
        yield finding("ucc-lacks-library", text, library)


def torch(facts: Facts) -> Iterator[Finding]:
    """torch is built for this host's GPUs, and for libucc's CUDA version."""
    libs = facts.libraries
    if not libs.torch:
        return
    kind, _, version = libs.torch_for.partition(" ")
    what = f"torch {libs.torch} is built for {libs.torch_for}"
    if facts.vendors and kind not in {VENDORS[vendor].memory for vendor in facts.vendors}:
        vendors = " and ".join(facts.vendors)
        yield finding("torch-lacks-vendor", f"{what}, and this host has {vendors} GPUs", vendors)
    elif facts.vendors and kind == "cuda" and libs.ucc_cuda and version.partition(".")[0] != libs.ucc_cuda:
        text = f"{what}, and UCC {libs.ucc} from {libs.ucc_path} for cuda {libs.ucc_cuda}"
        yield finding("torch-cuda", f"{text}: two CUDA runtimes and NCCLs in one process", libs.ucc_cuda)
    else:
        yield ok("torch", what)


def gpus(facts: Facts) -> Iterator[Finding]:
    """Every GPU of the machine is usable."""
    usable = {device.pci for device in facts.usable}
    drivers = dict(facts.drivers)
    for vendor in sorted({vendor for vendor, _ in facts.gpus}):
        all_of_them = [pci for v, pci in facts.gpus if v == vendor]
        mine = [pci for pci in all_of_them if pci in usable]
        if mine:
            known = drivers.get(vendor) or "unknown"
            yield ok("gpu", f"{len(mine)} of {counted(len(all_of_them), f'{vendor} GPU')}, driver {known}")
        else:
            why = "its driver is not loaded" if vendor not in drivers else "this container was given none"
            yield finding("gpu-unusable", f"the machine has {counted(len(all_of_them), f'{vendor} GPU')}, but {why}")
    if not facts.gpus:
        yield ok("gpu", "none: ranks use host memory")


def network(facts: Facts) -> Iterator[Finding]:
    """There is a network, it is the configured one, and its MTU fits."""
    chosen = dict(facts.env).get("UCX_NET_DEVICES", "")
    ports = {port.name for port in facts.ports}
    known = {*facts.all_interfaces, *ports, *(name.partition(":")[0] for name in ports)}
    unknown = [name for name in chosen.split(",") if name and name != "all" and name not in known]
    if unknown:
        text = f"UCX_NET_DEVICES names {', '.join(unknown)}, which this host does not have"
        yield finding("net-unknown", text, ", ".join(sorted(known - {"lo"})))
    outside = [interface for interface in facts.interfaces if interface[0] != "lo"]
    if not outside and not facts.ports:
        yield finding("net-missing", "no network interface is up: ranks of other hosts cannot be reached")
    else:
        words = [f"{name} ({speed or '?'} Mbit/s, MTU {mtu})" for name, speed, mtu in outside]
        words += [f"{port.name} ({port.layer}, {port.state})" for port in facts.ports]
        yield ok("network", ", ".join(words))
    slow = [name for name, _, mtu in _fast(facts) if 0 < mtu < JUMBO]
    if slow:
        yield finding("mtu-small", f"{', '.join(slow)} is fast, but its packets are small", slow[0])


def _fast(facts: Facts) -> list[tuple[str, int, int]]:
    """Fast interfaces: (name, Mbit/s, MTU). Those of clouds do not tell their speed."""
    least = 0 if facts.flow_limit[1] else FAST
    return [each for each in facts.interfaces if each[0] != "lo" and (each[1] >= FAST or each[1] == least)]


def over_tcp(facts: Facts) -> bool:
    """True if UCX uses TCP on a fast network."""
    ports = any(port.state == "ACTIVE" for port in facts.ports)
    return bool(_fast(facts)) and not (ports and any(name.startswith(RDMA) for name in facts.libraries.transports))


def _short_windows(facts: Facts) -> str:
    """The kernel's limits on data in flight of a connection that are too low, as text."""
    words = {name: value.split()[-1] for name, value in facts.sysctl if name.startswith("net.ipv4.tcp_")}
    return ", ".join(f"{name} ends at {n} bytes" for name, n in words.items() if n.isdigit() and int(n) < MIN_WINDOW)


def rdma(facts: Facts) -> Iterator[Finding]:
    """RDMA ports are up, have addresses, may pin memory, and are used."""
    if facts.libraries.transport:
        yield ok("transport", "; ".join(f"{what}: {by}" for what, by in facts.libraries.transport))
    if not facts.ports:
        yield ok("rdma", "no RDMA ports: between hosts UCX uses TCP")
        return
    active = [port for port in facts.ports if port.state == "ACTIVE"]
    for port in active:
        if port.layer == "Ethernet" and not port.roce_v2:
            yield finding("roce-gid", f"{port.name} has no RoCE v2 address", port.name)
    if active and facts.memlock < 0:
        yield ok("rdma", f"{counted(len(active), 'active port')}, unlimited pinned memory")


def fabric(facts: Facts) -> Iterator[Finding]:
    """The vendors' collective libraries use the RDMA ports, if there are any."""
    active = [port.name for port in facts.ports if port.state == "ACTIVE"]
    for vendor, found in facts.fabrics:
        if active and not found.kind and found.wanted == "auto":
            yield finding("fabric-idle", f"the library of {vendor} does not use {', '.join(active)}: {found.why}")
        else:
            yield ok("fabric", f"{vendor}: {found.describe()}")


def _gpudirect(facts: Facts) -> bool:
    """True if every vendor's driver gives network cards access to device memory: from a kernel version on, or by
    module."""
    kernel, modules = int(facts.kernel.partition(".")[0]), {*facts.modules, *["open"] * facts.open_driver}
    rows = [VENDORS[vendor] for vendor in facts.vendors]
    return all(kernel >= row.peer_kernel if row.peer_kernel else modules & set(row.peer_modules) for row in rows)


def host(facts: Facts) -> Iterator[Finding]:
    """Limits and settings of the system that would slow a job down."""
    if facts.shm >= MIN_SHM:
        yield ok("shm", f"/dev/shm has {_gib(facts.shm)} free")
    if facts.ranks_here <= facts.cores:
        yield ok("cores", f"{counted(facts.cores, 'core')} for {counted(facts.ranks_here, 'rank')}")


#: Findings that follow from the facts directly: code, and a function that returns the text if there is a problem.
_PLAIN: tuple[tuple[str, Callable[[Facts], object]], ...] = (
    ("ucx-lacks-shm", lambda f: f.libraries.ucx and not SHARED_MEMORY & set(f.libraries.transports)
     and "UCX has no shared-memory transport: ranks of one host use the network"),
    ("gpu-denied", lambda f: f.denied and f"no permission for {', '.join(f.denied)}"),
    ("bar-small", lambda f: (small := [device for device in f.usable if device.small_bar])
     and f"the processor reaches {_gib(small[0].window)} of {_gib(small[0].memory)} of {len(small)} GPUs' memory; "
     "the short paths of UCX and UCC are off there, and small messages are slower"),
    ("iommu", lambda f: f.usable and f.iommu_translates
     and "the IOMMU translates traffic between GPUs and network cards"),
    ("rdma-down", lambda f: (down := [port.name for port in f.ports if port.state != "ACTIVE"])
     and f"{', '.join(down)} is not active"),
    ("gpudirect", lambda f: f.usable and any(port.state == "ACTIVE" for port in f.ports) and not _gpudirect(f)
     and "network cards cannot reach the GPUs' memory: everything between hosts goes through host memory"),
    ("rdma-idle", lambda f: f.libraries.idle
     and f"UCX {f.libraries.ucx} from {f.libraries.ucx_path} does not reach {', '.join(f.libraries.idle)}: bytes "
         "between hosts go over TCP"
         + (f"; {f.libraries.site_ucx} has a UCX with RDMA" if f.libraries.site_ucx else "")),
    ("memlock", lambda f: f.ports and f.memlock >= 0
     and f"only {f.memlock >> 10} KiB of memory may be pinned, and RDMA pins all that it sends from"),
    ("shm-denied", lambda f: f.shm < 0 and "/dev/shm is not there, or cannot be written"),
    ("shm-small", lambda f: 0 <= f.shm < MIN_SHM and f"/dev/shm has {f.shm >> 20} MiB free"),
    ("nofile", lambda f: 0 <= f.nofile < MIN_NOFILE and f"only {f.nofile} files and sockets may be open"),
    ("ptrace", lambda f: (scope := f.kernel_number("kernel.yama.ptrace_scope"))
     and f"kernel.yama.ptrace_scope is {scope}: ranks cannot copy from each other's memory (cma)"),
    ("cores-few", lambda f: f.ranks_here > f.cores
     and f"{f.ranks_here} ranks share {counted(f.cores, 'core')}: UCC and UCX wait by polling"),
    ("sched-groups", lambda f: f.kernel.startswith("6.18.") and f.ranks_here >= f.cores
     and f.kernel_number("kernel.sched_autogroup_enabled")
     and "Linux 6.18 shares cores among sessions: threads that yield and nap, as those of waiting ranks do, can keep "
     "other sessions from the cores for seconds"),
    ("numa-balancing", lambda f: f.usable and f.kernel_number("kernel.numa_balancing")
     and "the kernel moves pages between NUMA nodes under running transfers"),
    ("flow-limit", lambda f: over_tcp(f) and f.flow_limit[1]
     and f"{f.flow_limit[0]} limits a connection to {f.flow_limit[1] / 1000:g} Gbit/s; network threads have up to 8 "
     "between two ranks, all else has one"),
    ("tcp-window", lambda f: over_tcp(f) and _short_windows(f)),
)  # fmt: skip


def plain(facts: Facts) -> Iterator[Finding]:
    for code, wrong in _PLAIN:
        if text := wrong(facts):
            yield finding(code, str(text))


def settings(facts: Facts) -> Iterator[Finding]:
    """Environment variables are known and valid, and do not exclude what this host needs."""
    env = dict(facts.env)
    for name in variables.unknown(env):
        yield finding("env-unknown", f"unknown variable {name}", cure=variables.meant(name))
    for name in variables.TABLE:
        try:
            variables.get(name, env)
        except ValueError as error:
            yield finding("env-bad", str(error), f"{variables.PREFIX}{name}")
    words = {word.strip() for word in env.get("UCX_TLS", "all").split(",")}
    if not any(word.startswith("^") for word in words):
        yield from _transports(facts, words)
    forced = [name for name in env if name.startswith("UCCHB_UCC_")]
    steering = [name for name in ("UCC_TLS", "UCC_CLS", "UCC_CL_BASIC_TLS", "UCC_TL_UCP_TUNE") if name in env]
    if forced:
        yield finding("ucc-bridge", f"{', '.join(forced)} has no effect: bridges have forced settings (docs/bridge.md)")
    if steering:
        text = f"{', '.join(steering)} has an effect inside islands only: bridges have forced settings"
        yield finding("ucc-bridge", text, cure="unset it, or use UCCH_TUNE to choose algorithms of ucc_hetero")
    yield ok("settings", f"{counted(len(env), 'variable')} looked at")


def _transports(facts: Facts, words: set[str]) -> Iterator[Finding]:
    given = f"UCX_TLS={','.join(sorted(words))}"
    for memory in (VENDORS[vendor].memory for vendor in facts.vendors):
        if not words & {"all", memory, f"{memory}_copy"}:
            yield finding("tls-no-gpu", f"{given} shuts out {memory}: GPU memory cannot be sent", memory)
    if not words & WIRE_UP:
        yield finding("tls-no-wireup", f"{given} has no transport that can set up a connection between hosts")


def vendor_settings(facts: Facts) -> Iterator[Finding]:
    """Settings of vendors' libraries do not make streams or copies wait for each other, or end ranks."""
    env = dict(facts.env)
    for vendor in facts.vendors:
        mine = [device for device in facts.usable if device.vendor == vendor]
        shown, linked = len(seen(vendor, mine, env)), vendor in facts.linked
        holds = {"always": True, "several devices": shown > 1, "no links": len(mine) > 1 and not linked}
        for trap in VENDORS[vendor].traps:
            if trap.name in env and holds[trap.when] and trap.bad(env[trap.name]):
                text = trap.text.format(given=f"{trap.name}={env[trap.name]}", devices=shown)
                yield finding("env-vendor", text, cure=trap.cure)
        if VENDORS[vendor].dmabuf:
            yield from _dmabuf(facts, env.get(VENDORS[vendor].dmabuf, "try"), VENDORS[vendor].dmabuf)


def _dmabuf(facts: Facts, value: str, name: str) -> Iterator[Finding]:
    """UCX before 1.23 finds the kernel's configuration only in /boot, which containers lack."""
    version = tuple(int(part) for part in re.findall(r"\d+", facts.libraries.ucx)[:2])
    if facts.kernel_config or version >= (1, 23) or int(facts.kernel.partition(".")[0]) < 6:
        return
    told = value.lower() in ("y", "yes", "on", "1")
    unknown = f"{name}=y: UCX then does not know GPU memory at all"
    then = unknown if told else "network cards get GPU memory by way of the host"
    lacks = f"does not find /boot/config-{facts.kernel}, by which it tells that the kernel has dmabuf"
    yield finding("dmabuf", f"UCX {facts.libraries.ucx} {lacks}; {then}", name)


CHECKS = (mpi, libraries, torch, gpus, network, rdma, fabric, host, plain, settings, vendor_settings)


def examine(facts: Facts) -> list[Finding]:
    """All findings about one host."""
    return [each for check in CHECKS for each in check(facts)]
