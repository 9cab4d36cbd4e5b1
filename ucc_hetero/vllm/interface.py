"""vLLM's classes that a connector is made of, or, where there is no vLLM, as much of them as another engine needs."""

from __future__ import annotations

import enum
from typing import Any

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
    )
except ModuleNotFoundError as error:
    if error.name != "vllm":
        raise  # one that lacks something of its own

    class KVConnectorRole(enum.Enum):  # type: ignore[no-redef]
        """The process that a connector is for: the scheduler's or a worker's."""

        SCHEDULER = 0
        WORKER = 1

    class KVConnectorMetadata:  # type: ignore[no-redef]
        """Messages of a step from the scheduler to the workers."""

    class KVConnectorBase_V1:  # type: ignore[no-redef]
        """A connector."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            self._connector_metadata: Any = None

        def bind_connector_metadata(self, connector_metadata: Any) -> None:
            """Begin a step."""
            self._connector_metadata = connector_metadata

        def clear_connector_metadata(self) -> None:
            """End a step."""
            self._connector_metadata = None


__all__ = ["KVConnectorBase_V1", "KVConnectorMetadata", "KVConnectorRole"]
