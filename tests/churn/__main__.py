"""Kills and restarts replicas all the time, and checks that they stay equal to the bit: python -m tests.churn --help.

At the end the parameters are computed again from the list of members of each step.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist

from .replica import SIZE, gradient

#: Seconds for all replicas to meet again, on a machine with few cores.
PATIENCE = 120


class Churn:
    """A job of ``ranks`` replicas, and the faults that happen to them."""

    def __init__(self, ranks, seed):
        self.random, self.ranks = random.Random(seed), ranks
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = {}
        self.incarnations = [0] * ranks
        self.generation, self.members = 0, []
        self.trained = []
        self.kills = self.stops = 0
        self.began = time.monotonic()

    def start(self, number):
        self.incarnations[number] += 1
        words = [str(self.store.port), str(number), str(self.incarnations[number])]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE_"))}
        command = [sys.executable, str(Path(__file__).with_name("replica.py")), *words]
        self.processes[number] = subprocess.Popen(command, env=env | {"OMP_NUM_THREADS": "1"})

    def living(self):
        return [
            number
            for number, process in sorted(self.processes.items())
            if process.poll() is None and self.store.check([f"ready/{number}/{self.incarnations[number]}"])
        ]

    def regroup(self):
        """Make a new generation if the set of live replicas has changed, or if a call of the current generation
        failed."""
        who = [f"{number}/{self.incarnations[number]}" for number in self.living()]
        if new := bool(who) and (who != self.members or self.store.check([f"failed/{self.generation}"])):
            self.generation, self.members = self.generation + 1, who
            self.store.set(f"generation/{self.generation}", json.dumps(who))
            self.store.set("current", str(self.generation))
        return new

    def befall(self):
        """Kill some replicas, or stop one for a moment; one that has the state survives."""
        living = self.living()
        self.random.shuffle(living)
        if self.random.random() < 0.2 and living:
            self.stops += 1
            self.processes[living[0]].send_signal(signal.SIGSTOP)
            time.sleep(self.random.uniform(0, 1))
            self.processes[living[0]].send_signal(signal.SIGCONT)
            return
        living.remove(next(n for n in living if f"{n}/{self.incarnations[n]}" in self.trained))
        for number in living[: self.random.choice([1, 1, 1, 2, self.ranks])]:
            self.processes[number].kill()
            self.processes[number].wait()
            self.kills += 1

    def run(self, seconds, faults):
        for number in range(self.ranks):
            self.start(number)
        fate = restart = 0.0
        while (now := time.monotonic()) - self.began < seconds and self.kills + self.stops < faults:
            self.regroup()
            if self.store.check(["unlike"]):
                raise AssertionError(f"replicas differ: {self.store.get('unlike').decode()}")
            if self.store.check([f"trained/{self.generation}"]):
                self.trained = self.members
            if now > fate and self.trained and len(self.living()) == self.ranks:
                self.befall()
                fate = now + self.random.uniform(0.5, 4)
            for number, process in list(self.processes.items()):
                if (status := process.poll()) is None or now < restart:
                    continue
                if status != -signal.SIGKILL:
                    raise AssertionError(f"replica {number} ended with status {status}")
                self.start(number)
                restart = now + self.random.uniform(0, 1)
            time.sleep(0.02)

    def end(self):
        """Let all live replicas end at the same step; compare their states with the expected one."""
        until = time.monotonic() + PATIENCE
        while self.regroup() or len(self.members) < self.ranks or not self.store.check([f"trained/{self.generation}"]):
            assert time.monotonic() < until, "replicas do not come together"
            for number, process in self.processes.items():
                if process.poll() is not None:
                    self.start(number)
            time.sleep(0.02)
        self.store.set("end", "1")
        keys = [f"state/{number}" for number in range(self.ranks)]
        while not self.store.check(keys):
            assert time.monotonic() < until, f"states that came: {[k for k in keys if self.store.check([k])]}"
            time.sleep(0.02)
        states = [self.store.get(key).decode() for key in keys]
        state = json.loads(states[0])
        ends = [(each["step"], each["history"][-1]) for each in map(json.loads, states)]
        assert len(set(states)) == 1, f"replicas differ at the end: {ends}"
        assert [process.wait(PATIENCE) for process in self.processes.values()] == [0] * self.ranks
        return state

    def expected(self, state):
        """Parameters computed from the members of each step's generation."""
        total = np.zeros(SIZE, np.int64)
        firsts = [*(first for first, _ in state["history"]), state["step"]]
        for (first, generation), last in zip(state["history"], firsts[1:], strict=True):
            for who in json.loads(self.store.get(f"generation/{generation}")):
                for step in range(first, last):
                    total += gradient(int(who.split("/")[0]), step)
        return total

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.churn", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--faults", type=int, default=sys.maxsize, help="kills and stops after which it ends as well")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    churn = Churn(options.ranks, options.seed)
    try:
        churn.run(options.seconds, options.faults)
        state = churn.end()
        assert (churn.expected(state) == np.array(state["parameters"])).all(), "the parameters are wrong"
    finally:
        churn.close()
    print(f"right: {state['step']} steps in {churn.generation} generations, {churn.kills} kills, {churn.stops} stops")


if __name__ == "__main__":
    main()
