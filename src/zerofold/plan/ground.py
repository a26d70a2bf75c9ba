"""What all rows and tiers of a point have in common: degrees, units, arithmetic, and the floor that none goes below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zerofold.plan.activities import Shares
from zerofold.plan.collectives import send_seconds, tensor_span, wires_of
from zerofold.plan.compute import UnitSeconds, unit_seconds
from zerofold.plan.held import units_of_rank, widths_of
from zerofold.plan.machine import Machine
from zerofold.plan.mesh import Mesh, mesh_of
from zerofold.plan.pipelining import bubble_seconds
from zerofold.plan.point import Point
from zerofold.plan.shape import ROOT, ModelShape, UnitShape
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
    block_checkpoint: float = 0.0
    """Bytes of one device and one micro-batch that a block keeps for its recomputation, its share of its group's."""


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
        _block_checkpoint(model, point),
    )


def _block_checkpoint(model: ModelShape, point: Point) -> float:
    blocks = sum(unit.count for unit in model.units if unit.name != ROOT)
    if not (point.checkpoint_every and model.activities and blocks):
        return 0.0
    share = 1 / point.tensor if point.keeps_parts else Shares.of(point).stream
    return model.activity(point.checkpoint_every).checkpoints.at(point.micro_batch) / blocks * share


def _floor(
    model: ModelShape,
    machine: Machine,
    point: Point,
    mesh: Mesh,
    wires: Wires,
    units: Sequence[UnitShape],
    taken: Sequence[UnitSeconds],
) -> Floor:
    forward = sum(unit.count * each.forward for unit, each in zip(units, taken, strict=True))
    backward = sum(unit.count * each.backward for unit, each in zip(units, taken, strict=True))
    tensor = bubble = 0.0
    for exchange in model_exchanges(model, point):
        nbytes = exchange.size * exchange.itemsize
        if exchange.group == TENSOR:
            tensor += exchange.times * wires.seconds(exchange.collective, nbytes, tensor_span(mesh, machine))
        else:  # of the first micro-batch, on its way through and back; later ones are sent beside compute
            bubble = 2 * (mesh.pipeline - 1) * send_seconds(nbytes, mesh, machine)
    # While the pipeline fills and drains, a stage waits for the others, and for what they exchange inside.
    passes = 3 if point.checkpoint_every else 2
    inside = tensor / point.accumulate / passes  # of a forward
    bubble += bubble_seconds(point, forward + inside, backward + (passes - 1) * inside)
    return Floor(point.accumulate * (forward + backward), bubble, tensor)
