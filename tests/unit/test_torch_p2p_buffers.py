"""Buffers of messages on device memory: when they are copied, and when they are used again."""

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'ucc-hetero[torch]'")
import torch
from torch_notes import Cuda, Stream

from ucc_hetero.torch import p2p_buffers


def test_messages_go_through_buffers_while_there_is_room(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p_buffers, "_MOST", 100)
    buffers = p2p_buffers.P2pBuffers(torch.device("cuda", 0))
    tensor = torch.arange(10.0)
    copy, sent = buffers.outgoing(tensor)
    tensor.zero_()
    assert copy.tolist() == list(range(10)) and not cuda.notes
    target, rest = torch.zeros(10), []
    buffer, deliver = buffers.incoming(target, lambda: rest.append(1))
    assert not cuda.notes and buffer.data_ptr() != target.data_ptr()
    assert (
        buffers.outgoing(tensor) is None
        and buffers.incoming(target, None) is None
        and buffers.outgoing(tensor[:0]) is None
    )
    buffer.copy_(copy)
    with cuda.stream(Stream("other", cuda.notes)):
        deliver()
    assert cuda.notes == ["other waits for an event of main"]  # kernels before the receive may still read the target
    assert target.tolist() == list(range(10)) and rest == [1]
    sent()
    assert buffers.incoming(target, None) is not None and buffers.outgoing(tensor) is not None


def test_buffers_of_messages_are_used_again_once_they_are_empty(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p_buffers, "_IDLE", 100)
    buffers, tensor = p2p_buffers.P2pBuffers(torch.device("cuda", 0)), torch.arange(10.0)
    first, deliver = buffers.incoming(tensor, None)
    deliver()
    assert cuda.notes == [], "it is delivered in the stream that it was asked for in"
    (kept,) = buffers._kept[tensor.dtype, tensor.shape]
    monkeypatch.setattr(kept.copied, "passed", False, raising=False)
    second, sent = buffers.outgoing(tensor)
    assert second.data_ptr() != first.data_ptr(), "its copy has not been made yet"
    sent()
    kept.copied.passed = True
    assert buffers.incoming(tensor, None)[0].data_ptr() == first.data_ptr()
    third, deliver = buffers.incoming(tensor, None)
    assert third.data_ptr() == second.data_ptr()
    # No more than so much is kept, of whatever kind, and nothing that is still to be copied from.
    for n in (1, 10, 20, 5, 1):
        _, sent = buffers.outgoing(torch.ones(n))
        sent()
    assert buffers._idle == 4 * sum(each.tensor.numel() for kept in buffers._kept.values() for each in kept) <= 100
    assert buffers._used == 2 * 40
