"""The source distribution of the installed mpi4py, whose tests are run through this package."""

import importlib.metadata
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "suites"


class SourceMissing(RuntimeError):
    """The source distribution is neither in the cache nor to be had from the package index."""


def test_folder(cache: Path = CACHE) -> Path:
    """The ``test`` folder of the installed version's source distribution; fetched once, then found in ``cache``."""
    version = importlib.metadata.version("mpi4py")
    folder = cache / f"mpi4py-{version}" / "test"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            unpacked = _unpacked(version, Path(temporary))
            try:
                unpacked.rename(folder.parent)
            except OSError:  # another process was faster
                if not folder.is_dir():
                    raise
    return folder


def _unpacked(version: str, into: Path) -> Path:
    # Without isolation and with what is installed, pip prepares the metadata; nothing is compiled.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-binary", "mpi4py", f"mpi4py=={version}", "--dest", str(into)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    archives = list(into.glob("mpi4py-*.tar.gz"))
    if done.returncode or len(archives) != 1:
        raise SourceMissing(f"pip could not fetch the source distribution of mpi4py {version}:\n{done.stderr.strip()}")
    with tarfile.open(archives[0]) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4, and later 3.10s
        archive.extractall(into, **safely)
    return into / archives[0].name.removesuffix(".tar.gz")
