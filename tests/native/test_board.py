"""The arrival board: who called what, who is missing, who left, who died."""

import mmap
import os
import subprocess
import sys
from typing import Any

import pytest

from ucc_hetero.native.libraries import ffi, lib

SLOTS = 3


@pytest.fixture
def boards() -> Any:
    """Three ranks' boards on one page, as if each were a process of its own."""
    page = mmap.mmap(-1, int(lib.ucch_board_bytes(SLOTS)))
    memory = ffi.from_buffer(page)
    made = [lib.ucch_board_new(memory, SLOTS, i, ffi.new("int[]", list(range(SLOTS)))) for i in range(SLOTS)]
    yield made
    for board in made:
        lib.ucch_board_free(board)


def publish(board: Any, signature: int, text: str) -> int:
    return int(lib.ucch_board_publish(board, signature, ffi.new(f"char[{lib.UCCH_LABEL_BYTES}]", text.encode())))


def label(board: Any, slot: int, seq: int) -> str:
    out = ffi.new(f"char[{lib.UCCH_LABEL_BYTES}]")
    return "" if lib.ucch_board_label(board, slot, seq, out) else ffi.string(out).decode()


def test_equal_calls_are_no_mismatch(boards: Any) -> None:
    for board in boards:
        assert publish(board, 7, "allreduce") == 1
    assert [lib.ucch_board_mismatch(board, 1) for board in boards] == [-1] * SLOTS


def test_a_different_call_is_seen_by_all_and_named(boards: Any) -> None:
    publish(boards[0], 7, "allreduce float32[4]")
    assert lib.ucch_board_mismatch(boards[0], 1) == -1, "nobody else is there yet"
    publish(boards[1], 8, "allreduce float32[8]")
    assert lib.ucch_board_mismatch(boards[1], 1) == 0
    assert lib.ucch_board_mismatch(boards[0], 1) == 1
    assert label(boards[0], 1, 1) == "allreduce float32[8]"


def test_a_rank_far_ahead_is_no_mismatch(boards: Any) -> None:
    """Its entry of our call has been overwritten: it says nothing about ours."""
    publish(boards[0], 7, "bcast")
    for call in range(200):
        publish(boards[1], 7 if call == 0 else 99, "bcast")
    assert lib.ucch_board_mismatch(boards[0], 1) == -1
    assert label(boards[0], 1, 1) == ""


def test_sequence_numbers_tell_who_is_missing(boards: Any) -> None:
    publish(boards[0], 1, "a")
    publish(boards[0], 1, "b")
    publish(boards[2], 1, "a")
    assert [lib.ucch_board_seq(boards[0], i) for i in range(SLOTS)] == [2, 0, 1]


def test_a_rank_that_left_is_gone_for_later_calls_only(boards: Any) -> None:
    publish(boards[1], 1, "last")
    lib.ucch_board_leave(boards[1])
    assert lib.ucch_board_gone(boards[0], 1) == -1
    assert lib.ucch_board_gone(boards[0], 2) == 1


def test_a_dead_process_is_gone() -> None:
    page = mmap.mmap(-1, int(lib.ucch_board_bytes(2)))
    memory = ffi.from_buffer(page)
    ours = lib.ucch_board_new(memory, 2, 0, ffi.new("int[]", [0, 1]))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        # The first field of a slot is its process's id.
        ffi.cast("int64_t *", memory + lib.ucch_board_bytes(1))[0] = child.pid
        assert lib.ucch_board_gone(ours, 1) == -1
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert lib.ucch_board_gone(ours, 1) == 1, "it has ended, though nobody has asked for its status"
    assert lib.ucch_board_gone(ours, 1) == 1
    lib.ucch_board_free(ours)


