"""`zerofold plan --html`: bars of memory for every row, and sliders that do the plan's own arithmetic in the page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zerofold.observe.html import page_of, write_whole
from zerofold.placement import Tier
from zerofold.plan.formulas import Formulas, Inputs, Outputs
from zerofold.plan.machine import Machine
from zerofold.plan.memory import memory
from zerofold.plan.point import Point, name_of
from zerofold.plan.shape import ModelShape

PEAK, HOST, DISK = "device_peak", "host", "disk"
"""Of the outputs: the most that is on the device at once, and what is elsewhere. All others are parts of a bar."""
_NO_PARTS = ("init peak",)  # another time than training
_MOST_DEVICES = 100_000
_TOLD = ("checkpoint_every", "checkpoints_on", "accumulate", "tensor", "pipeline", "precision", "group")
_MOST_STOPS = 6  # of a slider, where formulas are looked for
_FEW_PLACES = 1000  # so many are all looked at


@dataclass(frozen=True, kw_only=True)
class Slider:
    """A number that a reader may move, and how far."""

    name: str
    label: str
    value: int
    low: int = 1
    high: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train. `bytes_at` gives the bytes of one rank by line, and PEAK, for values of the sliders."""

    name: str
    detail: str = ""
    bytes_at: Callable[[Inputs], Outputs]
    recommended: bool = False
    needs: str = ""
    """Of the sliders, for the row to be possible."""
    said: str = ""
    """Its name in sentences."""

    @property
    def key(self) -> str:
        return f"{self.name} {self.detail}".strip()


def write_page(plan: dict[str, Any], path: Path, *, rows: Sequence[Row] = (), sliders: Sequence[Slider] = ()) -> None:
    """One file that shows a plan, the object that `--json` prints: its stages as bars.

    With `rows` and `sliders` it answers for other values of the sliders too, to the byte as Python does. Raises
    NotAFormulaError where a row's arithmetic cannot be followed; no page is written then.

    >>> import tempfile
    >>> row = Row(name="3", bytes_at=lambda at: {"optimizer": 12 * -(-10**9 // at["devices"])})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = Path(folder, "plan.html")
    ...     devices = Slider(name="devices", label="devices", value=8, high=1024)
    ...     write_page({"title": "a model"}, page, rows=[row], sliders=[devices])
    ...     page.stat().st_size < 100_000
    True
    """
    title = str(plan.get("title") or "A model")
    data: dict[str, Any] = {
        "title": title,
        "lead": str(plan.get("lead") or ""),
        "title_at": plan.get("title_at"),
        "notes": [str(note) for note in plan.get("notes") or ()],
        "left_out": [str(note) for note in plan.get("left_out") or ()],
        "rows": _shown(rows, sliders) if rows else _of_stages(plan),
        "sliders": [asdict(slider) for slider in sliders],
        "recommended": str(plan.get("reason") or ""),
        "chosen": str(plan.get("chosen") or ""),
        "config": [str(line) for line in plan.get("config") or ()],
        "device_memory": plan.get("device_memory"),
        "limits": plan.get("limits"),
        "command": plan.get("command"),
        "formulas": formulas_of(rows, sliders).as_data() if rows and sliders else None,
    }
    scripts = ("draw.js", "formulas.js", "plan.js")
    write_whole(path, page_of(f"{title}: plan", data, scripts=scripts, footer="Written by zerofold plan."))


def _shown(rows: Sequence[Row], sliders: Sequence[Slider]) -> list[dict[str, Any]]:
    here = {slider.name: slider.value for slider in sliders}
    return [
        {
            "key": row.key,
            "name": row.name,
            "detail": row.detail,
            "recommended": row.recommended,
            "needs": row.needs,
            "said": row.said or row.key,
            "bytes": _as_texts(_bytes_or_none(row, here)),
        }
        for row in rows
    ]


