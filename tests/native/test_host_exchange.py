"""Control messages between ranks of several hosts: comparison of calls, deaths, and invalid messages."""

import mmap
import os
import random
import socket
import struct
import tempfile

import pytest
from processes import LONG, until

from ucc_hetero.native.libraries import ffi, lib

CALLS, REPORT, GONE, WAITS, CUT, PROBE = 2, 3, 4, 5, 6, 7
KEY = 0x1234567890ABCDEF
REPORT_FORMAT, GONE_FORMAT, WAITS_FORMAT = f"<QiI{lib.UCCH_REFUSAL_BYTES}s", "<QQii", f"<Qd{lib.UCCH_LABEL_BYTES}s"


class Rank:
    """Rank 0 of two hosts, in this process; the test is the last rank, alone on the other host."""

    def __init__(self, silence, slots, heartbeat, key):
        ours, self.far = socket.socketpair()
        self.page = mmap.mmap(-1, int(lib.ucch_board_bytes(slots)))
        self.board = lib.ucch_board_new(ffi.from_buffer(self.page), slots, 0, list(range(slots)), 1)
        assert lib.ucch_board_add_far(self.board, slots + 1) == 0
        self.link = lib.ucch_link_new(ours.detach(), silence)
        assert self.link >= 0
        self.exchange = lib.ucch_host_exchange_new(
            self.board, key, 0, slots + 1, [0] * slots + [1], 1, [self.link], [slots]
        )
        if heartbeat:
            assert lib.ucch_host_exchange_add_host(self.exchange, slots, bytes(16), 16, heartbeat) == 0

    def call(self, signature, label):
        return int(lib.ucch_board_publish(self.board, signature, label.encode().ljust(lib.UCCH_LABEL_BYTES, b"\0")))

    def say(self, kind, data, key=KEY):
        self.far.sendall(struct.pack("<IIQ", len(data), kind, key) + data)

    def hear(self, *kinds):
        """Return the data of the next message of these kinds."""
        return self.word(*kinds)[1]

    def word(self, *kinds):
        """Return the next message of these kinds: its kind, and its data."""
        self.far.settimeout(LONG)
        while True:
            size, found, _ = struct.unpack("<IIQ", self._exactly(16))
            data = self._exactly(size)
            if found in kinds:
                return found, data

    def report(self):
        call, rank, signature, text = struct.unpack(REPORT_FORMAT, self.hear(REPORT))
        return call, rank, signature, text.rstrip(b"\0")

    def say_calls(self, *hashes):
        """Send the test's own calls, from the first one on."""
        self.say(CALLS, struct.pack(f"<QQ{len(hashes)}I", 1, len(hashes), *hashes))

    def say_cut(self, one, other, path):
        self.say(CUT, struct.pack(f"<ii{lib.UCCH_PATH_BYTES}s", one, other, path))

    def cut(self, waited, peer):
        """(failure, its rank) of a call that has waited for a peer for so many seconds."""
        found = ffi.new("int *", peer)
        return int(lib.ucch_board_cut(self.board, waited, found)), found[0]

    def path(self):
        """The link to the last rank that is cut."""
        return ffi.string(lib.ucch_board_link(self.board, 2))

    def _exactly(self, count):
        parts = b""
        while len(parts) < count:
            parts += self.far.recv(count - len(parts))
        return parts

    calls = 0

    def fate(self):
        return int(lib.ucch_board_fate(self.board, -2 - 1))


@pytest.fixture
def rank():
    made = []

    def make(silence=0.0, slots=1, heartbeat=0.0, key=KEY):
        made.append(Rank(silence, slots, heartbeat, key))
        return made[-1]

    yield make
    for each in made:
        if each.exchange != ffi.NULL:
            lib.ucch_host_exchange_free(each.exchange)
        each.far.close()
        lib.ucch_board_free(each.board)


def test_calls_that_differ_are_known_on_both_sides(rank):
    here = rank()
    signatures = [7 << 32 | 9, 11, 13]
    for number, signature in enumerate(signatures):
        here.call(signature, f"call {number}")
    first, count, *hashes = struct.unpack("<QQ3I", here.hear(CALLS))
    assert (first, count) == (1, 3) and 0 not in hashes
    here.say_calls(hashes[0], hashes[1] ^ 2, hashes[2])
    assert here.report() == (2, 0, hashes[1], b"call 1")
    here.say(REPORT, struct.pack(REPORT_FORMAT, 2, 1, hashes[1] ^ 2, b"another"))
    until(lambda: lib.ucch_board_mismatch(here.board, 2) == -3)
    assert lib.ucch_board_mismatch(here.board, 1) == -1 and lib.ucch_board_mismatch(here.board, 3) == -3
    text, whose = ffi.new("char[]", int(lib.UCCH_LABEL_BYTES)), ffi.new("int *")
    assert lib.ucch_board_differs(here.board, whose, text) == 2 and (whose[0], ffi.string(text)) == (1, b"another")


