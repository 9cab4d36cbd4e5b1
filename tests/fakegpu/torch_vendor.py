"""A vendor's own backend of torch for the fake devices: Gloo moves the bytes, and a thread waits for streams.

As with NCCL a message starts in the current stream's order, a backend's messages are sequential, and creating a
backend waits for the other rank. Waiting for a message blocks the host. Import this before a group is created.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch_device import Event

from ucc_hetero.machine.vendors import VENDORS
from ucc_hetero.torch import fabric_messages

for _name in ("nvidia", "amd"):
    VENDORS[_name] = replace(VENDORS[_name], torch=("cpu", "cuda"), torch_build="", torch_backend="gloo")

#: (sender, receiver, bytes) of messages that used this backend, by group rank, as this rank has posted them.
posted = []
#: If set: creating a backend fails; messages cannot be started.
broken, refuses = threading.Event(), threading.Event()
ended = []


class Moved:
    def __init__(self):
        self.over, self.error = threading.Event(), None

    def wait(self):
        self.over.wait()
        if self.error is not None:
            raise self.error

    def is_completed(self):
        return self.over.is_set()

    def exception(self):
        return self.error


class Backend:
    def __init__(self, store, rank, places, seconds):
        if broken.is_set():
            raise RuntimeError("no such backend")
        self._gloo = dist.ProcessGroupGloo(store, rank, len(places), timedelta(seconds=seconds))
        self._places, self._jobs = tuple(places), queue.SimpleQueue[Callable[[], None]]()
        threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self):
        while True:
            self._jobs.get()()

    def _post(self, move, tensor, peer):
        assert tensor.dtype is not torch.int16, "NCCL has no such type"
        if refuses.is_set():
            raise RuntimeError("cannot be begun")
        posted.append((*self._places, tensor.numel() * tensor.element_size()))
        moved, before, memory = Moved(), Event(), tensor.as_subclass(torch.Tensor)
        before.record()

        def job():
            while not before.query():
                time.sleep(1e-4)
            try:
                move([memory], peer, 0).wait()
            except Exception as error:
                moved.error = error
            moved.over.set()

        self._jobs.put(job)
        return moved

    def send(self, tensors, to, tag):
        return self._post(self._gloo.send, tensors[0], to)

    def recv(self, tensors, origin, tag):
        return self._post(self._gloo.recv, tensors[0], origin)

    def shutdown(self):
        raise AssertionError("NCCL waits here for the other rank, which may do so for another backend")

    def abort(self):
        ended.append(self._places)


fabric_messages.BACKENDS["gloo"] = Backend
