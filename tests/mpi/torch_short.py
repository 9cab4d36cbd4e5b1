"""Cases of test_torch_api.py: repeated calls take a short path. Random calls, repeated ones among them, are in
torch_collectives.py."""

from itertools import product

import torch
import torch.distributed as dist
from frames import files_of, frames_of
from torch_cases import DEVICE, N
from torch_catalogue import OPS, drawn_blocks, made

#: Calls: name, operation, arguments.
REPEATED = [
    *((name, OPS.SUM, {}) for name in ("allreduce_", "broadcast_", "reduce_", "_allgather_base_")),
    ("_reduce_scatter_base_", OPS.SUM, {}), ("alltoall_base_", OPS.SUM, {}),
    ("allreduce_", OPS.AVG, {}), ("allgather_", OPS.SUM, {}), ("reduce_scatter_", OPS.SUM, {}),
    ("allreduce_", OPS.SUM, {"async_op": True}), ("allreduce_", OPS.AVG, {"async_op": True}),
]  # fmt: skip


def case_few_frames():
    """At most twelve of our Python functions run; more in calls of lists, and in asynchronous ones on devices."""
    for count, (name, op, how) in product((3, 70_000), REPEATED):
        tries = []
        for turn in range(8):
            one, works = made(name, drawn_blocks(turn, (count,)), N - 1, op), []
            tries.append(frames_of(lambda one=one, works=works, how=how: works.append(one.call(**how))))
            [work.wait() for work in works if work is not None]
            one.check(f"{name} {count} {op} {how}")
        lists = name in ("allgather_", "reduce_scatter_")
        most = 12 + 22 * lists + 12 * (DEVICE != "cpu" and "async_op" in how)
        assert min(map(len, tries)) <= most, (name, count, op, how, min(tries, key=len))


def case_results_are_the_callers():
    """Not memory that a call used in their place, as for lists, and for a type that is moved as bytes."""
    for turn, name in product(range(4), ("allreduce_", "allgather_", "reduce_scatter_", "alltoall_")):
        one = made(name, drawn_blocks(turn, (50,)))
        work = one.call(async_op=True)
        work.wait()
        one.check(name)
        assert all(a is b for a, b in zip(work.result(), one.outputs, strict=True)), name
    for _ in range(2):
        half = torch.ones(6, dtype=torch.complex32, device=DEVICE)
        work = dist.group.WORLD.broadcast([half], 0)
        work.wait()
        assert work.result()[0] is half


def case_split_sizes_bind_nothing():
    tries = []
    for turn in range(5):
        one = made("alltoall_base_", drawn_blocks(turn, (3,), name="alltoall_base_"))
        tries.append(files_of(one.call))
        one.check()
    assert DEVICE != "cpu" or any("buffers/forms.py" not in files for files in tries), tries[-1]


def case_few_frames_of_several_as_one():
    def as_one(calls):
        with dist._coalescing_manager():
            for each in calls:
                each.call()

    for count in (3, 70_000):
        tries = []
        for turn in range(8):
            calls = [made("allreduce_", drawn_blocks(turn + k, (count,))) for k in range(3)]
            tries.append(frames_of(lambda calls=calls: as_one(calls)))
            [each.check() for each in calls]
        most = 18 if DEVICE == "cpu" else 12  # on the host each of the three has its own
        assert min(map(len, tries)) <= most, (count, tries[-1])
