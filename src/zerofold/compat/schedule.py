"""What DeepSpeed's schedules have in common, as torch schedulers.

A torch scheduler counts from 0 when it is built, DeepSpeed's from -1: `last_epoch` is `last_batch_iteration` + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

Rate = float | Sequence[float]
"""One number for all parameter groups, or one for each."""


class Schedule(LRScheduler):
    """What the five have in common: numbers that depend on the iteration alone, and a state that is the iteration."""

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        optimizer = torch_optimizer(optimizer)
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)
        if last_batch_iteration != -1:
            # Resuming: the rates are the optimizer's business until the next step.
            self.last_batch_iteration = last_batch_iteration
            set_rates(optimizer, rates)
            self._last_lr = [*rates]

    @property
    def last_batch_iteration(self) -> int:
        """-1 before the first step."""
        return self.last_epoch - 1

    @last_batch_iteration.setter
    def last_batch_iteration(self, iteration: int) -> None:
        self.last_epoch = iteration + 1

    def step(self, last_batch_iteration: int | None = None) -> None:
        """To the next iteration, or to the one given."""
        if last_batch_iteration is not None:
            self.last_batch_iteration = last_batch_iteration - 1
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """The position alone: the shape of the schedule comes from its arguments."""
        return {"last_batch_iteration": self.last_batch_iteration, "last_lr": self.get_last_lr()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes DeepSpeed's states as well. The optimizer's own state has the rates."""
        if "last_batch_iteration" not in state_dict:
            found = ", ".join(map(str, state_dict)) or "nothing"
            raise ValueError(
                f"the state of a schedule has no last_batch_iteration but {found}: pass what state_dict() gave"
            )
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        self._last_lr = list(state_dict.get("last_lr", [group["lr"] for group in self.optimizer.param_groups]))


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """A rate that is a tensor stays one: a compiled or captured step reads it."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer itself, or the one that a wrapper has as `.optimizer`."""
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, torch.optim.Optimizer):
            return found
    raise TypeError(f"{type(optimizer).__name__} is no torch.optim.Optimizer: pass the optimizer whose rate is to move")


def per_group(groups: Sequence[Any], value: Rate, name: str) -> list[float]:
    if not isinstance(value, Sequence):
        return [value] * len(groups)
    if len(value) != len(groups):
        raise ValueError(
            f"{name} has {len(value)} numbers for {len(groups)} parameter groups; give one number or as many"
        )
    return list(value)


def positive(number: int, name: str) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number <= 0:
        raise ValueError(f"{name}={number!r} must be a whole number, at least 1")
    return number
