"""A replica of a model in a group that changes all the time: PORT NUMBER INCARNATION."""

import hashlib
import json
import os
import sys
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

import ucc_hetero.torch

SIZE, CHECKED = 1000, 5
END = 1 << 20
LIMIT = timedelta(seconds=20)


def gradient(number, step):
    """A replica's gradient in a step: integers, so that sums are exact in any order."""
    return np.random.default_rng((number, step)).integers(-1000, 1000, SIZE)


class Replica:
    """Parameters, their step, and the generations that computed them: (first step, generation)."""

    def __init__(self, port, number, incarnation):
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.number, self.generation, self.step = number, 0, 0
        self.who = f"{number}/{incarnation}"
        self.parameters = torch.zeros(SIZE, dtype=torch.int64)
        self.history = []
        self.looked = 0.0
        self.store.set(f"ready/{self.who}", "1")

    def next(self):
        """Members of the next generation to which this replica belongs."""
        while True:
            current = int(self.store.get("current"))
            if current > self.generation:
                self.generation = current
                members = json.loads(self.store.get(f"generation/{current}"))
                if self.who in members:
                    return members
            time.sleep(0.02)

    def leaves(self):
        """1 if there is a new generation, END at the end."""
        if time.monotonic() - self.looked < 0.1:
            return 0
        self.looked = time.monotonic()
        return END if self.store.check(["end"]) else int(int(self.store.get("current")) > self.generation)

    def join(self, group):
        """Take the state of the most advanced replica."""
        steps = torch.empty(group.size(), dtype=torch.int64)
        group._allgather_base(steps, torch.tensor([self.step])).wait()
        source = int(steps.argmax())
        self.step = int(steps[source])
        text = torch.zeros(1 << 18, dtype=torch.uint8)
        if group.rank() == source:
            said = json.dumps(self.history).encode()
            text[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
        for tensor in (self.parameters, text):
            options = dist.BroadcastOptions()
            options.rootRank = source
            group.broadcast([tensor], options).wait()
        self.history = json.loads(bytes(text.tolist()).rstrip(b"\0") or b"[]")
        self.history.append([self.step, self.generation])

    def digest(self):
        bits = self.parameters.numpy().tobytes() + json.dumps([self.step, self.history]).encode()
        return int.from_bytes(hashlib.sha256(bits).digest()[:7], "little")

    def train(self, group):
        """Train until the next generation or the end. True for the former. Exits if the replicas differ."""
        leave = 0
        while not leave:
            both = torch.empty(SIZE + 1, dtype=torch.int64)
            both[:SIZE] = torch.from_numpy(gradient(self.number, self.step))
            both[SIZE] = self.leaves()
            group.allreduce([both]).wait()
            self.parameters += both[:SIZE]
            self.step += 1
            leave = int(both[SIZE])
            if leave or self.step % CHECKED == 0:
                digests = torch.empty(group.size(), dtype=torch.int64)
                group._allgather_base(digests, torch.tensor([self.digest()])).wait()
                if len(set(digests.tolist())) != 1:
                    self.store.set("unlike", f"step {self.step} of generation {self.generation}: {digests.tolist()}")
                    os._exit(3)
                if group.rank() == 0:
                    self.store.set(f"trained/{self.generation}", "1")
        return leave >= END

    def run(self):
        while True:
            members = self.next()
            rank, size = members.index(self.who), len(members)
            vendors = [f"nvidia:{(size + 1) // 2}", *([f"amd:{size // 2}"] if size > 1 else [])]
            os.environ["UCCH_EMULATE"] = ",".join(vendors)  # the layout of this process's first generation
            group = None
            try:
                place = dist.PrefixStore(f"g{self.generation}", self.store)
                group = ucc_hetero.torch.process_group(place, rank, size, LIMIT)
                self.join(group)
                if self.train(group):
                    break
            except RuntimeError as error:
                print(f"replica {self.number}, generation {self.generation}: {str(error)[:300]}", flush=True)
                self.store.set(f"failed/{self.generation}", "1")
            if group is not None:
                group.abort()
        state = {"step": self.step, "history": self.history, "parameters": self.parameters.tolist()}
        self.store.set(f"state/{self.number}", json.dumps(state))
        group.shutdown()


if __name__ == "__main__":
    Replica(*map(int, sys.argv[1:])).run()
