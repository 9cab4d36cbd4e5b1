"""``python -m ucc_hetero tune``: the job's own ranks measure which algorithm is fastest at which size.

Every candidate of a size has its turn in every round, and those that are clearly slower leave early. What differs from
the choice that would be made anyway becomes a rule. Rank 0 writes the table, which later jobs read (UCCH_TUNE_FILE).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..api.comm import Communicator
from ..planner.collectives import elements
from ..planner.cost import Links
from ..planner.rules import Measured, Rule, Wires, save_table
from ..planner.select import Choice, Tuning, candidates, choose, example_call
from ..planner.topology import link_weights
from .finding import Finding, improvements
from .plan import short_name
from .trial import Trial, forced
from .tune_pairs import pair_rules

#: Candidates slower than the best by this factor after the first round are measured no further.
_HOPELESS = 1.5
#: Rounds at every size, and what one sample of a candidate should take.
_ROUNDS, _SECONDS = 5, 1e-3


def tune(
    comm: Communicator, collectives: Sequence[str], sizes: Sequence[int], tell: Callable[[Finding], None]
) -> list[Finding]:
    """Measure every candidate of every collective and size; ``tell`` is called on every rank after each size."""
    before, found = comm._run.members.tuning, []
    bare = replace(before, user=(), measured=(), links=None, messages=())
    try:
        for collective in collectives:
            for nbytes in sizes if collective != "barrier" else [0]:
                found.append(measure(comm, collective, nbytes, bare))
                tell(found[-1])
    finally:
        comm._run.retune(before)
    return found


def measure(
    comm: Communicator,
    collective: str,
    nbytes: int,
    tuning: Tuning,
    rounds: int = _ROUNDS,
    seconds: float = _SECONDS,
) -> Finding:
    """Seconds of every candidate at one size; the default is what ``tuning`` chooses. Leaves another tuning behind.

    ``seconds``: what a sample should take, of which there are as many as ``rounds``.
    """
    topology, run = comm.topology, comm._run
    total = elements(example_call(topology, collective, nbytes // 4)) * 4
    default = choose(topology, collective, total, tuning)
    trial = Trial(comm, collective, nbytes, seconds)
    times: dict[Choice, list[float]] = {default: []}
    times |= {choice._replace(queued=default.queued): [] for choice in candidates(topology, collective, total)}
    calls: dict[Choice, int] = {}
    for choice in times:
        run.retune(forced(choice, collective))
        trial.warm()
        calls[choice] = trial.calls
        times[choice].append(trial.sample())
    # All ranks know the same times, so all measure the same candidates on.
    best = min(min(t) for t in times.values())
    hopeful = [c for c, t in times.items() if c == default or t[0] < _HOPELESS * best]
    for turn in range(1, rounds):
        # Each in another place of a round: what comes before it is not always the same.
        for choice in hopeful[turn % len(hopeful) :] + hopeful[: turn % len(hopeful)]:
            run.retune(forced(choice, collective))
            trial.calls = calls[choice]
            trial.run()
            times[choice].append(trial.sample())
    trial.close()
    return Finding.of(collective, total, default, times)


def rules_of(found: Sequence[Finding]) -> tuple[Rule, ...]:
    """Rules for ranges of sizes, which end halfway (geometrically) between sizes with different bests.

    There are none for sizes where the default was best, so that they follow what later versions know better, and none
    from twice the longest size on.
    """
    return tuple(Rule(name, low, high, best.algorithm, best.fragments) for name, best, low, high in improvements(found))


def save(
    path: str | Path,
    comm: Communicator,
    found: Sequence[Finding],
    pairs: Sequence[Finding],
    links: Links,
    wires: Wires,
) -> int:
    """Write the table on rank 0; returns the number of rules."""
    rules, messages = rules_of(found), pair_rules(pairs)
    hosts = [round(1e-6 / link.beta) for link in links.hosts]
    speeds = [hosts[host] for host in comm.topology.hosts] if hosts else [0] * comm.size
    bare = comm._run.members.bare
    if comm.rank == 0:
        weights = _clear(link_weights(bare.hosts, speeds))
        save_table(path, bare, Measured(rules, weights, links, messages, wires))
    return len(rules) + len(messages)


def _clear(weights: tuple[int, ...]) -> tuple[int, ...]:
    """Weights, if they differ by more than what measuring them does."""
    return weights if weights and max(weights) > 1.25 * min(weights) else ()


def describe(one: Finding) -> str:
    """One line: the best, and what each candidate took."""
    return one.line(str(one.kind), short_name)
