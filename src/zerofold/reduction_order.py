"""Gradients are reduced in one order on all ranks, whatever the order in which they arrive.

A unit is reduced as soon as it and all units before it in the shared order are complete. What is left when backward
ends (units that some rank never reached, gradients that came twice) is agreed on first: one all-reduce of a few
numbers tells every rank how far each got, which parameters have a gradient anywhere, and whether all ranks gathered
the same units in the same order.
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

    def __init__(self, units: list[Unit], row: Row, reducer: Reducer, control: Comm) -> None:
        self.row, self.reducer, self.control = row, reducer, control
        with_gradients = [unit for unit in units if unit.trainable]
        # The root's embeddings come last in backward, the last-defined unit most likely first.
        self.order = [unit for unit in with_gradients[::-1] if unit is not units[0]]
        self.order += [unit for unit in with_gradients if unit is units[0]]
        self.suspended = False  # inside no_sync
        self._learned = False
        self._ready: list[Unit] = []
        self._launched = 0  # how many of `order` have been started in this backward
        self._arrivals: dict[Unit, int] = {}  # gradients in this backward
        self._had_gradient: dict[Slab, set[int]] = {}  # among what has been started since the last agreement
        self._gather_tag = 0
        self._backwards = 0  # since the last step
        self._expected_backwards = 1
        self._syncing = True
        self._versions_at_reduction: list[int] | None = None  # of all shards, until somebody is seen to update them
        self._warned = False

    def note_gather(self, unit: Unit) -> None:
        self._gather_tag = (self._gather_tag * 1000003 + unit.index + 1) % _TAG_RANGE

    def begin_backward(self) -> None:
        self._backwards += 1
        waits = self.row.reduces_once_a_step and self._backwards < self._expected_backwards
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
        while self._launched < len(self.order) and self.order[self._launched] in self._ready:
            self._launch(self.order[self._launched])
            self._launched += 1

    def end_backward(self) -> None:
        if self._syncing:
            self.synchronize()
            return
        for unit in self.order:
            for gradients in _gradients_of(unit):
                gradients.keep_partial()

    def before_step(self) -> None:
        """Learns how many backwards make a step, and reduces what is still partial."""
        self._expected_backwards, self._backwards = max(1, self._backwards), 0
        self.flush()

    def flush(self) -> None:
        """Reduces what no_sync, or a step of several backwards, has left on this rank."""
        self._forget_cleared()
        if any(gradients.arrived_since_reduce for unit in self.order for gradients in _gradients_of(unit)):
            self._ready, self._launched = [], 0
            self.synchronize()

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

    def synchronize(self) -> None:
        """Agrees with the other ranks on what is left, reduces it, and shows the results."""
        self._forget_cleared()
        here = self._state()
        self.control.all_reduce(here, unit="agreement", op=dist.ReduceOp.MAX).wait()
        agreed = here.tolist()
        launched_anywhere, tag, negative_tag = round(agreed[0]), agreed[1], agreed[2]
        if tag != -negative_tag:
            raise RuntimeError(
                f"rank {self.control.rank}: the ranks gathered different units or in a different order, so at least "
                "one computed with wrong weights; every rank must run the same modules in the same order. Last "
                f"calls here: {self.control.traffic.last(8)}"
            )
        self._gather_tag = 0
        count = len(self.order)
        first_time, again, present = agreed[3 : 3 + count], agreed[3 + count : 3 + 2 * count], agreed[3 + 2 * count :]
        for position, unit in enumerate(self.order):
            behind = self._launched <= position < launched_anywhere
            beyond = position >= launched_anywhere and first_time[position] > 0
            if behind or beyond:
                self._launch(unit)
        for position, unit in enumerate(self.order):
            if again[position] > 0:
                self._launch(unit)
        self.reducer.finish()
        flags = iter(present)
        for slab in self._slabs():
            assert slab.gradients is not None
            slab.gradients.settle([next(flags) > 0 for _ in slab.parameters])
        self._learn()
        self._had_gradient.clear()
        self._versions_at_reduction = [slab.shard._version for slab in self._slabs()]

    def _forget_cleared(self) -> None:
        for unit in self.order:
            for gradients in _gradients_of(unit):
                gradients.forget_cleared()

    def _launch(self, unit: Unit) -> None:
        for slab in unit.slabs:
            if slab.gradients is not None:
                self._had_gradient.setdefault(slab, set()).update(slab.gradients.arrived_since_reduce)
                slab.gradients.launch(self.reducer, unit.name)

    def _state(self) -> Tensor:
        """Numbers to be agreed on by their maximum over ranks."""
        first_time, again = [], []
        for position, unit in enumerate(self.order):
            pending = any(gradients.arrived_since_reduce for gradients in _gradients_of(unit))
            first_time.append(float(pending and position >= self._launched))
            again.append(float(pending and position < self._launched))
        present = []
        for slab in self._slabs():
            assert slab.gradients is not None
            had = self._had_gradient.get(slab, set()) | slab.gradients.arrived_since_reduce
            present += [float(index in had) for index in range(len(slab.parameters))]
        tag = float(self._gather_tag)
        return torch.tensor([self._launched, tag, -tag, *first_time, *again, *present], dtype=torch.float64)

    def _learn(self) -> None:
        """After the first backward, rank 0's order of completion becomes everybody's."""
        if self._learned:
            return
        self._learned = True
        seen = [self.order.index(unit) for unit in self._ready]
        agreed = self.control.all_gather_objects(seen)[0]
        unseen = [position for position in range(len(self.order)) if position not in agreed]
        self.order = [self.order[position] for position in [*agreed, *unseen]]

    def _slabs(self) -> Iterator[Slab]:
        for unit in self.order:
            yield from (slab for slab in unit.slabs if slab.gradients is not None)


def _gradients_of(unit: Unit) -> Iterator[Gradients]:
    return (slab.gradients for slab in unit.slabs if slab.gradients is not None)
