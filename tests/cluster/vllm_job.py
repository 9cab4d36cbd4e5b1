"""A worker of an engine that sends a cache (send FOLDER ADDRESS), or one that receives it and loses the sender during
the transfer (load FOLDER ADDRESS). Once its blocks are reported as failed, they belong to other requests."""

import os
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "fakegpu"))
from vllm_engine import BLOCK, HEADS, OnDevice, Runner, facts

from ucc_hetero.vllm import UccHeteroConnector
from ucc_hetero.vllm.interface import KVConnectorRole
from ucc_hetero.vllm.messages import Load, Part, Remote, Step

PORT, LAYERS, BLOCKS, DIM = 14579, 8, 64, 512
SENT, NEXT = 1, 2


def worker(role, folder, address):
    """Return a connector as a worker has it, and its cache, on the device if there is one."""
    extra = {"secret_file": f"{folder}/secret", "host": address, "timeout": 600, "lease": 600}
    device, layers = os.environ.get("FAKEGPU_LAYOUT", ""), []
    for _ in range(LAYERS):
        memory = Runner.memory(BLOCKS * HEADS * BLOCK * DIM, device)
        layers.append(memory.view(BLOCKS, HEADS, BLOCK, DIM).fill_(SENT if role == "kv_producer" else 0))
    connector = UccHeteroConnector(facts({"role": role, "port": PORT, "extra": extra}), KVConnectorRole.WORKER)
    connector.register_kv_caches({f"layer{i}": OnDevice(each) if device else each for i, each in enumerate(layers)})
    return connector, layers


def step(connector, said):
    """A step of the engine: returns requests that were sent, requests that were received, and failed blocks."""
    connector.bind_connector_metadata(said)
    connector.start_load_kv(None)
    sent, come = connector.get_finished(set())
    failed = connector.get_block_ids_with_load_errors()
    connector.clear_connector_metadata()
    return sent or set(), come or set(), failed


def send(folder, address):
    connector, _ = worker("kv_producer", folder, address)
    step(connector, Step(offers={"request": [list(range(BLOCKS))]}))
    Path(folder, "ready").touch()
    while True:
        if step(connector, Step())[0]:
            print("sent, or given up", flush=True)
        time.sleep(0.001)


def load(folder, address):
    connector, layers = worker("kv_consumer", folder, "127.0.0.1")
    remote = Remote("request", "send", (address,), PORT, 1, BLOCKS * BLOCK)
    blocks = torch.randperm(BLOCKS).tolist()
    said, failed = Step(loads=[Load("request", remote, [Part(0, blocks)])]), set()
    come = set()
    while not come:
        _, come, failed = step(connector, said)
        said = Step()
        time.sleep(0.001)
    begun = torch.stack([each[:, 0, 0, 0] == SENT for each in layers]).double().mean().item()
    for each in layers:
        each.fill_(NEXT)
    assert failed == set(blocks), f"all has come: {len(failed)} blocks failed"
    print(f"lost when {begun:.0%} was there", flush=True)
    Path(folder, "failed").touch()
    while not Path(folder, "over").exists():
        step(connector, Step())
        time.sleep(0.001)
    written = [int((each != NEXT).flatten(1).any(1).sum()) for each in layers]
    print("right" if not any(written) else f"blocks of others were written: {written}", flush=True)
    connector.shutdown()


if __name__ == "__main__":
    if "FAKEGPU_LAYOUT" in os.environ:
        import arrays  # noqa: F401  it chooses the vendor

        from ucc_hetero import device

        device.bind(device.place_of())
    {"send": send, "load": load}[sys.argv[1]](*sys.argv[2:])
