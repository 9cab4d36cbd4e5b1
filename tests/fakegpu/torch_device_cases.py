"""Cases of a torch group on the fake GPU library: messages that repeat earlier ones, or only resemble them."""

import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch_device as gpu
from processes import until

from ucc_hetero.native.libraries import load

load()
import torch  # noqa: E402  its libraries come after ours
import torch.distributed as dist  # noqa: E402
from arrays import Graph  # noqa: E402

import ucc_hetero.torch  # noqa: E402, F401  registers the backend

#: Of random messages; no vendor's library has tags, and NCCL does not have the last type.
SIZES, TAGS = (1, 2, 50, 1000, 16_384, 70_000, 300_000), (0, 0, 0, 7)
TYPES = [torch.float32] * 9 + [torch.int16]


def batch(*pairs):
    how = {"to": dist.isend, "from": dist.irecv}
    return dist.batch_isend_irecv([dist.P2POp(how[way], tensor, peer, tag=tag) for way, tensor, peer, tag in pairs])


def wait(works):
    for work in works:
        work.wait()


class Ring:
    """A rank of the default group, which sends to the right and receives from the left."""

    def __init__(self, backend="ucch"):
        dist.init_process_group(backend)
        self.group, self.r, self.p = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
        self.right, self.left = (self.r + 1) % self.p, (self.r - 1) % self.p

    def exchange(self, sent, got, value):
        """What each rank has computed goes to the right, and what was sent may be overwritten once that was waited
        for."""
        sent.fill(value + self.r), got.fill(-1)
        wait(batch(("to", sent, self.right, 0), ("from", got, self.left, 0)))
        sent.fill(-5)

    def check(self, got, value):
        seen = got.seen()
        assert (seen == value + self.left).all(), (self.r, value, seen[:4])

    def steps(self, sent, got, count):
        for step in range(count):
            self.exchange(sent, got, step)
            self.check(got, step)


def write(tensor, value):
    tensor.fill(value) if tensor.dtype == torch.float32 else tensor.as_subclass(torch.Tensor).fill_(value)


class Random(Ring):
    """Random messages between all ranks, single, one way and in batches, in alternating streams, in reused or new
    memory; inside a vendor, if torch_vendor was imported, exactly these go by its own backend."""

    def __init__(self):
        super().__init__()
        seed = int(os.environ["DICE"])
        self.alike, self.own = random.Random(seed), random.Random(seed * 100 + self.r)
        self.vendor = sys.modules.get("torch_vendor")
        self.inside = {0, 1, 2} if self.vendor and os.environ.get("UCCH_TORCH_VENDOR") != "n" else set()
        self.streams, self.idle = [gpu.state.current, gpu.Stream()], {}

    def told(self, *ranks):
        return self.inside >= set(ranks)

    def went(self):
        """Messages that have gone by the vendor's backend since the last look."""
        seen, self.vendor.posted[:] = list(self.vendor.posted), []
        return seen

    def memory(self, n, dtype):
        """Some that another message has had, or new, maybe where some was freed."""
        found = self.idle.setdefault((n, dtype), [])
        if found and self.own.random() < 0.1:
            found.pop().block.close()
        return found.pop() if found else gpu.empty(n, dtype=dtype)

    def end(self, works):
        """Wait for them in any order; some are looked at before."""
        for work in self.own.sample(works, len(works)):
            while self.own.random() < 0.3 and not work.is_completed():
                time.sleep(1e-4)
            work.wait()

    def in_any_order(self, of):
        """Of pairs of ranks, whose messages stay in order."""
        order = {pair: self.own.random() for pair, *_ in of}
        return sorted(of, key=lambda each: order[each[0]])

    def drawn(self, kind, value):
        """(pair of ranks, number, tag, tensor) of this rank's messages."""
        ranks = range(self.p)
        pairs = [(a, b) for a in ranks for b in ranks if a < b or (a > b and kind != "one way")]
        each = [(pair, k) for pair in pairs for k in range(1 if kind == "batch" else self.alike.randint(1, 3))]
        plan = [(*about, *map(self.alike.choice, (TAGS, SIZES, TYPES))) for about in each]
        return [
            (pair, value + 10 * pair[0] + k, tag, self.memory(n, dtype))
            for pair, k, tag, n, dtype in plan
            if self.r in pair
        ]

    def turn(self, kind, value):
        mine = self.drawn(kind, value)
        sends, takes = ([each for each in mine if each[0][side] == self.r] for side in (0, 1))
        posts, waits = self.own.choice(self.streams), self.own.choice(self.streams)

        def refill():
            return [tensor.fill(-5) for *_, tensor in sends if tensor.dtype == torch.float32]

        with torch.cuda.stream(posts):
            for pair, number, _, tensor in mine:
                write(tensor, number if pair[0] == self.r else -1)
            if kind == "batch":
                both = [("to", t, b, tag) if a == self.r else ("from", t, a, tag) for (a, b), _, tag, t in mine]
                works = batch(*self.own.sample(both, len(both)))
            else:  # all ranks send first
                works = [dist.isend(t, b, tag=tag) for (_, b), _, tag, t in self.in_any_order(sends)]
                if kind == "one way":  # a tensor is its send's until that was waited for, and no longer
                    self.end(works)
                    refill()
                works += [dist.irecv(t, a, tag=tag) for (a, _), _, tag, t in self.in_any_order(takes)]
        with torch.cuda.stream(waits):
            self.end(works)
            refill()
            for about, number, _, tensor in takes:
                seen = tensor.seen()
                assert (seen == number).all(), (self.r, kind, about, number, seen[:4])
        for stream in self.streams:
            stream.synchronize()
        due = [(*pair, t.numel() * t.element_size()) for pair, _, tag, t in mine if self.told(*pair) and not tag]
        assert not self.vendor or sorted(self.went()) == sorted(due), (kind, due)
        for *_, tensor in mine:
            self.idle[tensor.numel(), tensor.dtype].append(tensor)

    def turns(self):
        for step in range(40):
            self.turn(self.alike.choice(("one by one", "one way", "batch")), 100 * step)


