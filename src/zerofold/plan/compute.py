"""How long a device computes: each unit, forward and backward, for one micro-batch.

    seconds = flops / (ATTAINED · rate) + bytes / memory rate + kernels · KERNEL_GAP
              and at least kernels · kernel_seconds

So the rate that matrix products attain falls with their size: a kernel has the same gap before it, whatever it does.
`ATTAINED` was fitted to runs on one H200 (`tests/test_plan_times.py` says how far each is off).
"""

from __future__ import annotations

from typing import NamedTuple

from zerofold.plan.away import STATES_BYTES
from zerofold.plan.held import widths_of
from zerofold.plan.machine import Machine
from zerofold.plan.point import Point
from zerofold.plan.shape import ModelShape, Phase, Work

ATTAINED = 0.88
"""Of the 16-bit rate of large products, for products of the sizes that a model has, and for attention, of which all
flops are counted though a causal one skips half."""
ATTAINED_FP32 = 1.0
"""The same in fp32, which is slow enough for every product to be large."""
KERNEL_GAP = 1.5e-6
"""Seconds between a kernel and the next that depends on it."""
_TF32 = 0.5  # of the 16-bit rate


class UnitSeconds(NamedTuple):
    """Of one unit and one micro-batch; backward with what is computed again."""

    forward: float
    backward: float


def matrix_rate(machine: Machine, precision: str) -> float:
    """Flops a second that a model's products attain."""
    if widths_of(precision).compute == 2:
        return ATTAINED * machine.flops
    if precision == "tf32":
        return ATTAINED * max(machine.flops_fp32, _TF32 * machine.flops)
    return ATTAINED_FP32 * machine.flops_fp32


def work_seconds(work: Work, samples: float, machine: Machine, precision: str, tensor: int = 1) -> float:
    """Of one piece of work, shared by `tensor` devices.

    >>> from zerofold.plan.machine import Link
    >>> from zerofold.plan.shape import PerSample
    >>> link = Link(rate=1)
    >>> machine = Machine(name="m", device_memory=0, host_memory=0, flops=1e15, flops_fp32=1e13, memory_rate=1e12,
    ...                   kernel_seconds=1e-5, inside=link, across=link, to_host=link, host_update=1)
    >>> work_seconds(Work(PerSample(0, 8.8e11), PerSample(0, 1e9)), 2, machine, "bf16")
    0.004
    >>> work_seconds(Work(kernels=100), 1, machine, "bf16")  # too short: the host cannot start them faster
    0.001
    """
    matrix = work.flops.at(samples) / tensor / matrix_rate(machine, precision)
    other = work.moved.at(samples) / tensor / machine.memory_rate
    return max(matrix + other + work.kernels * KERNEL_GAP, work.kernels * machine.kernel_seconds)


def unit_seconds(model: ModelShape, machine: Machine, point: Point) -> list[UnitSeconds]:
    """For each of the model's units. Where only a number of parameters is known, the arithmetic of every token with
    every parameter is all that counts: 2 flops forward, 4 backward, 2 again with checkpoints."""
    if not model.activities:
        return [_by_count(unit.parameters, model, machine, point) for unit in model.units]
    forward, backward = [0.0] * len(model.units), [0.0] * len(model.units)
    for moment in model.activity(point.checkpoint_every).moments:
        taken = work_seconds(moment.work, point.micro_batch, machine, point.precision, point.tensor)
        phase = forward if moment.phase is Phase.FORWARD else backward
        phase[moment.unit] += moment.repeats * taken / model.units[moment.unit].count
    return [UnitSeconds(*pair) for pair in zip(forward, backward, strict=True)]


def update_seconds(
    parameters: float, gradient_width: int, machine: Machine, *, here: float = 1.0, copy_width: int = 0
) -> float:
    """Of the optimizer's states on the device, `here` of them all: 12 bytes a parameter are read and written, a copy of
    some width is written along. Gradients are read once for their norm, and once with the states."""
    states = 2 * STATES_BYTES + gradient_width + copy_width
    return parameters * (here * states + gradient_width) / machine.memory_rate


def _by_count(parameters: int, model: ModelShape, machine: Machine, point: Point) -> UnitSeconds:
    tokens = point.micro_batch * model.tokens
    once = 2 * tokens * parameters / point.tensor / matrix_rate(machine, point.precision)
    return UnitSeconds(once, (3 if point.checkpoint_every else 2) * once)
