"""Whole sums of gradients, which wait on the device for the last micro-batch of a step.

                    stays on the device                   goes to the host or a file
rows 0 and 1        sums, beside the flat gradient        sums: down once, with the last micro-batch
rows 2 and 3        the gradient itself adds up           nothing: down with every micro-batch
any, in a pipeline  sums; alone, they are the gradient    sums
                    (but with contiguous_gradients)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerofold.placement import Tiers
from zerofold.plan.held import HeldUnit, Ranks, has_both
from zerofold.plan.point import Point
from zerofold.plan.states import Widths


def waiting_sums(
    units: Sequence[HeldUnit],
    ranks: Ranks,
    widths: Widths,
    point: Point,
    placed: Sequence[Mapping[Tiers, int]] | None = None,
) -> int:
    """Bytes of sums that are not among the states. `placed`: how many of each unit are where; without it, those that
    the states of an offloaded unit would not have."""
    both = has_both(ranks.placed, widths, point, alone=ranks.alone)
    # Gradients in another memory are not what autograd adds up in, as little as those of masters are.
    away = has_both(ranks.placed, widths.beside(is_offloaded=True), point, alone=ranks.alone)
    if not away and point.pipeline == 1:
        return 0
    # A rank alone hands its sums to the optimizer; into a block of gradients they are copied.
    is_copied = point.contiguous_gradients and (ranks.placed.optimizer.is_cut or widths.is_apart)
    apart = not both and (not ranks.alone or is_copied)
    found = 0
    for number, unit in enumerate(units):
        count = unit.shape.count
        if placed is not None and not apart:
            count = sum(times for tiers, times in placed[number].items() if tiers.is_offloaded)
        found += _of_unit(unit, widths, point) * count
    return found


def sums_among_states(
    units: Sequence[HeldUnit], ranks: Ranks, widths: Widths, point: Point, placed: Sequence[Mapping[Tiers, int]]
) -> int:
    """Bytes of sums that are: of units whose states all stay on the device."""
    if not has_both(ranks.placed, widths, point, alone=ranks.alone):
        return 0
    return sum(
        _of_unit(unit, widths, point) * times
        for unit, some in zip(units, placed, strict=True)
        for tiers, times in some.items()
        if not tiers.is_offloaded
    )


def _of_unit(unit: HeldUnit, widths: Widths, point: Point) -> int:
    """The first micro-batch leaves what autograd made; the next one is added in the accumulation dtype. Of two, the
    second is reduced as it comes, but in a pipeline."""
    first = 2 if point.pipeline == 1 else 1
    width = widths.compute if point.accumulate <= first else widths.gradient
    return sum(slab.numel * width for slab in unit.slabs if slab.is_trained)
