"""Scripts of ranks in a torch group on the fake GPU library: messages that repeat earlier ones, or only resemble
them."""

COMMON = """
import os
import random
import signal
import sys
import time

import pytest
from ucc_hetero.native.libraries import load

import torch_device as gpu
load()
import torch
import ucc_hetero.torch

dist = torch.distributed
dist.init_process_group(os.environ.get("BACKEND", "ucch"))
group, r, p = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
right, left = (r + 1) % p, (r - 1) % p
#: Streams hand each other messages; otherwise they go by way of the host.
lanes = group._comms[0].goes_by_lane(right)

def batch(*pairs):
    how = {"to": dist.isend, "from": dist.irecv}
    return dist.batch_isend_irecv([dist.P2POp(how[way], tensor, peer, tag=tag) for way, tensor, peer, tag in pairs])

def wait(works):
    for work in works:
        work.wait()

def exchange(sent, got, value, tag=0):
    "What each rank has computed goes to the right, and what was sent may be overwritten once that was waited for."
    sent.fill(value + r), got.fill(-1)
    wait(batch(("to", sent, right, tag), ("from", got, left, tag)))
    sent.fill(-5)

def right_value(got, value):
    seen = got.seen()
    assert (seen == value + left).all(), (r, value, seen[:4])
"""

#: Random messages between all ranks, single, one way and in batches, in alternating streams, in reused or new memory;
#: inside a vendor, if torch_vendor was imported, exactly these go by its own backend.
RANDOM = COMMON
RANDOM += """
alike, own = random.Random(int(os.environ["DICE"])), random.Random(int(os.environ["DICE"]) * 100 + r)
vendor = sys.modules.get("torch_vendor")
inside = {0, 1, 2} if vendor and os.environ.get("UCCH_TORCH_VENDOR") != "n" else set()
streams, idle = [gpu.state.current, gpu.Stream()], {}
SIZES, TAGS = (1, 2, 50, 1000, 16_384, 70_000, 300_000), (0, 0, 0, 7)  # no vendor's library has tags
TYPES = [torch.float32] * 9 + [torch.int16]  # which NCCL does not have

def told(ranks):
    return inside >= set(ranks)

def went():
    "Messages that have gone by the vendor's backend since the last look."
    seen, vendor.posted[:] = list(vendor.posted), []
    return seen

def memory(n, dtype):
    "Some that another message has had, or new, maybe where some was freed."
    found = idle.setdefault((n, dtype), [])
    if found and own.random() < 0.1:
        found.pop().block.close()
    return found.pop() if found else gpu.empty(n, dtype=dtype)

def write(tensor, value):
    tensor.fill(value) if tensor.dtype == torch.float32 else tensor.as_subclass(torch.Tensor).fill_(value)

def end(works):
    "Wait for them in any order; some are looked at before."
    for work in own.sample(works, len(works)):
        while own.random() < 0.3 and not work.is_completed():
            time.sleep(1e-4)
        work.wait()

def in_any_order(of):
    "Of pairs of ranks, whose messages stay in order."
    order = {pair: own.random() for pair, *_ in of}
    return sorted(of, key=lambda each: order[each[0]])

def turn(kind, value):
    pairs = [(a, b) for a in range(p) for b in range(p) if a < b or a > b and kind != "one way"]
    each = [(pair, k) for pair in pairs for k in range(1 if kind == "batch" else alike.randint(1, 3))]
    plan = [(*about, alike.choice(TAGS), alike.choice(SIZES), alike.choice(TYPES)) for about in each]
    mine = [(pair, value + 10 * pair[0] + k, tag, memory(n, dtype)) for pair, k, tag, n, dtype in plan if r in pair]
    sends, takes = ([each for each in mine if each[0][side] == r] for side in (0, 1))
    posts, waits = own.choice(streams), own.choice(streams)
    refill = lambda: [tensor.fill(-5) for *_, tensor in sends if tensor.dtype == torch.float32]
    with torch.cuda.stream(posts):
        for pair, number, _, tensor in mine:
            write(tensor, number if pair[0] == r else -1)
        if kind == "batch":
            works = batch(*[("to", t, b, tag) if a == r else ("from", t, a, tag) for (a, b), _, tag, t in
                            own.sample(mine, len(mine))])
        else:  # all ranks send first
            works = [dist.isend(t, b, tag=tag) for (_, b), _, tag, t in in_any_order(sends)]
            if kind == "one way":  # a tensor is its send's until that was waited for, and no longer
                end(works)
                refill()
            works += [dist.irecv(t, a, tag=tag) for (a, _), _, tag, t in in_any_order(takes)]
    with torch.cuda.stream(waits):
        end(works)
        refill()
        for about, number, _, tensor in takes:
            seen = tensor.seen()
            assert (seen == number).all(), (r, kind, about, number, seen[:4])
    for stream in streams:
        stream.synchronize()
    due = [(*pair, t.numel() * t.element_size()) for pair, _, tag, t in mine if told(pair) and not tag]
    assert not vendor or sorted(went()) == sorted(due), (kind, due)
    for *_, tensor in mine:
        idle[tensor.numel(), tensor.dtype].append(tensor)

for step in range(40):
    turn(alike.choice(("one by one", "one way", "batch")), 100 * step)
"""

