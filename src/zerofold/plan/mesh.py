"""How the devices of a machine are divided: data × tensor × pipeline, and what of the model is on one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerofold.placement import INSIDE, Placement
from zerofold.plan.held import ranks_of
from zerofold.plan.machine import Machine
from zerofold.plan.point import Point
from zerofold.plan.shape import ROOT, ModelShape, UnitShape


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Degrees. Neighbours in a node share a tensor first, then data; pipeline stages are furthest apart."""

    data: int
    """N: ranks among which states may be cut."""
    tensor: int
    pipeline: int
    local: int
    """Ranks of one data group that share a node."""
    inside: int
    """G: ranks in a group of hsdp and hpz."""

    @property
    def groups(self) -> int:
        """R: how many of those groups there are."""
        return self.data // self.inside

    def ranks(self, placement: Placement) -> int:
        """Among how many a state so placed is cut.

        >>> from zerofold.placement import row
        >>> mesh = Mesh(data=16, tensor=1, pipeline=1, local=8, inside=8)
        >>> mesh.ranks(row("hsdp").optimizer), mesh.ranks(row(2).optimizer), mesh.ranks(row(2).parameters)
        (8, 16, 1)
        """
        if not placement.is_cut:
            return 1
        return self.inside if placement.axes == (INSIDE,) else self.data


def mesh_of(machine: Machine, point: Point) -> Mesh:
    """Raises ValueError where the degrees do not divide the devices."""
    ranks = ranks_of(machine, point)
    local = max(1, min(ranks.data, ranks.on_node // point.tensor))
    return Mesh(data=ranks.data, tensor=point.tensor, pipeline=point.pipeline, local=local, inside=ranks.group)


def units_of_rank(model: ModelShape, point: Point) -> tuple[UnitShape, ...]:
    """What the fullest device has of every unit, 1/tensor of each: its share of the blocks, and of a root that a
    pipeline cuts, the larger end. As `zerofold.plan.held` counts them."""
    if point.tensor == point.pipeline == 1:
        return model.units
    return tuple(_on_rank(unit, point.tensor, point.pipeline) for unit in model.units)


def _on_rank(unit: UnitShape, tensor: int, pipeline: int) -> UnitShape:
    tensors, trained, count = unit.tensors, unit.trained, unit.count
    if unit.name != ROOT:
        count = -(-count // pipeline)
    elif pipeline > 1 and len(tensors) > 1:
        tensors = (max(tensors),)
        trained = tensors[0]
    return replace(
        unit,
        trained=-(-trained // tensor),
        frozen=-(-unit.frozen // tensor),
        count=count,
        tensors=tuple(-(-each // tensor) for each in tensors),
        frozen_tensors=tuple(-(-each // tensor) for each in unit.frozen_tensors),
    )
