"""Whole tensors of a sharded model: read, written, refused; and an ordinary model after close."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import batches, largest_difference, make_model
from tests.ranks import raised
from torch import nn

import zerofold as zf

STAGES = (0, 1, 2, 3)


def prepared(stage: int, **settings: Any) -> tuple[Any, Any]:
    model = make_model()
    return zf.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage, **settings)


def read_everything(stage: int) -> float:
    reference = [p.detach() for p in make_model().parameters()]
    model, _ = prepared(stage)
    one_by_one = [zf.full(p) for p in model.parameters()]
    with zf.full_params(model):
        together = [p.detach().clone() for p in model.parameters()]
        assert all(type(p) is nn.Parameter for p in model.parameters())
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert shapes == [tuple(p.shape) for p in reference]
    zf.close(model)
    return max(largest_difference(reference, one_by_one), largest_difference(reference, together))


@pytest.mark.parametrize("stage", STAGES)
def test_whole_parameters_are_the_ones_put_in(ranks: Any, stage: int) -> None:
    assert ranks(3, read_everything, stage) == [0.0] * 3


def write(stage: int, from_rank: int | None, by_data: bool) -> tuple[float, float]:
    model, optimizer = prepared(stage)
    with zf.full_params(model, from_rank=from_rank), torch.no_grad():
        if from_rank is None or dist.get_rank() == from_rank:
            (model.head.weight.data if by_data else model.head.weight).fill_(0.25)
    read = zf.full(model.head.weight)
    (batch,) = batches(1)
    model(*batch).backward()
    optimizer.step()  # the optimizer starts from what was written
    moved = zf.full(optimizer.param_groups[0]["params"][-1])
    zf.close(model)
    return (read - 0.25).abs().max().item(), (moved - 0.25).abs().max().item()


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("from_rank", [None, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_changes_inside_full_params_are_kept(ranks: Any, stage: int, from_rank: int | None, by_data: bool) -> None:
    for wrong, moved in ranks(2, write, stage, from_rank, by_data):
        assert wrong == 0.0
        assert 1e-3 < moved < 0.05


def write_differently(stage: int) -> None:
    model, _ = prepared(stage)
    with zf.full_params(model), torch.no_grad():
        model.head.weight.fill_(float(dist.get_rank()))


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_write_different_values_are_told(ranks: Any, stage: int) -> None:
    for error in ranks(2, raised, write_differently, stage):
        assert "different values into 'head.weight'" in error
        assert "from_rank=0" in error


def whole_gradient(stage: int) -> float:
    (batch,) = batches(1)
    reference = make_model()
    reference(*batch).backward()
    model, _ = prepared(stage)
    model(*batch).backward()
    differences = []
    for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
        mean = expected.grad / dist.get_world_size()
        dist.all_reduce(mean)
        differences.append((zf.full_grad(p) - mean).abs().max().item())
    zf.close(model)
    return max(differences)


@pytest.mark.parametrize("stage", STAGES)
def test_full_grad_is_the_mean_over_ranks(ranks: Any, stage: int) -> None:
    assert max(ranks(2, whole_gradient, stage)) <= 1e-7


def fresh_after_step(stage: int) -> float:
    """Right after step(), before any forward, a read of a whole parameter waits for the other ranks' updates."""
    model, optimizer = prepared(stage)
    (batch,) = batches(1)
    model(*batch).backward()
    optimizer.step()
    direct = [p.detach().clone() for p in model.parameters()] if stage < 3 else None
    expected = [zf.full(p) for group in optimizer.param_groups for p in group["params"]]
    zf.close(model)
    return largest_difference(direct, expected) if direct else 0.0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_no_stale_parameter_is_read_after_a_step(ranks: Any, stage: int) -> None:
    assert ranks(2, fresh_after_step, stage) == [0.0, 0.0]


def eval_between_steps(stage: int) -> float:
    data = list(batches(4))
    finals = []
    for evaluates in (False, True):
        model, optimizer = prepared(stage)
        for batch in data:
            if evaluates:
                model.eval()
                with torch.no_grad():
                    model(*batch)
                model.train()
                model(*batch)  # with a graph that nobody uses
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        with zf.full_params(model):
            model(*data[0])
            finals.append([p.detach().clone() for p in model.parameters()])
        zf.close(model)
    return largest_difference(*finals)


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_between_steps_changes_nothing(ranks: Any, stage: int) -> None:
    assert ranks(2, eval_between_steps, stage) == [0.0, 0.0]


def closed(stage: int) -> bool:
    model, optimizer = prepared(stage)
    (batch,) = batches(1)
    model(*batch).backward()
    optimizer.step()
    zf.close(model)
    plain = all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    model(*batch).backward()
    alone = all(p.grad is not None for p in model.parameters())
    zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3 - stage)
    model(*batch).backward()
    zf.close(model)
    return plain and alone


@pytest.mark.parametrize("stage", STAGES)
def test_a_closed_model_is_ordinary_and_can_be_prepared_again(ranks: Any, stage: int) -> None:
    assert ranks(2, closed, stage) == [True, True]


def step_after_close(stage: int) -> str:
    model, optimizer = prepared(stage)
    zf.close(model)
    (batch,) = batches(1)
    model(*batch).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "stepped"


def trained_again(stage: int) -> int:
    """With the optimizer of a closed model, where its parameters never left it; how many hooks that leaves on it."""
    model, optimizer = prepared(0)
    for number in (0, 0, stage):
        (batch,) = batches(1)
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        zf.close(model)
        hooks = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_load_state_dict_post_hooks)
        zf.prepare(model, optimizer, stage=number)
    model(*batch).backward()
    before = zf.full(next(iter(model.parameters()))).clone()
    optimizer.step()
    changed = not torch.equal(before, zf.full(next(iter(model.parameters()))))
    zf.close(model)
    return hooks if changed else -1


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_whose_parameters_never_left_trains_the_model_again(ranks: Any, stage: int) -> None:
    assert ranks(2, trained_again, stage) == [0, 0]


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_of_a_closed_model_does_not_step_in_vain(ranks: Any, stage: int) -> None:
    for answer in ranks(2, step_after_close, stage):
        assert ("build a new optimizer" in answer) if stage else answer == "stepped"
