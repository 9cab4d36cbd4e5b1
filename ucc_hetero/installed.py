"""How this package is installed: the command for extras, and a check for a clone's folder that hides the package.

Imported first. If Python finds the clone's folder ``ucc_hetero`` before the installed package, as with ``python -m`` in
the clone, compiled parts are missing, and the error says so.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
#: Modules that only an installation has: compiled, or from elsewhere in the repository.
_INSTALLED = ("_native", "launch", "bench")


def extra(name: str) -> str:
    """The command that installs an extra, for error messages: from the clone, as no package index has a release."""
    return f"pip install -e '.[{name}]' in the clone of ucc_hetero"


def module(name: str) -> tuple[str, ...]:
    """The interpreter's arguments that run a module as ``-m`` does, and never the working folder's copy of it."""
    run = f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    # -P does the same from Python 3.11 on.
    return ("-c", f"import runpy, sys; sys.path = [folder for folder in sys.path if folder]; {run}")


def _is_ours(name: str) -> bool:
    """True if Python finds this module, and not in another clone that is installed in place."""
    spec = find_spec(name)
    return spec is not None and Path(spec.origin or "").resolve().is_relative_to(_FOLDER.parent)


def _refuse_the_source_tree() -> None:
    """``ImportError`` where the package is the clone's folder and nothing is installed from it here."""
    package, clone = __name__.rpartition(".")[0], _FOLDER.parent
    if not (clone / "cffi_build").is_dir():
        return
    missing = [name for name in (f"{package}.{each}" for each in _INSTALLED) if not _is_ours(name)]
    if missing:
        raise ImportError(
            f"{_FOLDER} is the source of {package}, and this Python has no installation from it: there is no "
            f"{', no '.join(missing)}. Install it from there: python -m pip install -e '.[ucc,mpi]' in "
            f"{clone}. Or, where {package} is installed already, start Python in another folder, or scripts "
            "from another folder, so that it finds the installed package first."
        )


_refuse_the_source_tree()
