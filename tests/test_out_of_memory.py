"""Out of memory: the error stays torch's, and says what is held and what would fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import Block, batches, make_model
from torch import Tensor, nn

import zerofold as zf
from zerofold.engine import Engine
from zerofold.observe.out_of_memory import Needs, explain_out_of_memory

MIB = 2**20


class Greedy(nn.Module):
    """Runs out of memory when told to; the real thing is in test_gpu.py."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4))
        self.is_greedy = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if self.is_greedy:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return x.sum()


def run_out(stage: int, precision: str | None) -> tuple[str, float]:
    """The notes of an error in a forward; and that the model trains on after it."""
    model = Greedy()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zf.prepare(model, optimizer, stage=stage, precision=precision, units=nn.Linear)

    def step() -> float:
        loss = model(torch.ones(2, 512))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    model.is_greedy = True
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step()
    model.is_greedy = False
    (note,) = caught.value.__notes__
    return note, step()


def test_an_error_in_forward_tells_what_is_held_and_what_would_fit(ranks: Any) -> None:
    for note, _ in ranks(2, run_out, 1, None):
        assert note.startswith("zerofold: out of memory on cpu, rank ")
        assert "stage 1" in note.splitlines()[0]
        # 4 MiB of parameters: fp32, gradients, two moments
        assert "parameters 4.0 MiB" in note
        assert "optimizer 4.0 MiB" in note
        assert "stage 0: 16.0 MiB, stage 1: 12.0 MiB, stage 2: 10.0 MiB, stage 3: 8.0 MiB" in note
        assert "stage=3 (8.0 MiB of states)" in note
        assert 'precision="bf16"' in note
        assert "smaller micro-batch" in note


def test_the_bytes_of_16_bit_training(ranks: Any) -> None:
    for note, _ in ranks(2, run_out, 3, "bf16"):
        # Ψ = 1 Mi: 2 + 4 + 12 at stage 0, 2 + 4 + 12/2, 2 + 16/2, 16/2
        assert "stage 0: 18.0 MiB, stage 1: 12.0 MiB, stage 2: 10.0 MiB, stage 3: 8.0 MiB" in note


def needs_of_a_model() -> list[int]:
    model = zf.shard(make_model(), stage=3, units=Block)
    engine = Engine.of(model)
    needs = Needs.of([entry for slab in engine.slabs() for entry in slab.entries], 2.0)
    assert explain_out_of_memory(engine)
    psi = engine.psi
    zf.close(model)
    return [needs.on_a_rank(stage, 4) - round(psi * per) for stage, per in enumerate((16, 10, 7, 4))]


def test_needs_follow_the_table_of_placements(ranks: Any) -> None:
    assert ranks(1, needs_of_a_model) == [[0, 0, 0, 0]]


def step_inside_the_context() -> list[str]:
    model = zf.shard(make_model(), stage=2)
    (batch,) = batches(1)
    with pytest.raises(torch.OutOfMemoryError) as caught, zf.explain_oom(model):
        model(*batch).backward()
        raise torch.OutOfMemoryError("as if in the update")
    dist.barrier()
    return caught.value.__notes__


def test_the_context_adds_one_note(ranks: Any) -> None:
    for notes in ranks(2, step_inside_the_context):
        assert len(notes) == 1
        assert "gradients" in notes[0]
