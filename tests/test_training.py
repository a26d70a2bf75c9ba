"""Torch semantics around the step: groups, schedulers, clearing, accumulation, closures, state from before."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import batches, largest_difference, make_model
from tests.ranks import raised
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zerofold as zf

STAGES = (0, 1, 2, 3)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-3)


def whole(model: nn.Module) -> list[torch.Tensor]:
    with zf.full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def groups_and_schedule(stage: int) -> float:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> None:
        for batch in batches(count):
            model(*batch).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    reference = make_model()
    wrapped = DistributedDataParallel(reference)
    optimizer = two_groups(reference)
    train(wrapped, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8), 8)

    # The scheduler and two steps of state exist before prepare: both must be carried over.
    model = make_model()
    plain = DistributedDataParallel(model)
    optimizer = two_groups(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    data = list(batches(8))
    for batch in data[:2]:
        plain(*batch).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    same, again = zf.prepare(model, optimizer, stage=stage)
    assert same is model
    assert again is optimizer
    for batch in data[2:]:
        model(*batch).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    ours = whole(model)
    zf.close(model)
    return largest_difference([p.detach() for p in reference.parameters()], ours)


@pytest.mark.parametrize("stage", STAGES)
def test_groups_schedulers_and_existing_state_are_kept(ranks: Any, stage: int) -> None:
    assert ranks(2, groups_and_schedule, stage) == [0.0, 0.0]


def shard_first(stage: int) -> float:
    """zf.shard, then an optimizer on what the model shows, as with FSDP2."""
    model = zf.shard(make_model(), stage=stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zf.attach(model, optimizer)
    reference, expected = make_model(), None
    other = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    wrapped = DistributedDataParallel(reference)
    for batch in batches(3):
        for trained, its in ((model, optimizer), (wrapped, other)):
            trained(*batch).backward()
            its.step()
            its.zero_grad()
    expected = [p.detach() for p in reference.parameters()]
    difference = largest_difference(expected, whole(model))
    zf.close(model)
    return difference


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_built_after_shard(ranks: Any, stage: int) -> None:
    assert ranks(2, shard_first, stage) == [0.0, 0.0]


def unattached_at_stage_three() -> float:
    model = zf.shard(make_model(), stage=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    before = whole(model)
    for batch in batches(2):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(state["exp_avg"].shape == p.shape for p, state in optimizer.state.items())
    moved = largest_difference(before, whole(model))
    zf.close(model)
    return moved


def test_where_parameters_are_cut_no_attaching_is_needed(ranks: Any) -> None:
    assert all(moved > 1e-4 for moved in ranks(2, unattached_at_stage_three))


CLEARINGS = ("optimizer", "optimizer zeros", "model", "model zeros")


def clear(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    owner: Any = optimizer if how.startswith("optimizer") else model
    owner.zero_grad(set_to_none="zeros" not in how)


def gradient_after_clearing(stage: int, how: str, under_no_sync: bool) -> float:
    """A gradient that was cleared, on whichever face and at whatever point, must not come back."""
    first, second = batches(2)
    model = make_model()
    model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    if under_no_sync:
        with zf.no_sync(model):
            model(*first).backward()
    else:
        model(*first).backward()
    clear(how, model, optimizer)
    model(*second).backward()
    optimizer.step()
    ours = whole(model)
    zf.close(model)
    reference = make_model()
    wrapped = DistributedDataParallel(reference)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    wrapped(*second).backward()
    plain.step()
    return largest_difference([p.detach() for p in reference.parameters()], ours)


@pytest.mark.parametrize("under_no_sync", [False, True])
@pytest.mark.parametrize("how", CLEARINGS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_cleared_gradient_does_not_come_back(ranks: Any, stage: int, how: str, under_no_sync: bool) -> None:
    assert max(ranks(2, gradient_after_clearing, stage, how, under_no_sync)) <= 1e-7


class LeavesOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
        for layer in self.layers[:count]:
            x = layer(x)
        return x


def gradients_of_a_layer_left_out(stage: int, how: str, twice: bool) -> list[float | None]:
    """What a backward under no_sync left of it was cleared, and the next one, or two, do not come to it."""
    model = LeavesOut()
    model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    with zf.no_sync(model):
        model(torch.ones(2, 8), 2).sum().backward()
    clear(how, model, optimizer)
    if twice:
        with zf.no_sync(model):
            model(torch.ones(2, 8), 1).sum().backward()
    model(torch.ones(2, 8), 1).sum().backward()
    found = [zf.full_grad(face) for face in optimizer.param_groups[0]["params"][2:]]
    optimizer.step()
    zf.close(model)
    return [None if gradient is None else gradient.abs().max().item() for gradient in found]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("how", CLEARINGS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_cleared_gradient_does_not_come_back_where_backward_does_not_come(
    ranks: Any, stage: int, how: str, twice: bool
) -> None:
    expected = 0.0 if "zeros" in how else None
    assert ranks(2, gradients_of_a_layer_left_out, stage, how, twice) == [[expected] * 2] * 2


def accumulate_without_no_sync(stage: int, counts: list[int], accumulate: int) -> tuple[float, list[float]]:
    """Difference from DDP, and how often all gradients were sent in each step."""
    data, world = list(batches(sum(counts))), dist.get_world_size()
    results = []
    sent: list[float] = []
    for sharded in (False, True):
        model = make_model()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        run: nn.Module = model
        if sharded:
            zf.prepare(model, optimizer, stage=stage, accumulate=accumulate)
        else:
            run = DistributedDataParallel(model)
        position = 0
        for count in counts:
            before = _sent(model) if sharded else 0
            for batch in data[position : position + count]:
                run(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            position += count
            if sharded:
                whole_once = sum(p.numel() for p in model.parameters()) * 4 * (world - 1) / world
                sent.append(round((_sent(model) - before) / whole_once, 1))
        results.append(whole(model) if sharded else [p.detach() for p in model.parameters()])
        if sharded:
            zf.close(model)
    return largest_difference(*results), sent


def _sent(model: nn.Module) -> float:
    sent = zf.ledger(model).snapshot()["comm_bytes"]
    return sent.get("reduce_scatter", 0) + sent.get("all_reduce", 0) / 2


@pytest.mark.parametrize("stage", [0, 1])
def test_whole_gradients_are_reduced_once_a_step(ranks: Any, stage: int) -> None:
    """Also when a step has fewer backwards than said, or more."""
    for difference, sent in ranks(2, accumulate_without_no_sync, stage, [3, 3, 2, 5], 3):
        assert difference <= 1e-6
        assert sent == [1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize("stage", [2, 3])
def test_cut_gradients_are_reduced_by_every_backward(ranks: Any, stage: int) -> None:
    for difference, sent in ranks(2, accumulate_without_no_sync, stage, [3, 1, 2], 3):
        assert difference <= 1e-6
        assert sent == [3.0, 1.0, 2.0]


def read_before_reduced(stage: int) -> None:
    model = make_model()
    zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    (batch,) = batches(1)
    with zf.no_sync(model):
        model(*batch).backward()
    zf.full_grad(next(model.parameters()))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_is_not_reduced_yet_cannot_be_read(ranks: Any, stage: int) -> None:
    for error in ranks(2, raised, read_before_reduced, stage):
        assert "still a local sum on every rank" in error
        assert "outside no_sync" in error


def run_with_closures(stage: int | None) -> list[torch.Tensor]:
    model = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is None:
        run: nn.Module = DistributedDataParallel(model)
    else:
        run, _ = zf.prepare(model, optimizer, stage=stage, clip=0.1)
    data = batches(3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = run(*next(data))
        loss.backward()
        if stage is None:
            torch.nn.utils.clip_grad_norm_(run.parameters(), 0.1)
        return loss

    for _ in range(3):
        optimizer.step(closure)
    if stage is not None:
        zf.close(model)
    return [p.detach() for p in model.parameters()]


def step_with_closure(stage: int) -> float:
    return largest_difference(run_with_closures(None), run_with_closures(stage))


@pytest.mark.parametrize("stage", STAGES)
def test_a_closure_is_clipped_and_reduced_too(ranks: Any, stage: int) -> None:
    assert max(ranks(2, step_with_closure, stage)) <= 1e-6


def norms(stage: int, norm_type: float) -> tuple[float, float, float]:
    (batch,) = batches(1)
    model = make_model()
    zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    model(*batch).backward()
    before = zf.clip_grad_norm_(model, 0.1, norm_type).item()
    after = zf.clip_grad_norm_(model, 1e9, norm_type).item()
    zf.close(model)
    reference = make_model()
    wrapped = DistributedDataParallel(reference)  # must live until backward has reduced
    wrapped(*batch).backward()
    return before, after, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type).item()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_is_torchs(ranks: Any, stage: int, norm_type: float) -> None:
    for before, after, expected in ranks(2, norms, stage, norm_type):
        assert before == pytest.approx(expected, rel=1e-6)
        assert after == pytest.approx(min(expected, 0.1), rel=1e-4)


def wasted_gradients(stage: int) -> list[str]:
    model = make_model()
    model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches(3):
            model(*batch).backward()
            optimizer.zero_grad()
        mine = [str(w.message) for w in caught if "no parameter has changed" in str(w.message)]
    zf.close(model)
    return mine


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_without_effect_is_said_once(ranks: Any, stage: int) -> None:
    for messages in ranks(2, wasted_gradients, stage):
        assert len(messages) == 1
        assert "zf.attach(model, optimizer)" in messages[0]