REPEATED = RANDOM
REPEATED += """
late, other = [], streams[1]
sent, got = [[gpu.empty(5) for _ in range(40)] for _ in range(2)]
for turn in range(3):  # many under way, of which none was waited for
    for k, (a, b) in enumerate(zip(sent, got)):
        a.fill(100 * turn + k + r), b.fill(-1)
        late += batch(("to", a, right, 1), ("from", b, left, 1))
    wait(late)
    late.clear()
    for k, b in enumerate(got):
        right_value(b, 100 * turn + k)
sent, got = ([gpu.empty(9) for _ in range(12)] for _ in range(2))
for turn in range(3):  # what has come lies in its buffer while the stream that asked for it has other work
    with torch.cuda.stream(other):
        wait(late)  # by lanes a tensor is its send's until that was waited for
        late.clear()
        for k, a in enumerate(sent):
            a.fill(100 * turn + k + r)
            late += batch(("to", a, right, 2))
    for _ in range(100):
        got[0].fill(-1)
    for b in got:
        batch(("from", b, left, 2))[0].wait()
        time.sleep(1e-3)
    for k, b in enumerate(got):
        right_value(b, 100 * turn + k)
dist.barrier()
dist.destroy_process_group()
"""

#: Messages in graphs: batches in any order, single ones, with others between replays, and some that are not awaited.
CAPTURED = COMMON
CAPTURED += """
from arrays import Graph

dice = random.Random(int(os.environ["DICE"]) * 100 + r)
stream, other = gpu.Stream(), gpu.Stream()
pairs = [(gpu.empty(n), gpu.empty(n)) for n in (1, 1000, 70_000, 1_500_000)]
single, copied = (gpu.empty(12), gpu.empty(12)), gpu.empty(1_500_000)
with torch.cuda.stream(stream):
    for sent, got in pairs:
        exchange(sent, got, 1.0)
    stream.synchronize()
    with Graph(stream._native) as graph:
        both = [("to", sent, right, k) for k, (sent, _) in enumerate(pairs)]
        both += [("from", got, left, k) for k, (_, got) in enumerate(pairs)]
        sends_first = dice.random() < 0.5
        works = batch(*both) if sends_first else batch(*both[4:], *both[:4])
        waiter = dice.choice((stream, other))
        with torch.cuda.stream(waiter):  # which goes on with the last message
            works[-1 if sends_first else len(works) // 2 - 1].wait()
            gpu.RUNTIME.copy(copied.data_ptr(), pairs[3][1].data_ptr(), copied.nbytes, waiter.cuda_stream)
        stream.wait_event(waiter.record_event())
        wait(dice.sample(works, len(works)))
        first = [lambda: dist.send(single[0], right, tag=9), lambda: dist.recv(single[1], left, tag=9)]
        for call in first[:: 1 if r else -1]:
            call()
    for turn in range(4):
        for k, (sent, got) in enumerate([*pairs, single]):
            sent.fill(10.0 * turn + k + r), got.fill(-1)
        graph.replay(stream._native)
        right_value(copied, 10.0 * turn + 3)
        for k, (sent, got) in enumerate([*pairs, single]):
            right_value(got, 10.0 * turn + k)
            if turn % 2:
                exchange(sent, got, 5.0)
    stream.synchronize()
    graph.close()
    with Graph(stream._native):
        left_out = dist.isend(pairs[0][0], right)
    with pytest.raises(dist.DistBackendError, match="not waited for"):
        for call in (dist.isend, dist.irecv):
            call(pairs[0][0], right)
    exchange(*pairs[1], 3.0)
    right_value(pairs[1][1], 3.0)
dist.barrier()
dist.destroy_process_group()
"""

