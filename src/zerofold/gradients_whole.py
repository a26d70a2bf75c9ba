"""Gradients where every rank updates everything: averaged in place, as under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerofold.gradients import SlabGradients, arrived_at
from zerofold.layout import FlatLayout
from zerofold.memory import share_storage
from zerofold.reduce import Reducer


class WholeGradients(SlabGradients):
    """Every rank ends with the whole mean gradient: `p.grad` is a view of one flat tensor, reduced in place.

    A second backward adds its local gradients to the mean of the first, and the sum is averaged. That leaves the first
    mean as it was, because it is the same on all ranks. DistributedDataParallel does the same.
    """

    def __init__(self, parameters: list[Tensor], layout: FlatLayout) -> None:
        self.parameters, self.layout = parameters, layout
        self.arrived_since_reduce: set[int] = set()
        self._flat: Tensor | None = None
        self._is_reserved = False
        self._under_way: Reducer | None = None

    def lie_in(self, flat: Tensor) -> None:
        """From now on autograd adds up in this memory of zeros, from the first backward on."""
        self._flat, self._is_reserved = flat, True

    def before_accumulate(self, index: int) -> None:
        if self._under_way is not None:  # autograd must not add to what is being reduced in place
            self._under_way.finish()
            self._under_way = None
        if self._is_reserved and self.parameters[index].grad is None:
            self.parameters[index].grad = self._view(self._storage(), index).zero_()

    def arrived(self, index: int) -> None:
        arrived_at(self.parameters[index])
        self.arrived_since_reduce.add(index)

    def abandon(self) -> None:
        self.arrived_since_reduce.clear()

    def take_local(self, index: int) -> Tensor | None:
        gradient, self.parameters[index].grad = self.parameters[index].grad, None
        self.arrived_since_reduce.discard(index)
        if gradient is not None and self._is_reserved:  # the next one to arrive is written into the same memory
            return gradient.clone()
        return gradient

    def put_local(self, index: int, gradient: Tensor) -> None:
        self.parameters[index].grad = gradient.view_as(self.parameters[index])
        self.arrived_since_reduce.add(index)

    def notice_changes(self) -> None:
        self.arrived_since_reduce = {i for i in self.arrived_since_reduce if self.parameters[i].grad is not None}

    def launch(self, reducer: Reducer, unit: str, *, across: bool) -> None:
        self.arrived_since_reduce.clear()
        if reducer.comm.size == 1:
            return  # what autograd left in p.grad is the mean
        flat = self._storage()
        for index, parameter in enumerate(self.parameters):
            view = self._view(flat, index)
            if parameter.grad is None:
                view.zero_()
            else:
                torch.mul(parameter.grad, 1 / reducer.comm.size, out=view)
                parameter.grad = view
        reducer.all_reduce(flat, unit=unit)
        self._under_way = reducer

    def settle(self, present: Sequence[bool]) -> None:
        self._under_way = None
        for index, parameter in enumerate(self.parameters):
            if present[index] and parameter.grad is None:  # only other ranks had one
                parameter.grad = self._view(self._storage(), index)

    def keep_partial(self) -> None:
        pass  # p.grad holds the local sum, as in DistributedDataParallel under no_sync

    def _storage(self) -> Tensor:
        if self._flat is None:
            like = self.parameters[0]
            self._flat = torch.zeros(self.layout.size, dtype=like.dtype, device=like.device)
        return self._flat

    def _view(self, flat: Tensor, index: int) -> Tensor:
        start = self.layout.offsets[index]
        return flat[start : start + self.layout.numels[index]].view(self.parameters[index].shape)

    @property
    def nbytes(self) -> int:
        flat = self._flat
        loose = [p.grad for p in self.parameters if p.grad is not None]
        if flat is None:
            return sum(grad.nbytes for grad in loose)
        return flat.nbytes + sum(grad.nbytes for grad in loose if not share_storage(grad, flat))
