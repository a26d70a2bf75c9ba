"""Rank 0 of 64 alone: torch's fake process group answers at once with wrong values, and every size is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerofold as zf
from zerofold.bench.gpt import GPT, Block, GPTSize, RandomTokens
from zerofold.bench.memory import make_finite

WORLD = 64
SIZE = GPTSize(vocab=256, width=256, layers=2, heads=4, seq=16)


def states_in_a_fake_world(stages: list[int]) -> dict[int, dict[str, float]]:
    """By stage: what one rank of many holds between backward and step, over the size of the whole."""
    dist.destroy_process_group()  # of the tests, which would be the default one otherwise
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    found: dict[int, dict[str, float]] = {}
    for stage in stages:
        with torch.device("meta"):
            model = GPT(SIZE, checkpointing=True)
        optimizer = torch.optim.AdamW(model.parameters())
        zf.prepare(model, optimizer, stage=stage, units=Block, clip=1.0, device="cpu")
        data = RandomTokens(SIZE, batch=1, rank=0)
        model(*data.at(0)).backward()
        make_finite(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        model(*data.at(1)).backward()
        held = zf.ledger(model).snapshot()["state_bytes"]
        found[stage] = {name: count / (4 * SIZE.parameters) for name, count in held.items()}
        updated = [getattr(p, "local", p).numel() for group in optimizer.param_groups for p in group["params"]]
        found[stage]["updated"] = sum(updated) / SIZE.parameters  # by the tensors, not by the ledger
        zf.close(model)
    dist.destroy_process_group()
    return found


def test_one_rank_of_many_holds_its_share(ranks: Any) -> None:
    (found,) = ranks(1, states_in_a_fake_world, [0, 1, 2, 3])
    whole, share = pytest.approx(1.0, rel=0.02), pytest.approx(1 / WORLD, rel=0.02)
    for stage, held in found.items():
        assert held["updated"] == (whole if stage == 0 else share)
        assert held["optimizer"] / 2 == (whole if stage == 0 else share)
        assert held["gradients"] == (whole if stage == 0 else share)
        assert held["parameters"] == (whole if stage < 3 else share)
