"""Sdist and wheel have all that is there: one wheel for every Python from 3.10 on."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
