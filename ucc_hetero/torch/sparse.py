"""All-reduce of sparse tensors: every rank's non-zero elements, gathered and added up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .reduction import Reduction

if TYPE_CHECKING:
    from .collectives import Collectives
    from .work import Work


def allreduce_sparse(group: Collectives, tensor: Any, how: Reduction) -> Work:
    """Sum a sparse COO tensor over all ranks, in place; finished when this returns."""
    if how.op.name != "SUM" or how.factor is not None:
        raise ValueError(f"all_reduce of sparse tensors sums only, and {how.op} was asked for")
    mine = tensor.detach().coalesce()
    counts = torch.empty(group.size(), dtype=torch.int64)
    group.all_gather_single(counts, torch.tensor([mine._nnz()])).wait()
    indices = _gather(group, mine.indices().t(), counts.tolist())
    values = _gather(group, mine.values(), counts.tolist())
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, device=tensor.device).coalesce()
    with torch.no_grad():  # detach() of a sparse tensor does not share its elements
        tensor.copy_(total)
    return group._done([tensor])


def _gather(group: Collectives, rows: Any, counts: list[int]) -> Any:
    """The rows of every rank, one rank after the other."""
    parts = [rows.new_empty((n, *rows.shape[1:])) for n in counts]
    group.allgather([parts], [rows.contiguous()]).wait()
    return torch.cat(parts)
