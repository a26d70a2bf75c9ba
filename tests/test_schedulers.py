"""DeepSpeed's schedules: its numbers, and torch's manners."""

from __future__ import annotations

import copy
import importlib.util
import os
from typing import Any

import pytest
import torch

from zerofold.compat import schedulers
from zerofold.compat.schedulers import VALID_LR_SCHEDULES, make_scheduler
from zerofold.config import ConfigError

CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_min_lr": 1e-4, "warmup_max_lr": 0.02, "warmup_num_steps": 7}),
    ("WarmupLR", {"warmup_num_steps": 5, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_min_lr": [1e-4, 0.0], "warmup_max_lr": [0.02, 0.3], "warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 6}),
    ("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 9, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 5}),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_min_ratio": 0.2, "warmup_num_steps": 3, "warmup_type": "linear"}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 5}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.004,
            "cycle_max_lr": 0.015,
            "cycle_first_step_size": 6,
            "cycle_second_step_size": 3,
            "cycle_first_stair_count": 3,
            "decay_step_size": 2,
            "decay_lr_rate": 0.1,
            "decay_mom_rate": 0.01,
            "cycle_min_mom": [0.7, 0.8],
        },
    ),
    ("LRRangeTest", {"lr_range_test_step_size": 4}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
]
STEPS = 30


def make_optimizer() -> torch.optim.Adam:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.03)]
    return torch.optim.Adam(groups)


def numbers(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[Any]:
    """Rates and betas, when built and after every step."""
    seen = [[(group["lr"], *group["betas"]) for group in optimizer.param_groups]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        seen.append([(group["lr"], *group["betas"]) for group in optimizer.param_groups])
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    return seen


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_the_numbers_are_those_of_deepspeed() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    theirs = importlib.import_module("deepspeed.runtime.lr_schedules")
    assert theirs.VALID_LR_SCHEDULES == VALID_LR_SCHEDULES
    for name, params in CASES:
        one, other = make_optimizer(), make_optimizer()
        expected = numbers(getattr(theirs, name)(one, **copy.deepcopy(params)), one)
        assert numbers(make_scheduler(name, params, other), other) == expected, (name, params)


def test_recorded_numbers() -> None:
    """From DeepSpeed 0.19.8, where it is not installed."""
    recorded = {
        0: [0.0, 0.0, 0.010034333188799373, 0.01590404182398875],
        4: [0.0, 0.0, 0.0003868528072345415, 0.0006131471927654584],
        6: [0.0, 0.0, 0.04306765580733931, 0.06826061944859854],
        8: [0.01, 0.028000000000000018, 0.046, 0.06400000000000002],
        10: [0.001, 0.00125, 0.0015, 0.00175],
    }
    for case, expected in recorded.items():
        name, params = CASES[case]
        optimizer = make_optimizer()
        seen = numbers(make_scheduler(name, params, optimizer), optimizer, 3)
        assert [groups[0][0] for groups in seen] == pytest.approx(expected, rel=1e-12, abs=0), name


@pytest.mark.parametrize(("name", "params"), CASES)
def test_a_resumed_schedule_goes_on_as_if_nothing_had_happened(name: str, params: dict[str, Any]) -> None:
    optimizer = make_optimizer()
    whole = numbers(make_scheduler(name, params, optimizer), optimizer, 20)
    first = make_optimizer()
    scheduler = make_scheduler(name, params, first)
    numbers(scheduler, first, 8)
    second = make_optimizer()
    resumed = make_scheduler(name, params, second)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert resumed.get_last_lr() == [rate for rate, *_ in whole[8]]
    assert numbers(resumed, second, 12) == whole[8:]


def test_a_state_of_deepspeed_loads_and_others_are_refused() -> None:
    optimizer = make_optimizer()
    scheduler = schedulers.WarmupLR(optimizer, warmup_num_steps=10, warmup_type="linear")
    scheduler.load_state_dict({"last_batch_iteration": 4})
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.05, 0.015]
    with pytest.raises(ValueError, match="no last_batch_iteration but last_epoch: pass"):
        scheduler.load_state_dict({"last_epoch": 3})


def test_built_in_the_middle_leaves_the_rate_until_the_next_step() -> None:
    optimizer = make_optimizer()
    scheduler = schedulers.WarmupLR(optimizer, 0.0, 0.2, 10, "linear", last_batch_iteration=4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.03]
    optimizer.step()
    scheduler.step()
    assert scheduler.last_batch_iteration == 5
    assert scheduler.get_last_lr() == [0.1, 0.1]
    scheduler.step(7)
    assert scheduler.get_last_lr() == pytest.approx([0.14, 0.14])


def test_rates_that_are_tensors_stay_tensors() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)
    scheduler = schedulers.WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear")
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.05)


def test_torch_schedulers_by_name_and_messages() -> None:
    optimizer = make_optimizer()
    assert isinstance(make_scheduler("StepLR", {"step_size": 3}, optimizer), torch.optim.lr_scheduler.StepLR)
    with pytest.raises(ConfigError, match='no schedule of this name here; did you mean "WarmupLR"'):
        make_scheduler("WarmUpLr", {}, optimizer)
    with pytest.raises(ConfigError, match=r'scheduler.params.total_num_steps: nothing is given; add "total_num_steps"'):
        make_scheduler("WarmupDecayLR", {}, optimizer)
    with pytest.raises(ValueError, match="warmup_max_lr has 3 numbers for 2 parameter groups"):
        schedulers.WarmupLR(optimizer, warmup_max_lr=[0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match="warmup_type='cosine' does not exist; use 'log' or 'linear'"):
        schedulers.WarmupLR(optimizer, warmup_type="cosine")
    with pytest.raises(TypeError, match="int is no torch.optim.Optimizer"):
        schedulers.WarmupLR(3)


def test_momentum_is_left_alone_where_there_is_none() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.warns(UserWarning, match="SGD has no betas, so only the rate is cycled"):
        scheduler = schedulers.OneCycle(optimizer, 0.1, 0.2)
    assert scheduler.get_mom() is None
