"""Loads of a KV cache by vLLM's connector, beside plain copies of as many bytes, alternately, between two processes.

    mpirun -np 2 python tools/vllm_cost.py                                # one host
    python -m ucc_hetero.launch.emulate --hosts 2 --slots 1 --rate none -- mpirun -np 2 python tools/vllm_cost.py

Rank 1 has computed prompts; rank 0 loads their blocks, in random order, into a cache of the same layout or of another
one. A load lasts from the scheduler's step to the one in which it has ended. The other columns are GB/s of one put of
the same bytes, of a copy within rank 0, and of a TCP connection between both ranks. Best of all rounds.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Facts
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from ucc_hetero.machine import nics
from ucc_hetero.vllm import UccHeteroConnector
from ucc_hetero.vllm.interface import KVConnectorRole
from ucc_hetero.vllm.messages import Load, Part, Remote, Step

TOKENS, HEADS, DIM = 16, 8, 128


def connector(role: str, host: str, port: int, secret: str, cache: list[Any]) -> Any:
    """A worker's connector with its cache."""
    extra = {"secret_file": secret, "host": host, "timeout": 60, "lease": 600}
    config = Facts(
        kv_transfer_config=Facts(
            kv_connector_extra_config=extra, engine_id=role, kv_port=port,
            is_kv_producer=role == "prefill", is_kv_consumer=role == "decode",
        ),
        parallel_config=Facts(tensor_parallel_size=1, rank=0),
        model_config=Facts(model="cost", get_total_num_kv_heads=lambda: HEADS),
        cache_config=Facts(block_size=TOKENS, cache_dtype="auto"),
        compilation_config=Facts(), attention_config=Facts(backend="TRITON_ATTN"),
    )  # fmt: skip
    made = UccHeteroConnector(config, KVConnectorRole.WORKER, None)
    made.register_kv_caches({f"layer{i}": each for i, each in enumerate(cache)})
    return made


def caches(layers: int, blocks: int, layout: str) -> list[Any]:
    sizes = {"N": TOKENS, "H": HEADS}
    shape = [blocks, *(sizes[axis] for axis in layout), 2 * DIM]
    made = [torch.rand(shape).half() for _ in range(layers)]
    return made if layout == "HN" else [each.transpose(1, 2) for each in made]


def step(worker: Any, said: Step) -> Any:
    worker.bind_connector_metadata(said)
    worker.start_load_kv(None)
    return worker.get_transfer_results(set())


def best(rounds: int, what: Callable[[], Any]) -> float:
    out = []
    for _ in range(rounds):
        begin = time.perf_counter()
        what()
        out.append(time.perf_counter() - begin)
    return min(out)


class Wire:
    """A TCP connection between the ranks."""

    def __init__(self, comm: Any, host: str) -> None:
        if comm.rank == 1:
            server = socket.create_server((host, 0))
            comm.send(server.getsockname(), dest=0)
            self.sock, _ = server.accept()
        else:
            self.sock = socket.create_connection(comm.recv(source=1))

    def move(self, data: Any, sends: bool) -> None:
        view = memoryview(data)
        if sends:
            self.sock.sendall(view)
            self.sock.recv(1)
            return
        while view:
            view = view[self.sock.recv_into(view) :]
        self.sock.send(b"x")


def serve(comm: Any, args: Any, host: str, secret: str) -> None:
    """Rank 1: offer what rank 0 asks for."""
    port = next(port for port in range(20000 + os.getpid() % 10000, 40000) if _is_free(host, port))
    worker, wire = connector("prefill", host, port, secret, caches(args.layers, args.most, "NH")), Wire(comm, host)
    comm.send(port, dest=0)
    while (asked := comm.recv(source=0)) is not None:
        name, blocks = asked
        if name == "wire":
            wire.move(np.ones(blocks, np.uint8), True)
            continue
        step(worker, Step(offers={name: [blocks]}))
        comm.send(None, dest=0)
        while name not in step(worker, Step()).finished_sending:
            time.sleep(0.0005)
    worker.shutdown()


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((host, port)) != 0


def measure(comm: Any, args: Any, host: str, secret: str) -> None:
    """Rank 0: load, and print the table."""
    wire, port = Wire(comm, host), comm.recv(source=1)
    workers = {way: connector("decode", "", 0, secret, caches(args.layers, args.most, way)) for way in ("NH", "HN")}
    rng, page = np.random.default_rng(), args.layers * TOKENS * HEADS * 2 * DIM * 2
    print(f"{args.layers} layers, blocks of {TOKENS} tokens, {page / 2**20:g} MiB a block; from {host}")
    link = workers["NH"].worker.links.to(f"tcp://{host}:{port}").result()
    target = link.targets[0, 0]
    print(f"path of equal layouts: {link.peer.endpoint.info(target.table.regions[0], target.targets[0])}")
    print("blocks     MiB  load ms   GB/s  layout ms   GB/s   put GB/s  copy GB/s  TCP GB/s")
    for count in args.blocks:
        nbytes, row = count * page, []
        for worker in workers.values():
            times = []
            for i in range(args.rounds):
                name = f"{count}.{i}.{id(worker)}"
                there, mine = ([int(b) for b in rng.permutation(args.most)[:count]] for _ in "ab")
                comm.send((name, there), dest=1)
                comm.recv(source=1)
                begin = time.perf_counter()
                remote = Remote(name, "prefill", (host,), port, 1, count * TOKENS)
                results = step(worker, Step(loads=[Load(name, remote, [Part(0, mine)])]))
                while name not in results.finished_recving:
                    time.sleep(0.0001)  # an engine waits for its device, not with the interpreter's lock
                    results = step(worker, Step())
                times.append(time.perf_counter() - begin)
                assert not worker.get_block_ids_with_load_errors()
            row += [min(times) * 1e3, nbytes / min(times) / 1e9]
        row += plain(comm, args, target, wire, nbytes)
        print(f"{count:6} {nbytes / 2**20:7.0f} {row[0]:8.2f} {row[1]:6.2f} {row[2]:10.2f} {row[3]:6.2f}"
              f" {row[4]:10.2f} {row[5]:10.2f} {row[6]:9.2f}", flush=True)  # fmt: skip
    comm.send(None, dest=1)
    for worker in workers.values():
        worker.shutdown()


def plain(comm: Any, args: Any, target: Any, wire: Wire, nbytes: int) -> list[float]:
    """GB/s of a put into the other rank's cache, a copy, and a TCP connection."""
    table, peer = target.table, target.peer
    each = min(nbytes // args.layers, table.regions[0].nbytes)

    def put() -> None:
        done = [peer.put(table.regions[i], target.targets[i], 0, 0, each) for i in range(args.layers)]
        for request in done:
            request.Wait()

    one, two = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)

    def over() -> None:
        comm.send(("wire", nbytes), dest=1)
        wire.move(two, False)

    times = best(args.rounds, put), best(args.rounds, lambda: np.copyto(two, one)), best(args.rounds, over)
    return [nbytes / seconds / 1e9 for seconds in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--blocks", type=lambda text: [int(each) for each in text.split(",")], default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    args.most, comm = max(args.blocks), MPI.COMM_WORLD
    host = comm.bcast(next((where for where, _ in nics.addresses()), "127.0.0.1"), root=1)
    with tempfile.TemporaryDirectory() as folder:
        data = comm.bcast(os.urandom(32))
        secret = Path(folder, "secret")
        secret.write_bytes(data)
        (measure if comm.rank == 0 else serve)(comm, args, host, str(secret))


if __name__ == "__main__":
    main()
