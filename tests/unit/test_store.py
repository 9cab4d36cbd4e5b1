"""The store at which ranks meet, and recovery over a store: living ranks, agreement, survivors; ranks are threads
here."""

import errno
import itertools
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from processes import Instead

from ucc_hetero import Store, StoreServer
from ucc_hetero.__main__ import main
from ucc_hetero.bootstrap.meeting import meeting_of
from ucc_hetero.bootstrap.storecomm import StoreComm, let_in
from ucc_hetero.errors import AgreementError, CollectiveError, CollectiveTimeout, PeerError
from ucc_hetero.native.libraries import load
from ucc_hetero.rma.channel import ChannelError

SECRET, SIZE = os.urandom(32), 4


def on_ranks(ranks, call):
    """Results, or exceptions, of a call that all these ranks make at the same time."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        calls = [pool.submit(call, rank) for rank in ranks]
        return [each.exception(600) or each.result() for each in calls]


def test_the_command_names_a_missing_secret(tmp_path, capsys):
    assert main(["store", "tcp://127.0.0.1:0", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == f"ucc_hetero: {tmp_path / 'none'}: No such file or directory\n"


@pytest.fixture(params=["tcp", "unix"])
def server(request, tmp_path):
    made = StoreServer("tcp://127.0.0.1:0" if request.param == "tcp" else f"unix://{tmp_path}/store", SECRET)
    yield made
    made.close()


def test_keys_and_values(server):
    one, other = (Store(server.address, SECRET) for _ in range(2))
    data = bytes(range(256)) * 300
    one.set("a", data)
    one.set("b", "ü or €")
    assert other.get("a") == data and other.get("b").decode() == "ü or €"
    assert other.check(["a", "b"]) and not other.check(["a", "c"])
    with pytest.raises(KeyError):
        other.get("c")
    assert other.compare_set("c", "", "first") == one.compare_set("c", "", "second") == b"first"
    assert one.compare_set("c", b"first", b"third") == b"third"
    assert one.delete_key("c") and not other.delete_key("c") and not other.check(["c"])
    with pytest.raises(ValueError, match="the store refuses add"):
        one.add("a", 1)
    assert one.get("a") == data  # the store continues
    numbers = on_ranks(range(20), lambda _: Store(server.address, SECRET).add("n", 1))
    assert sorted(numbers) == list(range(1, 21))


def test_a_wait_that_is_interrupted_leaves_its_answer_to_nobody(server, monkeypatch):
    """Ctrl-C, or the end of the process, interrupts a waiting thread: the answer used to go to its next request."""
    store = Store(server.address, SECRET)
    store.set("a", "first")
    store.set("b", "second")

    def interrupted(writes):
        raise KeyboardInterrupt

    for _ in range(2):
        with server._lock, monkeypatch.context() as patched:  # no answer arrives
            patched.setattr(store._channel, "_wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.get("a")
    assert store.get("b") == b"second" and store.check(["a"]) and store.get("a") == b"first"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_request_that_is_interrupted_leaves_its_answer_to_nobody(server, monkeypatch, when):
    """As it is sent. Sent twice, it ends the connection."""
    store = Store(server.address, SECRET)
    store.set("a", "first")
    store.set("b", "second")
    usual = store._channel._try

    def interrupted(call, argument):
        if when == "after":
            usual(call, argument)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store._channel, "_try", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.get("a")
    if when == "before":
        assert store.get("b") == b"second"
    else:
        with pytest.raises(ChannelError):
            store.get("b")


def test_a_forked_child_that_ends_leaves_the_connection_to_its_parent(server):
    store = Store(server.address, SECRET)
    if not (child := os.fork()):
        try:
            del store
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    store.set("a", "of the parent")
    assert store.get("a") == b"of the parent"


def test_a_server_that_has_no_file_left_for_a_connection_goes_on(server, monkeypatch):
    failures, accept = [OSError(errno.EMFILE, "too many open files")], socket.socket.accept

    def accepted(listener):
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accepted)
    Store(server.address, SECRET).set("a", "b")  # accepted before
    assert Store(server.address, SECRET).get("a") == b"b" and not failures


def test_strangers_are_refused(server):
    with pytest.raises(ChannelError):
        Store(server.address, b"another secret of theirs")
    if server.address.startswith("tcp"):
        host, port = server.address[6:].split(":")
        with socket.create_connection((host, int(port))) as stranger, suppress(OSError):
            stranger.sendall(os.urandom(4096))
    Store(server.address, SECRET).set("a", "b")
    with pytest.raises(ValueError, match="16 bytes"):
        StoreServer("tcp://127.0.0.1:0", b"short")


@pytest.fixture
def comms():
    dist = pytest.importorskip("torch.distributed", reason="needs torch: pip install '.[torch]'")
    load()
    store = dist.HashStore()
    return [StoreComm.first(store, rank, range(SIZE), SIZE, 30.0) for rank in range(SIZE)]


def test_ranks_that_are_threads_of_a_process_are_refused(comms):
    """They would wait for each other's turns for ever."""
    for failure in on_ranks(comms, lambda comm: meeting_of(comm).__enter__()):
        assert isinstance(failure, AgreementError) and "ranks 0, 1, 2, 3 are one process" in str(failure)


