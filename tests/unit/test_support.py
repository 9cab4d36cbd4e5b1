"""docs/support.md and conformance.md have the package's tables. ``python tests/unit/test_support.py`` writes them."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ucc_hetero.api.comm import _ASKING, _OTHERS, Communicator
from ucc_hetero.bindings.ucc_enums import Coll
from ucc_hetero.planner import algorithms
from ucc_hetero.planner.collectives import ROWS
from ucc_hetero.planner.plan import KINDS
from ucc_hetero.types import DTYPES, OPS, reduction

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "suites"))
from buffer_suite import listed, reasons_table
from mpi4py_refusals import refusals
from mpi4py_refusals import table as refused_tests

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [DOCS / "support.md", DOCS / "conformance.md"]

#: Remarks of the page that come from no table of the package.
UNCOUNTED = "non-blocking: a message per block (`pairwise`)"
REMARKS = {
    "reduce_scatter": "in place `recvcounts` must be given",
    "gatherv": UNCOUNTED,
    "scatterv": UNCOUNTED,
    "alltoallv": UNCOUNTED,
}


def collectives() -> str:
    """One row per collective, which are alike for all kinds of memory."""
    lines = ["| collective | one island runs | several islands choose among | remarks |", "|---|---|---|---|"]
    for name, row in ROWS.items():
        kind = KINDS.get(row.step)
        code = kind and (kind.ucc_v if row.layout in ("ranks", "matrix") else kind.ucc)
        alone = f"UCC `{Coll(code).name}`" if code else "own messages and combinations"
        several = ", ".join(f"`{found}`" for found in sorted(algorithms.names(name)))
        remarks = REMARKS.get(name, "" if row.step else "one algorithm whatever the islands; combined on the host")
        lines.append(f"| {method(name)} | {alone} | {several} | {remarks} |")
    remarks = "host memory only (else Alltoallv, or copy to the host); packed and unpacked on both sides"
    return "\n".join([*lines, f"| Alltoallw | an Alltoallv of bytes | as Alltoallv | {remarks} |"])


def method(name: str) -> str:
    return name.capitalize()


def reductions() -> str:
    """One row for datatypes that are alike, one column per operation: the type it is computed in, or nothing."""
    names = [name for name in OPS if name not in ("MAXLOC", "MINLOC")]
    alike: dict[str, list[str]] = {}
    for dtype in DTYPES.values():
        cells = []
        for name in names:
            how = reduction(dtype, OPS[name])
            if how is None:
                word = ""
            elif dtype.kind == "bool":
                word = {"MAX": "or", "MIN": "and", "BXOR": "xor"}[how.op.name]
            else:
                word = "yes" if how.compute is dtype else f"in {how.compute}"
            cells.append(word)
        alike.setdefault(" | ".join(cells), []).append(str(dtype))
    lines = ["| datatype | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    return "\n".join([*lines, *(f"| {', '.join(dtypes)} | {cells} |" for cells, dtypes in alike.items())])


def mpi4py() -> str:
    """mpi4py's own tests that are refused."""
    return refused_tests(refusals())


def buffers() -> str:
    """Buffers that either mpi4py or this package refuses, and the other takes."""
    return reasons_table(listed())


TABLES: dict[str, Callable[[], str]] = {
    "collectives": collectives, "reductions": reductions, "mpi4py": mpi4py, "buffers": buffers,
}  # fmt: skip


def marked(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- table: {name} -->\n).*?(\n<!-- end -->)", re.S)


@pytest.mark.parametrize("name", TABLES)
def test_page_shows_the_tables(name: str) -> None:
    found = marked(name).search("".join(page.read_text() for page in PAGES))
    assert found and found[0] == f"{found[1]}{TABLES[name]()}{found[2]}", "run python tests/unit/test_support.py"


@pytest.mark.parametrize("name", [*ROWS, "alltoallw"])
def test_every_collective_has_its_methods(name: str) -> None:
    for spelling in (method(name), f"I{name}", f"{method(name)}_init"):
        assert callable(getattr(Communicator, spelling))


def test_remarks_are_about_collectives() -> None:
    assert set(REMARKS) <= set(ROWS)


def test_what_is_absent_is_listed() -> None:
    mpi4py = pytest.importorskip("mpi4py", reason="needs mpi4py: pip install mpi4py")
    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))
    passed_on = {name for name in dir(MPI.Cartcomm) if name.startswith(_ASKING) or name in _OTHERS}
    theirs = {name for kind in (MPI.Intracomm, MPI.Cartcomm) for name in dir(kind) if name[0].isupper()}
    absent = {name for name in theirs - passed_on if not hasattr(Communicator, name)}
    found = re.search(r"<!-- list: absent -->\n(.*?)<!-- end -->", PAGES[0].read_text(), re.S)
    assert found is not None
    assert absent <= set(re.findall(r"`(\w+)`", found[1])), "docs/support.md should list what is not there"
    assert not [name for name in re.findall(r"`(\w+)`", found[1]) if hasattr(Communicator, name)]


if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text()
        for table, make in TABLES.items():
            text = marked(table).sub(lambda m, make=make: f"{m[1]}{make()}{m[2]}", text)
        page.write_text(text)
