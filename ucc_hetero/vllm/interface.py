"""vLLM's base classes of a connector; without vLLM, minimal substitutes for another engine."""

from __future__ import annotations

import enum
from typing import Any

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
except ModuleNotFoundError as error:
    if error.name != "vllm":
        raise  # vLLM is installed, but a module of its own is missing

    class KVConnectorRole(enum.Enum):  # type: ignore[no-redef]
        """Process of a connector: scheduler or worker."""

        SCHEDULER = 0
        WORKER = 1

    class KVConnectorMetadata:  # type: ignore[no-redef]
        """Data of a step from the scheduler to the workers."""

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

    class KVConnectorStats:  # type: ignore[no-redef]
        """Numbers of transfers."""


__all__ = ["KVConnectorBase_V1", "KVConnectorMetadata", "KVConnectorRole", "KVConnectorStats"]
