"""Numbers of messages: what one side sends as the n-th the other expects as the n-th, whatever is between."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ucc_hetero.calls.p2p import Matching

ANY_SOURCE, ANY_TAG = -2, -1


class Message:
    def __init__(self, what: str, peer: int, tag: int) -> None:
        self.what, self.peer, self.tag = what, peer, tag


def number(side: Matching, what: str, peer: int, tag: int) -> int:
    message: Any = Message(what, peer, tag)
    return side.number(message)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=40), st.randoms())
def test_both_sides_count_alike(messages: list[tuple[bool, int]], random: Any) -> None:
    one, other = (Matching(frozenset({peer}), ANY_SOURCE, ANY_TAG) for peer in (1, 0))
    sent = {True: [], False: []}  # type: dict[bool, list[tuple[int, int]]]
    for forth, tag in messages:
        side, peer = (one, 1) if forth else (other, 0)
        sent[forth].append((tag, number(side, "send", peer, tag)))
    for forth, side, peer in ((True, other, 0), (False, one, 1)):
        wanted = sent[forth]
        tags = [tag for tag, _ in wanted]
        random.shuffle(tags)  # receives of other tags may be posted in any order
        found = [(tag, number(side, "receive", peer, tag)) for tag in tags]
        assert sorted(found) == sorted(wanted)


def test_who_has_lost_count_numbers_no_receives() -> None:
    for wild in ((ANY_SOURCE, 3), (1, ANY_TAG), None):
        side = Matching(frozenset({1}), ANY_SOURCE, ANY_TAG)
        assert number(side, "receive", 1, 3) == 1 and number(side, "synchronous send", 1, 3) == 1
        if wild is None:
            side.lose()
        else:
            assert number(side, "receive", *wild) == 0
        assert number(side, "receive", 1, 3) == 0
        assert number(side, "send", 1, 3) == 2, "what it sends the others know"


def test_others_are_not_counted() -> None:
    side = Matching(frozenset({1}), ANY_SOURCE, ANY_TAG)
    assert number(side, "send", 2, 3) == 0 and number(side, "receive", 2, 3) == 0