def test_what_a_rank_hears_before_it_has_made_its_own_exchange(rank):
    """A rank that has made a communicator tells what it does to ranks that are still making it."""
    here, words = rank(), struct.pack(REPORT_FORMAT, 1, 1, lib.UCCH_REFUSED_CALL, b"no")
    for key in (KEY - 1, KEY + 2, KEY + 3):
        here.say(REPORT, words, key)
    here.say_calls(1)
    until(lambda: lib.ucch_board_behind(here.board, 0, 2) == 1)  # that came last
    # The number of an earlier communicator, one without news, and two with some.
    found = []
    for key in (KEY - 1, KEY + 1, KEY + 2, KEY + 3):
        found.append(lib.ucch_board_refusal(rank(key=key).board, ffi.new("ucch_refusal *")))
    assert found == [0, 0, 1, 1]


def test_a_call_is_compared_that_others_made_before(rank):
    here = rank()
    here.say_calls(1, 3, 5)
    until(lambda: lib.ucch_board_behind(here.board, 0, 4) == 1)
    assert lib.ucch_board_behind(here.board, 0, 3) == -1
    here.call(1, "the same")
    here.call(8, "not the same")
    assert here.report()[0] == 2


def test_a_rank_says_in_which_call_it_waits(rank):
    """And when it no longer waits; a rank that failed in it need not report, as the others then ask for the reason."""
    here = rank()
    for fails in (False, True):
        call = here.call(8, "a long one")
        lib.ucch_board_open(here.board, 1)
        found, seconds, label = struct.unpack(WAITS_FORMAT, here.hear(WAITS))
        assert (found, label.rstrip(b"\0")) == (call, b"a long one")
        assert seconds >= 1, "shorter waits are not reported"
        if fails:
            lib.ucch_board_failed(here.board, call)
        lib.ucch_board_open(here.board, -1)
        assert struct.unpack_from("<Q", here.hear(WAITS, GONE))[0] == (call if fails else 0)


def test_a_rank_of_another_host_that_waits_elsewhere(rank):
    """All ranks of this host know, until this rank makes that call, or the other one no longer waits."""
    here = rank(slots=2)
    beside = lib.ucch_board_new(ffi.from_buffer(here.page), 2, 1, [0, 1], 1)
    label, seconds = ffi.new("char[]", int(lib.UCCH_LABEL_BYTES)), ffi.new("double *")

    def waits(call, since=7.0):
        here.say(WAITS, struct.pack(WAITS_FORMAT, call, since, f"call {call}".encode()))

    def known():
        return int(lib.ucch_board_waiter(beside, 2, label, seconds))

    waits(1)
    until(lambda: known() == 1)
    assert ffi.string(label) == b"call 1" and 7 <= seconds[0] < 7 + LONG
    assert lib.ucch_board_waiter(beside, 1, label, seconds) == 0
    here.call(8, "came to it")
    until(lambda: not known())
    waits(2)
    until(lambda: known() == 2)
    waits(0)
    until(lambda: not known())
    lib.ucch_board_free(beside)
    waits(3, float("nan"))
    until(lambda: lib.ucch_link_fate(here.link) != lib.UCCH_THERE)


def test_a_refused_call_that_another_host_makes(rank):
    """Each side sends the other its call; the refusing rank sends the reason, and all ranks know then."""
    here = rank()
    lib.ucch_board_refuse(here.board, b"no")
    here.call(8, "another one")
    _, _, refused, _ = struct.unpack("<QQ2I", here.hear(CALLS))
    here.say_calls(77)
    assert here.report() == (1, 0, refused, b"no")
    until(lambda: lib.ucch_board_broken(here.board))
    assert lib.ucch_board_mismatch(here.board, 1) == -1


