"""Builds the cffi module, for the stable ABI if possible. pyproject.toml has everything else."""

import os
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor

# Checked before pip resolves dependencies, which takes long on an old Python.
if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(
        "ucc_hetero needs Python 3.10 or newer, and this is {}.{}: make the environment with another one, as in "
        "python3.12 -m venv .venv".format(*sys.version_info[:2])
    )

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py


class ParallelBuild(build_ext):
    """Compiles as many files at a time as there are cores; an extension's files are compiled one by one otherwise."""

    def build_extensions(self):
        one_by_one = self.compiler.compile

        def compile_all(sources, **options):
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                objects = pool.map(lambda source: one_by_one([source], **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_all
        super().build_extensions()


class FreshBuild(build_py):
    """Copies modules to an empty folder, because pip builds in the clone, and files of an earlier build would be
    included."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(os.path.join(self.build_lib, "ucc_hetero"), ignore_errors=True)
        super().run()


free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

setup(
    cffi_modules=["cffi_build/build.py:ffibuilder"],
    cmdclass={"build_ext": ParallelBuild, "build_py": FreshBuild},
    options={} if free_threaded else {"bdist_wheel": {"py_limited_api": "cp310"}},
)
