"""pyproject.toml says what is there, and sdist and wheel have it: one wheel for every Python from 3.10 on."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="needs tomli: pip install tomli")

ROOT = Path(__file__).resolve().parents[2]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = CONFIG["tool"]["setuptools"]
MAPPED = {folder: package for package, folder in SETUPTOOLS["package-dir"].items()}


def packages() -> set[str]:
    """Every package in the tree, under the name that it is installed as."""
    found = set()
    for top in ("ucc_hetero", *MAPPED):
        for init in (ROOT / top).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / top).parts
            found.add(".".join([MAPPED.get(top, top), *parts]))
    return found


def test_every_package_is_installed() -> None:
    assert set(SETUPTOOLS["packages"]) == packages()


def test_every_source_is_in_a_package() -> None:
    for top in ("ucc_hetero", *MAPPED):
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path} would not be installed"


def test_modules_import_under_their_installed_names() -> None:
    import importlib.util

    for package in packages():
        assert importlib.util.find_spec(package), f"{package} is not installed: run make test"


def test_entry_points_exist() -> None:
    for target in CONFIG["project"].get("scripts", {}).values():
        module, _, function = target.partition(":")
        for folder, package in (*MAPPED.items(), ("ucc_hetero", "ucc_hetero")):
            if module == package or module.startswith(f"{package}."):
                path = ROOT / folder / Path(*module[len(package) :].strip(".").split(".")).with_suffix(".py")
                assert re.search(rf"^def {function}\(", path.read_text(), re.M), f"{target} does not exist"
                break


def test_an_old_python_is_refused_at_once() -> None:
    script = f"import sys; sys.version_info = (3, 9, 18); exec(open({str(ROOT / 'setup.py')!r}).read())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1 and done.stderr.startswith("ucc_hetero needs Python 3.10 or newer, and this is 3.9")


def test_runtime_dependencies_are_few() -> None:
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in CONFIG["project"]["dependencies"]}
    assert names == {"cffi", "mpi4py", "numpy"}


def test_extras_are_those_of_the_documentation() -> None:
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "install.md").read_text(), re.M)
    assert sorted(table) == sorted(CONFIG["project"]["optional-dependencies"])


NOT_SOURCES = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache")


def run(*command: str | Path, cwd: Path) -> str:
    job = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist and the wheel that was built from it."""
    pytest.importorskip("build", reason="building needs the extra 'dev'")
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, folder / "tree", ignore=NOT_SOURCES)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "tree", cwd=folder)
    return folder / "dist"


def modules(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}


def test_sdist_has_all_sources(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("cffi_build", "docs", "examples", "tests", "tools", "ucc_hetero"):
        sources = [
            path
            for path in (ROOT / folder).rglob("*")
            if path.suffix in {".c", ".cuh", ".h", ".md", ".py"}
            and path.stem != "_native"
            and path.parent.name != "_generated"  # what `make docs` leaves
        ]
        assert {path.relative_to(ROOT).as_posix() for path in sources} <= names


def test_wheel_is_whole(dist: Path) -> None:
    wheel = next(dist.glob("*.whl"))
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in (("ucc_hetero", ""), ("benchmarks", "bench/"), ("mpi_launch", "launch/")):
        assert {f"ucc_hetero/{package}{name}" for name in modules(ROOT / folder)} <= names
    kernels = [path for path in (ROOT / "ucc_hetero").rglob("*") if path.suffix in {".cuh", ".h"}]
    assert kernels and {path.relative_to(ROOT).as_posix() for path in kernels} <= names
    assert "ucc_hetero/py.typed" in names
    top = {name.partition("/")[0].partition("-")[0].removesuffix(".py") for name in names}
    assert top == {"ucc_hetero", "_ucc_hetero_autoload"}, "a generic name"


@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="no stable ABI without the GIL")
def test_wheel_is_for_the_stable_abi(dist: Path) -> None:
    wheel = next(dist.glob("*.whl"))
    assert "-cp310-abi3-linux" in wheel.name
    assert "ucc_hetero/_native.abi3.so" in zipfile.ZipFile(wheel).namelist()


def test_wheel_imports(dist: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(next(dist.glob("*.whl"))).extractall(tmp_path)
    code = (
        "import ucc_hetero.bench, ucc_hetero.launch; from ucc_hetero.native import libraries; print(libraries.__file__)"
    )
    assert run(sys.executable, "-c", code, cwd=tmp_path).strip() == str(
        tmp_path / "ucc_hetero" / "native" / "libraries.py"
    )
