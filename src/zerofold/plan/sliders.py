"""The page of a plan: its rows as functions of what a reader may move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerofold.plan.formulas import Inputs
from zerofold.plan.page import Row, Slider, rows_of, sliders_of, write_page
from zerofold.plan.point import name_of
from zerofold.plan.result import Plan
from zerofold.plan.shape import ModelShape
from zerofold.plan.text import config_lines


def write_plan_page(plan: Plan, file: Path, *, command: str = "") -> None:
    """One HTML file: bars for every row, and sliders whose numbers are those of `zf.plan`. Which rows fit is told for
    any of them. What else the plan says is that of the start; `command` tells it for other values, whose places in it
    are named: "--world-size {devices}"."""
    machine = plan.machine
    more: dict[str, Any] = {
        "lead": " ".join(plan.advice.sentences),
        "title_at": f"{plan.model.name} on {{devices}} of {machine.name}",
        "notes": [*plan.model.notes, *plan.mesh_sentences],
        "left_out": list(_left_out(plan)),
        "reason": plan.advice.reason,
        "device_memory": machine.device_memory,
        "limits": {
            "device": str(machine.device_memory),
            "host": str(machine.host_memory),
            "disk": str(machine.disk),
            "per_node": machine.per_node,
            "one_memory": machine.kind == "cpu",
        },
        "command": command,
    }
    if plan.recommended is not None:
        more["chosen"] = name_of(plan.recommended.point)
        more["config"] = config_lines(plan, plan.recommended)
    write_page({**plan.to_dict(), **more}, file, rows=rows_of_plan(plan), sliders=sliders_of_plan(plan))


def _left_out(plan: Plan) -> Iterator[str]:
    """Of the rows that the command shows, or would show."""
    auto = list(dict.fromkeys(found.point.stage for found in plan.offloaded if found.point.auto))
    if auto:
        yield (
            f"Not on this page: stage {' and '.join(auto)} with tiers chosen unit by unit, which follows no formula; "
            "zerofold plan has it in its tables."
        )
    if not plan.machine.disk:
        yield "No disk was given (--disk), so no row has states on one."


def sliders_of_plan(plan: Plan) -> list[Slider]:
    """Devices and the micro-batch; the length of a sequence where the model is made by formula."""
    return sliders_of(
        plan.machine, (plan.recommended or plan.stages[0]).point, None if plan.remake is None else plan.model.tokens
    )


def rows_of_plan(plan: Plan) -> list[Row]:
    def shape_at(at: Inputs) -> ModelShape:
        return plan.model if plan.remake is None else plan.remake(at["sequence"])

    points = [found.point for found in (*plan.stages, *plan.offloaded)]
    chosen = None if plan.recommended is None else plan.recommended.point
    if plan.global_batch is not None:  # rows that divide it in other ways are compared at one batch, which moves
        like = chosen or points[0]
        points = [replace(each, micro_batch=like.micro_batch, accumulate=like.accumulate) for each in points]
    return rows_of(points, shape_at, plan.machine, recommended=chosen)
