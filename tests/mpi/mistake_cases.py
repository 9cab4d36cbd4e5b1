"""Random mistakes of one rank in random collectives: ``mpirun -np N python mistake_cases.py TRIALS``.

On host memory, or with ``FAKEGPU_LAYOUT`` on fake devices.

The rank whose mistake it is raises that; all others, wherever they are, say who refused what, and so does every later
call. A communicator that is made then computes.
"""

import os
import random
import sys
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

if "FAKEGPU_LAYOUT" in os.environ:
    import arrays  # before a communicator is made

from refusal_cases import ended, named, run

from ucc_hetero import Communicator, RefusedError

WORLD = MPI.COMM_WORLD

#: Collective -> how many times the count a rank sends and receives; "p" is the number of ranks.
SHAPES = {
    "Allreduce": ("1", "1"), "Scan": ("1", "1"), "Allgather": ("1", "p"), "Alltoall": ("p", "p"),
    "Reduce_scatter_block": ("p", "1"), "Reduce": ("1", "1"), "Gather": ("1", "p"), "Scatter": ("p", "1"),
    "Bcast": ("", "1"),
}  # fmt: skip
REDUCING = {"Allreduce", "Scan", "Reduce_scatter_block", "Reduce"}
#: Collective -> the sides that the root alone has; of a Bcast all have the one that there is.
ROOTED = {"Reduce": "recv", "Gather": "recv", "Scatter": "send", "Bcast": ""}


class Trial(NamedTuple):
    """A call, and what one rank does wrong in it."""

    name: str
    form: str
    in_stream: bool
    mistake: str
    culprit: int
    count: int
    root: int
    before: int
    seed: int


def draw(rng: random.Random, on_device: bool) -> Trial:
    """Any trial."""
    name, culprit, root = rng.choice(list(SHAPES)), rng.randrange(WORLD.size), rng.randrange(WORLD.size)
    has_recv = ROOTED.get(name) != "recv" or culprit == root
    has_send = name != "Bcast" and (ROOTED.get(name) != "send" or culprit == root)
    mistakes = ["object"]
    mistakes += ["short", "type"] if has_recv and has_send else []  # a rank that has one side alone sees none
    mistakes += ["op"] * (name in REDUCING) + ["root"] * (name in ROOTED)
    form = rng.choice(["", "I", "_init"])
    count = rng.choice([1, 3, 100, 5000, 200_000])
    in_stream = on_device and form != "_init" and rng.random() < 0.5
    return Trial(
        name, form, in_stream, rng.choice(mistakes), culprit, count, root, rng.randrange(4), rng.randrange(1 << 30)
    )


def vector(count: int, dtype: str = "f4") -> Any:
    """Memory of random contents where this job has its data."""
    data = np.random.default_rng().integers(-100, 100, count).astype(dtype)
    return arrays.Array(count, dtype).set(data) if "FAKEGPU_LAYOUT" in os.environ else data


def contents(data: Any) -> Any:
    return data if isinstance(data, np.ndarray) else data.peek


def call(comm: Communicator, trial: Trial, wrong: bool) -> Any:
    """Make the trial's call, wrongly or not."""
    name, p = trial.name, comm.size
    sizes = [int(each.replace("p", str(p)) or 0) * trial.count for each in SHAPES[name]]
    mine = {side: ROOTED.get(name) != side or comm.rank == trial.root for side in ("send", "recv")}
    send = vector(sizes[0]) if mine["send"] else None
    recv = vector(sizes[1]) if mine["recv"] else None
    more: dict[str, Any] = {"root": trial.root} if name in ROOTED else {}
    if wrong and trial.mistake == "object":
        recv, send = (recv if recv is None else 5), (5 if recv is None else send)
    elif wrong and trial.mistake == "short":
        recv = vector(sizes[1] - 1)
    elif wrong and trial.mistake == "type":
        recv = vector(sizes[1], "f8")
    elif wrong:
        more[trial.mistake] = p if trial.mistake == "root" else "AVERAGE"
    if trial.in_stream:
        more["stream"] = arrays.runtime().stream()
    method = getattr(comm, f"{name}_init" if trial.form == "_init" else f"I{name.lower()}" if trial.form else name)
    return method(*([recv] if name == "Bcast" else [send, recv]), **more)


def computes(comm: Communicator, rng: random.Random) -> None:
    """The communicator is right."""
    count = rng.choice([1, 7, 3000])
    data, out = vector(count), vector(count)
    comm.Allreduce(data, out)
    assert (contents(out) == sum(WORLD.allgather(contents(data).copy()))).all()


def attempt(trial: Trial) -> None:
    """One trial, on a communicator of its own."""
    comm, rng = Communicator(WORLD), random.Random(trial.seed)
    for _ in range(trial.before):
        computes(comm, rng)
    try:
        run(call(comm, trial, comm.rank == trial.culprit))
    except RefusedError as error:
        assert comm.rank != trial.culprit and named(error, [trial.culprit]), (trial, error)
    except (TypeError, ValueError, BufferError, NotImplementedError) as error:
        assert comm.rank == trial.culprit and not isinstance(error, RefusedError), (trial, error)
    else:  # this rank's part may have been done before
        assert comm.rank != trial.culprit, trial
    ended(comm, [trial.culprit])
    WORLD.Barrier()
    comm.Free()


def main() -> None:
    seed = WORLD.bcast(int(os.environ.get("UCCH_TEST_SEED") or random.randrange(1 << 30)))
    rng = random.Random(seed)
    with Communicator(WORLD) as kept:
        for number in range(int(sys.argv[1])):
            trial = draw(rng, "FAKEGPU_LAYOUT" in os.environ)
            try:
                attempt(trial)
                computes(kept, random.Random(trial.seed))
            except BaseException:
                print(f"rank {WORLD.rank}: seed {seed}, number {number}: {trial}", flush=True)
                raise
        with Communicator(WORLD) as another:
            computes(another, rng)
    if WORLD.rank == 0:
        print("all mistakes told", flush=True)


if __name__ == "__main__":
    main()
