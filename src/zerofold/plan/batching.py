"""How many samples to compute at a time, and where inputs of checkpointed blocks wait meanwhile, when the samples of a
step are given.

Larger micro-batches gather parameters and reduce gradients less often. Where their checkpoints do not fit the device,
these go to the host, which costs copies. That pays if the copies take less than the traffic that is saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from zerofold.placement import Tier
from zerofold.plan.machine import Machine
from zerofold.plan.point import Point, Prediction
from zerofold.plan.predict import predict
from zerofold.plan.search import weighed
from zerofold.plan.shape import ModelShape
from zerofold.plan.space import divisors

_WHERE = {Tier.DEVICE: "on the device", Tier.HOST: "in host memory", Tier.NVME: "on the disk"}


class Batching(NamedTuple):
    """A rank's samples of a step, cut; where inputs wait, and why."""

    micro_batch: int
    accumulate: int
    keep: str
    partition: bool
    """Each tensor-parallel rank keeps its part (P_a)."""
    saved: float
    """Of a step's time, against the fastest with all inputs on the device; 0 where there is none."""
    sentence: str


def choose_batching(
    model: ModelShape, machine: Machine, point: Point, samples: int, *, most: int | None = None
) -> Batching | None:
    """The fastest that fits, for so many samples of a rank in a step; None where nothing fits. `point` says all else.

    most   samples at a time

    >>> from dataclasses import replace
    >>> from zerofold.plan.machine import Link
    >>> from zerofold.plan.presets import preset
    >>> from zerofold.plan.transformer import from_parameters
    >>> model, fast = from_parameters(13e9, seq=4096), preset("A100-80", devices=8)
    >>> slow = replace(fast, inside=Link(rate=2e9))
    >>> point = Point(stage="3", checkpoint_every=1)
    >>> [choose_batching(model, machine, point, 64)[:3] for machine in (fast, slow)]
    [(8, 8, 'device'), (16, 4, 'host')]
    """
    tried = list(_tried(model, machine, point, samples, most))
    fitting = [each for each in tried if each.fits]
    if not fitting:
        return None
    best = _fastest(fitting)
    here = [each for each in fitting if not each.point.keeps_away]
    said = f"micro-batches of {_in_words(best)}, inputs of checkpointed blocks {_where(best)}"
    saved = 0.0
    if not best.point.keeps_away:
        said += ": by the plan the fastest that fits"
    elif here:
        other = _fastest(here)
        saved = 1 - best.times.step / other.times.step
        said += (
            f": it pays, by the plan a step is {100 * saved:.0f}% shorter than with all of them {_where(other)}, in "
            f"micro-batches of {_in_words(other)}"
        )
    else:
        least = min((each for each in tried if not each.point.keeps_away), key=lambda each: each.point.micro_batch)
        said += f": on the device not even {_in_words(least)} fit ({least.lacks})"
    return Batching(
        best.point.micro_batch, best.point.accumulate, best.point.checkpoints_on, best.point.keeps_parts, saved, said
    )


def _tried(model: ModelShape, machine: Machine, point: Point, samples: int, most: int | None) -> Iterator[Prediction]:
    places = [Tier.DEVICE, Tier.HOST] + ([Tier.NVME] if machine.disk else [])
    kept = [replace(point, checkpoints_on=place.value) for place in places]
    kept += [parts for parts in (replace(each, partition=True) for each in kept) if parts.keeps_parts]
    for micro_batch in divisors(samples):
        if most is not None and micro_batch > most:
            break
        for each in kept:
            at = replace(each, micro_batch=micro_batch, accumulate=samples // micro_batch)
            yield predict(model, machine, at)


def _fastest(some: Sequence[Prediction]) -> Prediction:
    """Of equals the larger micro-batch: kernels are launched less often."""
    return min(some, key=lambda each: (weighed(each.times.step, each.point), -each.point.micro_batch))


def _in_words(found: Prediction) -> str:
    return f"{found.point.micro_batch} x {found.point.accumulate}"


def _where(found: Prediction) -> str:
    return f"{'in parts ' if found.point.keeps_parts else ''}{_WHERE[Tier(found.point.checkpoints_on)]}"
