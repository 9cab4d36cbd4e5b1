"""One random collective for ranks that may die in it: fresh data, one of its forms, and its result by numpy."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

NAMES = ("Allreduce", "Bcast", "Allgather", "Reduce_scatter_block", "Alltoall", "Barrier")
COUNTS = (1, 17, 1000, 50_000)


def device_arrays() -> Callable[[np.ndarray], Any]:
    """Makes copies of arrays on this rank's fake GPU."""
    import arrays as fake

    return lambda values: fake.Array(values.size, values.dtype).set(values)


def data(seed: object, rank: int, count: int) -> np.ndarray:
    """Numbers of a rank for a call; sums of them are exact."""
    rng = np.random.default_rng([random.Random(str(seed)).getrandbits(32), rank])
    return rng.integers(-1000, 1000, count).astype("f8")


def one_call(comm: Any, members: Sequence[int], me: int, seed: str, on_device: Any = None) -> None:
    """A random collective of ``members``, the same on all of them for equal seeds; its result is compared."""
    draw = random.Random(seed)
    name, count, size, place = draw.choice(NAMES), draw.choice(COUNTS), len(members), members.index(me)
    all_data = [data(seed, rank, count * size) for rank in members]
    sent, got = all_data[place].copy(), np.full(count * size, np.nan)
    root = draw.randrange(size)
    args: tuple[Any, ...] = (sent, got)
    if name == "Barrier":
        want, args = got.copy(), ()
    elif name == "Bcast":
        got[:] = sent
        want, args = all_data[root], (got, root)
    elif name == "Allreduce":
        want = sum(all_data)
    elif name == "Reduce_scatter_block":
        got = got[:count]
        want, args = sum(all_data)[place * count : (place + 1) * count], (sent, got)
    elif name == "Allgather":
        want, args = np.concatenate([each[:count] for each in all_data]), (sent[:count], got)
    else:
        want = np.concatenate([each[place * count : (place + 1) * count] for each in all_data])
    arrays = [each for each in args if isinstance(each, np.ndarray)]
    passed = [on_device(each) if on_device else each for each in arrays] + list(args[len(arrays) :])
    if draw.random() < 0.5:
        getattr(comm, name)(*passed)
    else:
        getattr(comm, f"I{name.lower()}")(*passed).Wait()
    if on_device and arrays:
        got = passed[len(arrays) - 1].peek.copy()
    assert np.array_equal(got, want, equal_nan=True), (name, seed, count, members)
