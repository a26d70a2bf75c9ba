"""Predictions and the search, as `zf.plan` asks for them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from zerofold.plan.machine import GB, Machine
from zerofold.plan.memory import activity_of, memory
from zerofold.plan.point import Memory, Point, Prediction, Times, Traffic
from zerofold.plan.shape import ModelShape


@dataclass(frozen=True)
class Found:
    """What the search says."""

    best: Prediction | None = None
    tried: int = 0
    larger: str = ""


def predict(model: ModelShape, machine: Machine, point: Point) -> Prediction:
    module = _part("predict")
    if module is not None:
        found: Prediction = module.predict(model, machine, point)
        return found
    held, missing = memory(model, machine, point), ""
    missing = lacks(held, machine)
    work = sum(m.repeats * m.work.flops.at(point.micro_batch) for m in activity_of(model, point).moments)
    times = Times(
        compute=work * point.accumulate / machine.flops,
        exposed={},
        update=0.0,
        efficiency=1.0,
        intensity={},
        bottleneck="compute",
    )
    return Prediction(
        point=point,
        memory=held,
        traffic=Traffic(elements={}, bytes={}),
        times=times,
        fits=not missing,
        lacks=missing,
        samples_per_second=point.samples * machine.devices / (point.tensor * point.pipeline) / (times.step or 1.0),
    )


def lacks(held: Memory, machine: Machine) -> str:
    """Which memories are too small, and by how much; nothing where all fits."""
    ranks = min(machine.per_node, machine.devices)
    wanted = (
        ("device memory", held.device_need, machine.device_memory),
        ("host memory of a node", ranks * sum(held.host.values()), machine.host_memory),
        ("disk of a node", ranks * sum(held.disk.values()), machine.disk),
    )
    parts = [
        f"{name}: {needed / GB:.1f} GB needed, {there / GB:.1f} there"
        for name, needed, there in wanted
        if needed > there
    ]
    return "; ".join(parts)


def look(model: ModelShape, machine: Machine, precision: str) -> Found:
    """The fastest point with everything free, and what twice the blocks would need."""
    search, larger = _part("search"), _part("larger")
    if search is None or larger is None or not model.activities:
        return Found()
    result = search.search(model, machine, precision=precision)
    return Found(result.best, result.tried, larger.next_larger(model, machine, result).sentence)


def _part(name: str) -> Any:
    try:
        return importlib.import_module(f"zerofold.plan.{name}")
    except ModuleNotFoundError:
        return None
