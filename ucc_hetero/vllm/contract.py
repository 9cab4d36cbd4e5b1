"""Properties of two engines that must fit before caches can be exchanged, and texts about differences."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from ..rma.pages import convertible, scale
from ..types import DTYPES

#: Version of the messages between connectors.
PROTOCOL = 3

#: Property that must be equal -> its name in messages, and what to do if it differs.
_EQUAL = {
    "protocol": ("versions of the connector", "run one version of ucc_hetero on both sides"),
    "model": ("models", 'name it by "model" in kv_connector_extra_config where only its paths differ'),
    "blocks": ("tokens a block in each group of caches", "give both one --block-size and one kind of cache manager"),
    "heads": ("heads of keys and values", "serve one model"),
    "backend": ("attention backends, which order the elements of a block each in its way", "give both TRITON_ATTN"),
}
#: Element types whose scales are compared.
_FP8 = {"float8_e4m3fn", "float8_e4m3fnuz"}


class ContractError(ValueError):
    """The engines cannot exchange caches."""


class Cache(NamedTuple):
    """Caches of equal form that a worker has for layers of one group: number of the group, names of the layers, element
    type or packed format, scales of each layer's keys and values."""

    group: int
    layers: list[str]
    elements: str
    scales: list[float]


@dataclass(frozen=True)
class Contract:
    """Properties of a worker: tokens of a block in each group of caches, number of pipeline stages, its caches, and
    vLLM's version."""

    model: str
    blocks: list[int]
    heads: int
    backend: str
    stages: int
    caches: list[Cache]
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
        caches = [Cache(*each) for each in said["caches"] if isinstance(each, list) and len(each) == 4]
        for each in caches:
            for value, kind in zip(each, (int, list, str, list), strict=True):
                if not isinstance(value, kind):
                    raise ContractError("the peer's contract is malformed")
        return cls(**{**said, "caches": caches})

    def common(self, other: Contract) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Layers that both have: numbers of a cache here and there -> numbers of the layers in the two."""
        out: dict[tuple[int, int], list[tuple[int, int]]] = {}
        places = {name: (j, n) for j, each in enumerate(other.caches) for n, name in enumerate(each.layers)}
        for i, each in enumerate(self.caches):
            for m, name in enumerate(each.layers):
                if name in places:
                    j, n = places[name]
                    out.setdefault((i, j), []).append((m, n))
        return out

    def differences(self, sender: Contract) -> list[str]:
        """Reasons why ``sender``'s cache cannot be converted to this one; empty if it can."""
        out = []
        for name, (what, cure) in _EQUAL.items() if self.digest != sender.digest else ():
            mine, theirs = getattr(self, name), getattr(sender, name)
            if mine != theirs:
                out.append(f"{what}: {mine} here and {theirs} there; {cure}")
        here, there = ([name for each in whose.caches for name in each.layers] for whose in (self, sender))
        if self.stages == sender.stages == 1 and sorted(here) != sorted(there):
            told = (f"{len(names)} ({names[0]} ...)" for names in (here, there))
            out.append(f"layers with a cache: {' here and '.join(told)} there; serve one model, with one vLLM")
        for (i, j), layers in self.common(sender).items():
            out += _unlike(self.caches[i], sender.caches[j], layers)
        return list(dict.fromkeys(out))


def _unlike(mine: Cache, theirs: Cache, layers: list[tuple[int, int]]) -> list[str]:
    """Reasons why the sender's layers cannot become these ones."""
    if mine.group != theirs.group:
        return ["groups of caches: give both or neither --disable-hybrid-kv-cache-manager"]
    if not convertible(theirs.elements, mine.elements):
        return [f"--kv-cache-dtype: {mine.elements} here and {theirs.elements} there; give both one"]
    factor = scale(theirs.elements, mine.elements)
    if any(
        mine.scales[2 * m : 2 * m + 2] != [factor * each for each in theirs.scales[2 * n : 2 * n + 2]]
        for m, n in layers
    ):
        return [
            f"scales of {theirs.elements} that are not those of {mine.elements} here: both have to take them from the "
            "checkpoint, which has to have some"
        ]
    return []