def _of_stages(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines that every plan has, where nothing more is known."""
    return [
        {
            "key": str(stage["stage"]),
            "name": str(stage["stage"]),
            "detail": "",
            "recommended": stage["stage"] == plan.get("recommended"),
            "bytes": _as_texts({state: stage[f"{state}_bytes"] for state in ("parameters", "gradients", "optimizer")}),
        }
        for stage in plan.get("stages") or ()
    ]


def _as_texts(sizes: Outputs) -> dict[str, str]:
    """Readers of JSON have 53 bits for a number."""
    return {line: str(size) for line, size in sizes.items()}


def rows_of(
    points: Sequence[Point],
    shape_at: Callable[[Inputs], ModelShape],
    machine: Machine,
    *,
    recommended: Point | None = None,
) -> list[Row]:
    """A row of the page for each point, from the plan's own memory model.

    `shape_at` makes the model for the values of the sliders, of which it may use "sequence"; the machine has "devices"
    of them, the point a micro-batch of "batch".

    >>> from zerofold.plan.presets import preset
    >>> from zerofold.plan.transformer import from_parameters
    >>> rows = rows_of([Point(stage="3")], lambda at: from_parameters(7.5e9), preset("A100-80"))
    >>> round(rows[0].bytes_at({"devices": 64, "batch": 1})["optimizer"] / 1e9, 1)
    1.4
    """

    def row(point: Point) -> Row:
        def bytes_at(at: Inputs) -> Outputs:
            here = replace(point, micro_batch=at["batch"])
            found = memory(shape_at(at), replace(machine, devices=at["devices"]), here)
            parts = {line: size for line, size in found.device.items() if line not in _NO_PARTS}
            away = {name: sum(sizes.values()) for name, sizes in ((HOST, found.host), (DISK, found.disk))}
            return {**parts, **away, PEAK: found.device_need}

        # What all rows share tells none of them apart.
        detail = _detail(point, {name for name in _TOLD if len({getattr(each, name) for each in shown}) > 1})
        return Row(
            name=_name(point),
            detail=detail,
            bytes_at=bytes_at,
            recommended=point == recommended,
            needs=_needs(point),
            said=name_of(point),
        )

    shown = [point for point in points if not point.auto]
    return [row(point) for point in shown]


def sliders_of(machine: Machine, point: Point, sequence: int | None = None) -> list[Slider]:
    """Where a reader begins, and how far one may go. `sequence`: of a model that is known for any other length too."""
    sliders = [
        Slider(name="devices", label="devices", value=machine.devices, high=max(_MOST_DEVICES, machine.devices)),
        Slider(name="batch", label="micro-batch, samples", value=point.micro_batch, high=max(512, point.micro_batch)),
    ]
    if sequence is not None:
        high = max(2**20, sequence)
        sliders.append(Slider(name="sequence", label="sequence, tokens", value=sequence, low=1, high=high))
    return sliders


def _name(point: Point) -> str:
    return f"stage {point.stage}" if point.stage.isdigit() else point.stage


def _needs(point: Point) -> str:
    """
    >>> _needs(Point(stage="hsdp", tensor=2, group=4)), _needs(Point())
    ('devices must be a multiple of 8: tensor 2 x pipeline 1 x groups of 4', 'devices must be a multiple of 1')
    """
    group = point.group or 1
    over = point.tensor * point.pipeline * group
    why = f": tensor {point.tensor} x pipeline {point.pipeline} x groups of {group}" if over > 1 else ""
    return f"devices must be a multiple of {over}{why}"


def _detail(point: Point, told: set[str]) -> str:
    away = {
        tier.value: [state for state in ("parameters", "gradients", "optimizer") if getattr(point.tiers, state) is tier]
        for tier in (Tier.HOST, Tier.NVME)
    }
    said = [f"{' and '.join(states)} on {tier}" for tier, states in away.items() if states]
    said += [f"{name.replace('_', ' ')} {getattr(point, name)}" for name in _TOLD if name in told]
    return ", ".join(said)


def formulas_of(rows: Sequence[Row], sliders: Sequence[Slider]) -> Formulas:
    """What the rows compute, for all values of the sliders that a reader is likely to choose; checked off the grid."""
    functions: Mapping[str, Callable[[Inputs], Outputs]] = {row.key: row.bytes_at for row in rows}
    if len(functions) < len(rows):
        raise ValueError("two rows of the page have the same name and detail: tell them apart by the detail")
    formulas = Formulas(functions)
    formulas.cover([{slider.name: slider.value for slider in sliders}])
    if math.prod(slider.high - slider.low + 1 for slider in sliders) <= _FEW_PLACES:
        formulas.cover(_places(sliders, lambda slider: list(range(slider.low, slider.high + 1))))
    formulas.cover(_places(sliders, stops))
    between = list(_places(sliders, _between))
    formulas.cover(between)
    formulas.check([{slider.name: slider.value for slider in sliders}, *between[:: max(1, len(between) // 20)]])
    return formulas


def stops(slider: Slider) -> list[int]:
    """Powers of two, and both ends.

    >>> stops(Slider(name="n", label="n", value=1, low=3, high=20))
    [3, 4, 8, 16, 20]
    """
    powers = [2**power for power in range(slider.high.bit_length()) if slider.low < 2**power < slider.high]
    step = max(1, -(-len(powers) // _MOST_STOPS))
    return sorted({slider.low, *powers[::step], slider.high})


def _between(slider: Slider) -> list[int]:
    """Numbers that are no powers of two: they round otherwise."""
    odd = (3 * 5**power + power for power in range(0, 20, 2))
    return [slider.low, *(each for each in odd if slider.low < each < slider.high)]


def _places(sliders: Sequence[Slider], values: Callable[[Slider], list[int]]) -> Iterator[dict[str, int]]:
    names = [slider.name for slider in sliders]
    for chosen in itertools.product(*map(values, sliders)):
        yield dict(zip(names, chosen, strict=True))


def _bytes_or_none(row: Row, here: Inputs) -> Outputs:
    try:
        return row.bytes_at(here)
    except ValueError:  # no such way to train with these numbers; perhaps with others
        return {}
