"""How the devices of a machine are divided: data × tensor × pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from zerofold.placement import INSIDE, Placement
from zerofold.plan.held import ranks_of
from zerofold.plan.machine import Machine
from zerofold.plan.point import Point


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