def repeated():
    """Random messages; many under way, of which none was waited for; and what has come lies in its buffer while the
    stream that asked for it has other work."""
    me = Random()
    me.turns()
    late, other = [], me.streams[1]
    sent, got = [[gpu.empty(5) for _ in range(40)] for _ in range(2)]
    for turn in range(3):
        for k, (a, b) in enumerate(zip(sent, got, strict=True)):
            a.fill(100 * turn + k + me.r), b.fill(-1)
            late += batch(("to", a, me.right, 1), ("from", b, me.left, 1))
        wait(late)
        late.clear()
        for k, b in enumerate(got):
            me.check(b, 100 * turn + k)
    sent, got = ([gpu.empty(9) for _ in range(12)] for _ in range(2))
    for turn in range(3):
        with torch.cuda.stream(other):
            wait(late)  # by lanes a tensor is its send's until that was waited for
            late.clear()
            for k, a in enumerate(sent):
                a.fill(100 * turn + k + me.r)
                late += batch(("to", a, me.right, 2))
        for _ in range(100):
            got[0].fill(-1)
        for b in got:
            batch(("from", b, me.left, 2))[0].wait()
            time.sleep(1e-3)
        for k, b in enumerate(got):
            me.check(b, 100 * turn + k)
    dist.barrier()
    dist.destroy_process_group()


