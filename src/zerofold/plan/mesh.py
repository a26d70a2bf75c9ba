"""How the devices of a machine are divided: data × tensor × pipeline, and what of the model is on one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from zerofold.layout import ALIGNMENT_BYTES
from zerofold.placement import INSIDE, Placement
from zerofold.plan.machine import Machine
from zerofold.plan.point import Point
from zerofold.plan.shape import ROOT, ModelShape, UnitShape
from zerofold.precision import policy_of


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
    model_ranks = point.tensor * point.pipeline
    if model_ranks < 1 or machine.devices % model_ranks:
        raise ValueError(
            f"tensor={point.tensor} times pipeline={point.pipeline} does not divide {machine.devices} devices; "
            "choose degrees whose product does"
        )
    data = machine.devices // model_ranks
    local = max(1, min(data, min(machine.per_node, machine.devices) // point.tensor))
    inside = point.group or math.gcd(local, data)
    if data % inside:
        raise ValueError(f"group={inside} does not divide the {data} data-parallel ranks; choose a divisor of {data}")
    return Mesh(data=data, tensor=point.tensor, pipeline=point.pipeline, local=local, inside=inside)


@dataclass(frozen=True)
class Widths:
    """Bytes of an element: in compute, as gradient on the wire, as gradient sum, as what the optimizer changes."""

    compute: int
    reduction: int
    accumulation: int
    master: int

    @property
    def has_master(self) -> bool:
        return self.compute != self.master


@lru_cache(maxsize=16)
def widths_of(precision: str) -> Widths:
    """By the name of a policy.

    >>> widths_of("bf16")
    Widths(compute=2, reduction=4, accumulation=4, master=4)
    """
    policy = policy_of(precision)
    compute = 4 if policy.parameters is None else policy.parameters.itemsize
    reduction = 4 if policy.reduction is None else policy.reduction.itemsize
    accumulation = 4 if policy.accumulation is None else policy.accumulation.itemsize
    return Widths(compute, reduction, accumulation, policy.master.itemsize)


def units_of_rank(model: ModelShape, point: Point) -> tuple[UnitShape, ...]:
    """What the fullest device has of every unit: all of the root, its share of the blocks, 1/tensor of each."""
    if point.tensor == point.pipeline == 1:
        return model.units
    return tuple(_on_rank(unit, point.tensor, point.pipeline) for unit in model.units)


def _on_rank(unit: UnitShape, tensor: int, pipeline: int) -> UnitShape:
    return replace(
        unit,
        trained=-(-unit.trained // tensor),
        frozen=-(-unit.frozen // tensor),
        count=unit.count if unit.name == ROOT else -(-unit.count // pipeline),
        tensors=tuple(-(-each // tensor) for each in unit.tensors),
    )


def padded(unit: UnitShape, ranks: int, itemsize: int) -> int:
    """Elements of one unit's trained parameters in its flat space, cut over `ranks`.

    >>> padded(UnitShape(name="block", trained=107, tensors=(100, 7)), 2, 4)
    192
    """
    if not unit.tensors:
        return unit.trained
    step = max(1, ALIGNMENT_BYTES // itemsize)
    used = sum(-(-each // step) * step for each in unit.tensors)
    shard = -(-used // ranks)
    return -(-shard // step) * step * ranks