def describe(settings: Any, caches: dict[str, Any]) -> tuple[Contract, list[tuple[list[Any], str]]]:
    """(contract of a worker, of each of its caches the arrays in the order of layers, and their axes).

    :class:`ContractError` if the engine's caches cannot be exchanged with any engine.
    """
    own, out = [], []
    for number, group in enumerate(settings.groups):
        for alike in _alike({name: caches[name] for name in caches if group.layers is None or name in group.layers}):
            names, arrays = list(alike), list(alike.values())
            elements = _elements(arrays[0], settings.cache_dtype)
            scales = _scales(settings.config, names) if elements in _FP8 else []
            own.append(Cache(number, names, elements, scales))
            out.append((arrays, _axes(arrays[0].shape, group.block)))
    backends = _backends(settings.config, [name for each in own for name in each.layers])
    if backends != {settings.backend}:
        raise ContractError(
            f"attention backend {', '.join(sorted(backends))}: both sides have to have {settings.backend}, as each has "
            f"an order of elements of its own; start vLLM with --attention-backend {settings.backend}"
        )
    blocks = [group.block for group in settings.groups]
    facts = settings.model, blocks, settings.heads, settings.backend, settings.stages
    return Contract(*facts, own, _version()), out


def _alike(caches: dict[str, Any]) -> list[dict[str, Any]]:
    """Caches of a group, divided by their form. Layers may share a cache; the first one names it."""
    out: dict[Any, dict[str, Any]] = {}
    seen = set()
    for name, cache in caches.items():
        if not hasattr(cache, "data_ptr") or cache.dim() not in _AXES:
            raise ContractError(f"layer {name} has no cache of attention: states of other kinds are not transferred")
        if cache.data_ptr() not in seen:
            seen.add(cache.data_ptr())
            out.setdefault((tuple(cache.shape), cache.stride(), cache.dtype), {})[name] = cache
    return list(out.values())


#: Number of dimensions of a layer's cache in vLLM -> axes: old MLA; current, with K and V of a head joined; older.
_AXES = {3: "BND", 4: "BHND", 5: "KBNHD"}


def _axes(shape: Any, block: int) -> str:
    axes = _AXES[len(shape)]
    if len(shape) == 5 and shape[0] != 2:
        axes = "BKNHD"
    if block % shape[axes.index("N")]:  # a backend may divide blocks
        raise ContractError(f"a cache of shape {tuple(shape)} has no blocks of {block} tokens, nor parts of them")
    return axes


def _elements(cache: Any, cache_dtype: str) -> str:
    name = str(cache.dtype).removeprefix("torch.")
    if name not in ("uint8", "int8"):
        return name
    if cache_dtype in ("fp8", "fp8_e4m3"):
        from vllm.platforms import current_platform

        return str(current_platform.fp8_dtype()).removeprefix("torch.")
    return cache_dtype


def element_type(cache: Cache) -> str | None:
    """The element type for a page table; None for a packed format, which is moved unchanged."""
    return cache.elements if cache.elements in DTYPES else None


def _layers(config: Any, names: list[str]) -> list[Any]:
    """vLLM's layers of these names; empty if this is not a vLLM engine."""
    context = getattr(config.compilation_config, "static_forward_context", {})
    return [context[name] for name in names if name in context]


def _backends(config: Any, names: list[str]) -> set[str]:
    """Attention backends of layers, as resolved by vLLM."""
    if layers := _layers(config, names):
        return {each.get_attn_backend().get_name() for each in layers}
    chosen = config.attention_config.backend
    return {getattr(chosen, "name", None) or str(chosen)}


def _scales(config: Any, names: list[str]) -> list[float]:
    """Scales of the keys and of the values of each layer."""
    layers, both = _layers(config, names), ("_k_scale_float", "_v_scale_float")
    return [float(getattr(layer, name, 1.0)) for layer in layers for name in both]


def _version() -> str:
    try:
        from vllm import __version__
    except ModuleNotFoundError:
        return ""
    return str(__version__)
