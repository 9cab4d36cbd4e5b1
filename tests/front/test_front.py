"""First use by a new user: a fresh clone, the commands of README and the first pages word for word, no settings; and
the contents of sdist and wheel.

`clone` is installed in place by `make demo` and README; `openmpi` and `mpich` are environments with the wheel. Blocks
behind a comment `<!-- needs ... -->` need more than this machine has.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCES = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache", "_native.*"
)
NOBODY = 65534
#: Prefixes of settings of the test run that a new user does not have; make's would reach `make demo`.
_SETTINGS = ("OMPI_", "PRTE_", "PMIX_", "PMI_", "UCC", "UCX_", "OMP_", "PYTHON", "MAKE", "MFLAGS", "VIRTUAL_ENV", "MPI")

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler: apt-get install gcc"),
    pytest.mark.timeout(1800),
]


def blocks(page, *languages):
    text = (ROOT / page).read_text()
    found = re.findall(r"^([^\n]*)\n+```(\w+)\n(.*?)^```", text, re.M | re.S)
    return [body for before, language, body in found if language in languages and not before.startswith("<!-- needs")]


@pytest.fixture(scope="module")
def place():
    folder = Path(tempfile.mkdtemp(prefix="front-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def environ(place):
    """The environment of a new user."""
    (place / "bin").mkdir()
    (place / "bin" / "quick").write_text('#!/bin/sh\nexec gcc "$@" -O0\n')  # a third of the time
    (place / "bin" / "quick").chmod(0o755)
    (place / "tmp").mkdir()
    (place / "tmp").chmod(0o1777)
    folders = [each for each in os.environ["PATH"].split(os.pathsep) if Path(each) != Path(sys.executable).parent]
    here = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    return here | {
        "PATH": os.pathsep.join(folders), "CC": str(place / "bin" / "quick"), "TMPDIR": str(place / "tmp"),
        "PYTHON": str(Path(sys.executable).resolve()),
    }  # fmt: skip


def run(words, cwd, env, **more):
    return subprocess.run(
        [*map(str, words)], cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1500,
        check=False, **more,
    )  # fmt: skip


def shell(script, cwd, env):
    done = run(["bash", "-ec", script], cwd, env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(place):
    shutil.copytree(ROOT, place / "ucc_hetero", ignore=NOT_SOURCES)
    return place / "ucc_hetero"


@pytest.fixture(scope="module")
def dist(place, clone, environ):
    """A folder with an sdist and the wheel that was built from it, which serves every Python from 3.10 on."""
    pytest.importorskip("build", reason="building needs the extra 'dev'")
    done = run([sys.executable, "-m", "build", "--no-isolation", "--outdir", place / "dist", clone], place, environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return place / "dist"


@pytest.fixture(scope="module")
def wheel(dist):
    return next(dist.glob("*.whl"))


def as_nobody():
    """Arguments of `run` that drop root's rights."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def may_start(python, place, environ):
    """True if an ordinary user can start this Python and it is new enough."""
    script = "import sys; sys.exit(sys.version_info < (3, 10))"
    try:
        return run([python, "-c", script], place, environ, **as_nobody()).returncode == 0
    except PermissionError:
        return False


@pytest.fixture(scope="module", params=["openmpi", "mpich"])
def installed(request, place, wheel, environ):
    """An environment with the wheel and one of the MPIs, not in place."""
    folder = place / request.param
    # An ordinary user may not be able to read the folder of the tests' Python.
    python = next(
        (each for each in (sys.executable, "/usr/bin/python3") if may_start(each, place, environ)), sys.executable
    )
    run([python, "-m", "venv", "--without-pip", folder], place, environ).check_returncode()
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q"]
    done = run([*pip, f"{wheel}[ucc,launch]", request.param], place, environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return environ | {"PATH": f"{folder / 'bin'}{os.pathsep}{environ['PATH']}"}


@pytest.fixture(scope="module")
def example(place):
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "example.py").write_text(blocks("docs/quickstart.md", "python")[0])
    return place / "elsewhere"


def test_the_first_page(clone, environ):
    """The first page in the clone, in place. Run as root it also shows that no settings for root are needed."""
    from ucc_hetero.launch.emulate import unavailable

    shell(blocks("docs/quickstart.md", "sh")[0], clone, environ)  # make demo
    active, script, shown = ". .venv/bin/activate\n", blocks("docs/quickstart.md", "python")[0], ""
    (clone / "example.py").write_text(script)
    for text in blocks("docs/quickstart.md", "sh")[1:]:
        if "emulate " not in text or unavailable() is None:
            shown += shell(active + text, clone, environ)
    for said in blocks("docs/quickstart.md", "text"):
        if "@1" not in said or unavailable() is None:
            assert set(said.splitlines()) <= set(shown.splitlines())
    (clone / "example.py").write_text(blocks("README.md", "python")[0])
    install = blocks("README.md", "sh")[-1]
    start = re.search(r"`example\.py` and run `(.+?)`", (ROOT / "README.md").read_text())[1]
    assert "pip install -e" in install and "flat" in shell(active + install + start, clone, environ)


