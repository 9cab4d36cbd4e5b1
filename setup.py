"""Build of the cffi module and, where it exists, for the stable ABI. pyproject.toml says everything else."""

import sys
import sysconfig

# Before pip looks for versions of everything that an old Python can have, which takes it long.
if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(
        "ucc_hetero needs Python 3.10 or newer, and this is {}.{}: make the environment with another one, as in "
        "python3.12 -m venv .venv".format(*sys.version_info[:2])
    )

from setuptools import setup

free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

setup(
    cffi_modules=["cffi_build/build.py:ffibuilder"],
    options={} if free_threaded else {"bdist_wheel": {"py_limited_api": "cp310"}},
)