def captured():
    """Messages in graphs: batches in any order, single ones, with others between replays, and some that are not
    awaited."""
    me, stream, other = Ring(), gpu.Stream(), gpu.Stream()
    dice = random.Random(int(os.environ["DICE"]) * 100 + me.r)
    pairs = [(gpu.empty(n), gpu.empty(n)) for n in (1, 1000, 70_000, 1_500_000)]
    single, copied = (gpu.empty(12), gpu.empty(12)), gpu.empty(1_500_000)
    with torch.cuda.stream(stream):
        for sent, got in pairs:
            me.exchange(sent, got, 1.0)
        stream.synchronize()
        with Graph(stream._native) as graph:
            sends = [("to", sent, me.right, k) for k, (sent, _) in enumerate(pairs)]
            receives = [("from", got, me.left, k) for k, (_, got) in enumerate(pairs)]
            sends_first, waiter = dice.random() < 0.5, dice.choice((stream, other))
            works = batch(*sends, *receives) if sends_first else batch(*receives, *sends)
            with torch.cuda.stream(waiter):  # which goes on with the last message
                works[-1 if sends_first else len(works) // 2 - 1].wait()
                gpu.RUNTIME.copy(copied.data_ptr(), pairs[3][1].data_ptr(), copied.nbytes, waiter.cuda_stream)
            stream.wait_event(waiter.record_event())
            wait(dice.sample(works, len(works)))
            first = [lambda: dist.send(single[0], me.right, tag=9), lambda: dist.recv(single[1], me.left, tag=9)]
            for call in first[:: 1 if me.r else -1]:
                call()
        for turn in range(4):
            for k, (sent, got) in enumerate([*pairs, single]):
                sent.fill(10.0 * turn + k + me.r), got.fill(-1)
            graph.replay(stream._native)
            me.check(copied, 10.0 * turn + 3)
            for k, (sent, got) in enumerate([*pairs, single]):
                me.check(got, 10.0 * turn + k)
                if turn % 2:
                    me.exchange(sent, got, 5.0)
        stream.synchronize()
        graph.close()
        with Graph(stream._native):
            _left_out = dist.isend(pairs[0][0], me.right)
        with pytest.raises(dist.DistBackendError, match="not waited for"):
            for call in (dist.isend, dist.irecv):
                call(pairs[0][0], me.right)
        me.exchange(*pairs[1], 3.0)
        me.check(pairs[1][1], 3.0)
    dist.barrier()
    dist.destroy_process_group()


def mistakes():
    """Mistakes raise the same errors as the first time, and later batches work as before. A message that is too long
    for its receiver fails there, each time."""
    me, sent, got = Ring(), gpu.empty(100), gpu.empty(100)
    for _ in range(6):
        me.steps(sent, got, 1)
        for _ in range(2):
            with pytest.raises(ValueError, match="tag"):
                batch(("to", sent, me.right, -4))
        with pytest.raises(ValueError, match=f"dest {me.p}"):
            me.group.send([sent], me.p, 0)
    dist.barrier()
    torch.cuda.synchronize = lambda: None
    lanes = me.group._comms[0].messages.goes_by_lane(me.right)
    long, short = gpu.empty(100), gpu.empty(10)
    for _ in range(2):
        long.fill(3.0)
        if me.r == 0:
            batch(("to", long, 1, 5))[0].wait()
        else:
            (work,) = batch(("from", short, 0, 5))
            until(work.is_completed)
            with pytest.raises(dist.DistBackendError, match="more than the buffer holds"):
                work.wait()
        dist.barrier()
        if me.r == 0 and lanes:  # it learns of it when it sends again
            with pytest.raises(dist.DistBackendError, match="refused an earlier message"):
                batch(("to", long, 1, 5))
    me.steps(sent, got, 3)
    dist.barrier()
    dist.destroy_process_group()


def death():
    """Rank 1 dies; the others get the error in messages that repeat earlier ones."""
    me, sent, got = Ring(), gpu.empty(100), gpu.empty(100)
    me.steps(sent, got, 5)
    dist.barrier()
    if me.r == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="rank 1 has left the job or died"):
        while True:
            (work,) = batch(("from", got, 1, 0))
            work.wait()
            until(work.is_completed)
            if work.exception() is not None:
                raise work.exception()
            dist.all_reduce(torch.ones(1))
    print("told", flush=True)
    os._exit(0)


def nested():
    """Calls in callbacks use a separate communicator: the group's messages make progress until both have ended."""
    me = Ring()

    def again(future):
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    mine = torch.full((1000,), me.r + 1.0)  # on the host: a torch without GPUs has no futures of others
    sums = dist.all_reduce(mine, async_op=True).get_future().then(again).wait()
    assert (sums == me.p * me.p * (me.p + 1) / 2).all(), sums[:3]
    me.steps(gpu.empty(9), gpu.empty(9), 1)
    dist.destroy_process_group()


