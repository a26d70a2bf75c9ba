"""Uneven data: a rank that has run out goes on with what it had, without weight, until all ranks are through."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, MutableMapping
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from zerofold.engine import Engine
from zerofold.nested import map_tensors

Batch = TypeVar("Batch")


class join(Generic[Batch]):  # noqa: N801  # used like a function, as zip and enumerate are
    """The batches of this rank, and then as many shadows as other ranks have batches more.

    A shadow is this rank's last batch once more (where it had none at all, the first batch of another rank). It runs
    through the same code, so every rank makes the same calls (gathers, reductions, steps, the user's own), and its
    gradients count as zeros. The mean of the gradients is taken over the ranks that have a batch of their own, so that
    the last batches train as strongly as the first ones; `divide_by="all"` divides by the number of all ranks, as
    torch's Join does by default: every batch of the epoch then has the same weight, and the last steps are smaller.

    `is_shadow` tells whether the batch in hand is one, for losses and counters; `present` which ranks have a batch of
    their own. Accumulation and `no_sync` work as usual: each micro-batch has the weight of its own iteration. Buffers
    (running statistics) follow the first rank that has data. Each iteration costs one all-reduce of a few numbers, and
    one batch is taken from the loader ahead of time.

    >>> import torch, zerofold as zf
    >>> model = torch.nn.Linear(8, 1)
    >>> model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    >>> batches = zf.join(model, [torch.ones(2, 8), torch.zeros(2, 8)])
    >>> for batch in batches:
    ...     model(batch).sum().backward(); optimizer.step(); optimizer.zero_grad()
    ...     print(batches.is_shadow, batches.present)
    False [0]
    False [0]
    >>> zf.close(model)
    """

    def __init__(self, model: nn.Module, batches: Iterable[Batch], *, divide_by: str = "present") -> None:
        if divide_by not in ("present", "all"):
            raise ValueError(f"join: divide_by={divide_by!r} must be 'present' (the ranks with data) or 'all'")
        if not isinstance(batches, Iterable):
            raise TypeError(f"join: batches is a {type(batches).__name__}: give the data loader, or a list of batches")
        self._engine, self._batches, self._divide_by = Engine.of(model), batches, divide_by
        self.is_shadow = False
        self.present: list[int] = []

    def __iter__(self) -> Iterator[Batch]:
        engine, hooks, buffers = self._engine, self._engine.hooks, self._engine.reductions.buffers
        control, source = engine.groups.control, iter(self._batches)
        batch: Any = None
        last: Any = None  # to repeat: kept before the loop can change it
        has_batch = False  # this one's or one to repeat
        outer = hooks.weight, buffers.source  # of a loop around this one
        ahead = list(islice(source, 1))
        try:
            while True:
                self.is_shadow = not ahead
                if ahead:
                    batch, ahead = ahead[0], list(islice(source, 1))
                    last = None if ahead else _copy(batch)
                elif has_batch:
                    batch = _copy(last)
                has_batch = has_batch or not self.is_shadow
                marks = torch.zeros(control.size + 1, dtype=torch.float64)
                marks[control.rank], marks[-1] = float(not self.is_shadow), float(not has_batch)
                control.all_reduce(marks, unit="join").wait()
                self.present = [rank for rank, mark in enumerate(marks[:-1].tolist()) if mark]
                if not self.present:
                    return
                if marks[-1]:
                    borrowed = self._borrow(None if self.is_shadow else batch)
                    if not has_batch:
                        batch = last = map_tensors(lambda tensor: tensor.to(engine.groups.gather.device), borrowed)
                        has_batch = True
                weight = control.size / len(self.present) if self._divide_by == "present" else 1.0
                hooks.weight = 0.0 if self.is_shadow else weight
                buffers.source = self.present[0]
                yield batch
        finally:
            hooks.weight, buffers.source = outer

    def _borrow(self, batch: Any) -> Any:
        """A batch of the first rank that has one, for those that have never had any."""
        control = self._engine.groups.control
        is_lender = control.rank == self.present[0]
        lent = map_tensors(lambda tensor: tensor.cpu(), batch) if is_lender else None  # a device here is none there
        return control.all_gather_objects(lent, unit="join")[self.present[0]]


def _copy(batch: Any) -> Any:
    """Containers and tensors anew, whatever the loop does to its own; other objects as they are."""
    if isinstance(batch, Tensor):
        return batch.detach().clone()
    if isinstance(batch, (list, tuple)) and type(batch) in (list, tuple):
        return type(batch)(_copy(item) for item in batch)
    if isinstance(batch, MutableMapping):
        copied = copy.copy(batch)
        for key, value in batch.items():
            copied[key] = _copy(value)
        return copied
    return map_tensors(lambda tensor: tensor.detach().clone(), batch)
