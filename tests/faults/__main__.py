"""Random faults at random moments of random jobs: ``python -m tests.faults --trials N --seed S``.

Trial i uses seed S + i, and is repeated by ``--trials 1`` with that seed. Needs root, for the emulated hosts on which
all jobs run.
"""

import argparse
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ucc_hetero.launch.emulate import unavailable

from .judge import run
from .menu import FAULTS, MOMENTS, draw

sys.path.insert(0, str(Path(__file__).parents[1] / "fakegpu"))

from building import build_all


def line(verdict):
    t = verdict.trial
    where = f"{'+'.join(map(str, t.slots))} {t.exchange} {'gpu' if t.gpu else 'host'} {t.vendors}"
    what = f"{t.fault} of {','.join(map(str, t.victims))} in {t.moment}"
    went = f"{verdict.right} right {verdict.answered} answered"
    bad = " ".join(f"{kind.upper()} {'; '.join(texts)}" for kind, texts in verdict.failures.items())
    bad += f"ok but for mpirun: {'; '.join(verdict.launcher)}" if verdict.launcher and not bad else ""
    return f"{t.seed} {where}: {what} ({verdict.moment or 'never'}): {went}, {verdict.seconds:.1f} s {bad or 'ok'}"


def table(verdicts):
    counts, bad = Counter(), Counter()
    for each in verdicts:
        key = each.trial.fault, each.trial.moment
        counts[key] += 1
        bad[key] += bool(each.failures)
    rows = [f"| | {' | '.join(MOMENTS)} |", f"|---|{'---|' * len(MOMENTS)}"]
    for fault in FAULTS:
        cells = [f"{counts[fault, m]}" + (f" ({bad[fault, m]})" if bad[fault, m] else "") for m in MOMENTS]
        rows.append(f"| {fault} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--seed", type=int, default=None, help="of the first trial; random by default")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=0, help="of the jobs; both by default")
    parser.add_argument("--fault", choices=FAULTS, help="of all trials; any by default")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--room", type=float, default=1, help="times longer than usual what would be late may take")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no trial is begun")
    parser.add_argument("--log", type=Path, help="folder for all that ranks of failing trials wrote")
    parser.add_argument("--details", action="store_true", help="print it")
    args = parser.parse_args()
    if reason := unavailable():
        parser.exit(2, f"{reason}\n")
    for name in ("PRTE_MCA_rmaps_default_mapping_policy", "OMPI_MCA_rmaps_base_oversubscribe"):
        os.environ.pop(name, None)  # hosts have enough slots, so mpirun must not oversubscribe
    first = random.randrange(10**6) if args.seed is None else args.seed
    print(f"seed {first}", flush=True)
    end, verdicts = time.monotonic() + args.limit, []

    def one(seed):
        if time.monotonic() > end:
            return
        verdict = run(draw(seed, args.hosts, args.fault), fakes, args.room)
        verdicts.append(verdict)
        print(line(verdict), flush=True)
        if verdict.failures and args.log:
            args.log.mkdir(exist_ok=True)
            (args.log / str(seed)).write_text(f"{line(verdict)}\n{verdict.output}")
        if args.details and verdict.failures:
            print(verdict.output, flush=True)

    fakes = build_all()
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, range(first, first + args.trials)))
    kinds = Counter(kind for each in verdicts for kind in each.failures)
    print(f"{table(verdicts)}\n{len(verdicts)} trials, of which failed: {dict(kinds) or 'none'}")
    print(f"mpirun's own doing, shown to be so: {sum(bool(each.launcher) for each in verdicts)}")
    return bool(kinds)


if __name__ == "__main__":
    sys.exit(main())
