"""`contiguous_gradients=True` (M_d): the same bits, in one block that is there before the first forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zerofold as zf
from models import Block, batches, make_model
from zerofold.sharded import ShardedTensor


def memory_of(gradient: Tensor) -> Tensor:
    return gradient.local if isinstance(gradient, ShardedTensor) else gradient


def run(stage: int, precision: str | None, contiguous: bool) -> tuple[list[Tensor], list[set[int]]]:
    """Weights after three steps of two micro-batches, the first of each without a reduction; and in which storages the
    gradients were before each step.
    """
    model = make_model(layers=3)
    model, optimizer = zf.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        stage=stage,
        precision=precision,
        units=Block,
        accumulate=2,
        contiguous_gradients=contiguous,
    )
    homes: list[set[int]] = []
    before = zf.ledger(model).snapshot()["state_bytes"]["gradients"]
    for index, batch in enumerate(batches(6), start=1):
        model(*batch).backward()
        if index % 2 == 0:
            shown = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            homes.append({memory_of(grad).untyped_storage().data_ptr() for grad in shown})
            after = zf.ledger(model).snapshot()["state_bytes"]["gradients"]
            assert after == before or not contiguous, (before, after)  # nothing beside the block
            optimizer.step()
            optimizer.zero_grad()
    with zf.full_params(model):
        weights = [p.detach().clone() for p in model.parameters()]
    zf.close(model)
    return weights, homes


def compared(stage: int, precision: str | None) -> tuple[bool, list[int], int]:
    """Equal weights; storages of each step with the block; how many blocks in all."""
    plain, spread = run(stage, precision, contiguous=False)
    ours, homes = run(stage, precision, contiguous=True)
    assert len(spread[-1]) > 1  # or this would show nothing
    return all(map(torch.equal, plain, ours)), [len(each) for each in homes], len(set.union(*homes))


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_the_same_bits_from_one_block_in_every_step(ranks: Any, world: int, stage: int, precision: str | None) -> None:
    assert ranks(world, compared, stage, precision) == [(True, [1, 1, 1], 1)] * world


def several_backwards(contiguous: bool) -> list[Any]:
    """More of them than `accumulate` told, under no_sync and not, with gradients cleared in both ways between."""
    model = make_model(layers=2)
    model = zf.shard(model, stage=3, precision="bf16", units=Block, contiguous_gradients=contiguous)
    data, found = list(batches(5)), []
    model(*data[0]).backward()
    with zf.no_sync(model):
        model(*data[1]).backward()
    model(*data[2]).backward()
    found += [zf.full_grad(p) for p in model.parameters()]
    model.zero_grad(set_to_none=False)
    model(*data[3]).backward()
    found += [zf.full_grad(p) for p in model.parameters()]
    model.zero_grad()
    model(*data[4]).backward()
    found += [zf.full_grad(p) for p in model.parameters()]
    zf.close(model)
    return found


def several_alike() -> bool:
    return all(map(torch.equal, several_backwards(contiguous=False), several_backwards(contiguous=True)))


@pytest.mark.parametrize("world", [1, 2])
def test_sums_and_clearing_are_as_without(ranks: Any, world: int) -> None:
    assert ranks(world, several_alike) == [True] * world
