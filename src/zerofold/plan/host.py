"""How long the host takes to start a step's kernels: Python, hooks and autograd, which a short kernel does not hide.

    passes   forwards and backwards       beside the device, which is ahead or behind
    update   the optimizer's step         the device waits: it has nothing to do when the gradients' norm is read
    clear    zero_grad                    beside the device's update

Where the model was run on this machine before (`ModelShape.launched`, by `zerofold.plan.probe`) these are what it took.
They hardly depend on the batch, since the host starts the same kernels for any. Of the update it was seen when the
device is through with it: what that takes longer than the plan says of a rank alone is what the host keeps it waiting,
and `clear` is in it. What the host makes ready for the update before it waits for the gradients' norm is one more part
of the passes: beside the device, where the host is ahead of it. Elsewhere they are counted:

    passes = host_seconds · micro-batches · (kernels + units · UNIT)
    update = host_seconds · units · UPDATE

The constants of this count were fitted to 16 runs of four models on one H200 and an engine that has changed since. It
now misses 7 steps of 20 by over 15% there (docs/plan.md): a guess for models and machines that nobody has run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from zerofold.plan.compute import unit_seconds, update_seconds
from zerofold.plan.held import widths_of
from zerofold.plan.machine import Machine
from zerofold.plan.point import Point
from zerofold.plan.shape import Launching, ModelShape

UNIT = 121
"""Kernels' worth of the host's time for a unit's forward and backward: finding, casting, releasing it."""
RECOMPUTE = 121
"""And again, where it is computed again in backward."""
UPDATE = 37
"""For its part of the step."""


AHEAD, BY_TURNS = 8, 4
"""How sharply the slower one of host and device decides (`waited_for`): where the host may run ahead, and where it asks
for values in every block, or nobody knows. Chosen by the same 16 runs, and 20 later ones."""


class HostSeconds(NamedTuple):
    """Of a step."""

    passes: float
    """Forwards and backwards, and what of the update goes on beside them."""
    update: float
    clear: float = 0.0
    """Of the gradients, after it."""
    runs_ahead: bool = False
    """It was seen not to wait for the device in every block."""


def host_seconds(model: ModelShape, machine: Machine, point: Point) -> HostSeconds:
    """Nothing where only a number of parameters is known of the model.

    >>> from zerofold.plan.machine import Link
    >>> from zerofold.plan.shape import UnitShape
    >>> link = Link(rate=1)
    >>> machine = Machine(name="m", device_memory=0, host_memory=0, flops=1, flops_fp32=1, memory_rate=1, inside=link,
    ...                   across=link, to_host=link, host_update=1)
    >>> model = ModelShape(name="m", units=(UnitShape(name="", trained=1),), tokens=1)
    >>> host_seconds(model, machine, Point(stage="0"))
    HostSeconds(passes=0.0, update=0.0, clear=0.0, runs_ahead=False)
    >>> ran = Launching(checkpoint_every=0, samples=1, forward=0.25, backward=0.5, update=0.125, clear=0.0)
    >>> host_seconds(replace(model, launched=(ran,)), machine, Point(stage="0", accumulate=2))
    HostSeconds(passes=1.5, update=0.125, clear=0.0, runs_ahead=True)
    """
    measured = model.launching(point.checkpoint_every)
    if measured is not None:
        passes = measured.passes if machine.kind != "cpu" else _beside_arithmetic(measured, model, machine, point)
        stages, runs_ahead = point.pipeline, measured.waits < sum(unit.count for unit in model.units)
        update, clear, ahead = measured.update, measured.clear, measured.ahead
        if measured.settled and machine.kind != "cpu":
            update, clear = max(0.0, measured.settled - ahead - _update_alone(model, machine, point)), 0.0
        seconds = ((point.accumulate * passes + ahead) / stages, update / stages, clear / stages)
        return HostSeconds(*seconds, runs_ahead=runs_ahead)
    if not model.activities or machine.kind == "cpu":  # where a kernel is the host's own work
        return HostSeconds(0.0, 0.0)
    moments = model.activity(point.checkpoint_every).moments
    kernels = sum(moment.repeats * moment.work.kernels for moment in moments)
    units = sum(unit.count for unit in model.units)
    uses = units * (UNIT + (RECOMPUTE if point.checkpoint_every else 0))
    each = machine.host_seconds / point.pipeline
    return HostSeconds(each * point.accumulate * (kernels + uses), each * units * UPDATE)


def launch_seconds(host: HostSeconds, machine: Machine, passes: float, update: float) -> float:
    """What a step takes longer than its `passes` and its `update` on the device do.

    >>> from zerofold.plan.presets import preset
    >>> round(launch_seconds(HostSeconds(passes=3.0, update=0.5, clear=1.0), preset("H200"), 1.0, 0.75), 2)
    2.76
    >>> launch_seconds(HostSeconds(passes=3.0, update=0.5, clear=1.0), preset("cpu"), 1.0, 0.75)
    4.0
    """
    if machine.kind == "cpu":  # nothing goes on beside the host; it has measured its own update
        return host.passes + max(0.0, host.update - update) + host.clear
    waited = waited_for(host.passes, passes, AHEAD if host.runs_ahead else BY_TURNS)
    return waited + host.update + max(0.0, host.clear - update)


def waited_for(host: float, device: float, turns: int) -> float:
    """Seconds of a device in which it has no kernel: all that the host takes longer, where one of them is far behind;
    where both take about as long, each waits for the other in turn.

    >>> [round(waited_for(*both, BY_TURNS), 2) for both in ((3, 1), (1, 1), (1, 3))]
    [2.01, 0.19, 0.01]
    >>> [round(waited_for(*both, AHEAD), 2) for both in ((3, 1), (1, 1), (1, 3))]
    [2.0, 0.09, 0.0]
    """
    return (host**turns + device**turns) ** (1 / turns) - device


def _update_alone(model: ModelShape, machine: Machine, point: Point) -> float:
    """On the device, where the model was run: a rank alone, whose gradients stay as autograd made them."""
    trained = sum(unit.count * unit.trained for unit in model.units)
    return update_seconds(trained, widths_of(point.precision).compute, machine)


def _beside_arithmetic(measured: Launching, model: ModelShape, machine: Machine, point: Point) -> float:
    """A CPU has computed what it launched. What the plan counts of that for so many samples is taken off."""
    same = replace(point, micro_batch=measured.samples)
    found = zip(model.units, unit_seconds(model, machine, same), strict=True)
    return max(0.0, measured.passes - sum(unit.count * (each.forward + each.backward) for unit, each in found))
