"""Train a classifier on handwritten digits, data-parallel over the ranks of an MPI job. Plain numpy.

    ucch-run -np 4 python examples/train_digits.py
    UCCH_EMULATE=nvidia:2,amd:2 ucch-run -np 4 python examples/train_digits.py --check

Every rank holds the whole model and a share of each batch. Gradients are summed over the ranks in one Allreduce per
step, so all ranks take the same step and their weights stay identical, bit for bit. That is verified at the end;
--check also trains alone, on the same batches, and compares. The exit status is 0 only if everything agrees.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from itertools import pairwise
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from ucc_hetero import IN_PLACE, Communicator

LAYERS = (64, 128, 10)  # 8 x 8 pixels, hidden units, digits
# Partial sums are added in another order than in a single process, so results differ in their last bits: by 2 to 6
# units of the type's rounding error, relative to the largest weight, with the default settings and 2 to 5 ranks.
# Unstable training (a high rate, tiny batches) amplifies the difference without bound.
TOLERANCE = 100  # in these units


class Alone:
    """The communicator of the reference run: a single rank without communication."""

    rank, size = 0, 1

    def Bcast(self, buf: np.ndarray, root: int = 0) -> None: ...

    def Allreduce(self, sendbuf: Any, recvbuf: np.ndarray) -> None: ...

    def stats(self) -> dict[str, float]:
        return {"seconds": 0.0}


class Perceptron:
    """A multi-layer perceptron whose parameters, and their gradients, are views of one flat vector each."""

    def __init__(self, dtype: str, seed: int) -> None:
        count = sum((rows + 1) * columns for rows, columns in pairwise(LAYERS))
        self.weights = np.zeros(count, dtype)
        # One more element for the loss: it is summed with the gradients and needs no separate Allreduce.
        self.bucket = np.zeros(count + 1, dtype)
        self.gradients = self.bucket[:-1]
        self.velocity = np.zeros(count, dtype)
        random = np.random.default_rng(seed)
        for matrix, _ in self.views(self.weights):
            matrix[:] = random.normal(0, 1 / np.sqrt(len(matrix)), matrix.shape)

    @staticmethod
    def views(flat: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """(matrix, bias) of each layer as views of ``flat``."""
        layers, start = [], 0
        for rows, columns in pairwise(LAYERS):
            end = start + rows * columns
            layers.append((flat[start:end].reshape(rows, columns), flat[end : end + columns]))
            start = end + columns
        return layers

    def forward(self, images: np.ndarray) -> list[np.ndarray]:
        """The activations of every layer; the last are log probabilities."""
        activations = [images]
        *hidden, (matrix, bias) = self.views(self.weights)
        for inner, shift in hidden:
            activations.append(np.tanh(activations[-1] @ inner + shift))
        logits = activations[-1] @ matrix + bias
        logits -= logits.max(axis=1, keepdims=True)
        return [*activations, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))]

    def backward(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Fill the bucket with the gradients and the loss, summed over these images."""
        *activations, scores = self.forward(images)
        self.bucket[-1] = -scores[np.arange(len(labels)), labels].sum()
        delta = np.exp(scores)
        delta[np.arange(len(labels)), labels] -= 1
        layers = zip(activations, self.views(self.weights), self.views(self.gradients), strict=True)
        for below, (matrix, _), (matrix_gradient, bias_gradient) in reversed(list(layers)):
            np.matmul(below.T, delta, out=matrix_gradient)
            delta.sum(axis=0, out=bias_gradient)
            delta = (delta @ matrix.T) * (1 - below**2)

    def step(self, batch: int, rate: float) -> float:
        """Take one step of gradient descent with momentum; returns the mean loss of the batch."""
        self.velocity *= 0.9
        self.velocity -= rate / batch * self.gradients
        self.weights += self.velocity
        return float(self.bucket[-1]) / batch


def load(dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images, training labels, test images, test labels: the same split on every rank."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.data[order] / 16).astype(dtype), digits.target[order]
    return images[:1440], labels[:1440], images[1440:], labels[1440:]


def train(comm: Any, options: argparse.Namespace, verbose: bool) -> tuple[np.ndarray, np.ndarray]:
    """Train; returns (weights, loss of each epoch)."""
    images, labels, test_images, test_labels = load(options.dtype)
    model = Perceptron(options.dtype, seed=comm.rank)
    comm.Bcast(model.weights, root=0)  # ranks began with different random weights
    shuffle = np.random.default_rng(1)  # the same order on every rank
    losses = []
    for epoch in range(1, options.epochs + 1):
        start, spent = time.perf_counter(), comm.stats()["seconds"]
        order, total = shuffle.permutation(len(images)), 0.0
        for first in range(0, len(order), options.batch):
            batch = order[first : first + options.batch]
            mine = batch[comm.rank :: comm.size]
            model.backward(images[mine], labels[mine])
            comm.Allreduce(IN_PLACE, model.bucket)
            total += model.step(len(batch), options.rate) * len(batch)
        losses.append(total / len(order))
        accuracy = (model.forward(test_images)[-1].argmax(axis=1) == test_labels).mean()
        if verbose:
            spent, took = comm.stats()["seconds"] - spent, time.perf_counter() - start
            print(
                f"epoch {epoch:3d}  loss {losses[-1]:.4f}  test accuracy {accuracy:6.2%}"
                f"  {took * 1e3:6.1f} ms, of which communication {spent * 1e3:6.1f} ms",
                flush=True,
            )
    return model.weights, np.array(losses)


def identical(comm: Any, weights: np.ndarray, losses: np.ndarray) -> bool:
    """True if every rank has the same weights and losses, to the last bit."""
    mine = np.array([zlib.crc32(weights), zlib.crc32(losses)], np.uint32)
    everyone = np.empty((comm.size, 2), np.uint32)
    comm.Allgather(mine, everyone)
    return bool((everyone == mine).all())


def compare(weights: np.ndarray, losses: np.ndarray, options: argparse.Namespace) -> bool:
    """True if a single process, given the same batches, gets the same result within rounding."""
    alone, alone_losses = train(Alone(), options, verbose=False)
    error = max(
        float(np.abs(weights - alone).max() / np.abs(alone).max()),
        float(np.abs(losses - alone_losses).max() / np.abs(alone_losses).max()),
    )
    limit = TOLERANCE * float(np.finfo(options.dtype).eps)
    print(f"largest relative difference from a single process: {error:.1e} (allowed: {limit:.1e})")
    return error <= limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=96, help="images per step, over all ranks (default: 96)")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--check", action="store_true", help="also train in a single process and compare")
    options = parser.parse_args()

    with Communicator() as comm:
        weights, losses = train(comm, options, verbose=comm.rank == 0)
        same = identical(comm, weights, losses)
        if comm.rank == 0:
            print("\nplans used:", comm.plan_summary(), sep="\n")
            print(f"weights and losses identical on all {comm.size} ranks: {'yes' if same else 'NO'}")
        verdict = np.array([same], np.uint8)
        if comm.rank == 0 and options.check:
            verdict[0] = same and compare(weights, losses, options)
        comm.Bcast(verdict, root=0)
    return 0 if same and verdict[0] else 1


if __name__ == "__main__":
    sys.exit(main())
