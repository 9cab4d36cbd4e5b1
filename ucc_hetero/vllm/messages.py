"""Data of a step from the scheduler's side to the workers', and messages between engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .interface import KVConnectorMetadata
from .settings import address


class Remote(NamedTuple):
    """A request that another engine has computed: request and engine ids, address of the first worker, number
    of workers, number of tokens."""

    request: str
    engine: str
    host: str
    port: int
    ranks: int
    tokens: int

    @property
    def addresses(self) -> list[str]:
        return [address(self.host, self.port + rank) for rank in range(self.ranks)]

    def params(self) -> dict[str, Any]:
        """vLLM's ``kv_transfer_params``, which a proxy passes from one engine to the other."""
        named = {
            "remote_request_id": self.request, "remote_engine_id": self.engine, "remote_host": self.host,
            "remote_port": self.port, "tp_size": self.ranks, "remote_num_tokens": self.tokens,
        }  # fmt: skip
        return {"do_remote_prefill": True, "do_remote_decode": False, **named}

    @classmethod
    def of(cls, params: dict[str, Any]) -> Remote:
        """Parse ``kv_transfer_params``. ``ValueError`` if they are invalid: they come with requests, which may be
        forged."""
        names = "remote_request_id", "remote_engine_id", "remote_host", "remote_port", "tp_size", "remote_num_tokens"
        values = [params.get(name) for name in names]
        for name, value, kind in zip(names, values, (str, str, str, int, int, int), strict=True):
            if type(value) is not kind:
                raise ValueError(f"kv_transfer_params: {name!r} is {value!r:.40}, not {kind.__name__}")
        found = cls(*values)  # type: ignore[arg-type]
        if not 0 < found.port < 65536 or not 0 < found.ranks <= 1024 or found.tokens < 0:
            raise ValueError(f"kv_transfer_params: there is no {found}")
        return found


class Load(NamedTuple):
    """Blocks of a local request to load from ``remote``, whose blocks from number ``first`` on they are. Without blocks
    the other engine is told that it need not keep them."""

    request: str
    remote: Remote
    blocks: list[int]
    first: int


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]
    """Data of a step: loads to start, and blocks of finished requests to offer."""

    loads: list[Load] = field(default_factory=list)
    offers: dict[str, list[int]] = field(default_factory=dict)
