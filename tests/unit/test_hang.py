"""``ucch-doctor hang``: which rank differed first, from the ranks' records; invalid files."""

import json
import random
import struct

import numpy as np
import pytest

from ucc_hetero.launch.doctor import hang, records
from ucc_hetero.launch.doctor.__main__ import main
from ucc_hetero.native.libraries import lib
from ucc_hetero.trace import flight
from ucc_hetero.trace.flight_files import HEADER, RECORD, parse

S = 1_000_000_000
#: The ranks' clocks differ; common time is this much later than a rank's own.
NOW = 5000 * S
SUM = "allreduce float32[1024] SUM"
GATHER = "allgather float32[4]"
STACK = """Thread 0x1 (most recent call first):
  File "threading.py", line 1 in wait

Current thread 0x2 (most recent call first):
  File "train.py", line 41 in load
  File "train.py", line 99 in <module>
"""


def call(label, seq, at, end=None, **more):
    """Return a call that began ``at`` seconds before the end and ended ``end`` seconds before it, or did not end."""
    times = {"called": NOW - int(at * S), "started": NOW - int(at * S)} | (
        {"ended": NOW - int(end * S)} if end is not None else {}
    )
    signature = sum(label.encode()) | 1
    return {"kind": 1, "label": label.encode(), "seq": seq, "signature": signature, "comm": 1, **times, **more}


def message(kind, peer, tag, at, end=None, **more):
    what = {"kind": 6 if kind == "send" else 7, "peer": peer, "tag": tag, "bytes": 64, "label": b"", "signature": 0}
    return call("", 0, at, end) | what | more


def file(rank, ops, ranks=(0, 1, 2, 3), stack="", **more):
    """Return a rank's file; ``capacity`` of its ring, ``written`` operations so far, ``comms`` besides the usual
    one."""
    capacity, written = more.get("capacity", 64), more.get("written", len(ops))
    ring = np.zeros(capacity, RECORD)
    for i, op in enumerate(ops):
        at = (written - len(ops) + i) % capacity
        for name, value in op.items():
            ring[at][name] = value
    about = {"rank": rank, "job": more.get("job", "j"), "host": f"h{rank // 2}", "pid": 100 + rank}
    lines = [about | {"vendor": "host", "command": "train.py"}]
    lines += [{"comm": 1, "number": 0, "time": 1, "ranks": list(ranks), "mine": list(ranks).index(rank)}]
    lines += more.get("lines", [])
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    numbers = capacity, written, RECORD.itemsize, 100 + rank, rank, NOW, NOW + 7 * S, len(text), len(stack), 1, 3, 43
    header = struct.pack("<8s3Q2q7Q", b"UCCHFLT1", *numbers).ljust(HEADER, b"\0")
    return header + ring.tobytes() + text + stack.encode()


def said(*files):
    return hang.diagnose(hang.job_of([parse(each) for each in files])[0])


def errors(*files):
    found = {}
    for each in said(*files):
        if each.level == "error":
            found[each.code] = f"{found.get(each.code, '')}{each.text}\n"
    return found


def good(upto):
    return [call(SUM, seq, 100 - seq, 99.5 - seq) for seq in range(1, upto + 1)]


def transfer(what, peer, at, end=None, **more):
    return call("", 0, at, end, comm=0, signature=0, peer=peer, kind=lib.UCCH_RECORD_TRANSFER + what, **more)


def files(*ops, **more):
    return [file(rank, own, range(len(ops)), **more) for rank, own in enumerate(ops)]


def half(mine):
    """Return a communicator of the last two of four ranks, as one of them records it."""
    return {"lines": [{"comm": 2, "number": 1, "time": 1, "ranks": [2, 3], "mine": mine}]}


FIVE, IN_SIX, FRAMES = good(5), [*good(5), call(SUM, 6, 41)], STACK[STACK.index('  File "train.py"') :]
AWAY = (f"rank 2 has not called {SUM}, call 6, in which ranks 0-1,3 have waited for 41 s: it has been in user code "
        f"for 94.5 s, after {SUM} (call 5)\n{FRAMES.rstrip()}")  # fmt: skip