def test_a_call_that_another_host_has_refused(rank):
    """The message arrives before this rank makes the call."""
    here = rank()
    here.say(REPORT, struct.pack(REPORT_FORMAT, 3, 1, lib.UCCH_REFUSED_CALL, b"why"))
    found, peer = ffi.new("ucch_refusal *"), ffi.new("int *")
    until(lambda: lib.ucch_board_refusal(here.board, found))
    assert (found.call, found.rank, ffi.string(found.text)) == (3, 1, b"why")
    assert [lib.ucch_board_verdict(here.board, call, peer) for call in (2, 3)] == [0, lib.UCCH_FAIL_REFUSED]
    assert peer[0] == -3
    for call in (1, 2):
        assert not lib.ucch_board_broken(here.board), "calls before it are made"
        assert here.call(8, "made") == call
    assert lib.ucch_board_broken(here.board)


def test_who_leaves_over_a_refused_call_says_that_first(rank):
    """A rank that has not made the call would be taken for dead, before the refusing rank has reported."""
    here = rank(slots=2)
    beside = lib.ucch_board_new(ffi.from_buffer(here.page), 2, 1, [0, 1], 1)
    here.call(8, "made")
    lib.ucch_board_refuse(beside, b"no")
    assert lib.ucch_board_broken(here.board)
    lib.ucch_board_leave(here.board)
    report = struct.unpack(REPORT_FORMAT, here.hear(REPORT, GONE))
    assert report == (1, 1, lib.UCCH_REFUSED_CALL, b"no".ljust(lib.UCCH_REFUSAL_BYTES, b"\0"))
    assert struct.unpack(GONE_FORMAT, here.hear(REPORT, GONE)) == (1, 0, 0, lib.UCCH_LEFT)
    lib.ucch_board_free(beside)


@pytest.mark.parametrize("failed", [0, 1])
def test_who_fails_because_ranks_of_its_host_differ_says_first_what_it_called(rank, failed):
    """It may free the communicator at once; other hosts would know only that a call has failed on it, or that it has
    left before the call was entered."""
    here = rank(slots=2)
    beside = lib.ucch_board_new(ffi.from_buffer(here.page), 2, 1, [0, 1], 1)
    for board, signature, label in (beside, 11, b"another"), (here.board, 9, b"made"):
        lib.ucch_board_publish(board, signature, label.ljust(lib.UCCH_LABEL_BYTES, b"\0"))
    lib.ucch_board_failed(here.board, failed)
    lib.ucch_board_leave(here.board)
    lib.ucch_host_exchange_free(here.exchange)
    here.exchange = ffi.NULL
    report = struct.unpack(REPORT_FORMAT, here.hear(REPORT, GONE))
    assert report == (1, 0, 9, b"made".ljust(lib.UCCH_REFUSAL_BYTES, b"\0"))
    assert struct.unpack(GONE_FORMAT, here.hear(REPORT, GONE)) == (1, failed, 0, lib.UCCH_LEFT)
    lib.ucch_board_free(beside)


def test_a_call_that_is_refused_after_it_was_announced(rank):
    """The call differs from its announcement: it is announced and compared again."""
    here = rank()
    here.say_calls(8)
    lib.ucch_board_announce(here.board, 8, b"as announced".ljust(lib.UCCH_LABEL_BYTES, b"\0"))
    assert struct.unpack("<QQI", here.hear(CALLS)) == (1, 1, 8)
    lib.ucch_board_refuse(here.board, b"no")
    words = dict(here.word(CALLS, REPORT) for _ in range(2))  # in either order
    assert struct.unpack("<QQI", words[CALLS]) == (1, 1, lib.UCCH_REFUSED_CALL)
    assert struct.unpack(REPORT_FORMAT, words[REPORT])[:2] == (1, 0)
    until(lambda: lib.ucch_board_broken(here.board))


def test_a_connection_that_breaks_is_a_death_and_silence_where_that_is_wanted(rank):
    broken, short, patient = rank(), rank(1.0), rank(0.0)
    broken.far.close()
    until(lambda: broken.fate() == lib.UCCH_DIED and short.fate() == lib.UCCH_SILENT)
    assert [lib.ucch_board_gone(broken.board, call) for call in (0, 1)] == [-3, -3] and patient.fate() == lib.UCCH_THERE
    assert struct.unpack(GONE_FORMAT, short.hear(GONE))[2:] == (1, lib.UCCH_SILENT)


