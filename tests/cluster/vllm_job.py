"""A worker of an engine that sends a cache (send FOLDER ADDRESS), or one that gets it and loses the first on its way
(load FOLDER ADDRESS): whose blocks, once they are said to have failed, belong to others."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace as Facts
from typing import Any

import numpy as np

from ucc_hetero.vllm import UccHeteroConnector
from ucc_hetero.vllm.interface import KVConnectorRole
from ucc_hetero.vllm.messages import Load, Remote, Step

PORT, LAYERS, BLOCKS, SIZE, HEADS, DIM = 14579, 8, 64, 16, 8, 256
#: Of the sender, and of who uses the blocks next.
SENT, NEXT = 1, 2


class Tensor(np.ndarray):
    """A layer's cache in host memory, with the methods of a tensor that the connector calls."""

    def dim(self) -> int:
        return self.ndim

    def data_ptr(self) -> int:
        return int(self.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(each // self.itemsize for each in self.strides)


class OnDevice:
    """One in a device's memory."""

    def __init__(self, memory: Any, seen: Tensor) -> None:
        self.memory, self.shape, self.dtype = memory, seen.shape, seen.dtype
        self.dim, self.data_ptr, self.stride = seen.dim, seen.data_ptr, seen.stride

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.memory.__cuda_array_interface__, "shape": self.shape}


def layer(value: int) -> tuple[Any, Tensor]:
    """(a layer's cache as the connector sees it, what is there), all of one number; on the device if there is one."""
    shape = BLOCKS, HEADS, SIZE, DIM
    count = int(np.prod(shape))
    memory = None
    if "FAKEGPU_LAYOUT" in os.environ:
        from arrays import Array

        memory = Array(count, np.float16)
    seen = (np.empty(count, np.float16) if memory is None else memory.peek).reshape(shape).view(Tensor)
    seen[:] = value
    return (seen if memory is None else OnDevice(memory, seen)), seen


def worker(role: str, folder: str, address: str) -> tuple[UccHeteroConnector, list[Tensor]]:
    """(a connector as a worker has it, the cache)."""
    extra = {"secret_file": f"{folder}/secret", "host": address, "timeout": 600, "lease": 600}
    send = role == "send"
    transfer = Facts(kv_connector_extra_config=extra, is_kv_producer=send, is_kv_consumer=not send, engine_id=role)
    transfer.kv_port = PORT
    config = Facts(
        kv_transfer_config=transfer,
        parallel_config=Facts(tensor_parallel_size=1, rank=0),
        model_config=Facts(model="none", get_total_num_kv_heads=lambda: HEADS),
        cache_config=Facts(block_size=SIZE, cache_dtype="auto"),
        compilation_config=Facts(),
        attention_config=Facts(backend="TRITON_ATTN"),
    )
    layers = [layer(SENT if send else 0) for _ in range(LAYERS)]
    connector = UccHeteroConnector(config, KVConnectorRole.WORKER)
    connector.register_kv_caches({f"layer{i}": cache for i, (cache, _) in enumerate(layers)})
    return connector, [seen for _, seen in layers]


def step(connector: UccHeteroConnector, said: Step) -> tuple[set[str], set[str], set[int]]:
    """A step of the engine: requests that have been sent, that have come, and blocks that have not."""
    connector.bind_connector_metadata(said)
    connector.start_load_kv(None)
    sent, come = connector.get_finished(set())
    failed = connector.get_block_ids_with_load_errors()
    connector.clear_connector_metadata()
    return sent or set(), come or set(), failed


def send(folder: str, address: str) -> None:
    """Offer all blocks, for ever."""
    connector, _ = worker("send", folder, address)
    step(connector, Step(offers={"request": list(range(BLOCKS))}))
    Path(folder, "ready").touch()
    while True:
        if step(connector, Step())[0]:
            print("sent, or given up", flush=True)
        time.sleep(0.001)


def load(folder: str, address: str) -> None:
    """Ask for all blocks; they do not come, and from then on nothing is written to them."""
    connector, layers = worker("load", folder, "127.0.0.1")
    remote = Remote("request", "send", address, PORT, 1, BLOCKS * SIZE)
    blocks = list(np.random.default_rng().permutation(BLOCKS).tolist())
    said, failed = Step(loads=[Load("request", remote, blocks, 0)]), set[int]()
    come = set[str]()
    while not come:
        _, come, failed = step(connector, said)
        said = Step()
        time.sleep(0.001)
    begun = float(np.mean([each[:, 0, 0, 0] == SENT for each in layers]))
    for each in layers:
        each[:] = NEXT
    assert failed == set(blocks), f"all has come: {len(failed)} blocks failed"
    print(f"lost when {begun:.0%} was there", flush=True)
    Path(folder, "failed").touch()
    while not Path(folder, "over").exists():
        step(connector, Step())
        time.sleep(0.001)
    written = [int((each != NEXT).any((1, 2, 3)).sum()) for each in layers]
    print("right" if not any(written) else f"blocks of others were written: {written}", flush=True)
    connector.shutdown()


if __name__ == "__main__":
    if "FAKEGPU_LAYOUT" in os.environ:
        import arrays  # noqa: F401  it chooses the vendor

        from ucc_hetero import device

        device.bind(device.place_of())
    {"send": send, "load": load}[sys.argv[1]](*sys.argv[2:])