SENT, GOT = message("send", 1, 7, 9, 9), [message("receive", 0, 7, at, at - 1) for at in (9, 8, 7)]
FLUSH, OLD_PUT = transfer(lib.UCCH_RMA_FLUSH, 103, 5), transfer(lib.UCCH_RMA_PUT, 102, 6, 5, own=1)
LOST = transfer(lib.UCCH_RMA_PUT, 99, 5, 4, status=lib.UCCH_FAIL_TIMEOUT, bytes=8, tag=1)

#: What happened -> files of the ranks, and every error with its text.
JOBS = {
    "nothing": (files(FIVE, FIVE, FIVE, FIVE), {}),
    "a call left out": (
        files(*([call(SUM, 1, 9, 8), *rest] for rest in (
            [call(GATHER, 2, 7), call("barrier", 3, 6)], [call("barrier", 2, 7)],
            [call(GATHER, 2, 7), call("barrier", 3, 6)],
        ))),
        {"hang-differs": "rank 1 called barrier as call 2, where ranks 0,2 called allgather float32[4]; "
                         "it is what the others called next: it has left call 2 out, or is one call ahead"},
    ),
    **{
        name: ([file(2, FIVE, stack=stack), *(file(rank, IN_SIX) for rank in (0, 1, 3))], {"hang-missing": AWAY})
        for name, stack in (("user code", STACK), ("untitled stack", FRAMES))
    },
    "waits elsewhere": (
        files(IN_SIX, IN_SIX, [*FIVE, message("receive", 1, 7, 12)], IN_SIX),
        {"hang-message": "rank 2 has waited 12 s for a receive of 64 bytes from rank 1, tag 7, which rank 1 has",
         "hang-missing": "it is in a receive of 64 bytes from rank 1, tag 7, for 12 s", "hang-circle": "2 for 1"},
    ),
    "another tag": (
        files([message("send", 1, 8, 5, 5), call(SUM, 1, 4)], [message("receive", 0, 7, 5)]),
        {"hang-message": "from rank 0, tag 7, which rank 0 has not sent; it has sent a message with tag 8 instead",
         "hang-missing": "rank 1 has not called", "hang-circle": "0 for 1 for 0"},
    ),
    # Processes are identified by number and host; new or completed calls are not findings.
    "a flush": (
        files([FLUSH, OLD_PUT, transfer(lib.UCCH_RMA_GET, 101, 0.1, own=1), transfer(lib.UCCH_RMA_FLUSH, 103, 4)],
              [], [], [call(SUM, 1, 9, 8)], stack=STACK),
        {"hang-transfer": "rank 0 has waited 5 s for a flush to process 103 of another host, which is rank 3: it has"},
    ),
    "a put": (
        files([LOST], [], [], []),
        {"hang-transfer": "rank 0 has waited 5 s for a put of 8 bytes with a notification to process 99 of another"},
    ),
    # Some of the receives with one tag have completed.
    "three of four": (files([SENT] * 3, [*GOT, message("receive", 0, 7, 3)]), {"hang-message": "has not sent"}),
    "four of four": (files([SENT] * 3 + [message("send", 1, 7, 1, 1)], [*GOT, message("receive", 0, 7, 3)]), {}),
    "unread": (
        files([message("send", 1, 9, 4)], [message("receive", 0, 7, 3)]),
        {"hang-message": "waits for a message with tag 7 instead", "hang-circle": "0 for 1 for 0"},
    ),
    "a rank that died": (
        [file(rank, [*FIVE, call(SUM, 6, 10)]) for rank in (0, 2, 3)], {"hang-dead": "rank 1 left no records"},
    ),
    "a sender that died": (
        [file(0, [message("receive", 1, 1, 5)], (0, 1))],
        {"hang-dead": "rank 1 left no records: ended, killed", "hang-message": "; rank 1 has left no records"},
    ),
    "stuck": (
        files(*([call(SUM, 1, 9 - rank)] for rank in range(4))),
        {"hang-stuck": f"all ranks are in {SUM}, call 1, the last for 6 s, and none has its data"},
    ),
    # The halves of a job: each has its own calls, and its own rank numbers.
    "half of them": (
        [file(2, [call(SUM, 1, 5, comm=2)], **half(0)), file(3, [call(GATHER, 1, 4, comm=2)], **half(1)),
         file(0, []), file(1, [])],
        {"hang-differs": f"call 1 of communicator 1.1 (ranks 2-3), where rank 2 called {SUM}"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", JOBS)
def test_jobs(what):
    given, wanted = JOBS[what]
    found = errors(*given)
    assert found.keys() == wanted.keys()
    assert all(text in found[code] for code, text in wanted.items()), found


def test_rings_that_have_gone_round():
    """Operations that the ring has overwritten do not count as never called or sent."""

    def full(rank, last, **more):
        return file(rank, [call(SUM, s, 100 - s, 99 - s) for s in range(last - 7, last + 1)], (0, 1),
                    capacity=8, written=100, **more)  # fmt: skip

    assert len(parse(full(0, 50)).records) == 7 and parse(full(0, 50)).lost == 93
    assert not errors(full(0, 50), full(1, 49))
    refused = call("ValueError: count", 50, 2, 2, kind=5, signature=0)
    assert not errors(full(0, 50), file(1, [*good(49)[-6:], refused], (0, 1), capacity=8, written=100))


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_that_are_none(tmp_path, capsys):
    whole = file(0, good(5), (0, 1), stack=STACK)
    bad = {
        "empty": b"", "short": whole[:100], "cut": whole[:-1], "more": whole + b"x", "magic": b"X" + whole[1:],
        "capacity": whole[:8] + (3).to_bytes(8, "little") + whole[16:], "text": b"x" * 9000,
        "kind": whole[: HEADER + 56] + b"\x63" + whole[HEADER + 57 :],
        "said": whole.replace(b'"rank": 0', b'"rank": x'), "mine": whole.replace(b'"mine": 0', b'"mine": 9'),
        "whose": whole.replace(b'"rank": 0', b'"rand": 0'),
    }  # fmt: skip
    for name, data in bad.items():
        (tmp_path / f"{name}.flight").write_bytes(data)
    assert main(["hang", str(tmp_path), str(tmp_path / "missing")]) == 1
    out = capsys.readouterr().out
    assert out.count("hang-file") == len(bad) + 1 and "0 errors" in out
    for words in ("fewer than the header", "cut off, or changed", "not a flight record", "which cannot be",
                  "line 1 of its description", "line 2 of its description",
                  "records of a kind", "No such file"):  # fmt: skip
        assert words in out, words


def test_nothing_to_read(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(records, "processes", list)
    monkeypatch.setenv("UCCH_FLIGHT", str(tmp_path / "none"))
    assert main(["hang"]) == 1
    out = capsys.readouterr().out
    assert f"no job of this user runs on this host, and {tmp_path}/none has no records" in out
    assert "1 warning" in out


def test_bytes_that_were_changed():
    """Files with random bytes changed are read, or refused with a message."""
    chance = random.Random(seed := random.randrange(1 << 32))
    whole = file(0, [*good(5), message("receive", 1, 7, 3)], (0, 1), stack=STACK)
    other = file(1, good(6), (0, 1))
    read = 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 9)):
            near = chance.random() < 0.5
            data[chance.randrange(200 if near else len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        try:
            dump = parse(bytes(data))
        except ValueError as error:
            assert str(error), seed
            continue
        read += 1
        found = hang.diagnose([dump, parse(other)])
        assert all(each.text for each in found), seed
    assert read > 20, seed


def test_times_that_were_damaged():
    limits = np.iinfo(RECORD["ended"])
    failed = call(SUM, 6, 2) | {"status": lib.UCCH_FAIL_TIMEOUT, "called": limits.max, "ended": limits.min}
    told = {each.code: each.text for each in said(file(0, [*good(5), failed], (0, 1)), file(1, good(6), (0, 1)))}
    assert f"rank 0: {SUM} (call 6) failed after" in told["hang-failed"], told


def test_a_rank_without_a_temporary_folder_has_none_for_its_records(monkeypatch):
    def none():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.delenv("UCCH_FLIGHT", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", none)
    assert flight.usual_folder() is None
