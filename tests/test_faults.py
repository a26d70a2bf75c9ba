"""Ranks that do different things, stop or die: every other rank says who, in which module and in which collective."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import Block, batches, make_model
from torch import Tensor, nn

import zerofold as zf
from zerofold.divergence import Account, Line, Seen, find_deadlock, find_mismatch, find_stop, who_is_gone

WIDTH = 64


class Experts(nn.Module):
    """Runs the experts it is told to; each is a unit of its own, and the later ones are larger."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        x = self.norm(x)
        for index in chosen:
            x = x + self.experts[index](x)
        return x


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        for block in self.blocks:
            x = block(x, chosen)
        return self.head(x).square().mean()


def routed(odd_one_out: list[int]) -> None:
    """Two steps on the same experts, then rank 2 takes others. How it ends, and after how many seconds."""
    torch.manual_seed(0)
    model = MoE()
    model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=3, units=nn.Linear)
    for step in range(4):
        model(torch.ones(2, WIDTH), odd_one_out if dist.get_rank() == 2 and step == 2 else [0, 1]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("odd_one_out", [[0, 3], [0], [3, 1, 0]])
def test_a_rank_that_routes_to_other_experts_is_named_on_all(ranks: Any, odd_one_out: list[int]) -> None:
    ranks(4, dist.get_rank)  # the processes exist before the clock starts
    start = time.monotonic()
    for said in ranks(4, routed, odd_one_out, expect_error=True):
        print(said)
    print(time.monotonic() - start)