def test_who_left_is_gone_for_later_calls(rank):
    here = rank()
    here.say(GONE, struct.pack(GONE_FORMAT, 5, 0, 1, lib.UCCH_LEFT))
    until(lambda: here.fate() == lib.UCCH_LEFT)
    assert [lib.ucch_board_gone(here.board, call) for call in (0, 5, 6)] == [-1, -1, -3]
    lib.ucch_board_leave(here.board)
    until(lambda: struct.unpack(GONE_FORMAT, here.hear(GONE))[2] == 0)


def test_a_call_that_has_failed_on_another_host(rank):
    """A rank that has made it, too, would not be missed in it."""
    here = rank()
    here.say(GONE, struct.pack(GONE_FORMAT, 7, 3, 1, lib.UCCH_LEFT))
    until(lambda: lib.ucch_board_gone(here.board, 3) == -3)
    assert [lib.ucch_board_gone(here.board, call) for call in (2, 7, 8)] == [-1, -3, -3]
    assert lib.ucch_board_given_up(here.board, -3) == 3


def test_who_leaves_and_hears_no_more_is_heard(rank):
    here = rank()
    here.call(8, "made")
    lib.ucch_board_failed(here.board, 1)
    lib.ucch_board_leave(here.board)
    lib.ucch_host_exchange_free(here.exchange)
    here.exchange = ffi.NULL
    assert struct.unpack("<QQI", here.hear(CALLS)) == (1, 1, 8)
    assert struct.unpack(GONE_FORMAT, here.hear(GONE)) == (1, 1, 0, lib.UCCH_LEFT)


def test_a_link_that_is_cut_ends_what_waits_for_long(rank):
    """By a message of the rank at its other end: calls that wait for that rank's host, or for all ranks, end."""
    here = rank(slots=2, heartbeat=5.0)
    assert here.cut(60.0, -1) == (0, -1) and not here.path()
    here.say_cut(2, 1, b"a - b")
    until(lambda: here.path() == b"a - b")
    assert here.cut(4.0, -1) == (0, -1)
    assert here.cut(6.0, -1) == here.cut(6.0, -4) == (lib.UCCH_FAIL_CONNECTION, -4) and here.cut(6.0, 1) == (0, 1)
    assert struct.unpack("<ii96s", here.hear(CUT))[:2] == (2, 1), "it is passed on"


def test_a_rank_that_waits_long_asks_all_others_to_probe_links_to_its_host(rank):
    """Its own host's ranks, too: they pass it on."""
    here = rank(slots=2, heartbeat=5.0)
    here.say(PROBE, struct.pack("<i", 2))
    assert struct.unpack("<i", here.hear(PROBE)) == (2,), "it is passed on"
    assert here.cut(4.0, -4)[0] == 0
    here.say(PROBE, struct.pack("<i", 2))  # has been passed on a moment ago
    assert here.cut(6.0, -4)[0] == 0
    assert struct.unpack("<i", here.hear(PROBE)) == (0,)


def test_a_connection_that_libucp_has_given_up_ends_what_waits_for_its_rank(rank):
    """At once; other ranks' messages and collectives, which have separate connections, do not end."""
    here = rank(slots=2, heartbeat=5.0)
    here.say_cut(0, 2, b"")
    here.say_cut(2, 1, b"")
    assert struct.unpack("<ii96s", here.hear(CUT))[:2] == (0, 2), "it is passed on"
    assert struct.unpack("<ii96s", here.hear(CUT))[:2] == (2, 1)
    assert here.cut(60.0, -1)[0] == here.cut(60.0, -4)[0] == 0
    here.say_cut(2, 0, b"")
    until(lambda: here.cut(0.0, -4)[0] == lib.UCCH_FAIL_CONNECTION)
    assert here.cut(60.0, -1)[0] == 0 and not here.path()
    here.say_cut(2, 1, b"a - b")
    until(lambda: here.path() == b"a - b")
    assert here.cut(60.0, -1)[0] == lib.UCCH_FAIL_CONNECTION


def test_what_comes_from_any_rank_waits_for_those_that_can_send(rank):
    """It ends once every rank has left or is behind a cut link, and at least one is."""
    here = rank(slots=1, heartbeat=5.0)
    assert lib.ucch_board_fate(here.board, lib.UCCH_ALL_PEERS) == lib.UCCH_THERE
    assert not lib.ucch_board_is_cut_off(here.board, 60.0)
    here.say_cut(1, 0, b"a - b")
    until(lambda: lib.ucch_board_is_cut_off(here.board, 6.0))
    assert not lib.ucch_board_is_cut_off(here.board, 4.0)
    assert lib.ucch_board_fate(here.board, lib.UCCH_ALL_PEERS) == lib.UCCH_THERE
    here.say(GONE, struct.pack(GONE_FORMAT, 9, 0, 1, lib.UCCH_DIED))
    until(lambda: lib.ucch_board_fate(here.board, lib.UCCH_ALL_PEERS) == lib.UCCH_DIED)