#: Mistakes raise the same errors as the first time, and later batches work as before.
MISTAKES = COMMON
MISTAKES += """
sent, got = gpu.empty(100), gpu.empty(100)
for step in range(6):
    exchange(sent, got, step)
    right_value(got, step)
    for _ in range(2):
        with pytest.raises(ValueError, match="tag"):
            batch(("to", sent, right, -4))
    with pytest.raises(ValueError, match=f"dest {p}"):
        group.send([sent], p, 0)
dist.barrier()
torch.cuda.synchronize = lambda: None
#: One that is too long for its receiver fails there, as it does the first time; the next ones are as before.
if p == 2:
    long, short = gpu.empty(100), gpu.empty(10)
    for n in range(2):
        long.fill(3.0)
        if r == 0:
            batch(("to", long, 1, 5))[0].wait()
        else:
            (work,) = batch(("from", short, 0, 5))
            while not work.is_completed():
                time.sleep(1e-3)
            with pytest.raises(dist.DistBackendError, match="more than the buffer holds"):
                work.wait()
        dist.barrier()
        if r == 0 and lanes:  # it learns of it when it sends again
            with pytest.raises(dist.DistBackendError, match="refused an earlier message"):
                batch(("to", long, 1, 5))
    for step in range(3):
        exchange(sent, got, step)
        right_value(got, step)
    dist.barrier()
dist.destroy_process_group()
"""

#: Rank 1 dies; the others get the error in messages that repeat earlier ones.
DEATH = COMMON
DEATH += """
sent, got = gpu.empty(100), gpu.empty(100)
for step in range(5):
    exchange(sent, got, step)
    right_value(got, step)
dist.barrier()
if r == 1:
    os.kill(os.getpid(), signal.SIGKILL)
said = []
while not said:
    try:
        (work,) = batch(("from", got, 1, 0))
        work.wait()
        while not work.is_completed():
            time.sleep(1e-3)
        if work.exception() is not None:
            raise work.exception()
        dist.all_reduce(torch.ones(1))
    except dist.DistBackendError as error:
        said.append(str(error))
print("told:", said, flush=True)
os._exit(0)
"""

#: Calls in callbacks use a separate communicator: the group's messages make progress until both have ended.
NESTED = COMMON
NESTED += """
def nested(future):
    return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

mine = torch.full((1000,), r + 1.0)  # on the host: a torch without GPUs has no futures of others
sums = dist.all_reduce(mine, async_op=True).get_future().then(nested).wait()
assert (sums == p * p * (p + 1) / 2).all(), sums[:3]
sent, got = gpu.empty(9), gpu.empty(9)
exchange(sent, got, 3.0)
right_value(got, 3.0)
dist.destroy_process_group()
print("right", flush=True)
"""

