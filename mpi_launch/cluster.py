"""The cluster file: hosts, slots, vendors and images; or the same from a scheduler's variables."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..installed import extra
from ..machine.vendors import VENDORS
from . import sources
from .sources import Host

LOCAL_NAMES = ("localhost", "127.0.0.1")
RUNTIMES = ("docker", "podman", "apptainer")
_VENDOR_WORDS = ("auto", *VENDORS)


class ClusterError(ValueError):
    """The cluster file or a scheduler's variable is invalid. The message names the field, and what to write."""


@dataclass(frozen=True, slots=True)
class VendorPart:
    """Settings for ranks of one vendor, in addition to those for all ranks."""

    image: str = ""
    runtime: str = "docker"
    #: Options for the container engine, such as volumes.
    runtime_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    #: As for the whole cluster, which it replaces.
    interfaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts and their common settings."""

    hosts: tuple[Host, ...] = ()
    vendors: Mapping[str, VendorPart] = field(default_factory=dict)
    #: Network interfaces, best first, named as in the kernel (``eth0``) or in UCX (``mlx5_0:1``).
    interfaces: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    #: Command that reaches a host; empty for MPI's default.
    ssh: str = ""
    #: Interpreter of the ranks' wrapper on every host; empty for that of ucch-run.
    python: str = ""

    @property
    def only_here(self) -> bool:
        """True if all ranks run on this machine, as far as names can tell."""
        return all(host.name in LOCAL_NAMES for host in self.hosts)

    @property
    def size(self) -> int:
        """Number of slots of all hosts."""
        return sum(host.slots for host in self.hosts)

    def part(self, vendor: str) -> VendorPart:
        """Settings of a vendor's ranks."""
        return self.vendors.get(vendor, VendorPart())


def _need(fits: bool, where: str, what: str, value: Any) -> None:
    if not fits:
        raise ClusterError(f"{where}: must {what}, not {value!r}")


def _text(where: str, value: Any) -> str:
    _need(isinstance(value, (str, int, float)) and not isinstance(value, bool), where, "be text", value)
    return str(value)


def _name(where: str, value: Any) -> str:
    text = _text(where, value)
    is_name = text != "" and not any(c.isspace() or c in ",:'\"" for c in text)
    _need(is_name, where, "be a name without blanks, commas or colons", value)
    return text


def _count(where: str, value: Any) -> int:
    _need(type(value) is int and value > 0, where, "be a whole number of at least 1", value)
    return int(value)


def _one_of(*words: str) -> Callable[[str, Any], str]:
    def read(where: str, value: Any) -> str:
        _need(value in words, where, f"be one of {', '.join(words)}", value)
        return str(value)

    return read


def _list(where: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    _need(isinstance(value, list), where, "be a list", value)
    return tuple(_text(f"{where}[{i}]", word) for i, word in enumerate(value))


def _map(where: str, value: Any) -> dict[str, str]:
    _need(isinstance(value, dict), where, "map names to values", value)
    for name in value:
        if not isinstance(name, str) or not name or "=" in name:
            raise ClusterError(f"{where}: {name!r} is not a name")
    # YAML reads "on" and "yes" as true, but a variable must get the text.
    words = {True: "true", False: "false", None: ""}
    return {n: words[v] if v is None or isinstance(v, bool) else _text(f"{where}.{n}", v) for n, v in value.items()}


def _mapping(where: str, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
    _need(isinstance(value, dict), where, "map names to values", value)
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ClusterError(f"{f'{where}.' if where else ''}{name}: is not a field; {hint}")
    return dict(value)


_vendor = _one_of(*_VENDOR_WORDS)
#: Field -> function that parses it.
_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("image", "ssh", "python"), _text),
    **dict.fromkeys(("interfaces", "runtime_args"), _list),
    "name": _name, "env": _map, "slots": _count, "vendor": _vendor, "runtime": _one_of(*RUNTIMES),
}  # fmt: skip
#: Fields that list hosts or are defaults for them; fields of a host; other fields.
_HOSTS = ("hosts", "hostfile", "source", "slots", "vendor", "components")
_HOST = ("name", "slots", "vendor")
_OTHERS = ("interfaces", "env", "ssh", "python")


def _read(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _READERS[name](f"{where}.{name}" if where else name, each) for name, each in given.items()}


