"""How long the host takes to start a step's kernels: Python, hooks and autograd, which a short kernel does not hide.

    seconds = host_seconds · (micro-batches · (kernels + units · UNIT) + units · UPDATE)

A step ends with a number that the host reads, so a device never has more than one step to run behind: the longer of
the two, device or host, is the step.
"""

from __future__ import annotations

from zerofold.plan.machine import Machine
from zerofold.plan.point import Point
from zerofold.plan.shape import ModelShape

UNIT = 110
"""Kernels' worth of the host's time for a unit's forward and backward: it is found, cast, released, its gradients noted."""
RECOMPUTE = 110
"""And again, where it is computed again in backward."""
UPDATE = 34
"""For its part of the step."""


def host_seconds(model: ModelShape, machine: Machine, point: Point) -> float:
    """Of a step; 0 where only a number of parameters is known of the model.

    >>> from zerofold.plan.machine import Link
    >>> from zerofold.plan.shape import UnitShape
    >>> link = Link(rate=1)
    >>> machine = Machine(name="m", device_memory=0, host_memory=0, flops=1, flops_fp32=1, memory_rate=1, inside=link,
    ...                   across=link, to_host=link, host_update=1)
    >>> host_seconds(ModelShape(name="m", units=(UnitShape(name="", trained=1),), tokens=1), machine, Point(stage="0"))
    0.0
    """
    if not model.activities or machine.kind == "cpu":  # where a kernel is the host's own work
        return 0.0
    moments = model.activity(point.checkpoint_every).moments
    kernels = sum(moment.repeats * moment.work.kernels for moment in moments)
    units = sum(unit.count for unit in model.units)
    uses = units * (UNIT + (RECOMPUTE if point.checkpoint_every else 0))
    return (point.accumulate * (kernels + uses) + units * UPDATE) / point.pipeline * machine.host_seconds
