"""The documentation is true: commands exist, links lead somewhere, public names are explained."""

import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ucc_hetero
from ucc_hetero.bindings import ucc, ucx
from ucc_hetero.machine.vendors import VENDORS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def commands(page: Path) -> str:
    """Commands that a page tells its reader to type: shell blocks and inline code."""
    text = page.read_text()
    return "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S) + re.findall(r"`([^`\n]+)`", text))


def test_what_a_page_names_exists(page: Path) -> None:
    targets = set(" ".join(re.findall(r"^([a-z ]+):", (ROOT / "Makefile").read_text(), re.M)).split())
    # "install make, python3 ..." is not a call of make: a call begins a line.
    assert set(re.findall(r"^make ([a-z]+)", commands(page), re.M)) <= targets
    for module in re.findall(r"python3? -m (ucc_hetero[\w.]*)", commands(page)):
        spec = importlib.util.find_spec(module)
        runs = spec and (spec.submodule_search_locations is None or importlib.util.find_spec(f"{module}.__main__"))
        assert runs, f"{page.name} tells to run {module}"
    for script in re.findall(r"\bexamples/[\w/]+\.py", page.read_text()):
        assert (ROOT / script).exists()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_tests_that_are_named_exist() -> None:
    for file in (ROOT / "Makefile", ROOT / "tests" / "sanitize" / "run.py"):
        for name in re.findall(r"tests/[\w/]+(?:\.py)?", file.read_text()):
            assert list(ROOT.glob(f"{name}*")), f"{file.name} names {name}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text().split()
    assert {page.stem for page in PAGES if page.parent.name == "docs"} - {"index"} <= set(index)


def public() -> Iterator[tuple[str, object]]:
    """(name, object) of the public functions and classes, and the public methods and properties of these classes."""
    named = [(name, getattr(ucc_hetero, name)) for name in ucc_hetero.__all__]
    for module in (ucc, ucx):
        named += [(f"{module.__name__}.{name}", getattr(module, name)) for name in module.__all__]
    for name, thing in named:
        if not (inspect.isclass(thing) or inspect.isroutine(thing)):
            continue
        if not (getattr(thing, "__module__", None) or "").startswith("ucc_hetero"):
            continue
        yield name, thing
        for member, value in vars(thing).items() if inspect.isclass(thing) else ():
            if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
                yield f"{name}.{member}", value


def test_public_names_have_docstrings() -> None:
    bare = [name for name, thing in public() if not (inspect.getdoc(thing) or "").strip()]
    assert not bare, "public names without a docstring"


def test_all_names_exist() -> None:
    assert len(set(ucc_hetero.__all__)) == len(ucc_hetero.__all__)
    assert all(hasattr(ucc_hetero, name) for name in ucc_hetero.__all__)


def test_settings_of_vendors_are_documented() -> None:
    page = (ROOT / "docs" / "launch.md").read_text()
    for vendor in VENDORS.values():
        for setting in vendor.settings:
            lines = [line for line in page.splitlines() if f"`{setting.name}={setting.value}`" in line]
            assert any(line.startswith(f"| {vendor.name} |") for line in lines), f"no {setting.name}={setting.value}"
