"""A KV connector for vLLM: prefill on one vendor's GPUs, decode on another vendor's.

vllm serve MODEL --attention-backend TRITON_ATTN --kv-transfer-config '{"kv_connector": "UccHeteroConnector",
    "kv_connector_module_path": "ucc_hetero.vllm", "kv_role": "kv_producer", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"secret_file": "/run/kv.secret", "host": "10.0.0.1"}}'
"""

from __future__ import annotations

from .connector import UccHeteroConnector

__all__ = ["UccHeteroConnector"]
