"""How torch's ranks start: with which device, and with which backend, which all of them must have chosen."""

import threading

import pytest

pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")
import torch
import torch.distributed as dist

from ucc_hetero.errors import CollectiveTimeout
from ucc_hetero.torch import devices, rendezvous


@pytest.mark.parametrize("count, local, chosen", [(4, 1, [1]), (2, 5, [1]), (1, 1, []), (0, 3, [])])
def test_torch_begins_with_the_device_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, count: int, local: int, chosen: list[int]
) -> None:
    """Once it begins, not before: a script may fork until then. One that chooses a device does so afterwards."""
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "_queued_calls", [])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    devices.start_with(local)
    assert not found
    for call, _ in torch.cuda._queued_calls:  # as torch does
        call()
    assert found == chosen
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    devices.start_with(local)
    assert found == chosen, "the script has chosen one already"


def test_ranks_that_chose_another_backend_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCCH_TORCH_REPLACE", "nccl")
    store = dist.HashStore()
    for rank in (0, 2):
        thread = threading.Thread(target=store.set, args=(f"ucch/chosen/{rank}", "y"))
        thread.start()
        thread.join()
    with pytest.raises(CollectiveTimeout, match=r"rank 4: rank\(s\) \[9, 5\] did not come .* UCCH_TORCH_REPLACE=nccl"):
        rendezvous.await_all(store, 2, [7, 9, 4, 5], 0.01)


def test_a_script_that_no_launcher_has_started_is_told_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    rendezvous.install()
    with pytest.raises(ValueError, match="RANK expected, but not set: start the script by `ucch-run -np N python"):
        next(dist.rendezvous("env://"))


def test_ranks_that_chose_the_same_backend_go_on() -> None:
    store = dist.HashStore()
    threads = [threading.Thread(target=rendezvous.await_all, args=(store, rank, [0, 1, 2], 0)) for rank in range(2)]
    for thread in threads:
        thread.start()
    rendezvous.await_all(store, 2, [0, 1, 2], 0)
    for thread in threads:
        thread.join()