def _hosts(given: Mapping[str, Any], base: Path, environ: Mapping[str, str]) -> tuple[Host, ...]:
    slots = _count("slots", given["slots"]) if "slots" in given else None
    vendor = _vendor("vendor", given.get("vendor", "auto"))
    words = _list("components", given.get("components", []))
    components = tuple(_vendor(f"components[{i}]", word) for i, word in enumerate(words))
    if components and given.get("source") != "slurm":
        raise ClusterError("components: are those of a heterogeneous Slurm job, and need source: slurm")
    ways = [name for name in ("hosts", "hostfile", "source") if name in given]
    if len(ways) != 1:
        raise ClusterError(f"hosts: give one of hosts, hostfile and source, not {' and '.join(ways) or 'none'}")
    if ways == ["hostfile"]:
        path = base / _text("hostfile", given["hostfile"])
        found = sources.hostfile(path)
    elif ways == ["source"]:
        _one_of("slurm")("source", given["source"])
        found = sources.slurm(environ)
    else:
        return _listed(given["hosts"], slots, vendor)
    if not found:
        where = "this environment's SLURM_ variables" if ways == ["source"] else given["hostfile"]
        raise ClusterError(f"{ways[0]}: no hosts found in {where}")
    count = 1 + max(each.component for each in found)
    if components and len(components) < count:
        raise ClusterError(f"components: the job has {count}, not {len(components)}")
    for i, each in enumerate(found):
        word = components[each.component] if components else each.vendor or vendor
        of = _vendor(f"{ways[0]}: vendor of {each.name}", word)
        found[i] = replace(each, slots=each.slots or slots or 1, vendor=of)
    return tuple(found)


def _listed(value: Any, slots: int | None, vendor: str) -> tuple[Host, ...]:
    value = [value] if isinstance(value, str) and value else value
    what = "be a list of hosts such as {name: node0, slots: 4, vendor: nvidia}"
    _need(isinstance(value, list) and bool(value), "hosts", what, value)
    found = []
    for i, each in enumerate(value):
        where = f"hosts[{i}]"
        entry = {"name": each} if isinstance(each, str) else _mapping(where, each, _HOST)
        if "name" not in entry:
            raise ClusterError(f"{where}.name: is missing")
        default = {"slots": slots or 1, "vendor": vendor}
        try:
            names = sources.expand(_text(f"{where}.name", entry["name"]))
        except ValueError as error:
            raise ClusterError(f"{where}.name: {error}") from None
        for name in names:
            found.append(Host(**_read(where, {**default, **entry, "name": name})))
    return tuple(found)


def _part(where: str, value: Any) -> VendorPart:
    return VendorPart(**_read(where, _mapping(where, value, tuple(each.name for each in fields(VendorPart)))))


def parse(document: Any, base: Path = Path(), environ: Mapping[str, str] | None = None) -> Cluster:
    """Make a cluster from a parsed YAML document. ``ClusterError`` names an invalid field."""
    if not isinstance(document, dict):
        raise ClusterError(f"must have fields such as hosts: [node0], not {document!r}")
    given = _mapping("", document, (*_HOSTS, *_OTHERS, "vendors"))
    hosts = _hosts(given, base, os.environ if environ is None else environ)
    parts = _mapping("vendors", given.get("vendors", {}), tuple(VENDORS))
    vendors = {name: _part(f"vendors.{name}", part or {}) for name, part in parts.items()}
    others = _read("", {name: given[name] for name in _OTHERS if name in given})
    cluster = Cluster(hosts=hosts, vendors=vendors, **others)
    name = next((host.name for host in hosts if host.vendor == "auto"), "")
    if name and any(part.image for part in vendors.values()):
        raise ClusterError(f"vendors: images are chosen by vendor before a host is asked: give the vendor of {name}")
    return cluster


def load(path: Path, environ: Mapping[str, str] | None = None) -> Cluster:
    """Read a cluster file. ``ClusterError`` names the file and the field."""
    try:
        import yaml
    except ImportError:
        raise ClusterError(f"reading a cluster file needs PyYAML: {extra('launch')}") from None
    try:
        return parse(yaml.safe_load(path.read_text()), path.parent, environ)
    except yaml.YAMLError as error:
        why = f"is not YAML: {error}"
    except ClusterError as error:
        why = str(error)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", "is not text")
    raise ClusterError(f"{path}: {why}")


def local(np: int) -> Cluster:
    """A cluster of this machine only."""
    return Cluster(hosts=(Host("localhost", np),))


def limited(cluster: Cluster, np: int) -> Cluster:
    """The cluster reduced to its first ``np`` slots. ``ClusterError`` if it has fewer."""
    if np > cluster.size:
        raise ClusterError(f"-np {np}: the hosts have {cluster.size} slots in all; raise slots or take fewer ranks")
    hosts = []
    for host in cluster.hosts:
        if np:
            hosts.append(replace(host, slots=min(host.slots, np)))
            np -= hosts[-1].slots
    return replace(cluster, hosts=tuple(hosts))
