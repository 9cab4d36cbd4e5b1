"""The arrival board: which rank called what, is missing, left, or died."""

import mmap
import os
import random
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from crews import alone
from processes import until

from ucc_hetero.native.libraries import ffi, lib

#: Rank numbers by slot.
RANKS = [4, 0, 7]
SLOTS = range(len(RANKS))
REFUSED, ANY, RING = int(lib.UCCH_REFUSED_CALL), int(lib.UCCH_ANY_CALL), 64


@contextmanager
def new_boards():
    """Return three ranks' boards on one page, as if each rank were a process."""
    page = mmap.mmap(-1, int(lib.ucch_board_bytes(len(RANKS))))
    made = [lib.ucch_board_new(ffi.from_buffer(page), len(RANKS), slot, ffi.new("int[]", RANKS), 1) for slot in SLOTS]
    yield made
    for board in made:
        lib.ucch_board_free(board)


@pytest.fixture
def boards():
    with new_boards() as made:
        yield made


def words(text=""):
    return ffi.new(f"char[{lib.UCCH_LABEL_BYTES}]", text.encode())


def publish(board, signature, text):
    return int(lib.ucch_board_publish(board, signature, words(text)))


def refusal_of(board):
    """(rank, call, text) of the refusal that has ended the communicator."""
    found = ffi.new("ucch_refusal *")
    if not lib.ucch_board_refusal(board, found):
        return None
    return int(found.rank), int(found.call), ffi.string(found.text).decode()


class Model:
    """The ranks' actions, and what ranks should see of them. A call's text is its rank's slot and its number."""

    def __init__(self):
        self.calls = [0 for _ in SLOTS]
        self.signatures = [{} for _ in SLOTS]
        self.end = None
        self.left, self.revoked = set(), False

    def seen(self, slot, call):
        """The signature of a call that is still on the page."""
        return None if call + RING in self.signatures[slot] else self.signatures[slot].get(call)

    def finish(self, slot, call):
        """A rank has refused a call that another one makes; of several such calls the first one counts."""
        if not self.end or call < self.end[1]:
            self.end = slot, call

    def enter(self, slot, signature, call):
        """A call, or its announcement; a call that it replaces must not have been refused by only some ranks."""
        old = call - RING
        if self.seen(slot, old) == REFUSED and any(
            self.calls[i] < old or self.seen(i, old) not in (None, REFUSED) for i in SLOTS
        ):
            self.finish(slot, old)
        self.signatures[slot][call] = signature
        if signature == REFUSED and any(
            self.calls[i] >= call and self.seen(i, call) != REFUSED for i in SLOTS if i != slot
        ):
            self.finish(slot, call)

    def mismatch(self, slot, call):
        def differs(theirs):
            pair = {self.seen(slot, call), theirs}
            return None not in pair and len(pair) == 2 and (ANY not in pair or REFUSED in pair)

        return next((other for other in SLOTS if differs(self.seen(other, call))), -1)

    def verdict(self, slot, call):
        if self.revoked:
            return int(lib.UCCH_FAIL_REVOKED), -1
        peer = self.mismatch(slot, call)
        if peer >= 0 and self.seen(peer, call) == REFUSED:
            self.finish(peer, call)
        if self.end and self.end[1] <= call:
            return int(lib.UCCH_FAIL_REFUSED), self.end[0]
        return (0 if peer < 0 else int(lib.UCCH_FAIL_MISMATCH)), peer

    def gone(self, slot, call):
        return next((i for i in SLOTS if i != slot and i in self.left and self.calls[i] < call), -1)


def act(draw, model, boards):
    behind = [1 + 4 * (max(model.calls) - calls) for calls in model.calls]
    slot = draw.choices(SLOTS, behind if draw.random() < 0.9 else None)[0]
    kinds = {"call": 75, "refuse": 10, "all refuse": 5, "announce": 5, "run": 3, "leave": 1, "revoke": 1}
    kind = draw.choices(list(kinds), list(kinds.values()))[0]
    for each in SLOTS if kind == "all refuse" else [slot]:
        for _ in range(draw.randrange(2 * RING) if kind == "run" else kind not in ("leave", "revoke")):
            call, board = model.calls[each] + 1, boards[each]
            signature = ANY if kind == "announce" else REFUSED if "refuse" in kind else 8 - (draw.random() < 0.97)
            text = f"{each} {call}"
            model.calls[each] += kind != "announce"
            model.enter(each, signature, call)
            if kind == "announce":
                assert lib.ucch_board_announce(board, ANY, words(text)) == call
            elif signature == REFUSED:
                assert lib.ucch_board_refuse(board, text.encode()) == call
            else:
                assert publish(board, signature, text) == call
    if kind == "leave":
        lib.ucch_board_leave(boards[slot])
        model.left.add(slot)
    if kind == "revoke":
        lib.ucch_board_revoke(boards[slot])
        model.revoked = True
    return f"{slot} {kind} {model.calls}"


