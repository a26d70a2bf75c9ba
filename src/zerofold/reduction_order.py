"""Gradients are reduced in one order on all ranks, whatever the order in which they arrive.

The units that had a gradient on any rank last time are expected this time. Each is reduced as soon as it and all
expected units before it are complete; when backward ends, every rank reduces the rest of them, with zeros where it
has nothing. Then one all-reduce of a few numbers tells which units are still left on any rank (unexpected ones, or
gradients that came twice), which parameters have a gradient anywhere, and whether all ranks gathered the same units
in the same order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.comm import Comm
from zerofold.gradients import Gradients
from zerofold.placement import Row
from zerofold.reduce import Reducer
from zerofold.unit import Slab, Unit

_TAG_RANGE = 2**31 - 1


class ReductionOrder:
    """Collects arriving gradients and starts each unit's reduction at the same point of the order on every rank."""

    def __init__(self, units: list[Unit], row: Row, reducer: Reducer, control: Comm, *, accumulate: int) -> None:
        self.row, self.reducer, self.control, self.accumulate = row, reducer, control, accumulate
        with_gradients = [unit for unit in units if unit.trainable]
        # The root's embeddings come last in backward, the last-defined unit most likely first.
        self.order = [unit for unit in with_gradients[::-1] if unit is not units[0]]
        self.order += [unit for unit in with_gradients if unit is units[0]]
        self.suspended = False  # inside no_sync
        self._expected = list(self.order)
        self._order_is_learned = False
        self._ready: list[Unit] = []
        self._launched = 0  # how many of the expected units have been started in this backward
        self._arrivals: dict[Unit, int] = {}  # gradients in this backward
        self._had_gradient: dict[Slab, set[int]] = {}  # among what has been started since the last agreement
        self._gather_tag = 0
        self._backwards = 0  # since the last step
        self._syncing = True
        self._has_partial = False  # a backward ended without a reduction, on all ranks alike
        self._versions_at_reduction: list[int] | None = None  # of all shards, until somebody is seen to update them
        self._warned = False

    def note_gather(self, unit: Unit) -> None:
        self._gather_tag = (self._gather_tag * 1000003 + unit.index + 1) % _TAG_RANGE

    def begin_backward(self) -> None:
        self._backwards += 1
        # Whole gradients may stay local sums until the last backward of a step; cut ones have no room to wait in.
        waits = not self.row.gradients.is_cut and self._backwards < self.accumulate
        self._syncing = not self.suspended and not waits
        self._ready, self._launched, self._arrivals = [], 0, {}

    def arrived(self, unit: Unit) -> None:
        """One more gradient of `unit` is there; the last one makes it ready."""
        self._arrivals[unit] = self._arrivals.get(unit, 0) + 1
        if self._arrivals[unit] == unit.trainable:
            self.ready(unit)

    def ready(self, unit: Unit) -> None:
        """No further gradient of `unit` is expected in this backward."""
        if not self._syncing or not unit.trainable or unit in self._ready:
            return
        self._ready.append(unit)
        while self._launched < len(self._expected) and self._expected[self._launched] in self._ready:
            self._launch(self._expected[self._launched])
            self._launched += 1

    def end_backward(self) -> None:
        if self._syncing:
            self._synchronize()
            self._learn_order()
            return
        self._has_partial = True
        for gradients in self._gradients():
            gradients.keep_partial()

    def abandon_backward(self) -> None:
        """Backward raised: what it had taken from autograd and not yet shown is dropped."""
        self.reducer.finish()
        self._had_gradient.clear()
        for gradients in self._gradients():
            gradients.abandon()

    def before_step(self) -> None:
        self._backwards = 0
        self.flush()

    def flush(self) -> None:
        """Reduces what no_sync, or an unfinished row of micro-batches, has left on this rank."""
        if self._has_partial:
            self._launched = len(self._expected)  # nothing is under way: all that is left is agreed on
            self._synchronize()

    def watch_for_updates(self) -> None:
        """Warns, once, when gradients were reduced and thrown away and no parameter changed in between."""
        if self._warned or self._versions_at_reduction is None or not self.row.optimizer.is_cut:
            return
        slabs = list(self._slabs())
        if [slab.shard._version for slab in slabs] != self._versions_at_reduction:
            self._versions_at_reduction = None
        elif all(face.grad is None for slab in slabs for face in slab.faces):
            self._warned = True
            warnings.warn(
                "gradients were reduced and cleared, but no parameter has changed since: call optimizer.step() between "
                "backward and zero_grad, and zf.attach(model, optimizer) if the optimizer was built before zf.shard",
                stacklevel=2,
            )

    def _synchronize(self) -> None:
        """Reduces what is expected, agrees with the other ranks on what is left, and shows the results."""
        for unit in self._expected[self._launched :]:
            self._launch(unit)
        self._launched = len(self._expected)
        for gradients in self._gradients():
            gradients.forget_cleared()
        numbers = self._state()
        self.control.all_reduce(numbers, unit="agreement", op=dist.ReduceOp.MAX).wait()
        tag, negative_tag, *flags = numbers.tolist()
        if tag != -negative_tag:
            raise RuntimeError(
                f"rank {self.control.rank}: the ranks gathered different units or in a different order, so at least "
                "one computed with wrong weights; every rank must run the same modules in the same order. Last "
                f"calls here: {self.control.traffic.last(8)}"
            )
        self._gather_tag, self._has_partial = 0, False
        pending, present = flags[: len(self.order)], iter(flags[len(self.order) :])
        for unit, left in zip(self.order, pending, strict=True):
            if left:
                self._launch(unit)
        self.reducer.finish()
        self._expected = []
        for unit in self.order:
            had = [[next(present) > 0 for _ in slab.parameters] for slab in unit.slabs if slab.gradients is not None]
            for gradients, indices in zip(_gradients_of(unit), had, strict=True):
                gradients.settle(indices)
            if any(any(indices) for indices in had):
                self._expected.append(unit)
        if self._expected:
            self._versions_at_reduction = [slab.shard._version for slab in self._slabs()]
        self._had_gradient.clear()

    def _launch(self, unit: Unit) -> None:
        for slab in unit.slabs:
            if slab.gradients is not None:
                self._had_gradient.setdefault(slab, set()).update(slab.gradients.arrived_since_reduce)
                slab.gradients.launch(self.reducer, unit.name)

    def _state(self) -> Tensor:
        """Numbers to be agreed on by their maximum over ranks."""
        pending = [float(any(g.arrived_since_reduce for g in _gradients_of(unit))) for unit in self.order]
        present = []
        for slab in self._slabs():
            assert slab.gradients is not None
            had = self._had_gradient.get(slab, set()) | slab.gradients.arrived_since_reduce
            present += [float(index in had) for index in range(len(slab.parameters))]
        tag = float(self._gather_tag)
        return torch.tensor([tag, -tag, *pending, *present], dtype=torch.float64)

    def _learn_order(self) -> None:
        """After the first backward, rank 0's order of completion becomes everybody's."""
        if self._order_is_learned:
            return
        self._order_is_learned = True
        seen = self.control.all_gather_objects([self.order.index(unit) for unit in self._ready])[0]
        unseen = [position for position in range(len(self.order)) if position not in seen]
        self.order = [self.order[position] for position in [*seen, *unseen]]
        self._expected = [unit for unit in self.order if unit in self._expected]

    def _slabs(self) -> Iterator[Slab]:
        for unit in self.order:
            yield from (slab for slab in unit.slabs if slab.gradients is not None)

    def _gradients(self) -> Iterator[Gradients]:
        for unit in self.order:
            yield from _gradients_of(unit)


def _gradients_of(unit: Unit) -> Iterator[Gradients]:
    return (slab.gradients for slab in unit.slabs if slab.gradients is not None)
