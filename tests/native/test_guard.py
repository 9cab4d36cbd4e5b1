"""The guard of ucp_request_cancel and ucp_request_free (cffi_build/abi/guard.c), on a plugin that misuses both."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import python

from ucc_hetero.native.libraries import load

PLUGIN = """
void ucp_request_cancel(void *worker, void *request);
void ucp_request_free(void *request);

void give_up(void) {
    ucp_request_cancel(0, (void *)-80L);
    ucp_request_free((void *)-80L);
}
"""

PROVOKE = """
import ctypes, sys
from ucc_hetero.native.libraries import lib, load
load()
plugin = ctypes.CDLL(sys.argv[1])
if sys.argv[2] == "guarded":
    assert lib.ucch_guard_cancel() == 0 == lib.ucch_guard_cancel()
assert lib.ucch_endpoint_errors() == 0
plugin.give_up()
print(lib.ucch_endpoint_errors())
"""


@pytest.mark.parametrize("linked", ["lazy", "now"])
def test_what_is_no_request_is_left_alone(compiled: Callable[..., Path], tmp_path: Path, linked: str) -> None:
    """Also where the dynamic linker has closed what it wrote (``now``)."""
    source, plugin = tmp_path / "plugin.c", tmp_path / "libucc_tl_ucp_test.so"
    source.write_text(PLUGIN)
    compiled(plugin, "-shared", "-fPIC", f"-Wl,-z,{linked},-z,relro", source, load().ucx_path)
    env = {"ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":handle_segv=0"}
    bare = python(PROVOKE, plugin, "as it is", env=env, check=False)
    assert bare.returncode == -signal.SIGSEGV, "libucp has learned it: the guard can go"
    assert python(PROVOKE, plugin, "guarded", env=env).stdout == "1\n"
