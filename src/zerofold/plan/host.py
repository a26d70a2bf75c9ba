"""How long the host takes to start a step's kernels: Python, hooks and autograd, which a short kernel does not hide.

    passes = host_seconds · micro-batches · (kernels + units · UNIT)      beside the device, which is ahead or behind
    update = host_seconds · units · UPDATE                                the device waits: the norm is read before it

The constants were fitted to 16 runs of four models on one H200 (docs/plan.md has them).
"""

from __future__ import annotations

from typing import NamedTuple

from zerofold.plan.machine import Machine
from zerofold.plan.point import Point
from zerofold.plan.shape import ModelShape

UNIT = 121
"""Kernels' worth of the host's time for a unit's forward and backward: finding, casting, releasing it."""
RECOMPUTE = 121
"""And again, where it is computed again in backward."""
UPDATE = 37
"""For its part of the step."""


_TURNS = 4


class HostSeconds(NamedTuple):
    """Of a step."""

    passes: float
    """Forwards and backwards."""
    update: float


def host_seconds(model: ModelShape, machine: Machine, point: Point) -> HostSeconds:
    """Nothing where only a number of parameters is known of the model.

    >>> from zerofold.plan.machine import Link
    >>> from zerofold.plan.shape import UnitShape
    >>> link = Link(rate=1)
    >>> machine = Machine(name="m", device_memory=0, host_memory=0, flops=1, flops_fp32=1, memory_rate=1, inside=link,
    ...                   across=link, to_host=link, host_update=1)
    >>> host_seconds(ModelShape(name="m", units=(UnitShape(name="", trained=1),), tokens=1), machine, Point(stage="0"))
    HostSeconds(passes=0.0, update=0.0)
    """
    if not model.activities or machine.kind == "cpu":  # where a kernel is the host's own work
        return HostSeconds(0.0, 0.0)
    moments = model.activity(point.checkpoint_every).moments
    kernels = sum(moment.repeats * moment.work.kernels for moment in moments)
    units = sum(unit.count for unit in model.units)
    uses = units * (UNIT + (RECOMPUTE if point.checkpoint_every else 0))
    each = machine.host_seconds / point.pipeline
    return HostSeconds(each * point.accumulate * (kernels + uses), each * units * UPDATE)


def waited_for(host: float, device: float) -> float:
    """Seconds of a device in which it has no kernel: all that the host takes longer, where one of them is far behind;
    where both take about as long, each waits for the other in turn.

    >>> [round(waited_for(*both), 2) for both in ((3, 1), (1, 1), (1, 3))]
    [2.01, 0.19, 0.01]
    """
    return (host**_TURNS + device**_TURNS) ** (1 / _TURNS) - device