def test_a_rank_of_this_host_may_send(rank):
    """Even if all other ranks are cut off."""
    here = rank(slots=2, heartbeat=5.0)
    here.say_cut(2, 1, b"a - b")
    until(lambda: here.path() == b"a - b")
    assert not lib.ucch_board_is_cut_off(here.board, 6.0)


NONSENSE = {
    "too long": struct.pack("<IIQ", 1 << 20, CALLS, KEY),
    "unknown": struct.pack("<IIQ", 4, 99, KEY) + b"four",
    "short": struct.pack("<IIQ", 8, CALLS, KEY) + bytes(8),
    "count": struct.pack("<IIQ", 20, CALLS, KEY) + struct.pack("<QQI", 1, 1 << 40, 1),
    "no call": struct.pack("<IIQ", 20, CALLS, KEY) + struct.pack("<QQI", 0, 1, 1),
    "last call": struct.pack("<IIQ", 24, CALLS, KEY) + struct.pack("<QQII", 2**64 - 1, 2, 1, 1),
    "rank": struct.pack("<IIQ", 256, REPORT, KEY) + struct.pack("<QiI240s", 1, 1 << 30, 1, b"x"),
    "how": struct.pack("<IIQ", 24, GONE, KEY) + struct.pack("<QQii", 1, 0, 1, 99),
    "link": struct.pack("<IIQ", 104, CUT, KEY) + struct.pack("<ii96s", 0, 2, b"a - b"),
    "asks": struct.pack("<IIQi", 4, PROBE, KEY, 1 << 30),
    "beat": struct.pack("<IIQ", 1, 0, KEY) + b"x",
}


#: Numbers that no peer has.
HUGE = 0, 2**31, 2**32 - 1, 2**63, 2**64 - 1


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_ends_the_connection(rank, what):
    here = rank()
    here.far.sendall(NONSENSE[what])
    until(lambda: here.fate() == lib.UCCH_DIED)


def test_anything_may_come(rank):
    seed = int(os.environ.get("UCCH_TEST_SEED") or random.randrange(1 << 30))
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(60):
        here = rank()
        for _ in range(rng.randint(1, 30)):
            kind = rng.choice([0, 0, CALLS, CALLS, REPORT, GONE, CUT, PROBE])
            n = rng.choice([1, 2, 500, 2048])
            size = {CALLS: 16 + 4 * n, REPORT: 256, GONE: 24, CUT: 104, PROBE: 4}.get(kind, 0)
            data = bytearray(rng.randbytes(size))
            if kind == CALLS:
                many = n if rng.random() < 0.9 else rng.choice(HUGE)
                data[:16] = struct.pack("<QQ", rng.choice([1, 2, 9000, *HUGE]), many)
            elif kind == REPORT:
                data[:12] = struct.pack("<Qi", rng.choice([1, 2, *HUGE]), rng.choice([0, 1, 1, 2]))
            elif kind == GONE:
                data[:16] = struct.pack("<QQ", rng.choice([1, *HUGE]), rng.choice([0, 1, *HUGE]))
                data[16:24] = struct.pack("<ii", rng.choice([-1, 1, 2, 1 << 20]), rng.randint(0, 5))
            elif kind == PROBE:
                data[:] = struct.pack("<i", rng.choice([0, 1, 1, 2]))
            elif kind == CUT:
                data[:8] = struct.pack("<ii", rng.choice([0, 1, 1, 2]), rng.choice([0, 0, 1, 1 << 30]))
            if rng.random() < 0.02:
                data = data[: len(data) // 2]
            try:
                here.say(kind, bytes(data), rng.choice([KEY, KEY, 1]))
            except OSError:
                break  # the peer has closed the connection
            here.calls += 1
            assert here.call(rng.getrandbits(64), "call") == here.calls, "our calls are as they were"
        lib.ucch_host_exchange_free(here.exchange)
        here.exchange = ffi.NULL


def test_what_cannot_be_served_is_closed():
    """The engine owns a connection from then on, also if it cannot wait for it."""
    with tempfile.TemporaryFile() as file:
        given = os.dup(file.fileno())
        assert lib.ucch_link_new(given, 0.0) < 0
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(given)
