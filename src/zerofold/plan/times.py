"""The time of a step: what a device computes, and what it waits for.

Every part comes from the same few numbers that the traffic and the memory of a step come from: arithmetic (`compute`),
links (`collectives`), states off the device (`away`); the overlap is that of the schedule, unit by unit (`overlap`).
"""

from __future__ import annotations

from collections.abc import Mapping

from zerofold.placement import Tier, row
from zerofold.plan import efficiency as model_of_intensity
from zerofold.plan.away import away_of, node_ranks
from zerofold.plan.collectives import data_span
from zerofold.plan.compute import matrix_rate, update_seconds
from zerofold.plan.ground import Ground, ground_of
from zerofold.plan.host import host_seconds, launch_seconds
from zerofold.plan.machine import Machine
from zerofold.plan.point import Memory, Point, Times, Traffic
from zerofold.plan.shape import ModelShape
from zerofold.plan.traffic import PIPELINE, TENSOR, reductions_in_step
from zerofold.plan.waits import Waits

LAUNCH = "launch"
"""What a device waits for the host to start its kernels."""


def times(
    model: ModelShape,
    machine: Machine,
    point: Point,
    memory: Memory | None = None,
    traffic: Traffic | None = None,
    *,
    ground: Ground | None = None,
) -> Times:
    """Seconds of a step. `memory` tells what went where, if tiers are chosen unit by unit. `traffic` is taken so that
    all parts of a prediction may be handed on; times come from the same counts. `ground`, for whoever has it already.

    >>> from zerofold.plan.machine import Link
    >>> from zerofold.plan.shape import UnitShape
    >>> link = Link(rate=1e11)
    >>> machine = Machine(name="m", devices=8, device_memory=0, host_memory=0, flops=1e15, flops_fp32=1e13,
    ...                   memory_rate=1e12, inside=link, across=link, to_host=link, host_update=1e9)
    >>> blocks = UnitShape(name="block", trained=10**8, count=10)
    >>> model = ModelShape(name="m", units=(UnitShape(name="", trained=0), blocks), tokens=2048)
    >>> found = times(model, machine, Point(stage="2", micro_batch=8))
    >>> round(found.compute, 3), found.bottleneck
    (0.118, 'compute')
    """
    ground = ground or ground_of(model, machine, point)
    waits = Waits(ground, machine, point, row(point.stage), away_of(point, memory))
    exposed = {PIPELINE: ground.floor.pipeline, TENSOR: ground.floor.tensor, **waits.total()._asdict()}
    compute, update = ground.floor.compute + _passes(waits), _update(waits)
    # The norm of all gradients is read between the passes and the update: neither hides what the other waits for.
    passes = compute + sum(exposed.values())
    exposed[LAUNCH] = launch_seconds(host_seconds(model, machine, point), machine, passes, update)
    exposed = {name: waited for name, waited in exposed.items() if waited > 0}
    intensity = _intensity(model, point)
    parts = {"compute": compute, "update": update, **exposed}
    return Times(
        compute=compute,
        exposed=exposed,
        update=update,
        efficiency=_efficiency(waits, intensity),
        intensity=intensity,
        bottleneck=max(parts, key=parts.__getitem__),
    )


def _passes(waits: Waits) -> float:
    """The engine's own passes over memory: casts from masters before use, gradients into buffers and sums."""
    ground, point, widths = waits.ground, waits.point, waits.ground.widths
    is_alone = ground.mesh.data == 1
    moved = 0.0
    if widths.has_master and (waits.row.parameters.is_cut or is_alone):
        gathers = 1 if point.pipeline > 1 else 2 * point.accumulate
        moved += gathers * (widths.master + widths.compute) * ground.trained / waits.owners
    if not is_alone:
        moved += reductions_in_step(waits.row, point) * (widths.compute + widths.wire) * ground.trained
    elif point.accumulate > 1:
        moved += point.accumulate * (widths.compute + 2 * widths.gradient) * ground.trained
    return moved / waits.machine.memory_rate


def _update(waits: Waits) -> float:
    """On the device. Whole 16-bit parameters of several ranks are written along."""
    ground, widths = waits.ground, waits.ground.widths
    writes_copy = widths.has_master and not waits.row.parameters.is_cut and ground.mesh.data > 1
    return update_seconds(
        ground.trained / waits.owners,
        waits.gradient_width,
        waits.machine,
        here=waits.away.optimizer.device,
        copy_width=widths.compute * writes_copy,
    )


def _efficiency(waits: Waits, intensity: Mapping[str, float]) -> float:
    """By the model of arithmetic intensity: the least over the states that are moved. What several ranks move of one
    state they move at the same time, so their rates add up."""
    machine, mesh, away = waits.machine, waits.ground.mesh, waits.away
    peak = matrix_rate(machine, waits.point.precision)
    rate = machine.memory_rate
    if away.optimizer.host:
        rate = machine.to_host.rate
    if away.optimizer.disk:
        rate = min(machine.disk_read, machine.disk_write) / node_ranks(machine)
    found = model_of_intensity.efficiency(intensity["optimizer"], rate * waits.owners, peak)
    whole = float(2**30)  # long enough that latencies do not count
    taken = waits.ground.wires.seconds("all_gather", whole, data_span(mesh))
    taken += waits.fetched(whole / mesh.ranks(waits.row.parameters)).total
    if taken:
        found = min(found, model_of_intensity.efficiency(intensity["parameters"], whole / taken, peak))
    if waits.point.keeps_away and "checkpoints" in intensity:
        rate = machine.to_host.rate
        if waits.point.checkpoints_on == Tier.NVME.value:
            rate = min(rate, machine.disk_read / node_ranks(machine), machine.disk_write / node_ranks(machine))
        found = min(found, model_of_intensity.efficiency(intensity["checkpoints"], rate, peak))
    return found


def _intensity(model: ModelShape, point: Point) -> dict[str, float]:
    found = {
        "parameters": model_of_intensity.parameter_intensity(point.micro_batch, model.tokens),
        "optimizer": model_of_intensity.optimizer_intensity(point.samples, model.tokens),
    }
    if model.hidden is not None and point.checkpoint_every:
        # Tensor-parallel ranks share a block's arithmetic, and move its whole input each unless that is cut too.
        whole = 1 if point.keeps_parts or point.sequence_parallel else point.tensor
        found["checkpoints"] = model_of_intensity.checkpoint_intensity(model.hidden, point.checkpoint_every) / whole
    return found
