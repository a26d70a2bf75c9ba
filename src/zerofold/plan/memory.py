"""Bytes of one rank at every moment of a step, in closed form: what `zerofold plan` shows and the search asks for.

        forward of a unit              backward of a unit                step
        ────────────────────────────   ──────────────────────────────    ─────────────────
states  parameters, optimizer,         … and the gradients that          all three
        gradients' flat space          have come so far
units   root, this one, one ahead      the same                          none
and     activations so far             activations left, local           the update's ring
                                       gradients, fused buffers

The peak is the largest column, over all units. Gradients of a rank alone are what autograd made: they come one unit
after the other while activations go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import trunc  # not int(), which forgets how a number was made: zerofold.plan.followed
from typing import NamedTuple

from zerofold.memory.buffers import default_buffer_bytes
from zerofold.offload.sizes import GRADIENTS, OPTIMIZER, PARAMETERS
from zerofold.placement import Tier, Tiers
from zerofold.plan.activities import activity_of
from zerofold.plan.followed import greatest, least
from zerofold.plan.held import (
    UPDATE_RING,
    HeldUnit,
    Ranks,
    fused_buffers,
    gathered_at_once,
    held_units,
    keeps_sent,
    local_gradients,
    ranks_of,
    widths_of,
)
from zerofold.plan.machine import Machine
from zerofold.plan.placed import by_tier
from zerofold.plan.point import Memory, Point
from zerofold.plan.shape import ROOT, Activity, ModelShape, Moment, Phase
from zerofold.plan.states import Widths
from zerofold.plan.sums import sums_among_states, waiting_sums

LIBRARY_WORKSPACES = 2 * 2**25
"""Of the matrix library on a GPU: one for the thread that runs forward, one for autograd's."""
FRAGMENTATION = 0.08
"""Of what comes and goes in a step: the allocator's blocks seldom fit each other. States stay, and leave no holes; nor
does the block of checkpoints, where they have one."""

LINES = (
    "parameters",
    "gradients",
    "optimizer",
    "fused buffers",
    "gathered units",
    "local gradients",
    "activation checkpoints",
    "working activations",
    "logits",
    "update ring",
    "library workspaces",
    "model buffers",
    "init peak",
    "fragmentation reserve",
)