@pytest.fixture(scope="module")
def demo(clone, environ):
    shell("make demo", clone, environ)
    return clone


def test_the_tutorial(demo, environ):
    """The tutorial in the environment of `make demo`: a plan, a rank that does not come, a figure."""
    plan, late, doctor, measure = blocks("docs/tutorial.md", "sh")
    (demo / "late.py").write_text(blocks("docs/tutorial.md", "python")[0])
    active = ". .venv/bin/activate\n"
    assert "split_rail in 16 fragments" in shell(active + plan, demo, environ)
    assert "rank(s) [2] have not called it" in shell(f"{active}! {late.strip()} 2>&1", demo, environ)
    assert re.search(r"rank 2 has not called .*\n.*line 9 in load_batch", shell(f"{active}! {doctor}", demo, environ))
    assert "report/index.html: 1 figure from 1 file" in shell(active + measure, demo, environ)


#: Further pages with commands.
PAGES = sorted(
    name for name in (f"docs/{each.name}" for each in (ROOT / "docs").glob("*.md"))
    if name not in ("docs/quickstart.md", "docs/tutorial.md") and blocks(name, "sh", "bash")
)  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_other_pages(page, demo, environ):
    """Run a page's commands with a small script in place of the user's; plain mpirun gets its options for root."""
    for name in ("example.py", "train.py"):
        (demo / name).write_text(blocks("docs/quickstart.md", "python")[0])
    (demo / "put.py").write_text(blocks("docs/rma.md", "python")[0])
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for text in blocks(page, "sh", "bash"):
        shell(". .venv/bin/activate\n" + text, demo, environ | root)


def test_an_installation(installed, clone, example):
    """Not in place: examples run elsewhere, the doctor runs in the clone's folder, and other commands raise there."""
    assert "3.0" in shell("ucch-run -np 2 python example.py", example, installed)
    assert " 0 errors" in shell("ucch-run -np 2 --check && ucch-doctor", clone, installed)
    done = run(["python", "-m", "ucc_hetero", "info"], clone, installed)
    assert done.returncode == 1 and "pip install -e '.[ucc,mpi]'" in done.stderr.splitlines()[-1]


def test_an_ordinary_user(installed, example):
    env = installed | {"HOME": installed["TMPDIR"]}
    if not may_start(shutil.which("python", path=env["PATH"]) or "", example, env):
        pytest.skip("an ordinary user cannot start this Python: it is in a folder of root's")
    done = run(["ucch-run", "-np", "2", "python", "example.py"], example, env, **as_nobody())
    assert done.returncode == 0 and "1 3.0" in done.stdout and "root" not in done.stderr, done.stdout + done.stderr


def modules(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}


def test_sdist_has_all_sources(dist):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("cffi_build", "docs", "examples", "tests", "tools", "ucc_hetero"):
        sources = [
            path
            for path in (ROOT / folder).rglob("*")
            if path.suffix in {".c", ".cuh", ".h", ".md", ".py"}
            and path.stem != "_native"
            and path.parent.name != "_generated"  # files that `make docs` leaves
        ]
        assert {path.relative_to(ROOT).as_posix() for path in sources} <= names


def test_wheel_is_whole(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in (("ucc_hetero", ""), ("benchmarks", "bench/"), ("mpi_launch", "launch/")):
        assert {f"ucc_hetero/{package}{name}" for name in modules(ROOT / folder)} <= names
    kernels = [path for path in (ROOT / "ucc_hetero").rglob("*") if path.suffix in {".cuh", ".h"}]
    assert kernels and {path.relative_to(ROOT).as_posix() for path in kernels} <= names
    assert "ucc_hetero/py.typed" in names
    top = {name.partition("/")[0].partition("-")[0].removesuffix(".py") for name in names}
    assert top == {"ucc_hetero", "_ucc_hetero_autoload"}, "a generic name"


@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="no stable ABI without the GIL")
def test_wheel_is_for_the_stable_abi(wheel):
    assert "-cp310-abi3-linux" in wheel.name
    assert "ucc_hetero/_native.abi3.so" in zipfile.ZipFile(wheel).namelist()


def test_wheel_imports(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import ucc_hetero.bench, ucc_hetero.launch; from ucc_hetero.native import libraries as l; print(l.__file__)"
    found = run([sys.executable, "-c", code], tmp_path, os.environ)
    assert found.stdout.strip() == str(tmp_path / "ucc_hetero" / "native" / "libraries.py"), found.stderr
