"""The page of a plan: its rows as functions of what a reader may move."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zerofold.plan.advice import name_of
from zerofold.plan.call import Plan
from zerofold.plan.formulas import Inputs, Outputs
from zerofold.plan.held import ranks_of
from zerofold.plan.memory import memory
from zerofold.plan.page import PEAK, Row, Slider, write_page
from zerofold.plan.point import Prediction

_NOT_IN_A_BAR = ("init peak",)
"""Lines that are no part of a step."""
_MOST_DEVICES, _MOST_SAMPLES, _LONGEST = 2**16, 2**10, 2**17


def write_plan_page(plan: Plan, file: Path) -> None:
    """One HTML file: bars for every row, and sliders whose numbers are those of `zf.plan`."""
    found = plan.to_dict()
    more = {
        "lead": " ".join(plan.advice.sentences),
        "notes": list(plan.model.notes),
        "reason": plan.advice.reason,
        "device_memory": plan.machine.device_memory,
    }
    write_page({**found, **more}, file, rows=rows_of(plan), sliders=sliders_of(plan))


def sliders_of(plan: Plan) -> list[Slider]:
    """Devices and the micro-batch; the length of a sequence where the model is made by formula."""
    devices, batch = plan.machine.devices, plan.stages[0].point.micro_batch
    found = [
        Slider(name="devices", label="devices", value=devices, high=max(_MOST_DEVICES, devices)),
        Slider(name="batch", label="micro-batch", value=batch, high=max(_MOST_SAMPLES, batch)),
    ]
    if plan.remake is not None:
        length = plan.model.tokens
        found.append(Slider(name="seq", label="sequence", value=length, high=max(_LONGEST, length)))
    return found


def rows_of(plan: Plan) -> list[Row]:
    """Automatic tiers are not among them: where a unit goes is a search, and no formula."""
    return [_row(plan, found) for found in (*plan.stages, *plan.offloaded) if not found.point.auto]


def _row(plan: Plan, found: Prediction) -> Row:
    # What a group has is fixed: other numbers of devices make more groups, or none that divide them.
    point = replace(found.point, group=ranks_of(plan.machine, found.point).group)

    def bytes_at(at: Inputs) -> Outputs:
        model = plan.model if plan.remake is None else plan.remake(at["seq"])
        machine = replace(plan.machine, devices=at["devices"])
        held = memory(model, machine, replace(point, micro_batch=at["batch"]))
        lines = {line: nbytes for line, nbytes in held.device.items() if line not in _NOT_IN_A_BAR}
        return {**lines, PEAK: held.device_peak}

    chosen = plan.recommended is not None and plan.recommended.point == found.point
    name, _, detail = name_of(found.point).partition(", ")
    return Row(name=name, detail=detail, bytes_at=bytes_at, recommended=chosen)
