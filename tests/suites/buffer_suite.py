"""Draws calls with buffers in all of mpi4py's forms, and compares MPI's results and refusals with this package's.

    python tests/suites/buffer_suite.py [--cases N] [--seed N] [--layout NAME]... [--write]

Fails for results that differ, and for what one side refuses and the other takes, but for the differences listed with
reasons in buffer_refusals.json. ``--write`` puts counts and reasons into docs/conformance.md.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from conftest import find_mpirun, mpi_command, mpi_environment, run_limited  # noqa: E402
from mpi4py_suite import write  # noqa: E402

LIST = HERE / "buffer_refusals.json"
#: name -> (ranks, vendors that are emulated, share of the cases)
LAYOUTS = {"2": (2, "", 0.35), "3": (3, "", 0.325), "3 of two vendors": (3, "nvidia:1,amd:2", 0.325)}
#: Seconds after which a call fails, and which a job may take for a start and for each case.
CALL, START, EACH = 60, 300, 0.5
#: Jobs that a layout may take: MPI's own calls stand still at times (Open MPI 5's Ialltoallw in place), which ends one.
JOBS = 5
#: Wrong results that are printed.
SHOWN = 10


class Listed(NamedTuple):
    """A difference with its reason: who refuses, by which words; and whether 20,000 cases may have none of it."""

    who: str
    words: tuple[str, ...]
    why: str
    rare: bool = False


class Tally(NamedTuple):
    """The outcomes of a layout: how many of each, by which listed reasons, and the cases that are wrong."""

    counts: Counter[str]
    reasons: Counter[Listed]
    wrong: list[str]


def listed() -> list[Listed]:
    """The committed differences."""
    return [Listed(**each | {"words": tuple(each["words"])}) for each in json.loads(LIST.read_text())]


def judge(found: Iterable[Sequence[Any]], known: Sequence[Listed]) -> Tally:
    """Compare outcomes, as the ranks wrote them, with the list."""
    tally = Tally(Counter(), Counter(), [])
    whose = {"only mpi4py refuses": "mpi4py", "only we refuse": "ours"}
    for kind, words, rank, _, case in found:
        reason = next(
            (each for each in known if each.who == whose.get(kind) and any(part in words for part in each.words)), None
        )
        if reason is not None:
            tally.reasons[reason] += 1
        elif kind not in ("alike", "not run"):
            tally.wrong.append(f"{kind} on rank {rank}: {words}\n  {case}")
        tally.counts[f"{kind}: {words}" if kind == "alike" else kind] += 1
    return tally


def run(layout: str, cases: int, seed: int, room: float = 1.0) -> list[Sequence[Any]]:
    """The outcomes of a layout, in a new job after a case in which MPI stands still; ``OSError`` without an mpirun,
    ``RuntimeError`` where a job does not end for another reason."""
    found: list[Sequence[Any]] = []
    for job in range(JOBS):
        lines, failure = _job(layout, cases - len(found), seed + 1000 * job, room)
        found += [line for line in lines if isinstance(line, list)]
        if not failure:
            return found
        notes = [line for line in lines if isinstance(line, dict)]
        case = next((note["case"] for note in reversed(notes) if "case" in note), "none was begun")
        if not notes or notes[-1]["stage"] != "mpi":
            raise RuntimeError(f"{layout}: {failure} in\n{case}")
        found.append(("not run", "MPI stands still", -1, "", case))
    raise RuntimeError(f"{layout}: MPI stood still in {JOBS} jobs, last in\n{found[-1][-1]}")


def _job(layout: str, cases: int, seed: int, room: float) -> tuple[list[Any], str]:
    """The lines that rank 0 wrote, and how the job failed."""
    mpirun = find_mpirun()
    if mpirun is None:
        raise OSError("no mpirun: install the extra 'mpi', or an MPI")
    ranks, vendors, _ = LAYOUTS[layout]
    # Open MPI's tuned algorithms stand still where ranks describe the same elements by different datatypes.
    environment = mpi_environment(mpirun) | {
        "UCCH_TIMEOUT": str(room * CALL),
        "OMPI_MCA_coll": "basic,libnbc,self,inter",
    }
    environment |= {"UCCH_EMULATE": vendors}
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "found"
        command = [*mpi_command(mpirun, ranks), sys.executable, str(HERE / "buffer_ranks.py")]
        job, late = run_limited(
            [*command, str(cases), str(seed), str(out)], environment, Path(temporary), room * (START + EACH * cases)
        )
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    failed = late or job.returncode
    return lines, f"the ranks {'were killed' if late else 'failed'}\n{job.output[-6000:]}\n" if failed else ""


def counts_table(tallies: dict[str, Tally]) -> str:
    """The counts as docs/conformance.md shows them."""
    rows = [
        "| ranks | calls | equal results | refused by both | listed differences | not run |",
        "|---|---|---|---|---|---|",
    ]
    for layout, (counts, reasons, _) in tallies.items():
        refused = counts["alike: both refuse"] + counts["alike: both fail"]
        rows.append(
            f"| {layout} | {counts.total():,} | {counts['alike: results']:,} | {refused:,} | {reasons.total():,} | "
            f"{counts['not run']:,} |"
        )
    return "\n".join(rows)


def reasons_table(known: Sequence[Listed]) -> str:
    """The differences as docs/conformance.md shows them."""
    said = {"mpi4py": "mpi4py", "ours": "this package"}
    return "\n".join(
        ["| refused only by | what |", "|---|---|", *(f"| {said[each.who]} | {each.why} |" for each in known)]
    )


def main(arguments: Sequence[str]) -> int:
    """Run the layouts; 1 when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000, help="in all layouts together (20,000)")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="a layout of ranks; all by default")
    parser.add_argument("--write", action="store_true", help="put counts and reasons into docs/conformance.md")
    options = parser.parse_args(arguments)
    layouts, known = options.layout or list(LAYOUTS), listed()
    shares = sum(LAYOUTS[layout][2] for layout in layouts)
    tallies = {}
    for seed, layout in enumerate(layouts, options.seed):
        found = run(layout, round(options.cases * LAYOUTS[layout][2] / shares), seed)
        tallies[layout] = tally = judge(found, known)
        print(f"{layout}, seed {seed}: {dict(tally.counts)}, {len(tally.wrong)} wrong", flush=True)
    wrong = [f"{layout}: {each}" for layout, tally in tallies.items() for each in tally.wrong]
    reasons = sum((tally.reasons for tally in tallies.values()), Counter[Listed]())
    if options.cases >= 20_000 and options.layout is None:
        wrong += [
            f"no case is refused by {each.who} as listed: {each.why}"
            for each in known
            if not (each.rare or reasons[each])
        ]
    for each, number in reasons.most_common():
        print(f"{number:6,} refused by {each.who} alone: {each.why}")
    print("\n".join(wrong[:SHOWN]), f"\n{len(wrong)} wrong" if wrong else "")
    if options.write and not wrong:
        write("buffer counts", counts_table(tallies))
        write("buffers", reasons_table(known))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
