"""What `zerofold bench plan` expects of one run: the peak of the device and the seconds of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from zerofold.memory.buffers import default_buffer_bytes
from zerofold.plan.machine import Machine
from zerofold.plan.memory import memory
from zerofold.plan.point import Point
from zerofold.plan.presets import preset
from zerofold.plan.shape import ModelShape
from zerofold.plan.times import times


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured setting of a model."""

    stage: int
    world: int
    batch: int
    checkpointing: bool


BUFFER_BYTES = {"cuda": default_buffer_bytes("cuda"), "cpu": 2**18}
"""Of fused communication. On the CPU a block goes in several, and small models are like large ones."""


class Rates(NamedTuple):
    """What a device reaches: flops and bytes a second, seconds from kernel to kernel, and of the host for each."""

    flops: float
    memory: float
    kernel: float
    host: float


def machine_of(device: str, world: int, rates: Rates | None) -> Machine:
    """The device that runs are measured on, as far as predictions need to know it."""
    machine = preset("H200" if device == "cuda" else "cpu", devices=world)
    if rates is None:
        return machine
    return replace(
        machine,
        flops=rates.flops,
        flops_fp32=rates.flops,
        memory_rate=rates.memory,
        kernel_seconds=rates.kernel,
        host_seconds=rates.host,
    )


def point_of(run: Run, precision: str, device: str) -> Point:
    return Point(
        stage=str(run.stage),
        micro_batch=run.batch,
        checkpoint_every=int(run.checkpointing),
        precision=precision,
        buffer_bytes=BUFFER_BYTES[device],
    )


def peak_bytes(shape: ModelShape, run: Run, precision: str, device: str) -> int:
    """By the same function that `zerofold plan` shows."""
    machine, point = machine_of(device, run.world, None), point_of(run, precision, device)
    # The plan takes ranks on the CPU to speak by gloo. The fake group reduces as a GPU's would, on the CPU too.
    return memory(shape, machine, point, by_gloo=False).device_peak


def step_seconds(shape: ModelShape, run: Run, precision: str, device: str, rates: Rates) -> float:
    return times(shape, machine_of(device, run.world, rates), point_of(run, precision, device)).step


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One run, predicted and measured. Seconds of a rank alone on a GPU."""

    model: str
    parameters: int
    run: Run
    predicted_bytes: int
    measured_bytes: int
    predicted_s: float | None = None
    measured_s: float | None = None

    @property
    def off(self) -> float:
        """What the prediction is over what was measured; negative where it is under."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def time_off(self) -> float | None:
        if self.predicted_s is None or self.measured_s is None:
            return None
        return self.predicted_s / self.measured_s - 1


class Failed(NamedTuple):
    """A model whose runs are missing, or those after some."""

    model: str
    message: str
