"""Cases of test_torch_strategies.py: Hugging Face's accelerate, which does not know the backend."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import ucc_hetero.torch

ucc_hetero.torch.replace(["gloo"])  # as UCCH_TORCH_REPLACE=gloo; it requests gloo on the host
Accelerator(cpu=True)  # makes the process group

from torch_cases import close, run  # noqa: E402, F401

STEPS, SHARE, LENGTH = 3, 2, 16


def fresh():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTH, attn_implementation="eager",
        )
    )  # fmt: skip


def rows(size):
    """All sequences, in order: SHARE for each rank and step."""
    return torch.randint(0, 64, (STEPS * SHARE * size, LENGTH), generator=torch.Generator().manual_seed(1))


def reference(size):
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in rows(size).split(SHARE * size):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def case_accelerate():
    accelerator = Accelerator(cpu=True)
    size = accelerator.num_processes
    assert size == dist.get_world_size() > 1 and dist.group.WORLD.name() == "ucch"
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(rows(size), batch_size=SHARE)  # batch k is rank k % size's
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch, want in zip(loader, reference(size), strict=True):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        close(accelerator.gather(loss.detach().reshape(1)).mean().item(), want, 1e-5, "accelerate")
    texts = accelerator.gather_for_metrics([f"rank {accelerator.process_index}"], use_gather_object=True)
    assert sorted(set(texts)) == [f"rank {r}" for r in range(size)], texts
