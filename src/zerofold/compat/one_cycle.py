"""The 1cycle policy (Smith 2018, arXiv:1803.09820): the rate up and down once, momentum the other way, then decay.

rate |    /\\                       momentum | ---.    .------
     |   /  \\____                            |     \\  /
     |__/        ''''---  decay              |      \\/
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from zerofold.compat.schedule import Rate, Schedule, per_group, torch_optimizer

_BETA2 = 0.99  # of every optimizer whose momentum is cycled, as in DeepSpeed


class OneCycle(Schedule):
    """From cycle_min_lr to cycle_max_lr and back, with the first of `betas` the other way, then the decay.

    cycle_first_step_size    steps up; cycle_second_step_size steps down, by default as many
    cycle_first_stair_count  steps of a staircase up, 0 for a straight line; cycle_second_stair_count the same, down
    decay_step_size          after the cycle the rate is divided by 1 + decay_lr_rate for each so many steps; 0 for none
    cycle_momentum           whether the first of an Adam's betas goes from cycle_max_mom to cycle_min_mom and back

    >>> import torch
    >>> optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> scheduler = OneCycle(optimizer, 0.1, 0.3, cycle_first_step_size=2)
    >>> rates = []
    >>> for _ in range(5):
    ...     optimizer.step(); scheduler.step()
    ...     rates.append(round(scheduler.get_last_lr()[0], 3))
    >>> rates
    [0.2, 0.3, 0.2, 0.1, 0.1]
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: Rate,
        cycle_max_lr: Rate,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rate = 0.8,
        cycle_max_mom: Rate = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        inner = torch_optimizer(optimizer)
        groups = inner.param_groups
        self._up = float(cycle_first_step_size)
        self._down = self._up if cycle_second_step_size is None else float(cycle_second_step_size)
        if self._up <= 0 or self._down < 0:
            raise ValueError(
                f"cycle_first_step_size={cycle_first_step_size} must be positive and "
                f"cycle_second_step_size={cycle_second_step_size} must not be negative"
            )
        self.total_size = self._up + self._down
        self._stairs_up = cycle_first_stair_count
        self._stairs_down = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.min_lrs = per_group(groups, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = per_group(groups, cycle_max_lr, "cycle_max_lr")
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum and _has_betas(inner)
        self._min_moms = per_group(groups, cycle_min_mom, "cycle_min_mom")
        self._max_moms = per_group(groups, cycle_max_mom, "cycle_max_mom")
        super().__init__(optimizer, last_batch_iteration)
        if self.cycle_momentum and last_batch_iteration == -1:
            self._set_momentum(self._min_moms)

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        if self.cycle_momentum and self._step_count > 1:  # torch takes the first step while it builds the schedule
            self._set_momentum(self._momentums())

    def get_lr(self) -> list[float | torch.Tensor]:
        if self.last_batch_iteration < self.total_size:
            part = self._height()
            return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        decay = self._decay(self.decay_lr_rate)
        return [rate / decay for rate in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group now; None where momentum is not cycled."""
        return [(momentum, _BETA2) for momentum in self._momentums()] if self.cycle_momentum else None

    def _momentums(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            part = self._height()
            return [high - (high - low) * part for low, high in zip(self._min_moms, self._max_moms, strict=True)]
        decay = self._decay(self.decay_mom_rate)
        return [momentum * decay for momentum in self._max_moms]

    def _set_momentum(self, momentums: list[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momentums, strict=True):
            group["betas"] = (momentum, _BETA2)

    def _height(self) -> float:
        """0 at the foot of the cycle, 1 at its top."""
        done = self.last_batch_iteration + 1
        passed = 1.0 + done / self.total_size - math.floor(1 + done / self.total_size)
        top = self._up / self.total_size
        is_rising = passed <= top
        stairs = self._stairs_up if is_rising else self._stairs_down
        if stairs <= 0:
            return passed / top if is_rising else (passed - 1) / (top - 1)
        # From whole numbers: a part that rounding left just below a stair would fall down a whole one.
        within = done % self.total_size
        if within <= self._up:
            return math.floor(within * stairs / self._up) / stairs
        return math.floor((self.total_size - within) * stairs / self._down) / stairs

    def _decay(self, rate: float) -> float:
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * ((self.last_batch_iteration - self.total_size + 1) / self.decay_step_size)


def _has_betas(optimizer: torch.optim.Optimizer) -> bool:
    if "betas" in optimizer.defaults:
        return True
    warnings.warn(
        f"cycle_momentum: {type(optimizer).__name__} has no betas, so only the rate is cycled; use an Adam, or set "
        "cycle_momentum to false",
        stacklevel=3,
    )
    return False
