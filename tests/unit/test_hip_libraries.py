"""Where HIP and its compiler are searched for, and the compiler's target."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hosts import amd_host

from ucc_hetero.device import DeviceRuntime, kernels
from ucc_hetero.machine import vendors
from ucc_hetero.native import libraries


def made(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder.parent


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Installed packages by name, initially none; this process has no HIP, nor is there one below ROCM_PATH."""
    found = {}
    monkeypatch.setattr(libraries, "package_dirs", lambda name: found.get(name, []))
    monkeypatch.setattr(libraries, "mapped", lambda name: None)
    monkeypatch.setattr(kernels, "mapped", lambda name: None)
    monkeypatch.setattr(kernels, "runtime_of", lambda vendor: None)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    return found


def test_hip_of_wheels_and_of_the_site(wheels, tmp_path):
    loaders = ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"]
    assert libraries.candidates(vendors.VENDORS["amd"].library)[-3:] == loaders
    site = made(tmp_path / "rocm/lib", "libamdhip64.so.6", "libamdhip64.so", "libhiprtc.so.6")
    sdk = made(tmp_path / "sdk/lib", "libamdhip64.so.7", "libhiprtc.so.7")
    torch = made(tmp_path / "torch/lib", "libamdhip64.so", "libhiprtc.so")
    wheels.update(torch=[torch], _rocm_sdk_core=[sdk])
    assert libraries.candidates(vendors.VENDORS["amd"].library)[:4] == [
        f"{torch}/lib/libamdhip64.so", f"{site}/lib/libamdhip64.so.6", f"{site}/lib/libamdhip64.so",
        f"{sdk}/lib/libamdhip64.so.7",
    ]  # fmt: skip
    compilers = kernels.candidates("amd")
    assert compilers[:3] == [f"{torch}/lib/libhiprtc.so", f"{site}/lib/libhiprtc.so.6", f"{sdk}/lib/libhiprtc.so.7"]
    del wheels["torch"]  # a CPU-only torch has no HIP
    assert libraries.candidates(vendors.VENDORS["amd"].library)[0] == f"{site}/lib/libamdhip64.so.6"


class Runtime(DeviceRuntime):
    """The parts of a runtime that its compiler uses."""

    def __init__(self):
        super().__init__("amd", 0, "")
        self.ops = SimpleNamespace(target=lambda device, text, room: 0)  # no runtime is loaded

    def bus(self, device):
        return ("0000:03:00.0", "0000:26:00.1", "0000:77:00.0")[device]


def test_the_compiler_is_told_the_target(tmp_path, monkeypatch):
    """Also for a partition; not if the kernel does not know the device, or a variable overrides the target."""
    found = vendors.devices(amd_host(tmp_path))
    monkeypatch.setattr(vendors, "devices", lambda: found)
    assert [Runtime().target(device) for device in range(3)] == ["gfx942", "gfx942", ""]
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "11.0.0")
    assert Runtime().target(0) == ""


@pytest.mark.parametrize(
    ("number", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (110000, "gfx1100"), (120001, "gfx1201"), (0, "")]
)
def test_names_of_targets(number, name):
    assert vendors.gfx(number) == name


@pytest.mark.parametrize(
    "name, there", [("libc.so", True), ("libc.so.6", True), ("libc.so.66", False), ("ibc.so", False)]
)
def test_files_of_loaded_libraries(name, there):
    found, all_mapped = libraries.mapped(name), Path("/proc/self/maps").read_text()
    assert f" {found}\n" in all_mapped if there else found is None
