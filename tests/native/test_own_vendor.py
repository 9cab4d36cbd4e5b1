"""A vendor outside the package (examples/own_vendor.c and .py): its runtime alone, and its ranks in a job with
others."""

import random
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from unittest.mock import patch

import pytest
from settings import OWN_QUEUES

from ucc_hetero import device, env
from ucc_hetero.device import registry
from ucc_hetero.machine import vendors
from ucc_hetero.machine.vendors import Library, Vendor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def library(tmp_path_factory, compiled):
    words = "-Wall", "-Werror", "-shared", "-fPIC", f"-I{ROOT / 'cffi_build'}", ROOT / "examples/own_vendor.c"
    return compiled(tmp_path_factory.mktemp("sim") / "libsim.so", *words, "-lpthread")


@pytest.fixture
def tables():
    """Restore the tables of vendors after the test."""
    registry.forget()
    with patch.dict(vendors.VENDORS), patch.dict(vendors.DLPACK), patch.dict(env.TABLE):
        yield
    registry.forget()


@pytest.mark.usefixtures("tables")
def test_a_library_brings_its_adapter(library, monkeypatch):
    monkeypatch.setenv("UCCH_SIM_LIB", str(library))
    device.register(Vendor(name="sim", adapter="sim", setting="SIM_LIB"))
    runtime = device.runtime_of("sim")
    assert runtime is not None and runtime.count() == 2 and runtime.version() == "1.0" and runtime.holds
    runtime.use(1)
    with runtime.alloc(64) as memory, runtime.alloc(64, pinned=True) as pinned:
        assert (runtime.pointer(memory.handle), runtime.pointer(pinned.handle).kind) == (("device", 1), "pinned")
        assert device.whose(memory.handle) == ("sim", 1)
    with pytest.raises(ValueError, match="vendor 'more': vendor 'sim' has this adapter already"):
        device.register(Vendor(name="more", adapter="sim"))


@pytest.mark.usefixtures("tables")
def test_threads_that_ask_for_a_runtime_at_once_have_the_same(library, monkeypatch):
    monkeypatch.setenv("UCCH_SIM_LIB", str(library))
    device.register(Vendor(name="sim", adapter="sim", setting="SIM_LIB"))
    for _ in range(200):
        registry.forget()
        together = Barrier(3)
        with ThreadPoolExecutor(3) as threads:
            asked = [
                threads.submit(lambda together=together: together.wait() >= 0 and device.runtime_of("sim"))
                for _ in range(3)
            ]
        assert {*map(id, (each.result() for each in asked))} == {id(device.runtime_of("sim"))}


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    ("adapter", "why"), [("other", "its adapter is of another release or vendor"), ("none", "it has no symbol")]
)
def test_a_library_without_the_adapter(library, fakegpu, monkeypatch, adapter, why):
    monkeypatch.setenv("UCCH_SIM_LIB", str(library if adapter == "other" else fakegpu["nvidia"]))
    device.register(Vendor(name="sim", adapter=adapter, library=Library("libsim.so"), setting="SIM_LIB"))
    assert device.runtime_of("sim") is None and why in device.report("sim")


#: The example, with the fake library of its vendor for each rank of another vendor.
AMONG_OTHERS = """
import sys
sys.path.insert(0, "EXAMPLES")
import own_vendor  # before any rank's vendor is told
import arrays
own_vendor.main()
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    "layouts", [["sim:3"], ["sim:2,nvidia:1,amd:1", "amd:1,sim:1,nvidia:1,sim:1"]], ids=["one", "three"]
)
def test_ranks_of_vendors(fakes, library, layouts):
    layout = random.choice(layouts)
    script = AMONG_OTHERS.replace("EXAMPLES", str(ROOT / "examples"))
    job, ranks = fakes(script, layout, FAKEGPU_SIM=str(library), **OWN_QUEUES), Counter[str]()
    for vendor, number in (part.split(":") for part in layout.split(",")):
        ranks[vendor] += int(number)
    assert Counter(re.findall(r", (\w+): right", job.stdout)) == ranks, job.output


@pytest.mark.mpi
def test_ranks_that_know_other_vendors(mpirun):
    """If a rank does not know a vendor, every rank gets an error before any rank waits."""
    script = """
import os
from mpi4py import MPI
from ucc_hetero import AgreementError, Communicator, device
from ucc_hetero.machine.vendors import Vendor
if MPI.COMM_WORLD.rank:
    device.register(Vendor(name="sim"))
try:
    Communicator()
except AgreementError as error:
    assert "register the same vendors on every rank" in str(error), error
    print("told", flush=True)
"""
    assert mpirun(script, 2, check=False).said("told") == 2
