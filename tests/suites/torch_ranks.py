"""One rank of torch's own ``DistributedTest``: its methods one after the other in this process, each in a new group.

``torch_suite.py`` starts the ranks. torch would start new processes for every method; the methods, their temporary
directory and their barrier over files are torch's.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import sys
import time
import traceback
import types
import unittest
from collections import ChainMap
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

#: Timeout between methods: a busy machine may delay a rank for long.
PATIENCE = 60
#: Seconds that all methods may take.
SUITE = 4000
#: Seconds in which a method fails on all ranks if one rank fails with an error that all of them make.
MOMENT = 5


class BackendName(str):
    """The backend's name, which the tests' gates ("only gloo", "only MPI") and branches accept as ``known`` too."""

    def __new__(cls, name, known):
        made = super().__new__(cls, name)
        made.known = known
        return made

    def __hash__(self):
        return hash(self.known)  # so that sets of names that contain the known one contain it

    def __eq__(self, other):
        return other == self.known or str.__eq__(self, other)

    def __ne__(self, other):
        return other not in (self.known, "mpi") and str.__ne__(self, other)


def load(backend, known="gloo"):
    """Return torch's module of tests for ``backend``, as if torch knew it: its gates are those of ``known``."""
    if find_spec("expecttest") is None:  # torch.testing derives a class from its class, but these tests do not use it
        sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)
    from torch.testing._internal import common_distributed

    cases = common_distributed.DistTestCases
    if backend == "ucch":
        cases.backend_feature["plugin"].add(backend)
    name = BackendName(backend, known) if backend == "ucch" else backend
    with mock.patch.object(os, "environ", ChainMap({"BACKEND": name}, os.environ)):
        from torch.testing._internal.distributed import distributed_test as tests
    return tests


def adapt(tests, backend):
    """Return the class of test methods; for ucch without gates for other backends, and with its profiler events."""
    stock = tests.Barrier.sync.__func__
    tests.Barrier.sync = classmethod(lambda cls, wait_for=None, timeout=PATIENCE: stock(cls, wait_for, PATIENCE))
    if backend == "ucch":
        for known in (
            tests.PROFILING_SUPPORTED_BACKENDS,
            tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
            tests.CUDA_PROFILING_SUPPORTED_BACKENDS,
        ):
            known.append(backend)

    class Methods(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        pass

    return Methods


def news(folder, rank):
    """Return a rank's notes so far: method, outcome, text, time."""
    file = folder / f"rank{rank}"
    lines = file.read_text().splitlines() if file.exists() else []
    return [tuple(json.loads(line)) for line in lines if line.endswith("]")]


def methods_of(kind):
    return sorted(name for name in dir(kind) if name.startswith("test_") and callable(getattr(kind, name)))


class Rank:
    """This process: runs methods and writes a line for each into its file."""

    def __init__(self, tests, kind, backend, folder, rank, size):
        self.tests, self.kind, self.backend, self.folder, self.rank, self.size = (
            tests, kind, backend, folder, rank, size,
        )  # fmt: skip
        self._file = (folder / f"rank{rank}").open("w")

    def note(self, method, outcome, text=""):
        """Write this rank's progress for the suite."""
        self._file.write(json.dumps([method, outcome, text, time.time()]) + "\n")
        self._file.flush()

    def run(self, method):
        self.note(method, "begun")
        function = getattr(self.kind, method)
        try:
            if getattr(function, "__unittest_skip__", False):
                outcome, text = "skipped", function.__unittest_skip_why__
            else:
                outcome, text = self._outcome(method)
        except BaseException:
            outcome, text = "failed", traceback.format_exc()
        self.note(method, outcome, text)
        return outcome != "failed" or self._refused(method)

    def _refused(self, method):
        """True if a method has failed on all ranks by the same error: no call is in progress, and other calls can
        follow."""
        import torch.distributed as dist

        end = time.monotonic() + MOMENT
        while time.monotonic() < end:
            lines = [line for rank in range(self.size) for line in news(self.folder, rank) if line[0] == method]
            errors = [line[2].strip().splitlines()[-1] for line in lines if line[1] == "failed"]
            if len(errors) == self.size:
                if len(set(errors)) == 1:
                    dist.destroy_process_group()
                return len(set(errors)) == 1
            time.sleep(0.1)
        return False

    def _outcome(self, method):
        import torch.distributed as dist
        from torch.testing._internal import common_utils

        test = self.kind(method)
        test.rank, test.file_name = self.rank, str(self.folder / f"store-{method}")
        self.tests.INIT_METHOD = f"file://{self.folder}/again-{method}"
        seconds = self.tests.CUSTOM_PG_TIMEOUT.get(method, self.tests.default_pg_timeout)
        dist.init_process_group(
            self.backend, init_method=test.init_method, world_size=self.size, rank=self.rank,
            timeout=timedelta(seconds=seconds),
        )  # fmt: skip
        test._barrier()
        common_utils.set_rng_seed()
        skipped = self._body(getattr(test, method))
        test._barrier()
        with contextlib.suppress(AssertionError, ValueError):  # some methods have destroyed it
            dist.destroy_process_group()
        return ("skipped", skipped) if skipped else ("passed", "")

    @staticmethod
    def _body(method):
        """Run a method; return why it was skipped, or ""."""
        from torch.testing._internal.common_distributed import TEST_SKIPS

        try:
            method()
        except unittest.SkipTest as reason:
            return str(reason) or "no reason given"
        except SystemExit as end:
            for skip in TEST_SKIPS.values():
                if skip.exit_code == end.code:
                    return skip.message
            raise
        return ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", action="store_true", help="tests of GPUs, one for each rank")
    parser.add_argument("--amd", default="", help="with --gpus: ranks that use the HIP runtime")
    parser.add_argument("--hip", default="", help="with --gpus: the HIP runtime of these ranks")
    options = parser.parse_args()
    faulthandler.enable()
    if options.gpus:
        sys.path.append(str(Path(__file__).parents[2] / "tools"))
        import torch_job

        torch_job.begin(options.amd, options.hip, SUITE)
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    folder = options.folder
    os.environ |= {
        "WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank), "TEMP_DIR": str(folder),
        "INIT_METHOD": f"file://{folder}/again", "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        # With fewer than 8 ranks torch runs tests of subgroups only for the backend MPI; they need 3.
        "BACKEND": "mpi",
    }  # fmt: skip
    import torch

    torch.set_num_threads(1)
    tests = load(options.backend, "nccl" if options.gpus else "gloo")
    kind = adapt(tests, options.backend)
    if not rank:
        (folder / "all").write_text("\n".join(methods_of(kind)))
    chosen = (folder / "methods").read_text().split() if (folder / "methods").exists() else []
    here = Rank(tests, kind, options.backend, folder, rank, size)
    for method in chosen or methods_of(kind):
        if not here.run(method):
            os._exit(3)  # peers may be inside a call of this rank's group


if __name__ == "__main__":
    main()