def test_deaths_are_looked_for_while_others_are_waited_for(comms):
    """A death on one rank's board ends the exchanges of all ranks."""
    looks = itertools.count()
    comms[1].watch(lambda: [3] if next(looks) > 20 else [])  # the others have been waiting for long
    for failure in on_ranks(comms[:3], lambda comm: comm.allgather(0)):
        assert isinstance(failure, PeerError) and "rank(s) [3]" in str(failure)
    made = on_ranks(comms[:3], StoreComm.Shrink)
    assert [each.Get_size() for each in made] == [3, 3, 3]
    late = on_ranks([comms[3]], StoreComm.Shrink)[0]
    assert isinstance(late, PeerError) and "gone on without it" in str(late)


def test_the_first_to_tell_of_a_death_is_right(comms):
    """When a cut network makes two sides declare each other dead."""
    for comm, others in ((comms[2], [0, 1]), (comms[0], [2, 3]), (comms[1], [2, 3])):
        comm.watch(lambda others=others: others)
    assert [comm.dead() for comm in (comms[2], *comms)] == [[0, 1]] * 5
    made = on_ranks(comms, StoreComm.Shrink)
    assert [each.Get_size() for each in made[2:]] == [2, 2]
    assert all(isinstance(each, PeerError) for each in made[:2])


class Ends:
    """A store that a rank loses after it has changed so many entries."""

    def __init__(self, store, changes):
        self._store, self._changes = store, changes

    def __getattr__(self, name):
        call = getattr(self._store, name)

        def until_then(*args):
            if name in ("add", "compare_set", "set") and args[-1] != 0:
                if not self._changes:
                    raise SystemExit
                self._changes -= 1
            return call(*args)

        return until_then


@pytest.mark.parametrize("changes", range(3))
def test_a_rank_that_dies_as_it_tells_of_a_death_hides_no_later_one(comms, changes):
    dying = StoreComm.first(Ends(comms[0].store, changes), 3, range(SIZE), SIZE, 30.0)
    dying.watch(lambda: [0])
    with suppress(SystemExit):
        dying.dead()
    comms[1].watch(lambda: [2])
    assert 2 in comms[1].dead() and comms[1].dead() == comms[2].dead()


def test_threads_that_read_of_a_death_at_a_time_miss_no_later_one(comms):
    def get(key):
        """Another thread of the rank reads between two calls of the first thread."""
        if not read:
            read.append(key)
            assert on_ranks([comm], StoreComm.dead) == [[1]]
        return comms[0].store.get(key)

    read, comm = [], StoreComm.first(Instead(comms[0].store, get=get), 0, range(SIZE), SIZE, 30.0)
    for rank in (1, 2):
        comms[3].watch(lambda rank=rank: [rank])
        assert comms[3].dead() == comm.dead() == [1, 2][:rank]


def test_an_exchange_that_is_interrupted_as_it_ends_goes_on(comms):
    """Ctrl-C as the values are read: the next look said that all had come, and had taken none."""

    def get(key):
        if not interrupts:
            interrupts.append(key)
            raise KeyboardInterrupt
        return comms[0].store.get(key)

    interrupts, words, every = [], [os.urandom(8) for _ in comms], bytearray(8 * SIZE)
    comm = StoreComm.first(Instead(comms[0].store, get=get), 0, range(SIZE), SIZE, 30.0)
    begun = comm.Iallgather(words[0], every)
    for each, word in zip(comms[1:], words[1:], strict=True):
        each.Iallgather(word, bytearray(8 * SIZE))
    with pytest.raises(KeyboardInterrupt):
        begun.Test()
    assert begun.Test() and every == b"".join(words)


