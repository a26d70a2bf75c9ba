"""Which row to choose and why, and what would have to change where none fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zerofold.placement import Tier, Tiers, row
from zerofold.plan.machine import GB, Machine
from zerofold.plan.memory import memory
from zerofold.plan.point import Point, Prediction
from zerofold.plan.predict import lacks
from zerofold.plan.shape import ModelShape

_NEAR = 1.02  # times as long: not worth another row, whose states leave less room
_MOST_DEVICES = 2**17


@dataclass(frozen=True)
class Advice:
    """`reason` in a sentence; `sentences` for a person."""

    reason: str
    sentences: tuple[str, ...] = ()


def name_of(point: Point) -> str:
    """
    >>> name_of(Point(stage="3", tiers=Tiers(Tier.HOST, Tier.HOST)))
    'stage 3, optimizer and gradients on the host'
    """
    label = f"stage {point.stage}" if point.stage.isdigit() else point.stage
    if point.auto:
        return f"{label}, tiers chosen unit by unit"
    tiers = {
        "optimizer": point.tiers.optimizer,
        "gradients": point.tiers.gradients,
        "parameters": point.tiers.parameters,
    }
    where = {Tier.HOST: "on the host", Tier.NVME: "on disk"}
    parts = []
    for tier, place in where.items():
        states = [state for state, held in tiers.items() if held is tier]
        if states:
            parts.append(f"{' and '.join([', '.join(states[:-1]), states[-1]] if len(states) > 1 else states)} {place}")
    return ", ".join([label, *parts])


def advise(
    model: ModelShape, machine: Machine, stages: Sequence[Prediction], offloaded: Sequence[Prediction]
) -> tuple[Prediction | None, Advice]:
    """The fastest that fits. Of those within 2% of it the one that needs least memory: it leaves room to grow."""
    fitting = [each for each in (*stages, *offloaded) if each.fits and _can_run(each.point)]
    if not fitting:
        return None, _nothing(model, machine, [*stages, *offloaded])
    fastest = min(each.times.step for each in fitting)
    near = [each for each in fitting if each.times.step <= _NEAR * fastest]
    best = min(near, key=lambda each: (each.point.auto or each.point.tiers.is_offloaded, each.memory.device_need))
    need, there = best.memory.device_need, machine.device_memory
    reason = f"{name_of(best.point)} is the fastest that fits: {_seconds(best.times.step)} a step"
    if len(near) > 1:
        reason += f", and of the {len(near)} within 2% of it the one that leaves most memory free"
    sentences = [
        f"Choose {name_of(best.point)}: {_gb(need)} of {_gb(there)} GB on each device, most in {best.memory.peak_at}; "
        f"{_seconds(best.times.step)} a step, {best.samples_per_second:.3g} samples a second on all devices.",
    ]
    others = [each for each in stages if not each.fits]
    if others:
        least = ", ".join(name_of(each.point) for each in others)
        sentences.append(f"Too large for a device: {least}.")
    elif len(near) > 1:
        sentences.append("Every row fits and the times are close; the one that leaves most memory free was taken.")
    sentences.append(f"What it waits for most: {best.times.bottleneck}.")
    return best, Advice(reason, tuple(sentences))


def _can_run(point: Point) -> bool:
    """ "dp" is the baseline that the others are measured against, never a choice."""
    return point.stage != "dp" and point.tensor == point.pipeline == 1


def _nothing(model: ModelShape, machine: Machine, tried: Sequence[Prediction]) -> Advice:
    nearest = min(tried, key=lambda each: each.memory.device_need / machine.device_memory + bool(each.memory.host))
    point = replace(nearest.point, tensor=1, pipeline=1)
    change = _what_would_fit(model, machine, point)
    return Advice(
        "nothing fits",
        (
            f"Nothing fits. Nearest is {name_of(nearest.point)}: {nearest.lacks or 'more memory is needed'}.",
            f"It would fit with {change}." if change else "No change of one setting makes it fit.",
        ),
    )


def _lacks(model: ModelShape, machine: Machine, point: Point) -> str:
    return lacks(memory(model, machine, point), machine)


def _what_would_fit(model: ModelShape, machine: Machine, point: Point) -> str:
    """The first of these changes that makes room, the cheapest to make first."""
    for what, change, fleet in _changes(machine, point):
        if not _lacks(model, fleet, change):
            return what
    return ""


def _changes(machine: Machine, point: Point) -> Iterator[tuple[str, Point, Machine]]:
    if not row(point.stage).parameters.is_cut:
        yield "stage 3", replace(point, stage="3"), machine
    cut = replace(point, stage="3" if not row(point.stage).parameters.is_cut else point.stage)
    if point.micro_batch > 1:
        half = replace(cut, micro_batch=max(1, cut.micro_batch // 2), accumulate=2 * cut.accumulate)
        yield f"micro-batches of {half.micro_batch}, {half.accumulate} to a step", half, machine
    if point.checkpoint_every == 0:
        yield "activation checkpointing", replace(cut, checkpoint_every=1), machine
    three = replace(cut, stage="3", group=0, auto=False, checkpoint_every=cut.checkpoint_every or 1)
    yield "stage 3 with optimizer states on the host", replace(three, tiers=Tiers(Tier.HOST, Tier.HOST)), machine
    yield "stage 3 with all states on the host", replace(three, tiers=Tiers(Tier.HOST, Tier.HOST, Tier.HOST)), machine
    devices = machine.devices
    while devices < _MOST_DEVICES:
        devices *= 2
        yield f"stage 3 on {devices} devices", replace(three, tiers=Tiers()), replace(machine, devices=devices)


def _gb(count: float) -> str:
    return f"{count / GB:.1f}"


def _seconds(count: float) -> str:
    return f"{count:.3g} s" if count >= 1 else f"{1000 * count:.3g} ms"
