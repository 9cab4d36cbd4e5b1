"""Tables of native objects that threads share."""

from __future__ import annotations

import sys
import threading
from collections import deque

from ucc_hetero.bindings.handle import Present


class Thing:
    pass


def test_those_present_while_threads_add() -> None:
    """Those that something refers to are all there, and those that nothing refers to are not."""
    present, over, held = Present[Thing](), threading.Event(), [Thing() for _ in range(50)]
    for each in held:
        present.add(each)

    def adds() -> None:
        some: deque[Thing] = deque(maxlen=30)
        while not over.is_set():
            some.append(Thing())
            present.add(some[-1])

    usual, threads = sys.getswitchinterval(), [threading.Thread(target=adds) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(3000):
            assert {*map(id, held)} <= {*map(id, present.all())}
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(usual)
    del held[10:], each
    assert {*map(id, present.all())} == {*map(id, held)}