def test_an_exchange_to_which_all_have_come_outlives_its_ranks(comms, monkeypatch):
    """What the last one brings makes another rank give up: this one has to learn why."""
    words, every, stock = [os.urandom(8) for _ in comms], bytearray(8 * SIZE), comms[0].check_peers

    def check_peers():
        for each, word in zip(comms[1:], words[1:], strict=True):
            each.Iallgather(word, bytearray(8 * SIZE))
        comms[1].Revoke()
        stock()

    monkeypatch.setattr(comms[0], "check_peers", check_peers)
    assert comms[0].Iallgather(words[0], every).Test() and every == b"".join(words)


def test_whoever_lives_is_waited_for(comms):
    for comm in comms:
        comm.seconds = 1.0
    for failure in on_ranks(comms[:3], StoreComm.Shrink):
        assert isinstance(failure, CollectiveTimeout) and "rank(s) [3]" in str(failure)


def test_long_data_is_gathered(server):
    """As the ranks' timelines are: longer than one value of our store may be."""
    comms = [StoreComm.first(Store(server.address, SECRET), rank, range(SIZE), SIZE, 30.0) for rank in range(SIZE)]
    data = [os.urandom(length) for length in (400_000, 0, 100, 150_000)]
    assert on_ranks(comms, lambda comm: comm.gather(data[comm.Get_rank()])) == [data, None, None, None]


def test_a_store_that_is_gone_ends_the_growth_of_all_ranks(comms, server):
    """Rank 0 alone asks it; the others waited for rank 0 until their deadline."""
    gone = Store(server.address, SECRET)
    gone.close()
    for failure in on_ranks(comms, lambda comm: let_in(comm, gone, 1, 1.0)):
        assert isinstance(failure, CollectiveError) and "rank 0 cannot ask the store: ChannelError" in str(failure)


def test_agreement(comms):
    for comm, flag in zip(comms, (0b111, 0b101, 0b110, 0b100), strict=True):
        comm.flag = flag
    assert on_ranks(comms, lambda comm: comm.Agree(comm.flag)) == [0b100] * 4
    comms[1].watch(lambda: [0])
    assert all(isinstance(each, PeerError) for each in on_ranks(comms[1:], lambda comm: comm.Agree(1)))
    assert on_ranks(comms[1:], StoreComm.Ack_failed) == [1] * 3
    assert on_ranks(comms[1:], lambda comm: comm.Agree(comm.flag)) == [0b100] * 3
    assert comms[1].Get_failed().ranks == (0,)


def test_exchanges_take_no_room_in_the_store(comms):
    """A job that creates and frees communicators for weeks must not fill its store."""
    store = comms[0].store

    def work(comm):
        part = comm.Dup()
        for number in range(20):
            assert part.allgather((number, comm.Get_rank())) == [(number, rank) for rank in range(SIZE)]
            for _ in range(3):  # the others run ahead of the first rank
                assert part.gather(number) == (None if comm.Get_rank() else [number] * SIZE)
        word = bytearray(1)
        for number in range(20):
            part.Send([number], (comm.Get_rank() + 1) % SIZE, tag=3)
            coming = part.Irecv(word, (comm.Get_rank() - 1) % SIZE, tag=3)
            while not coming.Test():
                time.sleep(0)
            assert word[0] == number
        comm.allgather(None)
        most = store.num_keys()
        comm.allgather(None)
        part.Free()
        comm.allgather(None)
        return most

    for most in on_ranks(comms, work):
        assert isinstance(most, int) and most < 10 * SIZE, most
    on_ranks(comms, StoreComm.Free)
    assert not store.num_keys()


def test_a_receive_that_was_cancelled_leaves_its_word_to_the_next(comms):
    word, later = bytearray(1), bytearray(1)
    given_up = comms[1].Irecv(word, 0, tag=5)
    assert not given_up.Test()
    given_up.Cancel()
    comms[0].Send([42], 1, tag=5)
    comms[0].Send([43], 1, tag=5)
    for want in (42, 43):
        coming = comms[1].Irecv(later, 0, tag=5)
        assert coming.Test()
        assert coming.Test()
        assert later[0] == want
    assert word[0] == 0