@pytest.mark.parametrize("steps", [5, 20, 80])
def test_what_ranks_see_of_each_other(steps):
    """After any actions: which rank differs, which rank refused which call, and which calls end on all ranks."""
    peer, label = ffi.new("int *"), words()
    for seed in range(random.randrange(10**6), 10**7, 10**5):
        draw, model, done = random.Random(seed), Model(), [f"seed {seed}"]
        with new_boards() as boards:
            for _ in range(steps):
                done.append(act(draw, model, boards))
                slot, other = draw.choice(SLOTS), draw.choice(SLOTS)
                board, call = boards[slot], max(1, draw.choice(model.calls) - draw.choice([-1, 0, 0, 1, 2, 63, 64]))
                verdict = int(lib.ucch_board_verdict(board, call, peer)), int(peer[0])
                assert verdict == model.verdict(slot, call), done
                assert lib.ucch_board_mismatch(board, call) == model.mismatch(slot, call), done
                assert lib.ucch_board_gone(board, call) == model.gone(slot, call), done
                end = model.end and (RANKS[model.end[0]], model.end[1], f"{model.end[0]} {model.end[1]}")
                assert [refusal_of(each) for each in boards] == [end for _ in SLOTS], done
                for each, calls in zip(boards, model.calls, strict=True):
                    broken = model.revoked or bool(model.end and model.end[1] <= calls + 1)
                    assert (bool(lib.ucch_board_broken(each)), bool(lib.ucch_board_revoked(each))) == (
                        broken, model.revoked,
                    ), done  # fmt: skip
                known = lib.ucch_board_label(board, other, call, label) == 0 and ffi.string(label).decode()
                assert known == (model.seen(other, call) is not None and f"{other} {call}"), done
                assert [lib.ucch_board_seq(board, i) for i in SLOTS] == model.calls, done