class Instant(NamedTuple):
    """One moment's bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Parts:
    """What is the same in every moment of a step. Bytes."""

    parameters: int
    optimizer: int
    gradients: int
    """All of them, as they are before the step."""
    gradients_stay: bool
    """Their memory is there in forward as well: a flat space, or sums of earlier micro-batches."""
    gathered: int
    gathered_last: int
    """In backward of the first block: no other is fetched."""
    fixed: int
    """Buffers and workspaces."""
    ring: int
    block: int = 0
    """Of inputs of checkpointed blocks, where they have one: it stays from step to step."""
    sums: int = 0
    """Whole gradients that wait for the last micro-batch, where they are not among the gradients above."""


def memory(
    model: ModelShape,
    machine: Machine,
    point: Point,
    *,
    widths: Widths | None = None,
    tiers: Mapping[str, Tiers] | None = None,
    by_gloo: bool | None = None,
) -> Memory:
    """What a rank holds, by line, and the most of it at once. Of the first rank, which has the most where they differ.

    `widths`: instead of those of the point's precision. `tiers`: of each unit by name, instead of the point's.
    `by_gloo`: whether ranks speak by it; by default those on the CPU do.

    >>> from zerofold.plan.presets import preset
    >>> from zerofold.plan.transformer import from_parameters
    >>> found = memory(from_parameters(7.5e9), preset("A100-80", devices=64), Point(stage="3", checkpoint_every=1))
    >>> round(found.states / 1e9, 1), found.peak_at
    (1.9, 'backward of the root')
    """
    point = replace(point, buffer_bytes=point.buffer_bytes or default_buffer_bytes(machine.kind))
    ranks, given = ranks_of(machine, point), widths or widths_of(point.precision)
    may_offload = point.auto or point.tiers.is_offloaded or bool(tiers)
    widths = given.beside(is_offloaded=may_offload)
    units = held_units(model, ranks, widths, point)
    activity = activity_of(model, point)
    samples = point.micro_batch
    on_cpu = machine.kind == "cpu"
    by_gloo = on_cpu if by_gloo is None else by_gloo
    gathered = gathered_at_once(units, ranks, point)
    buffers = fused_buffers(units, ranks, widths, point, by_gloo=by_gloo)
    workspaces = 0 if on_cpu else LIBRARY_WORKSPACES
    ring = UPDATE_RING if may_offload and not on_cpu else 0
    checkpoints, logits = trunc(activity.checkpoints.at(samples)), trunc(activity.logits.at(samples))
    alive = greatest(trunc(moment.alive.at(samples)) for moment in activity.moments)
    sums = waiting_sums(units, ranks, widths, point)
    local = greatest(local_gradients(unit, ranks, widths, point, by_gloo=by_gloo) for unit in units)
    tiered = by_tier(
        units,
        ranks,
        machine,
        point,
        taken=gathered + ring + buffers + workspaces + model.buffers,
        activations=alive + local + sums,
        given=tiers,
    )
    if may_offload and not tiered.is_offloaded:  # all of it stays after all
        here = replace(point, auto=False, tiers=Tiers())
        return memory(model, machine, here, widths=given, by_gloo=by_gloo)
    gathered = gathered_at_once(units, ranks, point, tiered.placed)
    sums = waiting_sums(units, ranks, widths, point, tiered.placed)
    most_local = local + sums
    states = tiered.by_tier[Tier.DEVICE]
    parts = Parts(
        parameters=states[PARAMETERS],
        optimizer=states[OPTIMIZER],
        gradients=states[GRADIENTS],
        gradients_stay=not ranks.alone or point.accumulate > 1 or point.contiguous_gradients,
        gathered=gathered,
        gathered_last=least((gathered, gathered_at_once(units, ranks, point, tiered.placed, with_next=False))),
        fixed=buffers + workspaces + model.buffers,
        ring=ring,
        block=checkpoints if point.keeps_a_block else 0,
        sums=sums,
    )
    init = _init_peak(units, ranks, widths, point, model, parts)
    instants = [*_instants(units, activity, parts, ranks, widths, point, by_gloo=by_gloo), Instant("init", init)]
    most = greatest(instant.nbytes for instant in instants)
    peak = next(instant for instant in instants if instant.nbytes == most)
    comes_and_goes = gathered + buffers + most_local + greatest((0, alive - parts.block))
    reserve = trunc(FRAGMENTATION * comes_and_goes)
    device = {
        "parameters": parts.parameters,
        "gradients": parts.gradients,
        "optimizer": parts.optimizer,
        "fused buffers": buffers,
        "gathered units": gathered,
        "local gradients": most_local,
        "activation checkpoints": checkpoints,
        "working activations": _working(units, activity, samples),
        "logits": logits,
        "update ring": ring,
        "library workspaces": workspaces,
        "model buffers": model.buffers,
        "init peak": init,
        "fragmentation reserve": reserve,
    }
    assert tuple(device) == LINES
    away = {tier: dict(tiered.by_tier[tier]) for tier in (Tier.HOST, Tier.NVME)}
    if point.keeps_away:
        whole = activity_of(model, replace(point, checkpoints_on="device")).checkpoints
        away[Tier(point.checkpoints_on)]["activation checkpoints"] = trunc(whole.at(samples))
    return Memory(
        device=device,
        host=away[Tier.HOST],
        disk=away[Tier.NVME],
        device_peak=peak.nbytes,
        peak_at=peak.name,
        gradient_arena=sum(
            unit.arena * times
            for unit, some in zip(units, tiered.placed, strict=True)
            for tiers_of_some, times in some.items()
            if tiers_of_some.gradients is Tier.DEVICE
        ),
        reserve=reserve,
        waiting=sums,
        sums=sums_among_states(units, ranks, widths, point, tiered.placed),
        shares=tiered.shares(units),
    )


def _working(units: Sequence[HeldUnit], activity: Activity, samples: int) -> int:
    """The most that is neither kept for recomputation nor logits. Both of these are where the root computes."""
    beside = {ROOT: activity.checkpoints + activity.logits}
    numbers = (
        moment.alive.at(samples) - beside.get(units[moment.unit].shape.name, activity.checkpoints).at(samples)
        for moment in activity.moments
    )
    return trunc(greatest((0, *numbers)))


def _instants(
    units: Sequence[HeldUnit],
    activity: Activity,
    parts: Parts,
    ranks: Ranks,
    widths: Widths,
    point: Point,
    *,
    by_gloo: bool,
) -> Iterator[Instant]:
    """Every moment at which the most can be there."""
    samples, base = point.micro_batch, parts.parameters + parts.optimizer + parts.fixed
    share = _Coming(units, parts.gradients)
    first_root = True
    last_block = max((n for n, each in enumerate(activity.moments) if units[each.unit].shape.name != ROOT), default=-1)
    for number, moment in enumerate(activity.moments):
        unit = units[moment.unit]
        name = unit.shape.name or "the root"
        alive, growth = trunc(moment.alive.at(samples)), abs(trunc(moment.growth.at(samples)))
        if moment.phase is Phase.FORWARD:
            # A pipeline's first stage, as others from the second micro-batch on, goes forward with earlier sums.
            gradients = parts.sums + (parts.gradients if parts.gradients_stay else 0)
            yield Instant(f"forward of {name}", base + gradients + parts.gathered + alive)
            continue
        local = parts.sums + _local_at(moment, unit, ranks, widths, point, by_gloo=by_gloo)
        if parts.gradients_stay:
            yield Instant(f"backward of {name}", base + parts.gradients + local + parts.gathered + alive)
            continue
        repeats = min(moment.repeats, unit.shape.count)
        # The first, the last, and the one before it, the last that finds another unit fetched.
        for more in dict.fromkeys((0, greatest((0, repeats - 2)), repeats - 1)):
            if moment.gradients is not None:
                come = share.of_made(moment.arrived + more * unit.local_gradients)
            else:
                come = share.after(moment.unit, more + 1, is_first=first_root)
            is_last = number == last_block and more == repeats - 1
            held = base + come + local + (parts.gathered_last if is_last else parts.gathered)
            yield Instant(f"backward of {name}", held + greatest((0, alive - growth * more)))
        if moment.gradients is not None:
            continue
        share.arrive(moment.unit, repeats, is_first=first_root)
        if unit.shape.name == ROOT:
            first_root = False
    if parts.sums:  # parameters are let go of before
        yield Instant("the reduction of the stage", base + parts.block + parts.gradients + parts.sums)
    yield Instant("step", base + parts.block + parts.gradients + parts.ring)


def _local_at(moment: Moment, unit: HeldUnit, ranks: Ranks, widths: Widths, point: Point, *, by_gloo: bool) -> int:
    """Gradients as autograd makes them, beside those that stay. A trace has followed them; else it may be a unit's."""
    if moment.gradients is None:
        return local_gradients(unit, ranks, widths, point, by_gloo=by_gloo)
    is_kept = not ranks.alone and keeps_sent(ranks, by_gloo=by_gloo)
    return trunc(moment.gradients + (moment.sent if is_kept else 0))


