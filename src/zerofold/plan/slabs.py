"""A unit's flat spaces as integers: what `zerofold.slab` will make of its parameters on one rank of any number.

Nothing here has a loop over ranks: a fleet of 100,000 costs what two cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerofold.offload.sizes import UnitSize
from zerofold.placement import Cut, Row
from zerofold.plan.followed import greatest, least, remembered
from zerofold.plan.shape import ROOT, UnitShape
from zerofold.plan.states import Widths, waiting_gradient

LARGE_ROOT_PARAMETER = 2**20
"""Bytes from which a parameter of the root is a slab by itself."""


@dataclass(frozen=True)
class SlabSize:
    """One slab, seen from the first rank. Elements."""

    numel: int
    """Without padding."""
    size: int
    """Of the flat space, with padding."""
    shard: int
    """Of the rank, with padding."""
    owned: int
    """Of the shard, what belongs to parameters."""
    tensors: int
    compute: int = 2
    """Bytes of an element of what forward computes with."""
    is_trained: bool = True

    @property
    def gathered_bytes(self) -> int:
        return self.size * self.compute


@remembered(4096)
def lay_out(numels: tuple[int, ...], widths: Widths, over: int, first_owns_all: bool, is_trained: bool) -> SlabSize:
    """The same numbers as `FlatLayout.even` and `by_owner`.

    >>> lay_out((100, 7), Widths.of("fp32"), 2, False, True)
    SlabSize(numel=107, size=192, shard=96, owned=96, tensors=2, compute=4, is_trained=True)
    """
    alignment, compute = widths.alignment, widths.compute
    end = sum(-(-numel // alignment) * alignment for numel in numels)
    if first_owns_all:
        return SlabSize(sum(numels), end, end, sum(numels), len(numels), compute, is_trained)
    each = -(-end // over)
    shard = -(-each // alignment) * alignment
    owned, offset = 0, 0
    for numel in numels:
        owned += greatest((0, least((offset + numel, shard)) - offset))
        offset += -(-numel // alignment) * alignment
    return SlabSize(sum(numels), shard * over, shard, owned, len(numels), compute, is_trained)


def slabs_of(unit: UnitShape, placed: Row, widths: Widths, over: int, *, built_bytes: int = 4) -> list[SlabSize]:
    """The slabs of one unit whose optimizer states are cut `over` ranks.

    >>> from zerofold.placement import row
    >>> [slab.size for slab in slabs_of(UnitShape(name="block", trained=107, tensors=(100, 7)), row(3), Widths(), 2)]
    [256]
    """
    found = []
    frozen = Widths(compute=widths.compute, master=widths.compute, has_master=False)
    for numels, total, each in (
        (unit.tensors, unit.trained, widths),
        (unit.frozen_tensors, unit.frozen, frozen),
    ):
        if not total:
            continue
        parts = numels or (total,)
        large: list[int] = []
        if unit.name == ROOT:
            large = [part for part in parts if part * built_bytes >= LARGE_ROOT_PARAMETER]
            parts = tuple(part for part in parts if part * built_bytes < LARGE_ROOT_PARAMETER)
        for some in (*((part,) for part in large), parts):
            if some:
                is_first = placed.cut is Cut.FIRST and placed.optimizer.is_cut
                found.append(lay_out(some, each, over, is_first, each is widths))
    return found


def unit_size(
    name: str,
    slabs: Sequence[SlabSize],
    placed: Row,
    widths: Widths,
    *,
    alone: bool,
    accumulate: int,
    copies: int = 0,
) -> UnitSize:
    """What a plan of tiers needs to know of a unit. `copies`: ranks that share a second copy of its parameters."""
    return UnitSize(
        name,
        sum(slab.shard for slab in slabs if slab.is_trained),
        sum(slab.shard for slab in slabs if not slab.is_trained),
        master_bytes=widths.master,
        moments_bytes=widths.moments,
        gradient_bytes=waiting_gradient(widths, alone=alone, accumulate=accumulate),
        compute_bytes=widths.compute,
        has_master=widths.has_master,
        gathered_bytes=sum(slab.gathered_bytes for slab in slabs),
        copy_bytes=sum(slab.size // copies * slab.compute for slab in slabs) if copies else 0,
        whole_parameters=not placed.parameters.is_cut and not alone,
    )
