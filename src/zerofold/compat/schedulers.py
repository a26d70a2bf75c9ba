"""DeepSpeed's learning-rate schedules: its arguments and its numbers, as torch schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from zerofold.compat.one_cycle import OneCycle
from zerofold.compat.schedule import Rate, Schedule, per_group, positive, torch_optimizer
from zerofold.config.components import SCHEDULES, check_params, scheduler_params
from zerofold.config.kinds import AUTO

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "make_scheduler",
]

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


class WarmupLR(Schedule):
    """From warmup_min_lr up to warmup_max_lr, and then that.

    warmup_max_lr     one number, or one for each parameter group; by default each group's own rate
    warmup_num_steps  steps until the maximum is reached
    warmup_type       "log" or "linear"

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> scheduler = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    >>> rates = []
    >>> for _ in range(6):
    ...     optimizer.step(); scheduler.step()
    ...     rates.append(round(scheduler.get_last_lr()[0], 3))
    >>> rates
    [0.0, 0.025, 0.05, 0.075, 0.1, 0.1]
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        groups = torch_optimizer(optimizer).param_groups
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in groups]
        self.min_lrs = per_group(groups, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = per_group(groups, warmup_max_lr, "warmup_max_lr")
        self.warmup_num_steps, self._rise = _warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | torch.Tensor]:
        iteration = self.last_batch_iteration
        if iteration < 0:
            return [*self.min_lrs]
        part = self._rise(iteration) if iteration < self.warmup_num_steps else self._after_warmup(iteration)
        return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _after_warmup(self, iteration: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Up as WarmupLR, then down to zero, in a line, at total_num_steps.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> scheduler = WarmupDecayLR(optimizer, total_num_steps=6, warmup_max_lr=0.1, warmup_num_steps=2)
    >>> rates = []
    >>> for _ in range(7):
    ...     optimizer.step(); scheduler.step()
    ...     rates.append(round(scheduler.get_last_lr()[0], 3))
    >>> rates
    [0.0, 0.1, 0.1, 0.075, 0.05, 0.025, 0.0]
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = positive(total_num_steps, "total_num_steps")
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after_warmup(self, iteration: int) -> float:
        left, length = self.total_num_steps - iteration, self.total_num_steps - self.warmup_num_steps
        return max(0.0, left / max(1.0, length))


class WarmupCosineLR(Schedule):
    """Each group's own rate times a part: up from warmup_min_ratio to 1, then along a cosine to cos_min_ratio.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    >>> scheduler = WarmupCosineLR(optimizer, total_num_steps=6, warmup_num_steps=2, cos_min_ratio=0.0)
    >>> rates = []
    >>> for _ in range(7):
    ...     optimizer.step(); scheduler.step()
    ...     rates.append(round(scheduler.get_last_lr()[0], 3))
    >>> rates
    [0.0, 1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = positive(total_num_steps, "total_num_steps")
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_num_steps, self._rise = _warmup(warmup_num_steps, warmup_type)
        self.org_lrs = [float(group["lr"]) for group in torch_optimizer(optimizer).param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def get_lr_ratio(self) -> float:
        """The part of its own rate that each group has now."""
        iteration = self.last_batch_iteration
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + self._rise(iteration) * (1.0 - self.warmup_min_ratio)
        length = max(1, self.total_num_steps - self.warmup_num_steps)
        passed = min(1.0, (iteration - self.warmup_num_steps + 1) / length)
        height = (1 + math.cos(math.pi * passed)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [rate * self.get_lr_ratio() for rate in self.org_lrs]


class LRRangeTest(Schedule):
    """Up from lr_range_test_min_lr for as long as training goes on, to see what rate a model can stand.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> scheduler = LRRangeTest(optimizer, 0.1, lr_range_test_step_size=2)
    >>> optimizer.step(); scheduler.step(); optimizer.step(); scheduler.step()
    >>> scheduler.get_last_lr()
    [0.2]
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Rate = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        groups = torch_optimizer(optimizer).param_groups
        self.min_lr = per_group(groups, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = positive(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | torch.Tensor]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        factor = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [rate * factor for rate in self.min_lr]


def make_scheduler(name: str, params: Mapping[str, Any] | None, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The schedule that a config names: one of DeepSpeed's, or a class of torch.optim.lr_scheduler.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> type(make_scheduler("WarmupLR", {"warmup_num_steps": 10}, optimizer)).__name__
    'WarmupLR'
    >>> make_scheduler("WarmupLR", {"warmup_steps": 10}, optimizer)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    zerofold.config.errors.ConfigError: scheduler.params.warmup_steps: 10 is given, ... did you mean "warmup_num_steps"?
    """
    known = scheduler_params(name)
    given = check_params(params or {}, known, "scheduler.params")
    given = {key: value for key, value in given.items() if value != AUTO}
    own: dict[str, Callable[..., LRScheduler]] = {
        "LRRangeTest": LRRangeTest,
        "OneCycle": OneCycle,
        "WarmupLR": WarmupLR,
        "WarmupDecayLR": WarmupDecayLR,
        "WarmupCosineLR": WarmupCosineLR,
    }
    build = own[name] if name in SCHEDULES else getattr(torch.optim.lr_scheduler, name)
    scheduler: LRScheduler = build(optimizer, **given)
    return scheduler


def _warmup(steps: int, kind: str) -> tuple[int, Callable[[int], float]]:
    """How many steps, at least 2, and the part of the way that is done after each."""
    steps = max(2, positive(steps or 1, "warmup_num_steps"))  # 0 is what older Trainers write for no warmup
    if kind == "log":
        unit = 1.0 / math.log(steps)
        return steps, lambda iteration: unit * math.log(iteration + 1)
    if kind == "linear":
        return steps, lambda iteration: iteration / steps
    raise ValueError(f"warmup_type={kind!r} does not exist; use 'log' or 'linear'")
