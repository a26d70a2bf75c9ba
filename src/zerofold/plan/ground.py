"""What all rows and tiers of a point have in common: degrees, units, arithmetic, and the floor that none goes below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zerofold.plan.collectives import send_seconds, tensor_span, wires_of
from zerofold.plan.compute import UnitSeconds, unit_seconds
from zerofold.plan.held import widths_of
from zerofold.plan.machine import Machine
from zerofold.plan.mesh import Mesh, mesh_of, units_of_rank
from zerofold.plan.point import Point
from zerofold.plan.shape import ModelShape, UnitShape
from zerofold.plan.states import Widths
from zerofold.plan.traffic import TENSOR, kept, model_exchanges
from zerofold.plan.wires import Wires


class Floor(NamedTuple):
    """Seconds of a step whatever the row and the tiers: arithmetic, the bubble of the pipeline, tensor parallelism."""

    compute: float
    pipeline: float
    tensor: float

    @property
    def seconds(self) -> float:
        return self.compute + self.pipeline + self.tensor


@dataclass(frozen=True)
class Ground:
    """For a model on a machine, degrees, batch and interval of checkpoints. `units` are those of one device, `stays`
    how many of each stay gathered from forward to backward, `seconds` what each computes."""

    mesh: Mesh
    wires: Wires
    widths: Widths
    units: Sequence[UnitShape]
    stays: Sequence[int]
    seconds: Sequence[UnitSeconds]
    floor: Floor
    trained: int
    """Parameters of one device before anything is cut over data-parallel ranks."""


def ground_of(model: ModelShape, machine: Machine, point: Point) -> Ground:
    mesh, widths = mesh_of(machine, point), widths_of(point.precision)
    wires = wires_of(machine)
    units = units_of_rank(model, point)
    found = unit_seconds(model, machine, point)
    return Ground(
        mesh,
        wires,
        widths,
        units,
        kept(units, widths.compute, point.live_bytes),
        found,
        _floor(model, machine, point, mesh, wires, units, found),
        sum(unit.count * unit.trained for unit in units),
    )


def _floor(
    model: ModelShape,
    machine: Machine,
    point: Point,
    mesh: Mesh,
    wires: Wires,
    units: Sequence[UnitShape],
    taken: Sequence[UnitSeconds],
) -> Floor:
    once = sum(unit.count * (each.forward + each.backward) for unit, each in zip(units, taken, strict=True))
    tensor = bubble = 0.0
    for exchange in model_exchanges(model, point):
        nbytes = exchange.size * exchange.itemsize
        if exchange.group == TENSOR:
            tensor = exchange.times * wires.seconds(exchange.collective, nbytes, tensor_span(mesh, machine))
        else:  # of the first micro-batch, on its way through and back; later ones are sent beside compute
            bubble = 2 * (mesh.pipeline - 1) * send_seconds(nbytes, mesh, machine)
    # While the pipeline fills and drains, a stage waits for the others, p−1 micro-batches long.
    bubble += (mesh.pipeline - 1) * (once + tensor / point.accumulate)
    return Floor(point.accumulate * once, bubble, tensor)
