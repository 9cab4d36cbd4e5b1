"""vLLM's base classes of a connector; without vLLM, minimal substitutes for another engine."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
except ModuleNotFoundError as error:
    if error.name != "vllm":
        raise  # vLLM is installed, but a module of its own is missing

    class KVConnectorRole(enum.Enum):  # type: ignore[no-redef]
        """Process of a connector: scheduler or worker."""

        SCHEDULER = 0
        WORKER = 1

    class _Substitute:
        """Base class of data that a connector passes on; or that the connector knows several groups of caches."""

    KVConnectorMetadata = KVConnectorHandshakeMetadata = SupportsHMA = KVConnectorStats = _Substitute

    class KVConnectorBase_V1:  # type: ignore[no-redef]
        """Base class of a connector."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            self._connector_metadata: Any = None

        def bind_connector_metadata(self, connector_metadata: Any) -> None:
            """Set the data of the current step."""
            self._connector_metadata = connector_metadata

        def clear_connector_metadata(self) -> None:
            """Clear the data of the current step."""
            self._connector_metadata = None

        def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
            """Return the requests that have been sent, and those received."""
            return None, None

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            """Return the requests that have been sent and received."""
            sent, come = self.get_finished(finished_req_ids)
            return SimpleNamespace(finished_sending=sent or set(), finished_recving=come or set(), failed_recving=set())


#: What vLLM calls tokens that another engine has computed; None for a vLLM that does not tell them apart.
_source = getattr(KVConnectorBase_V1, "_cache_hit_source", None)
PEER = getattr(type(_source), "P2P", _source)

__all__ = [
    "PEER", "KVConnectorBase_V1", "KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorRole",
    "KVConnectorStats", "SupportsHMA",
]  # fmt: skip
