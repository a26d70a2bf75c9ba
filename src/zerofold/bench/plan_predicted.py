"""What `zerofold bench plan` expects of one run: the peak of the device and the seconds of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from zerofold.memory.buffers import default_buffer_bytes
from zerofold.plan.host import host_seconds
from zerofold.plan.machine import Machine
from zerofold.plan.memory import memory
from zerofold.plan.point import Point
from zerofold.plan.presets import preset
from zerofold.plan.shape import Launching, ModelShape
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
    """What a device reaches: flops and bytes a second, seconds from kernel to kernel."""

    flops: float
    memory: float
    kernel: float


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


class Beforehand(NamedTuple):
    """All that was measured for the predicted seconds of a model, in none of the runs that they are compared with."""

    model: str
    rates: Rates
    launching: tuple[Launching, ...]


class StepTime(NamedTuple):
    """A predicted step, and what it was made of: by that a miss can be understood."""

    seconds: float
    parts: dict[str, float]
    """On the device, and what it waits for ("launch": for the host); then what the host takes, of which most may be
    beside the device."""


def step_time(shape: ModelShape, run: Run, precision: str, device: str, rates: Rates) -> StepTime:
    """`shape` with what the host was measured to take for it."""
    machine, point = machine_of(device, run.world, rates), point_of(run, precision, device)
    found, host = times(shape, machine, point), host_seconds(shape, machine, point)
    of_host = {f"host_{name}": getattr(host, name) for name in ("passes", "update", "clear")}
    return StepTime(found.step, {"compute": found.compute, "update": found.update, **found.exposed, **of_host})


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One run, predicted and measured; its peak unless times alone were asked for. Seconds of a rank alone on a GPU."""

    model: str
    parameters: int
    run: Run
    predicted_bytes: int
    measured_bytes: int | None
    predicted_s: float | None = None
    measured_s: float | None = None
    parts: dict[str, float] | None = None
    """Of the predicted seconds."""

    @property
    def off(self) -> float | None:
        """What the prediction is over what was measured; negative where it is under."""
        return None if self.measured_bytes is None else self.predicted_bytes / self.measured_bytes - 1

    @property
    def time_off(self) -> float | None:
        if self.predicted_s is None or self.measured_s is None:
            return None
        return self.predicted_s / self.measured_s - 1


class Failed(NamedTuple):
    """A model whose runs are missing, or those after some."""

    model: str
    message: str
