"""Build of the cffi module and, where it exists, for the stable ABI. pyproject.toml says everything else."""

import sysconfig

from setuptools import setup

free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

setup(
    cffi_modules=["cffi_build/build.py:ffibuilder"],
    options={} if free_threaded else {"bdist_wheel": {"py_limited_api": "cp310"}},
)
