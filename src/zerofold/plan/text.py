"""A plan as tables and sentences for a person."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.table import Table

from zerofold.placement import Tier
from zerofold.plan.advice import Advice
from zerofold.plan.configs import checkpoint_arguments, pipeline_arguments, tensor_arguments
from zerofold.plan.dividing import in_words
from zerofold.plan.machine import GB, Machine
from zerofold.plan.point import Prediction
from zerofold.plan.shape import ModelShape

_COLUMNS = (
    ("param-\neters", ("parameters",)),
    ("gra-\ndients", ("gradients", "local gradients")),
    ("opti-\nmizer", ("optimizer", "update ring")),
    ("buffers", ("fused buffers", "library workspaces")),
    ("gath-\nered", ("gathered units",)),
    ("check-\npoints", ("activation checkpoints",)),
    ("work-\ning", ("working activations",)),
    ("\nlogits", ("logits",)),
)
_FEWER = (
    ("param-\neters", ("parameters",)),
    ("gra-\ndients", ("gradients", "local gradients")),
    ("opti-\nmizer", ("optimizer", "update ring")),
    ("gath-\nered", ("gathered units",)),
)
_NARROW = (
    *_FEWER,
    ("check-\npoints", ("activation checkpoints",)),
    ("work-\ning", ("working activations", "logits")),
)
_ALL_COLUMNS = 100
_SHORT = {Tier.DEVICE: "device", Tier.HOST: "host", Tier.NVME: "disk"}


class Searching(Protocol):
    @property
    def sentence(self) -> str: ...


class Shown(Protocol):
    """What of a plan is shown."""

    @property
    def model(self) -> ModelShape: ...
    @property
    def machine(self) -> Machine: ...
    @property
    def stages(self) -> Sequence[Prediction]: ...
    @property
    def offloaded(self) -> Sequence[Prediction]: ...
    @property
    def recommended(self) -> Prediction | None: ...
    @property
    def advice(self) -> Advice: ...
    @property
    def searched(self) -> Searching: ...
    @property
    def next_larger(self) -> str: ...
    @property
    def mesh_sentences(self) -> Sequence[str]: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def ds_config(self) -> dict[str, Any]: ...
    @property
    def ds_config_note(self) -> str: ...


def plan_text(plan: Shown, *, width: int = 100, color: bool = False) -> str:
    """What `zerofold plan` prints."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, highlight=False, soft_wrap=False)
    machine, model = plan.machine, plan.model
    console.print(
        f"{model.name}: {model.parameters:,} parameters, on {machine.devices} of {machine.name} "
        f"({_gb(machine.device_memory)} GB each, {machine.per_node} to a node with {_gb(machine.host_memory)} GB of "
        f"host memory{f' and {_gb(machine.disk)} GB of disk' if machine.disk else ''})"
    )
    for note in (*model.notes, *plan.mesh_sentences):
        console.print(f"  {note}")
    with_all = width >= _ALL_COLUMNS
    console.print(_memory_table(plan.stages, "GB on each device", columns=_COLUMNS if with_all else _NARROW))
    console.print(_memory_table(plan.offloaded, "with states off the device", columns=_FEWER, tiers=True))
    title = "a step" if model.activities else "a step, GUESSED: without an example of inputs forward is not known"
    console.print(_time_table([*plan.stages, *plan.offloaded], title, with_all=with_all))
    for sentence in plan.advice.sentences:
        console.print(sentence)
    for sentence in (plan.searched.sentence, plan.next_larger):
        if sentence:
            console.print(sentence)
    if plan.recommended is not None:
        console.print()
        for line in config_lines(plan, plan.recommended):
            console.print(f"  {line}", soft_wrap=True)
    return out.getvalue()


