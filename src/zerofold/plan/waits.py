"""What a device waits for in a step, by whom: the wire, the host, the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zerofold.placement import Cut, Row, Tier
from zerofold.plan.away import STATES_BYTES, Away, disk_seconds, host_copy_seconds, host_update_seconds
from zerofold.plan.collectives import across_span, data_span, inside_span
from zerofold.plan.compute import UnitSeconds
from zerofold.plan.ground import Ground
from zerofold.plan.machine import Machine
from zerofold.plan.overlap import Lane, waits_for_queue, waits_in_backward, waits_in_forward
from zerofold.plan.point import Point
from zerofold.plan.shape import ROOT
from zerofold.plan.traffic import flat_size, reductions_in_step

GATHER, REDUCE, HOST, DISK = "gather", "reduce", "host", "disk"
_IDLE = UnitSeconds(0.0, 0.0)


class Parts(NamedTuple):
    """Seconds of something that goes on beside compute, by what is busy with it."""

    gather: float = 0.0
    reduce: float = 0.0
    host: float = 0.0
    disk: float = 0.0

    @property
    def total(self) -> float:
        return self.gather + self.reduce + self.host + self.disk

    def plus(self, other: Parts) -> Parts:
        return Parts(*(one + another for one, another in zip(self, other, strict=True)))

    def times(self, factor: float) -> Parts:
        return Parts(*(each * factor for each in self))


class _Moved(NamedTuple):
    """For each unit."""

    stored: Sequence[Parts]
    fetched: Sequence[Parts]


@dataclass(frozen=True)
class Waits:
    ground: Ground
    machine: Machine
    point: Point
    row: Row
    away: Away

    def total(self) -> Parts:
        """Each wait is shared out among all that was on the wire, the host or the disk at that time."""
        ground, micro_batches = self.ground, self.point.accumulate
        nothing = [Parts()] * len(ground.units)
        gathers, first = nothing, nothing
        if self.row.parameters.is_cut:
            first = self._gathers(over_all=True)
            gathers = first if self.row.copy is None else self._gathers(over_all=False)
        each_reduces = reductions_in_step(self.row, self.point) > 1
        last = self._reduces(across=True, adds=each_reduces)
        queued = self._queued()
        found = self._shared(waits_for_queue(self._lanes(queued=queued)), queued)
        found = found.plus(self._forward(first)).plus(self._unhidden())
        if self.point.pipeline > 1:
            # Units stay gathered, and gradients are reduced in one sweep when all micro-batches are through.
            found = found.plus(self._sum(last))
            if self.point.keeps_away:
                found = found.plus(self._forward(nothing).times(micro_batches - 1))
                found = found.plus(self._backward(nothing, nothing).times(micro_batches))
            return found
        found = found.plus(self._backward(gathers, last))
        if micro_batches > 1:
            again = self._forward(gathers)
            found = found.plus(again.times(micro_batches - 1))
            new, more = (self._reduces(across=False, adds=adds) if each_reduces else nothing for adds in (False, True))
            found = found.plus(self._backward(gathers, new))
            found = found.plus(self._backward(gathers, more).times(micro_batches - 2))
        return found

    def _unhidden(self) -> Parts:
        """What a rank alone takes from elsewhere where nobody cut parameters: none is fetched ahead or kept for
        backward (`zerofold.schedule`), so every use waits for all of it."""
        if self.row.parameters.is_cut or self.ground.mesh.data > 1:
            return Parts()
        uses = 1 if self.point.pipeline > 1 else 2 * self.point.accumulate
        return self._sum(self._gathers(over_all=True)).times(uses)

    @property
    def owners(self) -> int:
        """Among how many the optimizer's states are cut; a rank that updates everything counts alone."""
        return 1 if self.row.cut is Cut.FIRST else self.ground.mesh.ranks(self.row.optimizer)

    @property
    def gradient_width(self) -> int:
        """Alone, the gradient of one backward stays as autograd made it."""
        alone = self.ground.mesh.data == 1 and self.point.accumulate == 1
        return self.ground.widths.compute if alone else self.ground.widths.gradient

    def fetched(self, own: float) -> Parts:
        """What forward computes with, from where it is between uses; `own` bytes of this rank."""
        gone = self.away.parameters
        if gone.device == 1:
            return Parts()
        host = host_copy_seconds((1 - gone.device) * own, self.machine)
        return Parts(host=host, disk=disk_seconds(gone.disk * own, 0, self.machine))

    def _forward(self, gathers: Sequence[Parts]) -> Parts:
        stored = self._checkpoints.stored
        both = [one.plus(other) for one, other in zip(gathers, stored, strict=True)]
        return self._shared(waits_in_forward(self._lanes(gather=gathers, stored=stored)), both)

    def _backward(self, gathers: Sequence[Parts], reductions: Sequence[Parts]) -> Parts:
        fetched = self._checkpoints.fetched
        every = [one.plus(other).plus(third) for one, other, third in zip(gathers, reductions, fetched, strict=True)]
        lanes = self._lanes(gather=gathers, reduce=reductions, fetched=fetched)
        return self._shared(waits_in_backward(lanes), every)

    @cached_property
    def _checkpoints(self) -> _Moved:
        """Inputs of blocks, of one micro-batch: down beside forward, up beside backward, a block's share of each."""
        ground, every, machine = self.ground, self.point.checkpoint_every, self.machine
        nothing = [Parts()] * len(ground.units)
        if not self.point.keeps_away or not ground.block_checkpoint:
            return _Moved(nothing, nothing)
        group = every * ground.block_checkpoint
        over_bus = host_copy_seconds(group, machine)
        has_disk = self.point.checkpoints_on == Tier.NVME.value
        down = Parts(host=over_bus, disk=disk_seconds(0, group, machine) if has_disk else 0.0).times(1 / every)
        up = Parts(host=over_bus, disk=disk_seconds(group, 0, machine) if has_disk else 0.0).times(1 / every)
        blocks = [unit.name != ROOT for unit in ground.units]
        return _Moved([down if each else Parts() for each in blocks], [up if each else Parts() for each in blocks])

    def _shared(self, waited: float, parts: Sequence[Parts]) -> Parts:
        if not waited:
            return Parts()
        busy = self._sum(parts)
        # One that never ends would make a part of itself undefined.
        return busy.times(waited / busy.total) if busy.total < float("inf") else Parts(disk=waited)

    def _sum(self, parts: Sequence[Parts]) -> Parts:
        found = Parts()
        for unit, each in zip(self.ground.units, parts, strict=True):
            found = found.plus(each.times(unit.count))
        return found

    def _lanes(
        self,
        gather: Sequence[Parts] | None = None,
        reduce: Sequence[Parts] | None = None,
        queued: Sequence[Parts] | None = None,
        stored: Sequence[Parts] | None = None,
        fetched: Sequence[Parts] | None = None,
    ) -> list[Lane]:
        """The root's own work hides nothing: embeddings are short, and the head comes when all is there."""
        lanes = []
        for index, unit in enumerate(self.ground.units):
            taken = _IDLE if unit.name == ROOT else self.ground.seconds[index]
            parts = [each[index].total if each else 0.0 for each in (gather, reduce, queued, stored, fetched)]
            lanes.append(Lane(unit.count, self.ground.stays[index], taken.forward, taken.backward, *parts))
        return lanes

    def _gathers(self, *, over_all: bool) -> list[Parts]:
        """Of cut parameters: from host or disk to the device, then over the wire."""
        mesh, wires, width = self.ground.mesh, self.ground.wires, self.ground.widths.compute
        ranks = mesh.ranks(self.row.parameters)
        is_inside = bool(self.row.parameters.other_axes) or not over_all
        span = inside_span(mesh) if is_inside else data_span(mesh)
        found = []
        for unit in self.ground.units:
            whole = flat_size(unit, self.row, mesh, self.ground.widths, with_frozen=True) * width
            wire = Parts(gather=wires.seconds("all_gather", whole, span))
            found.append(wire.plus(self.fetched(whole / ranks)))
        return found

    def _reduces(self, *, across: bool, adds: bool = False) -> list[Parts]:
        """To their owners and, where they wait for the update off the device, down. `adds`: to an earlier one, which a
        rank alone brings up for that."""
        mesh, wires, widths, gone = self.ground.mesh, self.ground.wires, self.ground.widths, self.away.gradients
        span = inside_span(mesh) if self.row.reduces_across else data_span(mesh)
        collective = "reduce_scatter" if self.row.reduces_to_owner else "all_reduce"
        found = []
        for unit in self.ground.units:
            wire = wires.seconds(collective, unit.trained * widths.wire, span)
            if across and self.row.reduces_across:
                shard = unit.trained / mesh.inside * widths.gradient
                wire += wires.seconds("all_reduce", shard, across_span(mesh))
            own = unit.trained / self.owners * self.gradient_width
            host = host_copy_seconds((1 - gone.device) * own, self.machine)
            again = gone.disk * own if adds and mesh.data == 1 else 0.0
            host *= 2 if adds and mesh.data == 1 else 1
            found.append(Parts(reduce=wire, host=host, disk=disk_seconds(again, gone.disk * own, self.machine)))
        return found

    def _queued(self) -> list[Parts]:
        """What the next forward finds under way: updates off the device, whole parameters on their way."""
        gone, wires, widths = self.away.optimizer, self.ground.wires, self.ground.widths
        span = data_span(self.ground.mesh)
        found = []
        for unit in self.ground.units:
            own = unit.trained / self.owners
            read = gone.disk * own * STATES_BYTES
            written = read + self.away.parameters.disk * own * widths.compute
            read += self.away.gradients.disk * own * self.gradient_width
            wire = 0.0
            if self.row.refreshes_after_step:
                wire = wires.seconds("all_gather", unit.trained * widths.compute, span)
            host = host_update_seconds(gone.host * own, self.machine)
            found.append(Parts(gather=wire, host=host, disk=disk_seconds(read, written, self.machine)))
        return found