def collect(r, p):
    for step in range(40):
        got = [None] * p if r == 0 else None
        dist.gather_object((r, step), got)
        assert got is None or got == [(rank, step) for rank in range(p)], got
        plan = [("plan", step) if r == 0 else None]
        dist.broadcast_object_list(plan)
        assert plan == [("plan", step)], plan


def beside():
    """Objects that another thread gathers meanwhile, as asynchronous checkpoints do, in a group created by device type;
    and mistakes in calls of the host, which end no calls on devices."""
    me = Ring("cpu:ucch,cuda:ucch")
    r, p = me.r, me.p
    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(collect, r, p)
        for step in range(50):
            tensors = [gpu.empty(1000) for _ in range(4)]
            for tensor in tensors:
                tensor.fill(step + r)
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors[1:]]
            dist.all_reduce(tensors[0])
            wait(works)
            assert all((tensor.seen() == p * step + p * (p - 1) / 2).all() for tensor in tensors), (r, step)
        collected.result()
    many = torch.empty(p + (r == 1))
    with pytest.raises(ValueError if r == 1 else dist.DistBackendError) as caught:
        dist.all_gather_into_tensor(many, torch.ones(1))
    assert r != 1 or caught.type is ValueError
    tensor.fill(r)
    dist.all_reduce(tensor)
    assert (tensor.seen() == p * (p - 1) / 2).all(), r
    device, hosts = (me.group._comms[at].runner.members for at in (0, -1))
    assert device.channels and hosts.channels is None, "calls of the host need no streams"
    said = me.group.communicator.plan_summary()
    assert "queued" in said and " host: " in said, said


def fabric():
    """Three ranks of one vendor and one of another: messages inside the vendor use its backend, the others lanes."""
    import torch_vendor as vendor

    me = Random()
    me.turns()
    peers = [each for each in range(4) if each != me.r]
    small = {peer: (gpu.empty(50), gpu.empty(50)) for peer in peers}
    a, b = small[me.right][0], small[me.left][1]
    futures(me, a, b)
    at_the_end(me, vendor, a, b)
    for wrong in (("to", a, me.right, -4), *([("from", b, me.left, -1)] if me.told(me.r, me.left) else [])):
        with pytest.raises(ValueError, match="tag"):
            batch(wrong)
    me.went()
    without_library(me, vendor, small)
    dist.barrier()
    dist.destroy_process_group()


def futures(me, a, b):
    """Futures, and looking without waiting."""
    a.fill(3.0 + me.r), b.fill(-1)
    to, of = batch(("to", a, me.right, 0), ("from", b, me.left, 0))
    until(of.is_completed)
    assert of.is_success() and of.source_rank() == me.left
    to.get_future().wait()
    of.wait()
    me.check(b, 3.0)


def at_the_end(me, vendor, a, b):
    """A group does not wait at its end for a message that could not be begun."""
    group, right, left = dist.new_group(), me.told(me.r, me.right), me.told(me.left, me.r)
    if right:
        dist.isend(a, me.right, group).wait()
    if left:
        dist.irecv(b, me.left, group).wait()
        b.seen()
    dist.barrier(group)
    vendor.refuses.set()
    if right:
        with pytest.raises(RuntimeError, match="cannot be begun"):
            dist.isend(a, me.right, group)
    vendor.refuses.clear()
    before = len(vendor.ended)
    dist.destroy_process_group(group)
    assert len(vendor.ended) - before == right + left, vendor.ended


def without_library(me, vendor, small):
    """A library that cannot be had: those who wait are told, and other ways go on."""
    other = dist.new_group()
    vendor.broken.set()
    for peer, (a, b) in small.items():
        if me.told(peer, me.r):
            work = dist.isend(a, peer, other)
            for call in (work.wait, work.wait, lambda a=a, peer=peer: dist.isend(a, peer, other)):
                with pytest.raises(dist.DistBackendError, match="no such backend"):
                    call()
            assert work.is_completed() and not work.is_success() and "no such" in str(work.exception())
        else:
            a.fill(2.0 * me.r), b.fill(-1)
            wait([dist.isend(a, peer, other), dist.irecv(b, peer, other)])
            assert (b.seen() == 2 * peer).all()
