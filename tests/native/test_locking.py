"""The lock of all calls into libucc and libucp: held during each of them, and by no thread that waits."""

import gc
import os
import signal
import struct
import threading
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
from processes import python

from ucc_hetero import ucc, ucx
from ucc_hetero.bindings import handle, oob
from ucc_hetero.bindings import ucc as ucc_module
from ucc_hetero.bindings import ucx as ucx_module
from ucc_hetero.errors import CollectiveTimeout, LibraryError, LibraryNotFound
from ucc_hetero.native.libraries import ffi, lib, load
from ucc_hetero.types import DTYPES, OPS

#: Calls that a wait makes at least before it counts as endless.
MANY = 20_000


class Watched:
    """The extension's functions, some of them replaced; functions of libucc and libucp check that the lock is held."""

    def __init__(self, **replaced):
        self.depth = 0
        self.called = set()
        self._replaced = replaced

    def __getattr__(self, name):
        function = self._replaced.get(name) or getattr(lib, name)
        change = {"ucch_lock": 1, "ucch_unlock": -1}.get(name.removesuffix("_noted"), 0)
        guarded = name.startswith(("ucc_", "ucp_")) and "version" not in name.replace("init_version", "")
        if not change and not guarded:
            return function

        def call(*arguments):
            assert self.depth or not guarded, f"{name} without the lock"
            self.depth += change
            self.called.add(name)
            return function(*arguments)

        return call


@pytest.fixture
def watch(monkeypatch):
    def begin(**replaced):
        watched = Watched(**replaced)
        for module in (handle, oob, ucc_module, ucx_module):
            monkeypatch.setattr(module, "lib", watched, raising=False)
        return watched

    try:
        load()
    except LibraryNotFound as error:
        pytest.skip(str(error))
    return begin


class Alone:
    """An exchange of one rank, which completes at the second test."""

    rank, size = 0, 1

    def __init__(self, watched):
        self.watched, self.looks = watched, 0

    def begin(self, src, dst):
        dst[:] = src
        return self

    def test(self):
        assert self.watched.depth == 0, "other threads cannot do what the other ranks wait for"
        self.looks += 1
        return self.looks % 2 == 0


def test_calls_into_libucc_hold_the_lock(watch):
    watched = watch()
    with ucc.Lib("UCC") as library:
        assert library.attributes()["collectives"]
        with library.context() as context:
            assert context.address_length() > 0
            assert context.addresses("ucp") in (True, False)
            with context.team([0]) as team:
                mine, out = np.random.default_rng().random(100), np.full(100, np.nan)
                wanted = {"src": mine, "dst": out, "dtype": DTYPES["float64"], "op": OPS["SUM"]}
                with team.collective(ucc.Coll.ALLREDUCE, **wanted) as request:
                    request.post()
                    request.wait(30)
                assert (out == mine).all()
    assert watched.depth == 0
    assert {"ucc_init_version", "ucc_context_create", "ucc_team_destroy", "ucc_context_destroy"} <= watched.called


def test_calls_into_libucp_hold_the_lock(watch):
    watched = watch()
    with ucx.Context() as context:
        assert "host" in context.memory_types()
        assert context.transports()
        worker = context.worker()
        memory = context.register(np.zeros(100))
        assert memory.key
        memory.close()
        worker.close()
    assert watched.depth == 0
    wanted = {"ucp_init_version", "ucp_worker_create", "ucp_worker_destroy", "ucp_mem_map", "ucp_mem_unmap"}
    assert wanted <= watched.called


def test_while_ranks_make_a_context_others_have_the_lock(watch):
    """libucc asks for the other ranks' addresses repeatedly while its caller holds the lock."""
    watched = watch()
    exchange = Alone(watched)
    params = ffi.new("ucc_context_params_t *")
    calls = params.oob  # part of params
    key, record = oob.oob_of(exchange, calls)
    mine, everyone, request = ffi.new("char[]", b"me"), ffi.new("char[3]"), ffi.new("void **")

    def ask():
        assert watched.depth == 1
        return int(calls.req_test(request[0]))

    handle.locked(calls.allgather, mine, everyone, 3, calls.coll_info, request)
    assert [handle.locked(ask) for _ in range(2)] == [1, 0]
    calls.req_free(request[0])
    oob.forget(key)
    assert ffi.string(everyone) == b"me"
    assert watched.depth == 0
    assert record.failure is None


class Half:
    """The parts of a context that a team uses."""

    handle, native, rank = ffi.NULL, ffi.NULL, 1


