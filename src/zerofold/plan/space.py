"""All points that a search looks at: degrees × batches × intervals and places of checkpoints, in each rows × tiers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zerofold.placement import Row, Tier, Tiers, row
from zerofold.plan.held import has_both, widths_of
from zerofold.plan.machine import Machine
from zerofold.plan.mesh import mesh_of
from zerofold.plan.pipelining import can_run
from zerofold.plan.point import Point
from zerofold.plan.shape import ModelShape
from zerofold.plan.traffic import reductions_in_step

ROWS = ("0", "1", "2", "3", "hsdp", "hpz", "dp")
DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME

# Parameters off the device need cut ones, and the optimizer's states at least as far away (`zerofold.offload.wishes`).
_TIERS = [Tiers()]
_TIERS += [Tiers(HOST, HOST, parameters) for parameters in (DEVICE, HOST)]
_TIERS += [Tiers(NVME, HOST, parameters) for parameters in (DEVICE, HOST)]
_TIERS += [Tiers(NVME, NVME, parameters) for parameters in (DEVICE, HOST, NVME)]
_LARGEST_FREE_BATCH = 1024
_FREE_ROUNDS = (1, 2, 4)  # micro-batches in a step for each stage of a pipeline, where the batch is free


@dataclass(frozen=True, kw_only=True)
class Space:
    """`global_samples`: of all devices in a step. None leaves the batch free: one micro-batch of a power of two."""

    model: ModelShape
    machine: Machine
    global_samples: int | None = None
    precision: str = "bf16"
    rows: Sequence[str] = ROWS
    offload: bool = True
    tensor: Sequence[int] | None = None
    """Degrees to look at; None: all that divide the devices and the heads, beyond a node too."""
    pipeline: Sequence[int] | None = None
    micro_batches: Sequence[int] | None = None
    checkpoints: Sequence[int] | None = None
    sequence_parallel: bool = True
    """Tensor-parallel ranks cut norms and logits too, which costs no more traffic. Not every model's layers allow it:
    without, inputs of checkpointed blocks are also tried in parts (P_a)."""

    def groups(self) -> Iterator[Point]:
        """One point for each choice of degrees, batch and checkpoints; its row and tiers are still open."""
        for tensor in self._tensor_degrees():
            for pipeline in self._pipeline_degrees(tensor):
                data = self.machine.devices // (tensor * pipeline)
                for micro_batch, accumulate in self._batches(data, pipeline):
                    for every in self._intervals():
                        point = Point(
                            micro_batch=micro_batch,
                            accumulate=accumulate,
                            checkpoint_every=every,
                            tensor=tensor,
                            sequence_parallel=tensor > 1 and self.sequence_parallel,
                            loss_parallel=tensor > 1 and self.sequence_parallel,
                            pipeline=pipeline,
                            precision=self.precision,
                        )
                        if not can_run(point):
                            break
                        yield from self._kept(point)

    def _kept(self, point: Point) -> Iterator[Point]:
        """Where inputs of checkpointed blocks may wait, and whether in parts."""
        may_leave = self.offload and point.checkpoint_every and self.model.activities
        for place in (DEVICE, HOST, NVME) if may_leave else (DEVICE,):
            if place is NVME and not self.machine.disk:
                continue
            at = replace(point, checkpoints_on=place.value)
            yield at
            if replace(at, partition=True).keeps_parts:
                yield replace(at, partition=True)

    def members(self, group: Point) -> Iterator[Point]:
        """The points of a group."""
        for chosen in self._rows(group):
            for tiers in self._tiers(chosen):
                yield replace(group, stage=chosen.name, tiers=tiers)
            if self.offload:
                yield replace(group, stage=chosen.name, auto=True)

    def points(self) -> Iterator[Point]:
        for group in self.groups():
            yield from self.members(group)

    def size(self, group: Point) -> int:
        """How many points a group has."""
        return sum(sum(1 for _ in self._tiers(chosen)) + self.offload for chosen in self._rows(group))

    def _rows(self, group: Point) -> list[Row]:
        """Those that differ: a group of all ranks is no group, and a rank alone has few."""
        mesh, asked = mesh_of(self.machine, group), [row(name) for name in self.rows]
        if mesh.data == 1:
            found: dict[tuple[bool, bool, bool], Row] = {}
            for each in sorted(asked, key=lambda each: not each.parameters.is_cut):
                found.setdefault(self._alone(each, group), each)
            return list(found.values())
        has_groups = mesh.inside < mesh.data
        return [each for each in asked if has_groups or not each.has_groups]

    def _alone(self, chosen: Row, group: Point) -> tuple[bool, bool, bool]:
        """All that tells rows apart where nobody shares a state: parameters that are fetched ahead, which may also be
        sent away by name; whether gradients of micro-batches add up beside the one that the update reads; and whether
        each goes to where that is."""
        widths = widths_of(group.precision)
        sums = has_both(chosen, widths, group, alone=True)
        return chosen.parameters.is_cut, sums, reductions_in_step(chosen, group) > 1

    def _tiers(self, chosen: Row) -> Iterator[Tiers]:
        for tiers in _TIERS if self.offload else _TIERS[:1]:
            if NVME in (tiers.optimizer, tiers.gradients) and not self.machine.disk:
                continue
            if tiers.parameters is DEVICE or chosen.parameters.is_cut:
                yield tiers

    def _intervals(self) -> Sequence[int]:
        if self.checkpoints is not None:
            return self.checkpoints
        return [activity.checkpoint_every for activity in self.model.activities] or [0, 1]

    def _tensor_degrees(self) -> list[int]:
        if self.model.hidden is None or self.model.layers is None:
            return [1]
        devices, heads = self.machine.devices, self.model.heads
        usual = divisors(math.gcd(devices, heads)) if heads else [2**power for power in range(devices.bit_length())]
        asked = self.tensor if self.tensor is not None else usual
        return [degree for degree in asked if not devices % degree and (heads is None or not heads % degree)]

    def _pipeline_degrees(self, tensor: int) -> list[int]:
        """Stages of equal depth."""
        if self.model.hidden is None or self.model.layers is None:
            return [1]
        left = self.machine.devices // tensor
        asked = self.pipeline if self.pipeline is not None else divisors(self.model.layers)
        return [degree for degree in asked if not left % degree and not self.model.layers % degree]

    def _batches(self, data: int, pipeline: int) -> Iterator[tuple[int, int]]:
        if self.global_samples is None:
            sizes = self.micro_batches or [2**power for power in range(_LARGEST_FREE_BATCH.bit_length())]
            rounds = [pipeline * each for each in _FREE_ROUNDS] if pipeline > 1 else [1]
            yield from ((size, each) for size in sizes for each in rounds)
        elif not self.global_samples % data:
            each = self.global_samples // data
            sizes = divisors(each) if self.micro_batches is None else self.micro_batches
            yield from ((size, each // size) for size in sizes if not each % size)


def divisors(number: int) -> list[int]:
    """
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [each for each in range(1, int(number**0.5) + 1) if not number % each]
    return sorted({*small, *(number // each for each in small)})