#: Objects that another thread gathers meanwhile, as asynchronous checkpoints do, in a group created by device type; and
#: mistakes in calls of either kind, which end no calls of the other kind.
BESIDE = COMMON
BESIDE += """
from concurrent.futures import ThreadPoolExecutor

def collect():
    for step in range(40):
        got = [None] * p if r == 0 else None
        dist.gather_object((r, step), got)
        assert got is None or got == [(rank, step) for rank in range(p)], got
        plan = [("plan", step) if r == 0 else None]
        dist.broadcast_object_list(plan)
        assert plan == [("plan", step)], plan

with ThreadPoolExecutor(1) as pool:
    collected = pool.submit(collect)
    for step in range(50):
        tensors = [gpu.empty(1000) for _ in range(4)]
        for tensor in tensors:
            tensor.fill(step + r)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors[1:]]
        dist.all_reduce(tensors[0])
        wait(works)
        assert all((tensor.seen() == p * step + p * (p - 1) / 2).all() for tensor in tensors), (r, step)
    collected.result()

def refused(made, mine, theirs):
    "One rank makes a mistake, and the others the call."
    with pytest.raises(mine if r == 1 else theirs) as caught:
        made()
    assert r != 1 or caught.type is mine

many = torch.empty(p + (r == 1))
refused(lambda: dist.all_gather_into_tensor(many, torch.ones(1)), ValueError, dist.DistBackendError)
tensor.fill(r)
dist.all_reduce(tensor)
assert (tensor.seen() == p * (p - 1) / 2).all(), r
device, hosts = (group._comms[at].runner.members for at in (0, -1))
assert device.channels and hosts.channels is None, "calls of the host need no streams"
said = group.communicator.plan_summary()
assert "queued" in said and " host: " in said, said
print("right", flush=True)
"""

#: Three ranks of one vendor and one of another: messages inside the vendor use its own backend, the others lanes.
FABRIC = """
import torch_device
import torch_vendor as vendor
"""
FABRIC += RANDOM
FABRIC += """
assert p == 4
peers = [each for each in range(p) if each != r]
small = {peer: (gpu.empty(50), gpu.empty(50)) for peer in peers}

# Futures, and looking without waiting.
a, b = small[right][0], small[left][1]
a.fill(3.0 + r), b.fill(-1)
to, of = batch(("to", a, right, 0), ("from", b, left, 0))
while not of.is_completed():
    time.sleep(1e-4)
assert of.is_success() and of.source_rank() == left
to.get_future().wait()
of.wait()
right_value(b, 3.0)

# A group does not wait at its end for a message that could not be begun.
group = dist.new_group()
if told((r, right)):
    dist.isend(a, right, group).wait()
if told((left, r)):
    dist.irecv(b, left, group).wait()
    b.seen()
dist.barrier(group)
vendor.refuses.set()
if told((r, right)):
    with pytest.raises(RuntimeError, match="cannot be begun"):
        dist.isend(a, right, group)
vendor.refuses.clear()
before = len(vendor.ended)
dist.destroy_process_group(group)
assert len(vendor.ended) - before == told((r, right)) + told((left, r)), vendor.ended

# What cannot be, and a library that cannot be had: those who wait are told, and other ways go on.
for wrong in (("to", a, right, -4), *([("from", b, left, -1)] if told((r, left)) else [])):
    with pytest.raises(ValueError, match="tag"):
        batch(wrong)
went()
other = dist.new_group()
vendor.broken.set()
for peer in peers:
    if told((peer, r)):
        work = dist.isend(small[peer][0], peer, other)
        for call in (work.wait, work.wait, lambda: dist.isend(small[peer][0], peer, other)):
            with pytest.raises(dist.DistBackendError, match="no such backend"):
                call()
        assert work.is_completed() and not work.is_success() and "no such" in str(work.exception())
    else:
        a, b = small[peer]
        a.fill(2.0 * r), b.fill(-1)
        wait([dist.isend(a, peer, other), dist.irecv(b, peer, other)])
        assert (b.seen() == 2 * peer).all()
dist.barrier()
dist.destroy_process_group()
"""
