"""`contiguous_gradients=True` (M_d): the same bits, in one block that is there before the first forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

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


def prepared(stage: int, precision: str | None, accumulate: int, contiguous: bool) -> tuple[Any, torch.optim.Optimizer]:
    model = make_model(layers=3)
    return zf.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        stage=stage,
        precision=precision,
        units=Block,
        accumulate=accumulate,
        contiguous_gradients=contiguous,
    )


def sums(stage: int, precision: str, accumulate: int, contiguous: bool) -> tuple[list[Tensor], list[int], int]:
    """Weights after two steps, bytes of gradients before the first backward and after each, and how many slabs."""
    model, optimizer = prepared(stage, precision, accumulate, contiguous)
    held = [zf.ledger(model).snapshot()["state_bytes"]["gradients"]]
    for index, batch in enumerate(batches(2 * accumulate), start=1):
        model(*batch).backward()
        held.append(zf.ledger(model).snapshot()["state_bytes"]["gradients"])
        if index % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    with zf.full_params(model):
        weights = [p.detach().clone() for p in model.parameters()]
    slabs = len(model._zerofold_engine.slabs())
    zf.close(model)
    return weights, held, slabs


def sums_compared(stage: int, precision: str, accumulate: int) -> tuple[bool, int, int]:
    """Equal weights; by how much gradients ever took more than the block; and the block more than they took at most
    without it, but for rounding up.
    """
    plain, loose, slabs = sums(stage, precision, accumulate, contiguous=False)
    ours, block, _ = sums(stage, precision, accumulate, contiguous=True)
    more = block[0] - max(loose)
    return all(map(torch.equal, plain, ours)), max(block) - block[0], max(0, more - 2 * 512 * slabs)


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (1, "fp32"), (1, "bf16"), (1, "fp16")])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_sums_wait_in_the_block_and_take_no_more_than_before(
    ranks: Any, stage: int, precision: str, accumulate: int
) -> None:
    assert ranks(2, sums_compared, stage, precision, accumulate) == [(True, 0, 0)] * 2


class Twice(nn.Module):
    """Its block's gradients come twice in a backward, since a checkpoint that is reentrant has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.block = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = zf.checkpoint(self.block, x, use_reentrant=True)
        return x.square().sum()


def twice(contiguous: bool) -> list[Tensor]:
    model = zf.shard(Twice(), stage=1, units=nn.Sequential, accumulate=2, contiguous_gradients=contiguous)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found: list[Tensor] = []
    for index in range(6):
        model(torch.randn(4, 8, generator=generator).requires_grad_()).backward()
        if index % 2:
            found += [zf.full_grad(p) for p in model.parameters()]
            model.zero_grad()
    zf.close(model)
    return found


def twice_alike() -> bool:
    return all(map(torch.equal, twice(contiguous=False), twice(contiguous=True)))


def test_a_gradient_that_comes_again_while_its_sum_is_sent_does_not_change_it(ranks: Any) -> None:
    assert ranks(2, twice_alike) == [True] * 2


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


def accumulated(contiguous: bool) -> list[Any]:
    """Micro-batches that zf.accumulate adds up before a rank alone takes the sum: in fp32, wherever that goes."""
    model = zf.shard(make_model(layers=2), stage=2, precision="bf16", units=Block, contiguous_gradients=contiguous)
    zf.accumulate(model, lambda model, batch: model(*batch), list(batches(3)))
    found = [zf.full_grad(p) for p in model.parameters()]
    zf.close(model)
    return found


def accumulated_alike() -> bool:
    return all(map(torch.equal, accumulated(contiguous=False), accumulated(contiguous=True)))


def test_sums_of_accumulate_are_as_without(ranks: Any) -> None:
    assert ranks(1, accumulated_alike) == [True]


def predicted_lines(folder: Path, stage: int, precision: str | None, accumulate: int) -> dict[str, Any]:
    """By name, what ledger.json has of the gradients: predicted and measured."""
    model, optimizer = prepared(stage, precision, accumulate, contiguous=True)
    with zf.Run(folder / str(dist.get_rank()), model, every=1) as run:
        for index, batch in enumerate(batches(2 * accumulate), start=1):
            model(*batch).backward()
            if index % accumulate == 0:
                optimizer.step()
                run.step()
                optimizer.zero_grad()
    zf.close(model)
    if dist.get_rank():
        return {}
    lines = json.loads((folder / "0" / "ledger.json").read_text())["predicted"]
    return {line["line"]: (line["predicted"], line["measured"]) for line in lines if line["where"] == "device"}


@pytest.mark.parametrize(
    ("stage", "precision", "accumulate"),
    [(0, None, 1), (2, "bf16", 1), (3, "bf16", 2), (0, None, 2), (1, "bf16", 2), (1, "bf16", 3)],
)
@pytest.mark.parametrize("world", [1, 2])
def test_the_plan_knows_the_block_to_the_byte(
    ranks: Any, tmp_path: Path, world: int, stage: int, precision: str | None, accumulate: int
) -> None:
    lines = ranks(world, predicted_lines, tmp_path, stage, precision, accumulate)[0]
    for name in ("gradient arena", "gradients"):
        predicted, measured = lines[name]
        assert predicted == measured > 0, name
    assert lines["gradient arena"][0] % 512 == 0


def test_the_block_is_there_in_forward_too() -> None:
    """A rank alone has its gradients one by one otherwise, when activations go; the block is in every moment."""
    rows = [
        zf.plan(params=1e9, world_size=1, machine="H200", checkpoint_every=0, micro_batch=8, contiguous_gradients=each)
        for each in (False, True)
    ]
    without, with_block = (each.to_dict()["stages"][-1] for each in rows)
    assert without["gradient_arena_bytes"] == 0
    assert with_block["gradient_arena_bytes"] == with_block["held_bytes"]["gradients"] >= 2e9
    grown = with_block["device_peak_bytes"] - without["device_peak_bytes"]
    assert 0 < grown <= 1.1 * with_block["gradient_arena_bytes"]
    assert rows[1].config["contiguous_gradients"] is True
