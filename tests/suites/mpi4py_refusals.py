"""The tests of mpi4py that are refused, each with its reason, and results compared with them."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_name("mpi4py_refusals.json")


def among(name: str, patterns: Iterable[str]) -> bool:
    """True if a name is like one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Refusal(NamedTuple):
    """Tests that fail, on which layouts, by what words they do, and why that is right. ``hangs``: not even tried."""

    tests: tuple[str, ...]
    why: str
    words: str = ""
    layouts: tuple[str, ...] = ("*",)
    hangs: bool = False

    def matches(self, layout: str, test: str) -> bool:
        """True if it is about a test on a layout."""
        return among(layout, self.layouts) and among(test, self.tests)


class Result(NamedTuple):
    """Outcome of a test on all ranks together: passed, skipped (by mpi4py) or failed; and why."""

    kind: str
    why: str
    seconds: float = 0.0


class Verdict(NamedTuple):
    """The results of a layout against the list of refusals."""

    counts: Counter[str]
    #: Faults, in words.
    wrong: list[str]
    #: Refusals that a test failed by.
    used: set[Refusal]


def refusals() -> list[Refusal]:
    """The committed list."""
    return [
        Refusal(**{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})
        for entry in json.loads(LIST.read_text())
    ]


def judge(layout: str, results: Mapping[str, Result], listed: Sequence[Refusal]) -> Verdict:
    """Compare results with the list."""
    verdict = Verdict(Counter(), [], set())
    for test, result in results.items():
        about = [each for each in listed if each.matches(layout, test) and not each.hangs]
        by = [each for each in about if each.words in result.why]
        kind = "refused" if result.kind == "failed" and by else result.kind
        verdict.counts[kind] += 1
        verdict.used.update(by if kind == "refused" else ())
        if kind == "failed":
            said = " though by other words than those listed" if about else ""
            verdict.wrong.append(f"{layout}: {test} fails{said}: {result.why}")
        elif kind == "passed" and about:
            verdict.wrong.append(f"{layout}: {test} passes and is listed as refused: {about[0].why}")
    return verdict


def table(listed: Sequence[Refusal]) -> str:
    """The refusals as docs/conformance.md shows them."""
    rows = []
    for each in listed:
        names = ", ".join(f"`{test.removeprefix('test_')}`" for test in each.tests)
        where = "" if each.layouts == ("*",) else f" ({', '.join(each.layouts)} ranks)"
        rows.append(f"| {names}{where} | {each.why} |")
    return "\n".join(["| tests | why |", "|---|---|", *rows])
