"""Train through the death of ranks: a whole vendor's island is killed, and the survivors continue from memory.

    UCCH_EMULATE=nvidia:2,amd:2 mpirun --with-ft ulfm -np 4 python examples/train_through.py --kill 2,3 --check

With a store (`python -m ucc_hetero store tcp://0.0.0.0:7000 FILE`) the job grows back: --store tcp://HOST:7000
--secret FILE. The first surviving rank starts as many processes as have died, as a job's supervisor would.
Every ten steps the ranks admit them if all have arrived; at the step --whole-by they wait for them.

The model and the batches are those of train_digits.py. After a failed call the surviving ranks shrink the
communicator, agree on the last step that all of them have completed, and divide the next batch among themselves. Each
batch stays whole, so the losses are those of a run without deaths. --check also trains in a single process and
compares.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from train_digits import Perceptron, compare, identical, load

from ucc_hetero import IN_PLACE, MIN, Communicator, Store
from ucc_hetero.errors import CollectiveError


class Training:
    """One rank's part: the model, the next step, and the model before the last step."""

    def __init__(self, options: argparse.Namespace, comm: Communicator, store: Store | None) -> None:
        self.options, self.comm, self.store, self.step = options, comm, store, 0
        self.whole, self.started = comm.size, list[subprocess.Popen[bytes]]()
        self.images, self.labels, *_ = load(options.dtype)
        self.model = Perceptron(options.dtype, seed=comm.rank)
        shuffle = np.random.default_rng(1)
        orders = (shuffle.permutation(len(self.images)) for _ in range(options.epochs))
        firsts = range(0, len(self.images), options.batch)
        self.batches = [order[first : first + options.batch] for order in orders for first in firsts]
        self.losses = np.zeros(len(self.batches))
        self.share()

    def share(self) -> None:
        """Copy the state of the first rank, which has been in the job from the start, to all ranks."""
        step = np.array([self.step])
        for array in (step, self.model.weights, self.model.velocity, self.losses):
            self.comm.Bcast(array, root=0)
        self.step = int(step[0])
        self.before: tuple[np.ndarray, np.ndarray] | None = None

    def advance(self) -> None:
        """Take a step with the other ranks; if it fails, nothing has changed."""
        batch, model = self.batches[self.step], self.model
        mine = batch[self.comm.rank :: self.comm.size]  # divided among the surviving ranks
        model.backward(self.images[mine], self.labels[mine])
        self.comm.Allreduce(IN_PLACE, model.bucket)
        self.before = model.weights.copy(), model.velocity.copy()
        self.losses[self.step] = model.step(len(batch), self.options.rate)
        self.step += 1

    def go_on(self) -> None:
        """Drop the dead ranks, and go back to the last step that all survivors completed: a rank is at most one step
        ahead."""
        began = time.perf_counter()
        dead, self.comm = self.comm, self.comm.Shrink()
        dead.Free()
        least = np.array([self.step])
        self.comm.Allreduce(IN_PLACE, least, op=MIN)
        if self.before is not None and self.step > least[0]:
            self.model.weights[:], self.model.velocity[:] = self.before
            self.step -= 1
        if self.comm.rank == 0:
            took = time.perf_counter() - began
            print(f"{self.comm.size} ranks go on with step {self.step} after {took:.3f} s", flush=True)
            if self.store is not None:
                self.start(self.whole - self.comm.size)

    def start(self, count: int) -> None:
        """Start processes to replace those that have died; they are not ranks of the MPI job."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PRTE_"))}
        words = [sys.executable, *sys.argv, "--enter"]
        self.started += [subprocess.Popen(words, env=ours) for _ in range(count)]

    def grow(self) -> None:
        """Admit the started processes if they have arrived."""
        while True:
            began, grown = time.perf_counter(), self.comm.Grow(self.store, self.whole - self.comm.size)
            if grown is not None or self.step != self.options.whole_by:
                break
            time.sleep(0.05)
        if grown is not None:
            before, self.comm = self.comm, grown
            before.Free()
            self.share()
            if grown.rank == 0:
                took = time.perf_counter() - began
                print(f"{grown.size} ranks go on with step {self.step}, {took:.3f} s to let them in", flush=True)

    def run(self, doomed: bool) -> np.ndarray:
        """Train to the end; returns the loss of each epoch."""
        broken = False
        while self.step < len(self.batches):
            if doomed and self.step == self.options.at:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                if broken:
                    self.go_on()
                broken = False
                if self.store is not None and self.comm.size < self.whole and self.step % 10 == 0:
                    self.grow()
                self.advance()
            except CollectiveError:
                broken = True
        sizes = np.array([len(batch) for batch in self.batches])
        sums = (self.losses * sizes).reshape(self.options.epochs, -1).sum(axis=1)
        return sums / sizes.reshape(self.options.epochs, -1).sum(axis=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", default="", help="ranks that die, with commas between")
    parser.add_argument("--at", type=int, default=40, help="the step at which they do (default: 40)")
    parser.add_argument("--store", help="address of a store, to grow back by")
    parser.add_argument("--secret", type=Path, help="file with its secret")
    parser.add_argument("--whole-by", type=int, help="a multiple of 10: the step to wait for them at")
    parser.add_argument("--enter", action="store_true", help="come later, to a job that trains already")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=96, help="images per step, over all ranks (default: 96)")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--check", action="store_true", help="also train in a single process and compare")
    options = parser.parse_args()

    store = Store(options.store, options.secret.read_bytes()) if options.store else None
    comm = Communicator.Enter(store) if options.enter else Communicator()
    training = Training(options, comm, store)
    losses = training.run(not options.enter and str(comm.rank) in options.kill.split(","))
    comm, weights = training.comm, training.model.weights
    same = identical(comm, weights, losses)
    if comm.rank == 0:
        print("losses of the epochs:", *(f"{loss:.4f}" for loss in losses))
        print(f"weights and losses identical on all {comm.size} ranks: {'yes' if same else 'NO'}")
    verdict = np.array([same], np.uint8)
    if comm.rank == 0 and options.check:
        verdict[0] = same and compare(weights, losses, options)
    comm.Bcast(verdict, root=0)
    for process in training.started if comm.size < training.whole else ():
        process.terminate()  # it has arrived too late
    return 0 if verdict[0] else 1


if __name__ == "__main__":
    sys.exit(main())
