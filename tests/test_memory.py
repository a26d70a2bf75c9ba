"""What a rank holds: states by the formula, gathered bytes under their bound, buffers of a constant size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import batches, make_model

import zerofold as zf
from zerofold.engine import Engine

ALIGNMENT = 128


def held_states(stage: int) -> dict[str, Any]:
    """Between backward and step, where the most is held."""
    model = make_model(width=64, layers=4)
    count = len(list(model.parameters()))
    model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=stage)
    for batch in batches(2):
        optimizer.zero_grad()
        model(*batch).backward()
        snapshot = zf.ledger(model).snapshot()
        optimizer.step()
    after = zf.ledger(model).snapshot()
    zf.close(model)
    return {**snapshot, "optimizer": after["state_bytes"]["optimizer"], "parameters": count}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_take_what_the_formula_says(ranks: Any, world: int, stage: int) -> None:
    cut = {0: (), 1: ("optimizer",), 2: ("optimizer", "gradients"), 3: ("optimizer", "gradients", "parameters")}[stage]
    for held in ranks(world, held_states, stage):
        padding = ALIGNMENT * held["parameters"]
        bytes_per_parameter = {"parameters": 4, "gradients": 4, "optimizer": 8}
        measured = {**held["state_bytes"], "optimizer": held["optimizer"]}
        for state, each in bytes_per_parameter.items():
            formula = each * held["psi"] / (world if state in cut else 1)
            assert measured[state] <= formula * 1.01 + padding * each / 4, state
        assert held["temporary_bytes"]["gathered"] == 0


def live_bytes_seen(live_bytes: int | None) -> tuple[int, int, int]:
    """The most memory that gathered storages had at any forward or backward of a module, and the bound."""
    model = make_model(width=64, layers=6)
    model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, live_bytes=live_bytes)
    engine, most = Engine.of(model), 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(slab.storage.tensor.untyped_storage().nbytes() for slab in engine.slabs()))

    for module in model.modules():
        module.register_forward_pre_hook(look)
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    for batch in batches(3):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    bound, total = engine.schedule.live_bytes, sum(slab.storage.full_nbytes for slab in engine.slabs())
    zf.close(model)
    return most, bound, total


def test_gathered_bytes_stay_under_their_bound(ranks: Any) -> None:
    for most, bound, total in ranks(2, live_bytes_seen, None):
        assert 0 < most <= bound < 0.6 * total
    ((_, default, total), _) = ranks(2, live_bytes_seen, None)
    for most, bound, _ in ranks(2, live_bytes_seen, default + total // 10):
        assert 0 < most <= bound == default + total // 10


def buffers(width: int, buffer_bytes: int) -> int:
    model = make_model(width=width)
    model, _ = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, buffer_bytes=buffer_bytes)
    for batch in batches(2):
        model(*batch).backward()
    held = zf.ledger(model).snapshot()["temporary_bytes"]["buffers"]
    zf.close(model)
    return held


def test_fused_buffers_do_not_grow_with_the_model(ranks: Any) -> None:
    small, large = (ranks(2, buffers, width, 16384)[0] for width in (64, 256))
    assert small == large <= 4 * 16384


def grows_over_steps(stage: int) -> tuple[int, int]:
    import gc

    model = make_model()
    model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=stage)

    def tensors_after(steps: int) -> int:
        for batch in batches(steps):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            model(*batch)  # a graph that is dropped
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    counts = tensors_after(3), tensors_after(12)
    zf.close(model)
    return counts


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_piles_up_over_steps(ranks: Any, stage: int) -> None:
    for early, late in ranks(2, grows_over_steps, stage):
        assert late < early + 9  # one for each further step; a call that is just over may still hold its tensor
