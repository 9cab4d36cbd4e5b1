"""The arrival board: who called what, who is missing, who left, who died."""

import mmap
import os
import random
import subprocess
import sys
import time
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


def refusal_of(board: Any) -> tuple[int, int, str] | None:
    """(rank, call, text) of the refusal that has ended the communicator."""
    found = ffi.new("ucch_refusal *")
    if not lib.ucch_board_refusal(board, found):
        return None
    return int(found.rank), int(found.call), ffi.string(found.text).decode()


def verdicts(boards: Any, call: int) -> list[tuple[int, int]]:
    """How a call stands on each rank: a status, and which rank's fault it is."""
    peer = ffi.new("int *")
    return [(int(lib.ucch_board_verdict(board, call, peer)), int(peer[0])) for board in boards]


@pytest.mark.parametrize("first", ["refused", "made"])
def test_a_call_that_one_rank_refuses_and_another_makes(boards: Any, first: str) -> None:
    """It ends the communicator on all ranks, also on one that has not come to it; what was called before goes on."""
    assert [publish(board, 7, "bcast") for board in boards] == [1] * SLOTS
    if first == "refused":
        assert lib.ucch_board_refuse(boards[1], b"a mistake") == 2
        assert not any(map(lib.ucch_board_broken, boards)), "nobody has made it"
    assert publish(boards[0], 7, "bcast") == 2
    if first == "made":
        assert verdicts(boards[:1], 2) == [(0, -1)]
        assert lib.ucch_board_refuse(boards[1], b"a mistake") == 2
    else:
        assert verdicts(boards[:1], 2) == [(lib.UCCH_FAIL_REFUSED, 1)]
    assert [refusal_of(board) for board in boards] == [(1, 2, "a mistake")] * SLOTS
    assert all(map(lib.ucch_board_broken, boards))
    assert verdicts(boards, 1) == [(0, -1)] * SLOTS
    assert verdicts(boards, 5) == [(lib.UCCH_FAIL_REFUSED, 1)] * SLOTS


def test_calls_before_a_refused_one_are_made(boards: Any) -> None:
    """By ranks that are behind; the refused one, and those that would come later, they cannot make."""
    for call in (1, 2, 3):
        assert [publish(board, 7, "bcast") for board in boards[:2]] == [call] * 2
    assert publish(boards[0], 7, "bcast") == lib.ucch_board_refuse(boards[1], b"a mistake") == 4
    for call in (1, 2, 3):
        assert not lib.ucch_board_broken(boards[2])
        assert publish(boards[2], 7, "bcast") == call
        assert verdicts(boards, call) == [(0, -1)] * SLOTS
    assert all(map(lib.ucch_board_broken, boards))
    assert verdicts(boards[2:], 4) == [(lib.UCCH_FAIL_REFUSED, 1)]


def test_what_is_set_up_fits_any_call_but_a_refused_one(boards: Any) -> None:
    any_call = int(lib.UCCH_ANY_CALL), b"set up".ljust(int(lib.UCCH_LABEL_BYTES), b"\0")
    assert publish(boards[0], 7, "bcast") == lib.ucch_board_announce(boards[1], *any_call) == 1
    assert verdicts(boards[:2], 1) == [(0, -1)] * 2
    assert lib.ucch_board_refuse(boards[2], b"a mistake") == 1
    assert verdicts(boards[:2], 1) == [(lib.UCCH_FAIL_REFUSED, 2)] * 2


def test_of_several_refused_calls_the_first_one_ends_the_communicator(boards: Any) -> None:
    for _ in range(3):
        publish(boards[0], 7, "bcast")
    for _ in range(2):
        publish(boards[1], 7, "bcast")
    lib.ucch_board_refuse(boards[1], b"a later mistake")
    assert [refusal_of(board) for board in boards] == [(1, 3, "a later mistake")] * SLOTS
    lib.ucch_board_refuse(boards[2], b"a mistake")
    assert [refusal_of(board) for board in boards] == [(2, 1, "a mistake")] * SLOTS
    assert verdicts(boards[:2], 1) == verdicts(boards[:2], 2) == [(lib.UCCH_FAIL_REFUSED, 2)] * 2


def test_a_call_that_has_failed_elsewhere(boards: Any) -> None:
    """It may still end well here, but not long after; so may none that comes later."""
    for call in (1, 2, 3):
        assert [publish(board, 7, "bcast") for board in boards] == [call] * SLOTS
    lib.ucch_board_failed(boards[1], 3)
    lib.ucch_board_failed(boards[1], 2)
    assert [lib.ucch_board_given_up(boards[0], i) for i in range(SLOTS)] == [0, 2, 0]
    until = time.monotonic() + 60
    while lib.ucch_board_gone(boards[0], 2) != 1:
        assert time.monotonic() < until
    assert [lib.ucch_board_gone(boards[2], call) for call in (1, 2, 3)] == [-1, 1, 1]
    assert lib.ucch_board_gone(boards[1], 3) == -1, "no rank waits for itself"


def test_a_call_that_all_refuse_ends_nothing(boards: Any) -> None:
    for turn in range(3 * 64):  # longer than a rank's list of calls on the page
        for rank, board in enumerate(boards):
            assert lib.ucch_board_refuse(board, b"rank %d's mistake" % rank) == 2 * turn + 1
        for board in boards:
            assert publish(board, 7, "bcast") == 2 * turn + 2
    assert [refusal_of(board) for board in boards] == [None] * SLOTS
    assert verdicts(boards, 2 * 3 * 64) == [(0, -1)] * SLOTS


@pytest.mark.parametrize("ahead", [0, 1, 50])
def test_a_rank_that_is_ahead_of_its_refused_call(boards: Any, ahead: int) -> None:
    lib.ucch_board_refuse(boards[2], b"the mistake")
    for _ in range(ahead):
        publish(boards[2], 7, "bcast")
    if ahead == 1:
        lib.ucch_board_refuse(boards[2], b"another one")
    publish(boards[0], 7, "bcast")
    assert verdicts(boards[:1], 1) == [(lib.UCCH_FAIL_REFUSED, 2)]
    assert refusal_of(boards[1]) == (2, 1, "the mistake")


def test_a_rank_that_is_too_far_ahead_of_others_to_be_understood(boards: Any) -> None:
    """Nobody could tell any more that it has refused a call: it ends the communicator before."""
    lib.ucch_board_refuse(boards[2], b"the mistake")
    lib.ucch_board_refuse(boards[1], b"the mistake")
    for _ in range(200):
        publish(boards[2], 7, "bcast")
    assert refusal_of(boards[0]) == (2, 1, "the mistake")


def test_one_that_has_made_a_call_long_ago(boards: Any) -> None:
    for _ in range(200):
        publish(boards[1], 7, "bcast")
    lib.ucch_board_refuse(boards[0], b"a mistake")
    assert refusal_of(boards[1]) == (0, 1, "a mistake")


def test_reasons_are_whole_and_the_first_one_stays(boards: Any) -> None:
    text = bytes(random.choices(b"abcdefgh", k=int(lib.UCCH_REFUSAL_BYTES) - 1))
    publish(boards[0], 7, "bcast")
    lib.ucch_board_refuse(boards[1], text)
    lib.ucch_board_refuse(boards[2], b"later")
    assert refusal_of(boards[0]) == (1, 1, text.decode())