#: In a namespace of its own, where the next process's number can be chosen.
REUSED = """
import subprocess
from ucc_hetero.native.libraries import lib
def child():
    return subprocess.Popen(["sleep", "300"])
first = child()
lib.ucch_process_meet(first.pid)
assert not lib.ucch_process_ended(first.pid)
first.kill()
first.wait()
open("/proc/sys/kernel/ns_last_pid", "w").write(str(first.pid - 1))
second = child()
assert second.pid == first.pid, "another process came between"
assert lib.ucch_process_ended(first.pid), "the one that was met has ended"
lib.ucch_process_meet(second.pid)
assert not lib.ucch_process_ended(second.pid)
second.kill()
second.wait()
assert lib.ucch_process_ended(second.pid)
"""


def test_a_number_that_another_process_has_got(unshared: list[str]) -> None:
    job = subprocess.run([*unshared, sys.executable, "-c", REUSED], capture_output=True, text=True, timeout=120)
    assert job.returncode == 0, job.stderr


@pytest.fixture
def unshared() -> list[str]:
    words = ["unshare", "-Urpf", "--mount-proc"]
    test = "open('/proc/sys/kernel/ns_last_pid', 'w').write('50')"
    if subprocess.run([*words, sys.executable, "-c", test], capture_output=True, timeout=60).returncode:
        pytest.skip("no process namespaces here")
    return words


def test_revocation_is_seen_by_all(boards: Any) -> None:
    assert not any(lib.ucch_board_revoked(board) or lib.ucch_board_broken(board) for board in boards)
    lib.ucch_board_revoke(boards[1])
    assert all(lib.ucch_board_revoked(board) and lib.ucch_board_broken(board) for board in boards)


def test_without_a_page_calls_are_still_counted() -> None:
    board = lib.ucch_board_new(ffi.NULL, 1, 0, ffi.new("int[]", [os.getpid() % 7]))
    assert publish(board, 1, "a") == 1
    assert publish(board, 1, "a") == 2
    assert lib.ucch_board_mismatch(board, 2) == -1
    assert lib.ucch_board_gone(board, 2) == -1
    lib.ucch_board_free(board)


def test_our_own_entry_that_is_overwritten_says_nothing(boards: Any) -> None:
    """Calls that are launched into streams are looked at long after others were made."""
    for call in range(200):
        publish(boards[0], call, "allreduce")
    for call in range(150):
        publish(boards[1], call, "allreduce")
    for seq in (1, 100, 140, 150):
        assert lib.ucch_board_mismatch(boards[0], seq) == lib.ucch_board_mismatch(boards[1], seq) == -1


def refusal_of(board: Any, since: int, seq: int) -> tuple[int, int, str] | None:
    """(rank, call, text) of a refusal that concerns calls from ``since`` to ``seq``."""
    found = ffi.new("ucch_refusal *")
    if not lib.ucch_board_refused(board, since, seq, found):
        return None
    return int(found.rank), int(found.call), ffi.string(found.text).decode()


def test_a_refused_call_counts_and_is_told_to_all(boards: Any) -> None:
    assert [publish(board, 7, "bcast") for board in boards] == [1] * SLOTS
    assert lib.ucch_board_refuse(boards[1], 1, b"a mistake") == 2
    assert publish(boards[0], 7, "bcast") == 2
    assert refusal_of(boards[0], 0, 1) is None, "the call before it is well"
    assert refusal_of(boards[0], 0, 2) == (1, 2, "a mistake")
    assert refusal_of(boards[2], 0, 5) == (1, 2, "a mistake"), "and those behind it are not"
    assert refusal_of(boards[2], 3, 5) is None and not lib.ucch_board_stale(boards[2])
    assert lib.ucch_board_entered(boards[1], 2) == 1
    lib.ucch_board_settle(boards[0], 3)
    assert not lib.ucch_board_stale(boards[0]) and publish(boards[0], 7, "bcast") == 3