@pytest.mark.parametrize("has_board", [True, False])
def test_a_dead_process_is_gone(has_board):
    """Also before it has its board, and if its status has not been collected."""
    page = mmap.mmap(-1, int(lib.ucch_board_bytes(2)))
    memory = ffi.from_buffer(page)
    ours = lib.ucch_board_new(memory, 2, 0, [0, 1], 1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not lib.ucch_process_ended(child.pid)
        if has_board:  # the first field of a slot is the process id
            ffi.cast("int64_t *", memory + lib.ucch_board_bytes(1))[0] = child.pid
        else:
            lib.ucch_board_expect(ours, [os.getpid(), child.pid])
        assert lib.ucch_board_gone(ours, 1) == -1
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert lib.ucch_board_gone(ours, 1) == 1
    assert lib.ucch_board_gone(ours, 1) == 1
    lib.ucch_board_free(ours)


def test_a_page_is_cleared_for_its_next_communicator():
    """Calls, refusals and ends of all ranks; a rank that expects a late message does not undo it."""
    page = mmap.mmap(-1, int(lib.ucch_board_bytes(2)))
    boards = [lib.ucch_board_new(ffi.from_buffer(page), 2, slot, [0, 1], 1) for slot in (0, 1)]
    publish(boards[0], 1, "one")
    lib.ucch_board_refuse(boards[1], b"no")
    assert refusal_of(boards[0]) is not None
    lib.ucch_board_leave(boards[1])
    lib.ucch_board_expect(boards[0], [os.getpid()] * 2)
    assert lib.ucch_board_fate(boards[0], 1) == lib.UCCH_LEFT
    for board in boards:
        lib.ucch_board_clear(board)
        lib.ucch_board_free(board)
    assert not any(page[:])


def test_the_last_rank_that_drops_a_page_gives_its_memory_back():
    size, file = int(lib.ucch_board_bytes(2)) + 8, os.memfd_create("test")
    os.truncate(file, 1 << 60)
    page = lib.ucch_shared_map(file, 1 << 40, size)
    boards = [lib.ucch_board_new(page, 2, slot, [0, 1], 1) for slot in (0, 1)]
    for board in boards:
        publish(board, 1, "one")
        lib.ucch_board_clear(board)
        lib.ucch_board_free(board)
        held = os.fstat(file).st_blocks
        lib.ucch_shared_drop(page, size, 2)
    assert os.fstat(file).st_blocks < held
    lib.ucch_shared_unmap(page, size)
    os.close(file)


def test_a_page_that_was_given_back_without_a_call_is_the_next_ones_at_once():
    """The rank has left the communicator of that use, and not the next one; another rank's call notices this."""
    page = mmap.mmap(-1, int(lib.ucch_board_bytes(2)))
    memory = ffi.from_buffer(page)
    for use in (1, 2):
        ours = lib.ucch_board_new(memory, 2, 0, [0, 1], use)
        lib.ucch_board_expect(ours, [os.getpid()] * 2)
        assert publish(ours, 1, "barrier") == 1
        assert lib.ucch_board_fate(ours, 1) == lib.UCCH_THERE and lib.ucch_board_mismatch(ours, 1) == -1
        lib.ucch_board_give_back(memory, 1, use, True)
        assert lib.ucch_board_fate(ours, 1) == lib.UCCH_LEFT and lib.ucch_board_mismatch(ours, 1) == 1
        assert lib.ucch_board_label(ours, 1, 1, text := ffi.new("char[]", int(lib.UCCH_LABEL_BYTES))) == 0
        assert ffi.string(text) == b"Free" and not lib.ucch_board_given_back(ours, -1)
        lib.ucch_board_give_back(memory, 0, use, False)
        assert lib.ucch_board_given_back(ours, -1) and lib.ucch_board_fate(ours, 0) == lib.UCCH_THERE
        lib.ucch_board_clear(ours)
        lib.ucch_board_free(ours)


def test_a_rank_that_frees_after_a_failure_has_given_up():
    """It has not called Free where it should have made another call: that would hide why."""
    page = mmap.mmap(-1, int(lib.ucch_board_bytes(2)))
    memory, peer = ffi.from_buffer(page), ffi.new("int *")
    boards = [lib.ucch_board_new(memory, 2, slot, [0, 1], 1) for slot in (0, 1)]
    ours, theirs = boards
    for board in boards:
        lib.ucch_board_expect(board, [os.getpid()] * 2)
        assert publish(board, 1, "allreduce") == 1
    lib.ucch_board_failed(theirs, 1)
    lib.ucch_board_leave(theirs)
    lib.ucch_board_give_back(memory, 1, 1, False)
    assert publish(ours, 2, "bcast") == 2
    assert lib.ucch_board_verdict(ours, 2, peer) == 0
    assert lib.ucch_board_gone(ours, 2) == 1 and lib.ucch_board_given_up(ours, 1) == 1
    for board in boards:
        lib.ucch_board_free(board)


def test_a_number_that_another_process_has_got():
    def unshared(*words):
        words = ["unshare", "-Urpf", "--mount-proc", *words]
        return subprocess.run(words, capture_output=True, text=True, timeout=120)

    if unshared("sh", "-c", "echo 50 > /proc/sys/kernel/ns_last_pid").returncode:
        pytest.skip("needs namespaces for users and processes")
    job = unshared(sys.executable, *alone("lone_cases:reused_number", []))
    assert job.returncode == 0, job.stderr


def test_without_a_page_calls_are_still_counted():
    board = lib.ucch_board_new(ffi.NULL, 1, 0, ffi.new("int[]", [os.getpid() % 7]), 1)
    assert publish(board, 1, "a") == 1
    assert publish(board, 1, "a") == 2
    assert lib.ucch_board_mismatch(board, 2) == -1
    assert lib.ucch_board_gone(board, 2) == -1
    lib.ucch_board_free(board)


def test_a_call_that_has_failed_elsewhere(boards):
    """It may still succeed here, but only for a short time; later calls may not succeed."""
    for call in (1, 2, 3):
        assert [publish(board, 7, "bcast") for board in boards] == [call] * len(SLOTS)
    lib.ucch_board_failed(boards[1], 3)
    lib.ucch_board_failed(boards[1], 2)
    assert [lib.ucch_board_given_up(boards[0], i) for i in SLOTS] == [0, 2, 0]
    until(lambda: lib.ucch_board_gone(boards[0], 2) == 1)
    assert [lib.ucch_board_gone(boards[2], call) for call in (1, 2, 3)] == [-1, 1, 1]
    assert lib.ucch_board_gone(boards[1], 3) == -1, "no rank waits for itself"


def test_reasons_are_whole_and_the_first_one_stays(boards):
    text = bytes(random.choices(b"abcdefgh", k=int(lib.UCCH_REFUSAL_BYTES) - 1))
    publish(boards[0], 7, "bcast")
    lib.ucch_board_refuse(boards[1], text)
    lib.ucch_board_refuse(boards[2], b"later")
    assert refusal_of(boards[0]) == (RANKS[1], 1, text.decode())


def test_calls_are_counted_by_one_thread_at_a_time(boards):
    """By callers, and by the thread that makes progress, under the engine's lock."""
    counting = threading.Thread(target=lib.ucch_board_add, args=(boards[0], 1.0, 8))
    lib.ucch_lock()
    counting.start()
    counting.join(0.1)
    waits = counting.is_alive()
    lib.ucch_unlock()
    counting.join()
    calls, seconds, nbytes = ffi.new("uint64_t *"), ffi.new("double *"), ffi.new("uint64_t *")
    lib.ucch_board_stats(boards[0], calls, seconds, nbytes)
    assert waits and (calls[0], seconds[0], nbytes[0]) == (1, 1.0, 8)
