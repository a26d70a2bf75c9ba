"""What was predicted for a model that is being trained, beside what it takes: line by line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from zerofold.placement import Row, Tiers
from zerofold.plan.machine import Link, Machine
from zerofold.plan.memory import memory
from zerofold.plan.point import Memory, Point
from zerofold.plan.shape import ModelShape, UnitShape
from zerofold.plan.states import Widths
from zerofold.precision import Precision


class Parameter(NamedTuple):
    """All that a prediction asks of one."""

    numel: int
    is_trained: bool


class Line(NamedTuple):
    """Bytes."""

    name: str
    predicted: int
    measured: int

    @property
    def off(self) -> float:
        """By which part of what was measured the prediction is too large; 0 where neither is anything."""
        if not self.measured:
            return 0.0 if not self.predicted else float("inf")
        return self.predicted / self.measured - 1


def shape_of(units: Mapping[str, Iterable[Parameter]], *, name: str = "model", built_bytes: int = 4) -> ModelShape:
    """From the parameters of each unit, the root ("") first.

    >>> shape_of({"": [Parameter(64, True)], "block": [Parameter(100, True), Parameter(7, False)]}).units[1]
    UnitShape(name='block', trained=100, frozen=7, count=1, tensors=(100,), frozen_tensors=(7,))
    """
    found = []
    for unit, parameters in units.items():
        listed = list(parameters)
        trained = tuple(each.numel for each in listed if each.is_trained)
        frozen = tuple(each.numel for each in listed if not each.is_trained)
        found.append(
            UnitShape(name=unit, trained=sum(trained), frozen=sum(frozen), tensors=trained, frozen_tensors=frozen)
        )
    return ModelShape(name=name, units=tuple(found), source="model", built_bytes=built_bytes)


def predicted_for(
    units: Mapping[str, Iterable[Parameter]],
    *,
    row: Row,
    ranks: int,
    group: int = 0,
    precision: str | Precision | None = None,
    moments: float = 2.0,
    counters: int = 4,
    accumulate: int = 1,
    tiers: Mapping[str, Tiers] | None = None,
    live_bytes: int | None = None,
    buffer_bytes: int = 0,
    device_type: str = "cpu",
    built_bytes: int = 4,
    pipeline: int = 1,
    contiguous_gradients: bool = False,
) -> Memory:
    """For a model as the engine has it: every line but activations, of which it knows nothing.

    `group`: ranks inside one, where the mesh has two axes. `moments`: numbers that the optimizer keeps for each
    parameter; `counters`: bytes for each tensor besides. `tiers`: of the units that are offloaded. `pipeline`: its
    stages, of which the units are one rank's.

    >>> from zerofold.placement import row
    >>> found = predicted_for({"": [], "block": [Parameter(4096, True)]}, row=row(3), ranks=4, precision="bf16")
    >>> found.device["gradients"], found.device["optimizer"]
    (4096, 12292)
    """
    nowhere = Link(rate=1.0)
    machine = Machine(
        name="as it is",
        devices=ranks * pipeline,
        per_node=group or ranks,
        device_memory=0,
        host_memory=0,
        flops=1.0,
        flops_fp32=1.0,
        memory_rate=1.0,
        inside=nowhere,
        across=nowhere,
        to_host=nowhere,
        host_update=1.0,
        kind=device_type,
    )
    point = Point(
        stage=row.name,
        group=group,
        accumulate=accumulate,
        pipeline=pipeline,
        live_bytes=live_bytes,
        buffer_bytes=buffer_bytes,
        contiguous_gradients=contiguous_gradients,
    )
    widths = Widths.of(precision, moments=moments, counters=counters)
    return memory(shape_of(units, built_bytes=built_bytes), machine, point, widths=widths, tiers=tiers)


def lines(predicted: Memory, measured: Mapping[str, int]) -> list[Line]:
    """One for each line that was measured, under its name in `Memory.device`; "host …" and "disk …" are the others.

    >>> lines(Memory(device={"gradients": 100}, host={"optimizer": 7}), {"gradients": 80, "host optimizer": 7})
    [Line(name='gradients', predicted=100, measured=80), Line(name='host optimizer', predicted=7, measured=7)]
    """
    known = dict(predicted.device)
    known |= {f"host {state}": nbytes for state, nbytes in predicted.host.items()}
    known |= {f"disk {state}": nbytes for state, nbytes in predicted.disk.items()}
    if predicted.device_peak:
        known["peak"] = predicted.device_peak
    return [Line(name, known[name], nbytes) for name, nbytes in measured.items() if name in known]
