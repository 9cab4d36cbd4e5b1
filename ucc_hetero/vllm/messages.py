"""Data of a step from the scheduler's side to the workers', and messages between engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .interface import KVConnectorHandshakeMetadata, KVConnectorMetadata
from .settings import address


class Remote(NamedTuple):
    """A request that another engine has computed: request and engine ids, hosts of the workers (one, if all are
    there), port of the first worker, number of workers, number of tokens."""

    request: str
    engine: str
    hosts: tuple[str, ...]
    port: int
    ranks: int
    tokens: int

    @property
    def addresses(self) -> tuple[str, ...]:
        hosts = self.hosts if len(self.hosts) > 1 else self.hosts * self.ranks
        return tuple(address(host, self.port + rank) for rank, host in enumerate(hosts))

    def params(self) -> dict[str, Any]:
        """vLLM's ``kv_transfer_params``, which a proxy passes from one engine to the other."""
        named = {
            "remote_request_id": self.request, "remote_engine_id": self.engine, "remote_host": self.hosts[0],
            "remote_port": self.port, "remote_workers": self.ranks, "remote_num_tokens": self.tokens,
        }  # fmt: skip
        more = {"remote_hosts": list(self.hosts)} if len(self.hosts) > 1 else {}
        return {"do_remote_prefill": True, "do_remote_decode": False, **named, **more}

    @classmethod
    def of(cls, params: dict[str, Any]) -> Remote:
        """Parse ``kv_transfer_params``. ``ValueError`` if they are invalid: they come with requests, which may be
        forged."""
        names = [f"remote_{name}" for name in ("request_id", "engine_id", "host", "port", "workers", "num_tokens")]
        values = [params.get(name) for name in names]
        for name, value, kind in zip(names, values, (str, str, str, int, int, int), strict=True):
            if type(value) is not kind:
                raise ValueError(f"kv_transfer_params: {name!r} is {value!r:.40}, not {kind.__name__}")
        request, engine, host, port, ranks, tokens = values
        hosts = params.get("remote_hosts", [host])
        if type(hosts) is not list or not all(type(each) is str for each in hosts) or len(hosts) not in (1, ranks):
            raise ValueError(f"kv_transfer_params: 'remote_hosts' is {hosts!r:.40}, not a list of {ranks} str")
        found = cls(request, engine, tuple(hosts), port, ranks, tokens)  # type: ignore[arg-type]
        if not 0 < found.port < 65536 or not 0 < found.ranks <= 1024 or found.tokens < 0:
            raise ValueError(f"kv_transfer_params: there is no {found}")
        return found


class Part(NamedTuple):
    """Blocks of a local request in one group of caches. They are the remote request's from number ``first`` on."""

    first: int
    blocks: list[int]


class Load(NamedTuple):
    """Blocks of a local request to load from ``remote``, in each group of caches. Without blocks the other engine is
    told that it need not keep its own."""

    request: str
    remote: Remote
    parts: list[Part]

    @property
    def is_empty(self) -> bool:
        return not any(part.blocks for part in self.parts)


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]
    """Data of a step: loads to start, blocks of finished requests to offer in each group of caches, those of them that
    are kept for a next turn; new requests that wait to be scheduled, with the remote ones that they continue, and those
    that wait no longer."""

    loads: list[Load] = field(default_factory=list)
    offers: dict[str, list[list[int]]] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    waiting: dict[str, Remote] = field(default_factory=dict)
    scheduled: list[str] = field(default_factory=list)


@dataclass
class Place(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The host of a worker, for the scheduler."""

    host: str
