"""Gradients are reduced in one order on all ranks, whatever the order in which they arrive.

The slabs that had a gradient on any rank last time are expected this time. Each is reduced as soon as it and all
expected slabs before it are complete; when backward ends, every rank reduces the rest of them, with zeros where it
has nothing. Then one all-reduce of a few numbers tells which slabs are still left on any rank (unexpected ones, or
gradients that came twice), which parameters have a gradient anywhere, which buffers changed, and whether all ranks
gathered the same units in the same order.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.buffers import Buffers
from zerofold.comm import Comm, DivergenceError
from zerofold.placement import Row
from zerofold.reduce import Reducer
from zerofold.slab import Slab
from zerofold.unit import Unit

_TAG_RANGE = 2**31 - 1


class ReductionOrder:
    """Collects arriving gradients and starts each slab's reduction at the same point of the order on every rank."""

    def __init__(
        self, units: list[Unit], row: Row, reducer: Reducer, control: Comm, buffers: Buffers, *, accumulate: int
    ) -> None:
        self.row, self.reducer, self.control, self.accumulate = row, reducer, control, accumulate
        self.buffers = buffers
        # Until an order is learned: the last-defined unit first, the root's embeddings last.
        self._order = [slab for unit in [*units[:0:-1], units[0]] for slab in unit.trainable_slabs]
        # In this backward: those of the order that had a gradient on any rank last time.
        self._expected = list(self._order)
        self._order_is_learned = False
        self.suspended = False  # inside no_sync
        self.ends_step: bool | None = None  # the next backward, where somebody else counts micro-batches
        self._complete: list[Slab] = []  # in this backward, in the order it happened here
        self._launched = 0  # how many of the expected slabs have been started in this backward
        self._arrivals: dict[Slab, int] = {}  # gradients in this backward
        self._had_gradient: dict[Slab, set[int]] = {}  # among what has been started since the last agreement
        self._gather_tag = 0
        self._backwards = 0  # since the last reduction or step
        self._syncing = True
        self._by_unit = False  # a slab is complete when its unit is said to be, however many gradients arrive
        self._holds_back = False  # nothing is reduced before the end: more backwards of the same step are to come
        self._across = True  # reductions of this backward go on across groups
        self._has_partial = False  # a backward ended without the whole of its reduction, on all ranks alike
        self._versions_at_reduction: list[int] | None = None  # of all shards, until somebody is seen to update them
        self._wasted = 0  # how often gradients were thrown away
        self.steps = 0  # of attached optimizers
        self.count = 0  # of reductions that are through

    def note_gather(self, unit: Unit) -> None:
        self._gather_tag = (self._gather_tag * 1000003 + unit.index + 1) % _TAG_RANGE

    def begin_backward(self) -> None:
        self._backwards += 1
        # Whole gradients may stay local sums until the last backward of a step; cut ones have no room to wait in.
        is_last = self._backwards >= self.accumulate if self.ends_step is None else self.ends_step
        self._syncing = not self.suspended and (is_last or self.row.gradients.is_cut)
        self._across = is_last
        self._complete, self._launched, self._arrivals, self._by_unit = [], 0, {}, False
        self._holds_back = False

    def begin_accumulation(self, late: list[Unit]) -> None:
        """All micro-batches of a step at once. `late` units are complete at its end only, so the others come first."""
        self.begin_backward()
        self._syncing, self._across, self._by_unit = not self.suspended, True, True
        slabs = {slab for unit in late for slab in unit.slabs}
        self._expected.sort(key=lambda slab: slab in slabs)

    def begin_pipeline(self) -> None:
        """All micro-batches of a step, their forwards and backwards in any order: one sweep reduces them at the end."""
        self.begin_backward()
        self._syncing, self._across, self._holds_back = not self.suspended, True, True

    def arrived(self, slab: Slab) -> None:
        """One more gradient of `slab` is there; the last one completes it."""
        self._arrivals[slab] = self._arrivals.get(slab, 0) + 1
        if self._arrivals[slab] == len(slab.parameters) and not self._by_unit:
            self._completed(slab)

    def ended(self, unit: Unit) -> None:
        """No further gradient of `unit` is expected in this backward."""
        for slab in unit.trainable_slabs:
            self._completed(slab)

    def _completed(self, slab: Slab) -> None:
        if not self._syncing or self._holds_back or slab in self._complete:
            return
        self._complete.append(slab)
        while self._launched < len(self._expected) and self._expected[self._launched] in self._complete:
            self._launch(self._expected[self._launched])
            self._launched += 1

    def end_backward(self) -> None:
        if self._syncing:
            self._synchronize()
            self._learn_order()
            return
        self._has_partial = True
        for slab in self._order:
            slab.gradients.notice_changes()
            slab.gradients.keep_partial()

    def abandon_backward(self) -> None:
        """Backward raised: what it had taken from autograd and not yet shown is dropped."""
        self.reducer.finish()
        self._had_gradient.clear()
        for slab in self._order:
            slab.gradients.abandon()

    def flush(self) -> None:
        """Takes gradients as they are now, and reduces what no_sync or unfinished micro-batches left on this rank."""
        for slab in self._order:
            slab.gradients.notice_changes()
        if self._has_partial:
            self._launched = len(self._expected)  # nothing is under way: all that is left is agreed on
            self._across = True
            self._synchronize()

    def add(self, slab: Slab) -> None:
        """A slab that came after the model was sharded."""
        self._order.append(slab)
        self._expected.append(slab)
        self._versions_at_reduction = None

    def expect_no_update(self) -> None:
        """The step was skipped, and said so."""
        self._versions_at_reduction = None

    def watch_for_updates(self) -> None:
        """Warns, once, when gradients were reduced and thrown away twice and no parameter changed in between.

        Once is what a critic's turn begins with, where the generator's comes first.
        """
        if self._versions_at_reduction is None or not self.row.optimizer.is_cut:
            return
        if self.steps:  # an optimizer is attached and steps: gradients may be wanted elsewhere, as a generator's are
            return
        if [slab.version for slab in self._order] != self._versions_at_reduction:
            self._versions_at_reduction = None
        elif all(face.grad is None for slab in self._order for face in slab.faces):
            self._versions_at_reduction = None  # further forwards before the next backward say nothing new
            self._wasted += 1
            if self._wasted != 2:
                return
            warnings.warn(
                "gradients were reduced and cleared, but no parameter has changed since: call optimizer.step() between "
                "backward and zero_grad, and zf.attach(model, optimizer) if the optimizer was built before zf.shard",
                stacklevel=2,
            )

    def _synchronize(self) -> None:
        """Reduces what is expected, agrees with the other ranks on what is left, and shows the results."""
        for slab in self._expected[self._launched :]:
            self._launch(slab)
        for slab in self._order:
            if slab not in self._had_gradient:  # those have just been launched
                slab.gradients.notice_changes()
        numbers = self._state()
        self.control.all_reduce(numbers, unit="agreement", op=dist.ReduceOp.MAX).wait()
        tags, flags = numbers[: 2 * self._teams].view(2, -1).tolist(), numbers[2 * self._teams :].tolist()
        most_steps, fewest_steps = flags.pop(0), -flags.pop(0)
        if most_steps != fewest_steps:
            raise DivergenceError(
                f"rank {self.control.rank}: some ranks have taken {most_steps:.0f} optimizer steps and others "
                f"{fewest_steps:.0f} (here {self.steps}), so their weights differ: every rank must call step() as often"
            )
        if any(high != -low for high, low in zip(*tags, strict=True)):
            found = None if self.control.watcher is None else self.control.watcher.compare()
            raise DivergenceError(
                f"rank {self.control.rank}: the ranks gathered different units or in a different order, so at least "
                f"one computed with wrong weights; {found or 'every rank must run the same modules in the same order'}"
                f". Last calls here: {self.control.traffic.last(8)}"
            )
        slabs, changed = len(self._order), len(self.buffers.holders)
        left, present = flags[:slabs], iter(flags[slabs + changed :])
        self.buffers.synchronize(flags[slabs : slabs + changed])
        for slab, is_left in zip(self._order, left, strict=True):
            if is_left:
                self._launch(slab)
        self.reducer.finish()
        self._expected = []
        for slab in self._order:
            had_gradient = [next(present) > 0 for _ in slab.parameters]
            slab.gradients.settle(had_gradient)
            if any(had_gradient):
                self._expected.append(slab)
        if self._expected:
            self._versions_at_reduction = [slab.version for slab in self._order]
        self.count += 1
        self._gather_tag = 0
        self._has_partial = not self._across and self.reducer.across is not None
        self._backwards = 0 if self._across else self._backwards
        self._had_gradient.clear()

    def _launch(self, slab: Slab) -> None:
        slab.gradients.notice_changes()  # also what an earlier backward left here, and this one does not add to
        had = slab.gradients.arrived_since_reduce | slab.gradients.awaiting_across()
        self._had_gradient.setdefault(slab, set()).update(had)
        slab.gradients.launch(self.reducer, slab.unit, across=self._across and self.reducer.across is not None)

    def _state(self) -> Tensor:
        """Numbers to be agreed on by their maximum over ranks."""
        left, present = [], []
        for slab in self._order:
            arrived, waiting = slab.gradients.arrived_since_reduce, slab.gradients.awaiting_across()
            left.append(float(bool(arrived or (waiting and self._across))))
            had = self._had_gradient.get(slab, set()) | arrived | waiting
            present += [float(index in had) for index in range(len(slab.parameters))]
        # Who gathers together must have gathered the same; groups that repeat each other may differ in that.
        tags = torch.full((2, self._teams), -torch.inf, dtype=torch.float64)
        tags[:, self._team] = torch.tensor([self._gather_tag, -self._gather_tag], dtype=torch.float64)
        numbers = [self.steps, -self.steps, *left, *self.buffers.changed(), *present]
        return torch.cat([tags.view(-1), torch.tensor(numbers, dtype=torch.float64)])

    @property
    def _teams(self) -> int:
        return 1 if self.reducer.across is None or self.control.is_alone else self.reducer.across.size

    @property
    def _team(self) -> int:
        return 0 if self._teams == 1 or self.reducer.across is None else self.reducer.across.rank

    def _learn_order(self) -> None:
        """After the first backward, rank 0's order of completion becomes everybody's."""
        if self._order_is_learned:
            return
        self._order_is_learned = True
        seen = self.control.all_gather_objects([self._order.index(slab) for slab in self._complete])[0]
        unseen = [position for position in range(len(self._order)) if position not in seen]
        self._order = [self._order[position] for position in [*seen, *unseen]]
        self._expected = [slab for slab in self._order if slab in self._expected]
