"""Elements sent per rank and step, counted around torch.distributed's functions, not by our own counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import batches, make_model
from torch import nn

import zerofold as zf
from zerofold.bench.wire import count_elements

BOUND = {0: 2, 1: 2, 2: 2, 3: 3}
STEPS = 4


def elements_per_psi(stage: int, settings: dict[str, Any]) -> tuple[float, float]:
    """Per step after the first: counted from outside, and by the ledger."""
    model = make_model(width=64, layers=6)
    psi = sum(p.numel() for p in model.parameters())
    model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=stage, **settings)
    data = list(batches(STEPS + 1))

    def step(batch: Any) -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(data[0])
    before = zf.ledger(model).snapshot()["comm_elements"]
    with count_elements() as wire:
        for batch in data[1:]:
            step(batch)
    own = zf.ledger(model).snapshot()["comm_elements"] - before
    zf.close(model)
    counted = torch.tensor(wire.elements)
    dist.all_reduce(counted)  # what a rank sends on average
    return counted.item() / dist.get_world_size() / STEPS / psi, own / STEPS / psi


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_more_is_sent_than_the_formula_says(ranks: Any, world: int, stage: int) -> None:
    bound = BOUND[stage] * (world - 1) / world
    for outside, own in ranks(world, elements_per_psi, stage, {}):
        assert outside <= bound * 1.005
        assert outside >= 2 * (world - 1) / world  # less cannot be right
        assert own == pytest.approx(outside, rel=1e-3)


def test_the_tightest_memory_bound_still_sends_no_more_than_three(ranks: Any) -> None:
    root_and_one_block = 4 * (96 * 64 * 2 + 16 * 64 + 2 * 64 + 12 * 64 * 64 + 13 * 64 + 2 * 128)
    for outside, _ in ranks(2, elements_per_psi, 3, {"live_bytes": root_and_one_block}):
        assert 1.25 < outside <= 1.5 * 1.005


def test_without_overlap_no_more_is_sent(ranks: Any) -> None:
    for outside, _ in ranks(2, elements_per_psi, 3, {"overlap": False}):
        assert outside <= 1.5 * 1.005


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(torch.tanh(self.shared(torch.tanh(self.first(x)))))


def elements_of_a_backward() -> float:
    model = CalledTwice()
    psi = sum(p.numel() for p in model.parameters())
    zf.shard(model, stage=2, units=nn.Linear)
    for _ in range(2):
        loss = model(torch.ones(2, 64)).sum()
        with count_elements() as wire:
            loss.backward()
        model.zero_grad()
    zf.close(model)
    return wire.elements / psi


def test_a_block_that_is_called_twice_is_reduced_once(ranks: Any) -> None:
    """When its last call is through, and not with each."""
    for sent in ranks(2, elements_of_a_backward):
        assert 0.5 <= sent < 0.51