@pytest.fixture
def maps(monkeypatch):
    """Weak references to the maps of teams, to which libucc keeps pointers."""
    seen = []

    class Noted:
        def __getattr__(self, name):
            return getattr(ffi, name)

        def new(self, kind, *more):
            made = ffi.new(kind, *more)
            if kind == "uint64_t[]":
                seen.append(weakref.ref(made))
            return made

    monkeypatch.setattr(ucc_module, "ffi", Noted())
    return seen


def post(contexts, count, params, out):
    out[0] = ffi.cast("ucc_team_h", 1)
    return 0


#: Functions that create a team at once, without libucc.
TEAM = {
    "ucc_team_create_post": post, "ucc_team_create_test": lambda *_: 0, "ucc_context_progress": lambda *_: 0,
    "ucch_team_new": lambda *_: ffi.NULL, "ucch_team_free": lambda *_: None,
}  # fmt: skip


@pytest.mark.parametrize("status, error", [(1, CollectiveTimeout), (-1, LibraryError), (0, None)])
def test_a_team_that_is_given_up_or_dropped_keeps_its_map(watch, maps, status, error):
    """For example after a failed first call, or if the user does not close the team."""
    watch(**{**TEAM, "ucc_team_create_test": lambda *_: status})
    with pytest.raises(error, match=r"team|UCC") if error else nullcontext():
        ucc.Team(Half(), [0, 2, 1], timeout=0.01)
    gc.collect()
    assert [list(each()) for each in maps] == [[0, 2, 1]], "libucc still reads it"


@pytest.mark.parametrize("ends", [True, False])
def test_a_team_that_does_not_end_leaves_the_lock_to_others(watch, ends):
    """It ends once another thread has had the lock, or never, and then at its timeout."""
    had, looks = threading.Event(), [0]

    def other():
        lib.ucch_lock()
        lib.ucch_unlock()
        had.set()

    thread = threading.Thread(target=other)

    def destroy(team):
        looks[0] += 1
        if looks[0] == 1:
            thread.start()
        assert ends or looks[0] < 100 * MANY
        assert not ends or had.is_set() or looks[0] < MANY, "no other thread gets the lock"
        return 0 if ends and had.is_set() else 1

    watch(**TEAM, ucc_team_destroy=destroy)
    team = ucc.Team(Half(), [1, 0])
    if ends:
        team.close()
    else:
        with pytest.raises(CollectiveTimeout, match="not destroyed"):
            team.close(timeout=0.05)
    thread.join(30)
    assert had.is_set()


#: A library that misuses both (cffi_build/abi/guard.c).
PLUGIN = """
void ucp_request_cancel(void *worker, void *request);
void ucp_request_free(void *request);
__attribute__((section(".data.rel.ro"))) int given_up = 1; /* beside the addresses */

void give_up(void) {
    ucp_request_cancel(0, (void *)-80L);
    ucp_request_free((void *)-80L);
#ifdef WRITABLE
    given_up++;
#endif
}
"""


def end_within_a_page(library):
    """Shorten a library's read-only range (RELRO) by a word, as in one that was linked for smaller pages.

    The dynamic linker then leaves the last page writable, as the library's variables may follow.
    """
    image, relro = bytearray(library.read_bytes()), 0x6474E552
    (table,), (n,) = struct.unpack_from("<Q", image, 32), struct.unpack_from("<H", image, 56)
    (at,) = (at for at in range(table, table + 56 * n, 56) if struct.unpack_from("<I", image, at)[0] == relro)
    struct.pack_into("<Q", image, at + 40, struct.unpack_from("<Q", image, at + 40)[0] - 8)
    library.write_bytes(image)


@pytest.mark.parametrize("linked", ["lazy", "now", "now, for smaller pages"])
def test_what_is_no_request_is_left_alone(compiled, tmp_path, linked):
    """Also if the dynamic linker has made its tables read-only (``now``). Variables stay writable."""
    source, plugin = tmp_path / "plugin.c", tmp_path / "libucc_tl_ucp_test.so"
    way, _, within = linked.partition(", ")
    source.write_text(PLUGIN)
    options = [f"-Wl,-z,{way},-z,relro", *(["-DWRITABLE"] if within else [])]
    compiled(plugin, "-shared", "-fPIC", *options, source, load().ucx_path)
    if within:
        end_within_a_page(plugin)
    env = {name: os.environ.get(name, "") + ":handle_segv=0" for name in ("ASAN_OPTIONS", "TSAN_OPTIONS")}
    bare = python("lone_cases:guard", str(plugin), False, env=env, check=False)
    assert bare.returncode == -signal.SIGSEGV, "libucp has learned it: the guard can go"
    python("lone_cases:guard", str(plugin), True, env=env)
