"""Properties of two engines that must fit before caches can be exchanged, and texts about differences."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..rma.pages import convertible, scale
from ..types import DTYPES

#: Version of the messages between connectors.
PROTOCOL = 2

#: Property that must be equal -> its name in messages, and what to do if it differs.
_EQUAL = {
    "protocol": ("versions of the connector", "run one version of ucc_hetero on both sides"),
    "model": ("models", 'name it by "model" in kv_connector_extra_config where only its paths differ'),
    "layers": ("layers with a cache", "serve one model, with one vLLM"),
    "block": ("tokens a block", "give both one --block-size"),
    "heads": ("heads of keys and values", "serve one model"),
    "backend": ("attention backends, which order the elements of a block each in its way", "give both TRITON_ATTN"),
}
#: Element types whose scales are compared.
_FP8 = {"float8_e4m3fn", "float8_e4m3fnuz"}


class ContractError(ValueError):
    """The engines cannot exchange caches."""


@dataclass(frozen=True)
class Contract:
    """Properties of an engine's cache: element type or packed format, scales of each layer's keys and values, and
    vLLM's version."""

    model: str
    layers: list[str]
    block: int
    heads: int
    backend: str
    elements: str
    scales: list[float]
    vllm: str
    protocol: int = PROTOCOL

    @property
    def digest(self) -> str:
        """A hash of the properties that must be equal."""
        told = [getattr(self, name) for name in _EQUAL]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]

    def told(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def heard(cls, said: Any) -> Contract:
        """A peer's contract from JSON values. :class:`ContractError` if it is malformed."""
        if not isinstance(said, dict) or said.get("protocol") != PROTOCOL:
            version = said.get("protocol") if isinstance(said, dict) else said
            raise ContractError(f"protocol {version!r:.40} of the peer's connector, and {PROTOCOL} here")
        kinds = {field.name: {"int": int, "str": str}.get(str(field.type), list) for field in fields(cls)}
        if said.keys() != kinds.keys() or not all(isinstance(said[name], kind) for name, kind in kinds.items()):
            raise ContractError("the peer's contract is malformed")
        return cls(**said)

    def differences(self, sender: Contract) -> list[str]:
        """Reasons why ``sender``'s cache cannot be converted to this one; empty if it can."""
        out = []
        for name, (what, cure) in _EQUAL.items() if self.digest != sender.digest else ():
            mine, theirs = getattr(self, name), getattr(sender, name)
            if mine != theirs:
                here, there = (f"{len(x)} ({x[0]} ...)" if isinstance(x, list) and x else x for x in (mine, theirs))
                out.append(f"{what}: {here} here and {there} there; {cure}")
        if not convertible(sender.elements, self.elements):
            out.append(f"--kv-cache-dtype: {self.elements} here and {sender.elements} there; give both one")
        elif self._scaled(sender) != self.scales:
            out.append(
                f"scales of {sender.elements} that are not those of {self.elements} here: both have to take them from "
                "the checkpoint, which has to have some"
            )
        return out

    def _scaled(self, sender: Contract) -> list[float]:
        return [each * scale(sender.elements, self.elements) for each in sender.scales]


def describe(settings: Any, caches: dict[str, Any]) -> tuple[Contract, list[Any], str]:
    """(contract of a worker's caches, one array per layer in order, axes of these arrays).

    :class:`ContractError` if the engine's caches cannot be exchanged with any engine.
    """
    own: dict[int, tuple[str, Any]] = {}
    for name, cache in caches.items():
        if not hasattr(cache, "data_ptr") or cache.dim() not in _AXES:
            raise ContractError(f"layer {name} has no cache of attention: states of other kinds are not transferred")
        own.setdefault(cache.data_ptr(), (name, cache))  # layers may share a cache
    names, arrays = [name for name, _ in own.values()], [cache for _, cache in own.values()]
    backends, scales = _attention(settings.config, names)
    if set(backends) != {settings.backend}:
        raise ContractError(
            f"attention backend {', '.join(sorted(backends))}: both sides have to have {settings.backend}, as each has "
            f"an order of elements of its own; start vLLM with --attention-backend {settings.backend}"
        )
    axes = _axes(arrays[0].shape, settings.block)
    elements = _elements(arrays[0], settings.cache_dtype)
    contract = Contract(
        settings.model, names, settings.block, settings.heads, settings.backend, elements,
        scales if elements in _FP8 else [], _version(),
    )  # fmt: skip
    return contract, arrays, axes


#: Number of dimensions of a layer's cache in vLLM -> axes: old MLA; current, with K and V of a head joined; older.
_AXES = {3: "BND", 4: "BHND", 5: "KBNHD"}


def _axes(shape: Any, block: int) -> str:
    axes = _AXES[len(shape)]
    if len(shape) == 5 and shape[0] != 2:
        axes = "BKNHD"
    if shape[axes.index("N")] != block:
        raise ContractError(
            f"a cache of shape {tuple(shape)} has no blocks of {block} tokens: the attention backend divides them; "
            "choose a --block-size that it has kernels for"
        )
    return axes


def _elements(cache: Any, cache_dtype: str) -> str:
    name = str(cache.dtype).removeprefix("torch.")
    if name not in ("uint8", "int8"):
        return name
    if cache_dtype in ("fp8", "fp8_e4m3"):
        from vllm.platforms import current_platform

        return str(current_platform.fp8_dtype()).removeprefix("torch.")
    return cache_dtype


def element_type(contract: Contract) -> str | None:
    """The element type for a page table; None for a packed format, which is moved unchanged."""
    return contract.elements if contract.elements in DTYPES else None


def _attention(config: Any, names: list[str]) -> tuple[list[str], list[float]]:
    """(attention backends of the layers, their scales), as resolved by vLLM."""
    context = getattr(config.compilation_config, "static_forward_context", {})
    layers = [context[name] for name in names if name in context]
    if not layers:  # not a vLLM engine
        chosen = config.attention_config.backend
        return [getattr(chosen, "name", None) or str(chosen)], []
    scales = [float(getattr(each, name, 1.0)) for each in layers for name in ("_k_scale_float", "_v_scale_float")]
    return [each.get_attn_backend().get_name() for each in layers], scales


def _version() -> str:
    try:
        from vllm import __version__
    except ModuleNotFoundError:
        return ""
    return str(__version__)
