"""The nearest plan that a ds_config.json can name. DeepSpeed's format has one place for the optimizer's states of all
units, or of the last ones (`ratio`), and one for all parameters: none for tiers that are chosen unit by unit, none for
gradients, which wait on the host then, and none for their block, since its own flag is on in every config."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from zerofold.placement import Tier, Tiers, row
from zerofold.plan.away import away_of
from zerofold.plan.machine import Machine
from zerofold.plan.point import Point, Prediction, name_of
from zerofold.plan.predict import predict
from zerofold.plan.shape import ModelShape

_STEP = 0.05


def nearest_named(model: ModelShape, machine: Machine, found: Prediction) -> Prediction:
    """Itself, where its tiers have names; else the fastest of the named ones that fits, or the one that needs least."""
    if not found.point.auto:
        return found if not _unnamed(found.point) else predict(model, machine, _without_places(found.point))
    tried = [predict(model, machine, point) for point in _named(found, machine)]
    fitting = [each for each in tried if each.fits]
    if fitting:
        return min(fitting, key=lambda each: each.times.step)
    return min(tried, key=lambda each: each.memory.device_need)


def named_costs(found: Prediction, named: Prediction) -> str:
    """What the ds_config costs, in a sentence; nothing where it says all."""
    if named is found:
        return ""
    said = f"a ds_config has no {' and no '.join(_unnamed(found.point))}; the nearest is {name_of(named.point)}"
    if not named.fits:
        return f"{said}, and by the plan that does not fit: {named.lacks}"
    longer = 100 * (named.times.step / found.times.step - 1)
    return f"{said}: {named.times.step:.3g} s a step instead of {found.times.step:.3g} by the plan ({longer:+.0f}%)"


def _named(found: Prediction, machine: Machine) -> Iterator[Point]:
    point = replace(found.point, auto=False, contiguous_gradients=False)
    gone = away_of(found.point, found.memory).optimizer
    places = [Tier.DEVICE, Tier.HOST] if row(point.stage).parameters.is_cut else [Tier.DEVICE]
    least = math.ceil(100 * (1 - gone.device)) / 100
    parts = [least + _STEP * n for n in range(math.ceil((1 - least) / _STEP))]
    for parameters in places:
        for part in (*parts, 1.0):
            if part:
                yield replace(point, tiers=Tiers(Tier.HOST, Tier.HOST, parameters), part=round(part, 2))
        if machine.disk:
            yield replace(point, tiers=Tiers(Tier.NVME, Tier.HOST, parameters))
    if machine.disk and Tier.HOST in places:
        yield replace(point, tiers=Tiers(Tier.NVME, Tier.HOST, Tier.NVME))


def _unnamed(point: Point) -> list[str]:
    """What of it has no name there."""
    said = {
        "tiers chosen unit by unit": point.auto,
        "gradients on disk": not point.auto and point.tiers.gradients is Tier.NVME,
        "block of gradients": point.contiguous_gradients,
    }
    return [what for what, is_so in said.items() if is_so]


def _without_places(point: Point) -> Point:
    tiers = point.tiers
    gradients = Tier.HOST if tiers.gradients is Tier.NVME else tiers.gradients
    return replace(point, tiers=replace(tiers, gradients=gradients), contiguous_gradients=False)
