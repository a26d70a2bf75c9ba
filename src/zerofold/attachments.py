"""What an engine holds for rooms further down, which it does not know: they put it there, and others read it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zerofold.plan.traffic import Share
from zerofold.traffic import Traffic


@dataclass(frozen=True)
class StepInfo:
    """How the last `optimizer.step()` went."""

    norm: float
    """Of all gradients over all ranks, before clipping."""
    skipped: bool
    """A gradient was infinite or NaN, so nothing was changed."""
    non_finite: str | None
    """The first parameter with such a gradient."""
    loss_scale: float
    """With which the gradients were computed; 1 where nothing is scaled."""
    skipped_total: int


@dataclass
class Verdict:
    """What was decided about one set of gradients, for all optimizers of the model that step by them."""

    info: StepInfo
    reduction: int
    """The number of the reduction that made the gradients."""
    stepped: set[torch.optim.Optimizer]
    """Each steps by it once: a second step wants another look at the gradients."""
    is_clipped: bool = False
    """One of the optimizers has scaled all gradients already, in place."""


class Updates(Protocol):
    """Of offloaded states, in the background."""

    def finish(self) -> None: ...
    def get_ready(self) -> None: ...
    def close(self) -> None: ...
    @property
    def figures(self) -> dict[str, float]: ...
    @property
    def nbytes_on_device(self) -> int: ...
    def let_go(self) -> None: ...


class Activations(Protocol):
    """What waits for backward, in bytes by tier."""

    @property
    def nbytes(self) -> dict[str, int]: ...
    @property
    def peak_nbytes(self) -> dict[str, int]: ...


class Checkpoints(Activations, Protocol):
    """Inputs of checkpointed blocks that wait for backward."""

    @property
    def arena_nbytes(self) -> int: ...
    @property
    def is_cut(self) -> bool: ...
    def count_in(self, traffic: Traffic | None) -> None: ...


class Stages(Protocol):
    """Of a pipeline, which this rank runs."""

    microbatches: int

    @property
    def memory(self) -> dict[str, int]: ...
    @property
    def share(self) -> Share: ...


class Counts(Protocol):
    """What is sent inside the model's own code, where no `Comm` sends it."""

    def around(self, *what: Any) -> AbstractContextManager[None]: ...
    def seen(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]: ...
    def remove(self) -> None: ...
