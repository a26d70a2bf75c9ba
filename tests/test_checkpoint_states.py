"""Optimizer states that come late, are not there, or go; what a checkpoint leaves out begins anew; plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import RankPool
from torch import Tensor, nn

import zerofold as zf
from zerofold.checkpoint.plain import decode, encode
from zerofold.engine import Engine
from zerofold.unit import State

BF16_MOMENTS = zf.Precision(parameters=torch.bfloat16, moments=torch.bfloat16)


def make(kind: Any = torch.optim.AdamW, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.Linear(8, 8).requires_grad_(False))
    return zf.prepare(model, kind([p for p in model.parameters() if p.requires_grad], lr=0.1), **settings)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        data = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    return [zf.full(p).clone() for p in model.parameters()]


def from_before_the_first_step(path: Path, offload: Any) -> list[list[Tensor]]:
    """The weights of two steps: by a fresh run, by one that loads what was saved before any, by one whose states go."""
    found = []
    model, optimizer = make(stage=3, offload=offload)
    zf.save(model, optimizer, path)
    train(model, optimizer, range(2))
    found.append(weights(model))
    zf.load(model, optimizer, path)
    train(model, optimizer, range(2))
    found.append(weights(model))
    zf.load(model, None, path)
    optimizer.state.clear()
    train(model, optimizer, range(2))
    found.append(weights(model))
    zf.close(model)
    return found


@pytest.mark.parametrize("tier", [None, "host", "nvme"])
def test_states_that_are_not_there_begin_as_zeros_wherever_they_live(
    ranks: RankPool, tmp_path: Path, tier: str | None
) -> None:
    offload = {"optimizer": tier, "path": str(tmp_path / "away")} if tier == "nvme" else tier
    for fresh, loaded, cleared in ranks(2, from_before_the_first_step, tmp_path / "run", offload):
        assert all(map(torch.equal, fresh, loaded))
        assert all(map(torch.equal, fresh, cleared))


def unfrozen_late(kind: Any, settings: dict[str, Any]) -> bool:
    model, optimizer = make(kind, **settings)
    train(model, optimizer, range(2))
    before = weights(model)[-1]
    model[3].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[3].parameters())})
    train(model, optimizer, range(2))
    has_learnt = not torch.equal(weights(model)[-1], before)
    zf.close(model)
    return has_learnt


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"stage": 3, "precision": BF16_MOMENTS}),
        (torch.optim.AdamW, {"stage": 2, "cut": "whole", "precision": BF16_MOMENTS}),
        (torch.optim.Adafactor, {"stage": 2, "cut": "whole"}),
        (torch.optim.Adagrad, {"stage": 3}),
    ],
    ids=["bf16 moments", "bf16 moments by owner", "factored", "from the start"],
)
def test_parameters_come_late_to_an_optimizer_with_states(ranks: RankPool, kind: Any, settings: dict[str, Any]) -> None:
    assert ranks(2, unfrozen_late, kind, settings) == [True, True]


def added_before_the_load(path: Path) -> list[Any]:
    """States that are loaded for a group that no step has seen yet have the dtype that a step would give them."""
    found = []
    for is_resumed in (False, True):
        model, optimizer = make(torch.optim.SGD, stage=2, precision="bf16")
        optimizer.defaults["momentum"] = 0.9
        model[3].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[3].parameters()), "momentum": 0.9})
        if is_resumed:
            zf.load(model, optimizer, path)
        else:
            train(model, optimizer, range(2))
            zf.save(model, optimizer, path)
        train(model, optimizer, range(2, 3))
        state = optimizer.state[optimizer.param_groups[1]["params"][0]]["momentum_buffer"]
        found.append((weights(model), zf.full(state)))
        zf.close(model)
    return found


def test_groups_that_were_added_before_a_load_get_their_states_exactly(ranks: RankPool, tmp_path: Path) -> None:
    for (weights, state), (loaded, loaded_state) in ranks(2, added_before_the_load, tmp_path):
        assert state.dtype == loaded_state.dtype == torch.float32
        assert torch.equal(state, loaded_state)
        assert all(map(torch.equal, weights, loaded))


def an_empty_group(path: Path) -> list[float]:
    rates = []
    for is_resumed in (False, True):
        model = nn.ParameterDict({"none": nn.Parameter(torch.zeros(0, 3)), "some": nn.Parameter(torch.ones(5))})
        groups = [{"params": [model["none"]]}, {"params": [model["some"]]}]
        model, optimizer = zf.prepare(model, torch.optim.SGD(groups, lr=1.0), stage=3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        if is_resumed:
            zf.load(model, optimizer, path, scheduler=scheduler)
            rates += [group["lr"] for group in optimizer.param_groups] + scheduler.get_last_lr()
        else:
            optimizer.step()
            scheduler.step()
            zf.save(model, optimizer, path, scheduler=scheduler)
        zf.close(model)
    return rates


def test_a_group_without_elements_keeps_its_learning_rate(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(1, an_empty_group, tmp_path) == [[0.5, 0.5, 0.5, 0.5]]


def in_a_file(path: Path, precision: Any) -> bool:
    model, optimizer = make(stage=1, precision=precision, offload={"optimizer": "nvme", "path": str(path)})
    train(model, optimizer, range(2))
    is_there = all(torch.isfinite(each).all() for each in weights(model))
    zf.close(model)
    return is_there


def test_fp16_masters_may_live_in_a_file(ranks: RankPool, tmp_path: Path) -> None:
    policy = zf.Precision(parameters=torch.float16, moments=torch.bfloat16)
    assert ranks(2, in_a_file, tmp_path, "fp16") == [True, True]
    assert ranks(2, in_a_file, tmp_path, policy) == [True, True]


def average_of_what_came_late(path: Path, saves: bool) -> list[Tensor]:
    model, optimizer = make(stage=3)
    average = zf.EMA(model, decay=0.5)
    train(model, optimizer, range(1))
    model[3].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[3].parameters())})
    if saves:
        zf.save(model, optimizer, path)
    train(model, optimizer, range(1, 3))
    found = [zf.full(each) for each in average.state_dict().values()]
    zf.close(model)
    return found


def test_saving_does_not_change_the_average_of_what_came_late(ranks: RankPool, tmp_path: Path) -> None:
    saved, alone = (ranks(2, average_of_what_came_late, tmp_path, saves)[0] for saves in (True, False))
    assert all(map(torch.equal, saved, alone))


def test_tensors_in_sets_and_as_keys_are_all_kept() -> None:
    stored: dict[str, Tensor] = {}
    value = {"set": {torch.tensor(1), torch.tensor(2)}, "keys": {torch.tensor(3): "a", torch.tensor(4): "b"}}
    found = decode(encode(value, "extra", stored), stored.__getitem__)
    assert sorted(int(each) for each in found["set"]) == [1, 2]
    assert {int(key): text for key, text in found["keys"].items()} == {3: "a", 4: "b"}


def read_while_it_is_on_its_way(path: Path) -> list[Any]:
    model, _optimizer = make(stage=3)
    zf.save(model, None, path)
    model[3].requires_grad_(True)
    zf.load(model, None, path)  # gathers the unit of what was unfrozen, and once more when it has the new values
    unit = next(unit for unit in Engine.of(model).units if unit.state is State.GATHERING)
    model[3].weight.sum()
    found = unit.state is State.READY
    zf.close(model)
    return [found]


def test_parameters_that_are_shown_wait_for_what_was_loaded(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, read_while_it_is_on_its_way, tmp_path) == [[True], [True]]
