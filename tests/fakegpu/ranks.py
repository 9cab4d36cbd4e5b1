"""First lines of scripts of ranks on fake GPUs; importing it selects this rank's device, before any communicator."""

# These names are for scripts.
# ruff: noqa: F401, F403

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from arrays import Array, Gate, Graph, ndarray, runtime
from mpi4py import MPI

from ucc_hetero import AVG, IN_PLACE, MAX, MIN, SUM, Communicator, Request, device, rma
from ucc_hetero.errors import *
from ucc_hetero.native.libraries import lib


def numbers(k, rank, n, dtype=np.float32):
    """Return a rank's contribution to the k-th call, which every rank can compute. Sums are exact."""
    return np.random.default_rng([k, rank]).integers(-40, 40, n).astype(dtype)


def around(comm):
    """The next and the previous rank of a ring."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def own_device(comm):
    """The runtime, with this rank's device in use."""
    runtime().use(comm._runner.members.place.device)
    return runtime()


def held():
    """Return a blocked stream, and the gate that blocks it."""
    stream = runtime().stream()
    return stream, Gate(stream)


def reached(stream):
    done = runtime().event()
    done.record(stream.handle)
    while not done.done():
        time.sleep(1e-3)


def sent():
    """Return the bytes that this host has sent by each of its two links."""
    return [int(Path(f"/sys/class/net/eth{k}/statistics/tx_bytes").read_text()) for k in (0, 1)]


def failure(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"
