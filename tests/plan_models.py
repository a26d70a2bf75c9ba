"""Shapes and machines for tests of the plan: GPTs by formula, the H200 that figures were measured on."""

from __future__ import annotations

import math

from zerofold.placement import Cut, Tier, row
from zerofold.plan.ground import ground_of
from zerofold.plan.machine import GB, GIB, TERA, Link, Machine
from zerofold.plan.point import Memory, Point
from zerofold.plan.shape import ROOT, Activity, ModelShape, Moment, PerSample, Phase, UnitShape, Work

H200 = Machine(
    name="H200",
    device_memory=139 * GIB,
    host_memory=125 * GIB,
    disk=1000 * GB,
    flops=792 * TERA,
    flops_fp32=52 * TERA,
    memory_rate=3400 * GB,
    inside=Link(rate=450 * GB, latency=3e-6),
    across=Link(rate=50 * GB, latency=8e-6),
    to_host=Link(rate=55 * GB, latency=1e-5),
    host_update=3.3e9,
    disk_read=3.1 * GB,
    disk_write=3.0 * GB,
)


def gpt(
    *,
    layers: int,
    hidden: int,
    heads: int | None = None,
    vocab: int = 32768,
    tokens: int = 1024,
    intervals: tuple[int, ...] = (0, 1),
    itemsize: int = 2,
    fused: float = 1.0,
) -> ModelShape:
    """A GPT with untied embeddings; activations by the formulas of the memory model, 16 bytes and more a value of the
    hidden state. `fused`: the part of the elementwise traffic that is left after compilation."""
    heads = heads or max(1, hidden // 128)
    block = UnitShape(name="block", trained=12 * hidden**2 + 4 * hidden, count=layers)
    root = UnitShape(name=ROOT, trained=(2 * vocab + tokens) * hidden + 2 * hidden)
    wide = tokens * hidden
    attention = 2 * wide * tokens  # causal: half of two products of tokens × tokens
    matrix = PerSample(0, 2 * tokens * 12 * hidden**2 + attention)
    moved = PerSample(0, 12 * itemsize * 2 * wide * fused)
    once = Work(matrix, moved, kernels=16)
    head = Work(PerSample(0, 2 * wide * vocab), PerSample(0, 14 * tokens * vocab), kernels=6)
    activities = []
    for every in intervals:
        again = 1 if every else 0
        depth = every or layers
        inner = PerSample(0, tokens * depth * 8 * itemsize * hidden)
        inputs = PerSample(0, itemsize * wide * (-(-layers // every) if every else 0))
        alive = inner + inputs
        each = 1 / layers
        growth = PerSample(0, (inputs.each if every else inner.each) * each)
        moments = (
            Moment(phase=Phase.FORWARD, unit=0, alive=alive, work=head),
            Moment(phase=Phase.FORWARD, unit=1, alive=alive, work=once, repeats=layers, growth=growth),
            Moment(phase=Phase.BACKWARD, unit=0, alive=alive, work=head + head),
            Moment(phase=Phase.BACKWARD, unit=1, alive=alive, work=_times(once, 2 + again), repeats=layers),
        )
        activities.append(Activity(checkpoint_every=every, moments=moments, checkpoints=inputs))
    return ModelShape(
        name=f"gpt-{layers}x{hidden}",
        units=(root, block),
        activities=tuple(activities),
        tokens=tokens,
        source="shape",
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
    )


def _times(work: Work, times: int) -> Work:
    return sum((work for _ in range(times - 1)), work)


def simple_memory(model: ModelShape, machine: Machine, point: Point) -> Memory:
    """A closed form that stands in for the plan's own: states by row and tier, the largest activations, two units."""
    ground, chosen = ground_of(model, machine, point), row(point.stage)
    mesh, widths = ground.mesh, ground.widths
    owners = 1 if chosen.cut is Cut.FIRST else mesh.ranks(chosen.optimizer)
    own = math.ceil(ground.trained / owners)
    is_whole = not chosen.parameters.is_cut and mesh.data > 1
    gradients = own * (2 if mesh.data == point.accumulate == 1 else 4)
    if not chosen.gradients.is_cut and point.accumulate > 1:
        gradients = ground.trained * 4
    unit = max(each.parameters for each in ground.units) * widths.compute
    device = {"parameters": ground.trained * widths.compute if is_whole else 0, "gathered": 2 * unit}
    alive = max((moment.alive.at(point.micro_batch) for moment in _moments(model, point)), default=0)
    device["activations"] = math.ceil(alive / point.tensor / point.pipeline)
    sizes = {"optimizer": own * 12, "gradients": gradients}
    tiers: dict[str, dict[str, int]] = {"device": device, "host": {}, "nvme": {}}
    if point.auto:
        left = max(0, machine.device_memory - sum(device.values()) - gradients)
        here = min(sizes["optimizer"], left)
        host = min(sizes["optimizer"] - here, machine.host_memory // min(machine.per_node, machine.devices))
        tiers["device"] |= {"optimizer": here, "gradients": gradients}
        tiers["host"]["optimizer"], tiers["nvme"]["optimizer"] = host, sizes["optimizer"] - here - host
    else:
        tiers[point.tiers.optimizer.value]["optimizer"] = sizes["optimizer"]
        tiers[point.tiers.gradients.value]["gradients"] = gradients
    if not is_whole and point.tiers.optimizer is not Tier.DEVICE:
        home = tiers[point.tiers.parameters.value]
        home["parameters"] = home.get("parameters", 0) + own * widths.compute
    peak = sum(tiers["device"].values())
    return Memory(device=tiers["device"], host=tiers["host"], disk=tiers["nvme"], device_peak=peak)


def _moments(model: ModelShape, point: Point) -> tuple[Moment, ...]:
    return model.activity(point.checkpoint_every).moments if model.activities else ()
