"""Which row to choose and why, and what would have to change where none fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zerofold.placement import Tier, Tiers, row
from zerofold.plan.machine import GB, Machine
from zerofold.plan.memory import memory
from zerofold.plan.pipelining import can_run
from zerofold.plan.point import Point, Prediction, degrees_in_words, name_of
from zerofold.plan.predict import lacks
from zerofold.plan.shape import ModelShape

_NEAR = 1.02  # times as long: not worth another row, whose states leave less room
_MOST_DEVICES = 2**17


@dataclass(frozen=True)
class Advice:
    """`reason` in a sentence; `sentences` for a person."""

    reason: str
    sentences: tuple[str, ...] = ()


def advise(
    model: ModelShape, machine: Machine, stages: Sequence[Prediction], offloaded: Sequence[Prediction]
) -> tuple[Prediction | None, Advice]:
    """The fastest that fits. Of those within 2% of it the one that needs least memory: it leaves room to grow."""
    fitting = [each for each in (*stages, *offloaded) if each.fits and _can_run(each.point)]
    if not fitting:
        return None, _nothing(model, machine, [*stages, *offloaded])
    fastest = min(each.times.step for each in fitting)
    near = [each for each in fitting if each.times.step <= _NEAR * fastest]
    best = min(near, key=lambda each: (each.point.is_away, each.memory.device_need))
    need, there = best.memory.device_need, machine.device_memory
    reason = f"{name_of(best.point)} is the fastest that fits: {_seconds(best.times.step)} a step"
    if len(near) > 1:
        stays = any(each.point.is_away for each in near) and not best.point.is_away
        reason = (
            f"{len(near)} ways that fit are within 2% of the fastest ({_seconds(fastest)} a step); of them, "
            f"{'with all states on the device, ' if stays else ''}{name_of(best.point)} leaves most memory free"
        )
    sentences = [
        f"Choose {name_of(best.point)}: {_gb(need)} of {_gb(there)} GB on each device, most in {best.memory.peak_at}; "
        f"{_seconds(best.times.step)} a step, {best.samples_per_second:.3g} samples a second on all devices.",
    ]
    sentences.append(f"Why: {reason}.")
    others = [each for each in stages if not each.fits]
    if others:
        sentences.append(f"Too large for a device: {', '.join(name_of(each.point) for each in others)}.")
    sentences.append(_spent(best))
    return best, Advice(reason, tuple(sentences))


_WAITS = {
    "gather": "gathering parameters",
    "reduce": "reducing gradients",
    "host": "the host",
    "disk": "the disk",
    "update": "the update",
    "pipeline": "other stages of the pipeline",
    "tensor": "exchanging activations",
    "launch": "the host starting kernels",
}


def _spent(found: Prediction) -> str:
    """Where the time of a step goes, in a sentence."""
    times = found.times
    if not times.step < float("inf"):
        return "A step would never end: it needs a disk whose rate is not known."
    computing = f"{100 * times.compute / times.step:.0f}% of a step is arithmetic"
    others = {name: spent for name, spent in {**times.exposed, "update": times.update}.items() if spent > 0}
    if not others:
        return f"{computing}."
    most = max(others, key=others.__getitem__)
    return f"{computing}; the most of the rest, {_seconds(others[most])}, is {_WAITS[most]}."


def searched_sentence(best: Prediction | None, tried: int, samples: int | None = None) -> str:
    """What the search found, where the batch (or how `samples` of all ranks make one), the checkpoints and the degrees
    are free too."""
    batch = "batch" if samples is None else f"{samples} samples to a step, and micro-batch"
    if best is None:
        return f"With {batch}, checkpoints, tensor and pipeline degree free: nothing fits either."
    point = best.point
    kept = (
        f"the input of every {point.checkpoint_every} blocks kept"
        if point.checkpoint_every > 1
        else ("every block's input kept" if point.checkpoint_every else "no checkpoints")
    )
    degrees = f", {degrees_in_words(point)}" if point.tensor * point.pipeline > 1 else ""
    return (
        f"With {batch}, checkpoints and degrees free, the most samples a second: {name_of(point)}{degrees}, "
        f"micro-batches of {point.micro_batch}, {point.accumulate} to a step, {kept}: "
        f"{_seconds(best.times.step)} a step, {best.samples_per_second:.3g} samples a second ({tried} points tried)."
    )


def _can_run(point: Point) -> bool:
    """ "dp" is the baseline that the others are measured against, never a choice."""
    return point.stage != "dp"


def _nothing(model: ModelShape, machine: Machine, tried: Sequence[Prediction]) -> Advice:
    nearest = min(tried, key=lambda each: each.memory.device_need / machine.device_memory + bool(each.memory.host))
    point = nearest.point
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
        if can_run(half):
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