def config_lines(plan: Shown, chosen: Prediction) -> list[str]:
    """The calls and the ds_config.json of what is recommended."""
    config = plan.config
    shown = _in_a_call({name: value for name, value in config.items() if name != "mesh"})
    found = [f"# {in_words(chosen.point)}"]
    cut, stages, mesh = tensor_arguments(chosen.point), pipeline_arguments(chosen.point), _mesh(config)
    if mesh:
        found.append(f"mesh = {mesh}")
        shown += ", mesh=mesh"
    if cut:  # else `zf.pipeline` and `zf.prepare` do it by themselves
        found.append(f"zf.tensor_parallel(model, mesh, {_in_a_call(cut)})")
    if stages:
        found.append(f"pipe = zf.pipeline(model, mesh, {_in_a_call(stages)})")
    found.append(f"zf.prepare({'pipe' if stages else 'model'}, optimizer, {shown})")
    kept = checkpoint_arguments(chosen.point)
    if kept:
        each = (f"{name}={'mesh' if name == 'partition' else repr(value)}" for name, value in kept.items())
        found.append(f"zf.checkpoint_blocks(model, {', '.join(each)})")
    found.append(f"ds_config.json: {json.dumps(plan.ds_config)}")
    return [*found, f"({plan.ds_config_note})"] if plan.ds_config_note else found


def _in_a_call(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _mesh(config: dict[str, Any]) -> str:
    mesh = config.get("mesh")
    if isinstance(mesh, dict):
        return f"zf.mesh({_in_a_call(mesh)})"
    return "" if mesh is None else f'init_device_mesh("cuda", {tuple(mesh)})'


def _memory_table(
    rows: Sequence[Prediction], title: str, *, columns: Sequence[tuple[str, Sequence[str]]], tiers: bool = False
) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("\nrow", no_wrap=True)
    if tiers:
        table.add_column("optimizer,\nparameters", no_wrap=True)
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("\nhost", "\ndisk") if tiers else ("init\npeak",):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("most at\nonce", justify="right", no_wrap=True)
    table.add_column("\nfits", no_wrap=True)
    for found in rows:
        memory = found.memory
        cells = [_gb(sum(memory.device[line] for line in lines)) for _, lines in columns]
        where = [_tiers(found)] if tiers else []
        others = [_gb(sum(memory.host.values())), _gb(sum(memory.disk.values()))]
        table.add_row(
            found.point.stage,
            *where,
            *cells,
            *(others if tiers else [_gb(memory.device["init peak"])]),
            _gb(memory.device_need),
            "yes" if found.fits else "no",
        )
    return table


def _tiers(found: Prediction) -> str:
    if found.point.auto:
        return "auto"
    return f"{_SHORT[found.point.tiers.optimizer]}, {_SHORT[found.point.tiers.parameters]}"


def _time_table(rows: Sequence[Prediction], title: str, *, with_all: bool) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("row", no_wrap=True)
    table.add_column("states", no_wrap=True)
    batches = len({(each.point.micro_batch, each.point.accumulate) for each in rows}) > 1
    if batches:
        table.add_column("batch", justify="right", no_wrap=True)
    shown = ("GB sent", "compute s", "waits s", "update s", "step s", "eff.", "samples/s")
    for heading in shown if with_all else (*shown[:3], "step s", "samples/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for found in rows:
        times = found.times
        is_away = found.point.auto or found.point.tiers.is_offloaded
        table.add_row(
            found.point.stage,
            _tiers(found) if is_away else "device",
            *([f"{found.point.micro_batch}x{found.point.accumulate}"] if batches else []),
            _gb(sum(found.traffic.bytes.values())),
            _number(times.compute),
            _number(sum(times.exposed.values())),
            *([_number(times.update)] if with_all else []),
            _number(times.step),
            *([f"{100 * times.efficiency:.0f}%"] if with_all else []),
            _number(found.samples_per_second),
            times.bottleneck,
            style=None if found.fits else "dim",
        )
    return table


def _gb(count: float) -> str:
    """
    >>> _gb(16.6e9), _gb(2_460_000), _gb(3.2e14)
    ('16.6', '0.0025', '3.2e5')
    """
    number = count / GB
    if number >= 1e5:
        return f"{number:.1e}".replace("e+0", "e").replace("e+", "e")
    if number >= 1000:
        return f"{number:,.0f}"
    if number >= 10 or number == 0:
        return f"{number:.1f}"
    return f"{number:.2f}" if number >= 0.1 else f"{number:.2g}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
