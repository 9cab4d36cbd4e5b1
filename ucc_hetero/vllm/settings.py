"""Settings of the connector, from vLLM's configuration and ``kv_connector_extra_config``."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from ..machine import nics
from ..rma import Certificates

#: Key of kv_connector_extra_config -> default.
_KNOWN: dict[str, Any] = {
    "secret_file": None,
    "host": None,
    "port": None,
    "tls": None,
    "prefill": [],
    "model": None,
    "attention_backend": "TRITON_ATTN",
    "timeout": 60,
    "lease": 120,
    "keep": 0,
}


class Group(NamedTuple):
    """A group of layers whose caches have the same blocks of a request: its number in vLLM, tokens of a block, names
    of the layers (None: all), and True if blocks before a window of tokens are dropped."""

    number: int
    block: int
    layers: list[str] | None
    windowed: bool


class Settings:
    """Settings of an engine. ``timeout``: seconds that a load may take; ``lease``: seconds for which blocks are kept
    for the decoding engine; ``keep``: seconds for which that keeps them for a next turn; ``groups``: of caches that are
    transferred; ``world``: number of workers."""

    def __init__(self, config: Any, caches: Any = None) -> None:
        self.config = config
        transfer, parallel, model = config.kv_transfer_config, config.parallel_config, config.model_config
        extra = dict(transfer.kv_connector_extra_config)
        if unknown := extra.keys() - _KNOWN.keys():
            raise ValueError(f"kv_connector_extra_config: {sorted(unknown)} are not among {sorted(_KNOWN)}")
        self._extra = {**_KNOWN, **extra}
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise ValueError(f"{name}: {getattr(parallel, name)}: caches that are divided by tokens are not known")
        self.sends, self.receives = bool(transfer.is_kv_producer), bool(transfer.is_kv_consumer)
        self.engine, self.ranks = str(transfer.engine_id), int(parallel.tensor_parallel_size)
        self.stages = int(getattr(parallel, "pipeline_parallel_size", 1))
        self.world = self.ranks * self.stages
        self.rank = int(getattr(parallel, "rank", 0)) % self.world
        replica = int(getattr(parallel, "data_parallel_index", 0))
        self.port = int(self._extra["port"] or transfer.kv_port) + replica * self.world
        self.host = self._host()
        self.model = str(self._extra["model"] or model.model)
        self.backend = str(self._extra["attention_backend"])
        self.cache_dtype, self.groups = str(config.cache_config.cache_dtype), _groups(config.cache_config, caches)
        self.heads = 1 if getattr(model, "use_mla", False) else int(model.get_total_num_kv_heads())
        #: Tokens at the end of a prompt that only the decoding engine computes: vLLM drops blocks before the window of
        #: the token after the prompt, but the decoding engine needs the window of the prompt's last token; and layers
        #: that draft several tokens need as many.
        ahead = int(getattr(config, "num_prefill_lookahead_tokens", 0))
        self.own_tokens = max(ahead - 1, int(any(group.windowed for group in self.groups)))
        self.timeout, self.lease, self.keep = (float(self._extra[name]) for name in ("timeout", "lease", "keep"))
        if self.keep and not (self.sends and self.receives):
            raise ValueError('kv_connector_extra_config: "keep" needs "kv_role": "kv_both"')

    def _host(self) -> str:
        """The address or name by which other engines reach this one; not needed if it only receives."""
        given = str(self._extra["host"] or "")
        if self.sends and given in ("", "0.0.0.0", "::"):
            found = [where for where, _ in nics.addresses()]
            known = f"this host has {', '.join(found)}" if found else "this host has none but its own"
            raise ValueError(
                'kv_connector_extra_config: "host", the address, or interface, by which decoding engines reach this '
                f"one: {known}"
            )
        return nics.address_of(given) or given or "127.0.0.1"

    @property
    def alone(self) -> str:
        """The address if it is a loopback address, which other hosts cannot reach; empty otherwise."""
        try:
            found = socket.getaddrinfo(self.host, None)[0][4][0] if self.sends else ""
        except OSError:
            return ""  # listening will raise the error
        return str(found) if found and ip_address(found).is_loopback else ""

    @property
    def secret(self) -> bytes:
        path = self._extra["secret_file"]
        if not path:
            raise ValueError(
                'kv_connector_extra_config: "secret_file", a file of at least 16 random bytes that all engines have'
            )
        return Path(path).read_bytes()

    @property
    def tls(self) -> Certificates | None:
        """Certificates, if connections are to be encrypted."""
        return Certificates(*self._extra["tls"]) if self._extra["tls"] else None

    @property
    def listens(self) -> str:
        """Address to listen at. A worker that only receives takes any free port, as it makes all connections."""
        return address(self.host, self.port + self.rank if self.sends else 0)

    @property
    def prefill(self) -> list[str]:
        """Addresses of engines with which contracts are compared at the start."""
        places = [str(each).rpartition(":") for each in self._extra["prefill"]]
        for host, _, port in places:
            if not host or not port.isdigit():
                raise ValueError(f'kv_connector_extra_config: "prefill" names {host}:{port}, which is not host:port')
        return [address(host.strip("[]"), int(port)) for host, _, port in places]

    def own_heads(self, count: int) -> tuple[int, int]:
        """(first head of this worker, number of heads) of layers of which it has ``count``. With fewer heads than
        workers several workers have the same one; layers may have other numbers of heads than the model."""
        total = count * self.ranks if count > 1 else self.heads
        return self.rank % self.ranks * total // self.ranks, total


#: Kinds of caches with blocks of tokens, as vLLM's classes are named.
_TOKENS = {"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"}


def _groups(config: Any, caches: Any) -> list[Group]:
    """The groups that vLLM wants to be transferred."""
    found = getattr(caches, "kv_cache_groups", None)
    if not found:
        return [Group(0, int(config.block_size), None, False)]
    numbers, out = getattr(caches, "transfer_group_ids", range(len(found))), []
    for number in numbers:
        spec = found[number].kv_cache_spec
        each = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]  # one for each layer, or one for all
        for layer in each:
            if not _TOKENS & {kind.__name__ for kind in type(layer).__mro__}:
                raise ValueError(f"{type(layer).__name__}: states of layers other than attention are not transferred")
        names = "sliding_window", "attention_chunk_size"
        windowed = any(getattr(layer, name, None) for layer in each for name in names)
        out.append(Group(number, int(spec.block_size), list(found[number].layer_names), windowed))
    return out


def address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