def test_whether_all_have_refused(boards: Any) -> None:
    lib.ucch_board_refuse(boards[0], 0, b"mine")
    assert lib.ucch_board_entered(boards[0], 1) == -1, "who has not come may enter it"
    for rank in (1, 2):
        lib.ucch_board_refuse(boards[rank], rank, b"theirs")
    assert [lib.ucch_board_entered(board, 1) for board in boards] == [0] * SLOTS
    for _ in range(200):
        publish(boards[1], 7, "bcast")
    assert lib.ucch_board_refuse(boards[0], 0, b"mine") == 2
    assert lib.ucch_board_entered(boards[0], 2) == 1, "however long ago"


def test_calls_given_up_are_told_with_their_reason(boards: Any) -> None:
    """Also what other hosts say is heeded, and of many refusals the latest ones are remembered."""
    given_up = ffi.new("ucch_refusal *", {"first": 5, "last": 9, "call": 4, "rank": 2, "by": 1, "text": b"why"})
    lib.ucch_board_give_up(boards[0], given_up)
    assert refusal_of(boards[1], 1, 4) is None and refusal_of(boards[1], 7, 7) == (2, 4, "why")
    far = ffi.new("ucch_refusal *", {"first": 20, "last": 20, "call": 20, "rank": 7, "by": 7, "text": b"far"})
    lib.ucch_board_told(boards[1], far)
    assert refusal_of(boards[1], 20, 20) == (7, 20, "far") and refusal_of(boards[0], 20, 20) is None
    for _ in range(100):
        number = lib.ucch_board_refuse(boards[2], 2, b"again")
    assert refusal_of(boards[0], number, number) == (2, number, "again")


def test_a_notice_that_somebody_needs_is_not_written_over(boards: Any) -> None:
    """Whoever is behind reads all of them, whoever is ahead with nothing under way needs the latest only."""
    first, slow, ahead = boards
    for _ in range(200):
        publish(ahead, 7, "bcast")
    made = 0
    while lib.ucch_board_room(first):
        made = lib.ucch_board_refuse(first, 0, b"a mistake")
    assert made >= 16 and not lib.ucch_board_room(first)
    assert publish(slow, 7, "bcast") == 1 and not lib.ucch_board_room(first)
    assert refusal_of(slow, 0, 1) == (0, 1, "a mistake")
    assert lib.ucch_board_room(first), "one that was read is no longer needed on the page"
    for _ in range(2 * made):
        assert lib.ucch_board_room(first)
        lib.ucch_board_refuse(first, 0, b"another one")
        lib.ucch_board_stale(slow)
    assert [refusal_of(slow, seq, seq) for seq in (1, made)] == [(0, seq, "a mistake") for seq in (1, made)]
    assert refusal_of(slow, 3 * made, 3 * made) == (0, 3 * made, "another one")
    assert lib.ucch_board_stale(ahead)


def test_calls_under_way_need_all_notices(boards: Any) -> None:
    first, _, ahead = boards
    lib.ucch_board_leave(boards[1])
    lib.ucch_board_open(ahead, 1)
    for _ in range(200):
        publish(ahead, 7, "bcast")
    while lib.ucch_board_room(first):
        lib.ucch_board_refuse(first, 0, b"a mistake")
    lib.ucch_board_open(ahead, -1)
    assert lib.ucch_board_room(first)


def test_a_refusal_that_reaches_into_the_future_is_no_news_of_the_past(boards: Any) -> None:
    """A rank that was ahead has given up calls that we have not come to: each is refused when we do."""
    for call in range(3):
        publish(boards[1], 7, str(call))
    notice = ffi.new("ucch_refusal *", {"first": 2, "last": 5, "call": 2, "rank": 2, "by": 0})
    lib.ucch_board_give_up(boards[0], notice)
    assert lib.ucch_board_stale(boards[1])
    lib.ucch_board_settle(boards[1], 4)
    assert not lib.ucch_board_stale(boards[1])
    for call, refused in ((4, 1), (5, 1), (6, 0)):
        assert publish(boards[1], 7, "next") == call
        assert lib.ucch_board_refused(boards[1], call, call, ffi.NULL) == refused
        lib.ucch_board_settle(boards[1], call + 1)