class _Coming:
    """Gradients of a rank alone, as they arrive. `total`: what of all of them is on the device in the end."""

    def __init__(self, units: Sequence[HeldUnit], total: int) -> None:
        self._units = units
        self._all = sum(unit.states.gradients * unit.shape.count for unit in units)
        self._part = total / self._all if self._all else 0.0
        self._arrived = 0.0

    def _of(self, index: int, count: int, is_first: bool) -> float:
        unit = self._units[index]
        if unit.shape.name != ROOT:
            return unit.states.gradients * count
        # The head's gradient comes first and the embeddings' last; one that both share is there from the first.
        large = [slab for slab in unit.slabs if slab.is_trained and slab.tensors == 1]
        last = greatest(slab.numel for slab in large) if len(large) > 1 else 0
        numel = sum(slab.numel for slab in unit.slabs if slab.is_trained)
        late = last / numel if numel else 0.0
        return unit.states.gradients * ((1 - late) if is_first else late)

    def of_made(self, nbytes: float) -> int:
        """Of so many bytes that autograd made: what is on the device, as they are kept."""
        made = sum(unit.local_gradients * unit.shape.count for unit in self._units)
        return trunc(nbytes / made * self._all * self._part) if made else 0

    def after(self, index: int, count: int, *, is_first: bool) -> int:
        return trunc(least((self._all, self._arrived + self._of(index, count, is_first))) * self._part)

    def arrive(self, index: int, count: int, *, is_first: bool) -> None:
        self._arrived = least((self._all, self._arrived + self._of(index, count, is_first)))


def _init_peak(
    units: Sequence[HeldUnit], ranks: Ranks, widths: Widths, point: Point, model: ModelShape, parts: Parts
) -> int:
    """Units get memory one after the other: whole masters, their shard, and what stays for forward. There are no
    gradients and no moments yet. A model that is on the device already is there as well, until it is cut."""
    moments = widths.moments * sum(
        slab.owned * unit.shape.count for unit in units for slab in unit.slabs if slab.is_trained
    )
    kept = parts.parameters + greatest((0, parts.optimizer - moments))
    whole = greatest(sum(slab.size * widths.master for slab in unit.slabs) for unit in units)
    before = 0 if point.on_meta else model.parameters * model.built_bytes // (point.tensor * point.pipeline)
    most = greatest((kept, before))
    return most + whole if not ranks.alone or widths.has_master else most
