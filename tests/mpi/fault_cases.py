"""Ranks that die at random moments, and survivors that go on: ``fault_cases.py SEED ROUND ...``.

A round is the ranks (of the whole job) that die in it, with commas between; those behind a colon die while the others
shrink. Survivors make random collectives until a call fails, shrink, and have every result compared with numpy's. With
``FAKEGPU_LAYOUT`` their arrays are on fake GPUs.
"""

import os
import random
import signal
import sys
import threading
import time

import fault_call
import numpy as np

import ucc_hetero
from ucc_hetero.errors import CollectiveError

seed, rounds = int(sys.argv[1]), sys.argv[2:]
comm = ucc_hetero.Communicator()
me, members = comm.rank, list(range(comm.size))


def die_after(seconds: float) -> None:
    """Kill this process, wherever it is then."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def one_call(number: int) -> None:
    """The random collective of that number; its result compared."""
    fault_call.one_call(comm, f"{seed} {len(members)} {number}")


def go_on(error: Exception) -> None:
    """Shrink, and learn who is left; again if somebody dies before that."""
    global comm, members
    began = time.monotonic()
    print(f"rank {me}: {type(error).__name__}: {error}", flush=True)
    while True:
        old, comm = comm, comm.Shrink()
        old.Free()
        took, found = time.monotonic() - began, np.empty(comm.size, "i8")
        try:
            comm.Allgather(np.array([me]), found)
        except CollectiveError:
            continue
        members = found.tolist()
        print(f"rank {me}: {len(members)} go on after {took:.3f} s", flush=True)
        return


for step, text in enumerate(rounds):
    first, later = ([int(v) for v in part.split(",") if v] for part in f"{text}:".split(":")[:2])
    # Of all that die at a time: one that did later might while MPI makes a communicator, where Open MPI 5.0.11 crashes.
    delay = random.Random(f"{seed} {step}").uniform(0, 0.2)
    number = 0
    while set(members) & {*first, *later}:
        if me in first and number == 20:  # all have begun; some of them may be a call behind
            die_after(delay)
        try:
            one_call(number)
            number += 1
        except CollectiveError as error:
            if me in later:
                die_after(delay / 10)
            go_on(error)
            number = (number // 1000 + 1) * 1000  # survivors need not have come to the same call
for number in range(1_000_000, 1_000_020):
    one_call(number)
print(f"right: rank {me} of {members}", flush=True)
