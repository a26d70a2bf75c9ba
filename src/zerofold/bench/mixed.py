"""`zerofold bench mixed`: the 16-bit training step, side by side, with the whole device for one engine at a time.

    round 0   [plain][fsdp2][ds3][zf3]      each in new processes that end before the next start:
    round 1   [zf3][ds3][fsdp2][plain]      half a GPU would not do for two

Two engines of a round are minutes apart, so drift does not cancel as it does in `bench step`; the second round runs
backwards, and the spread shows what is left of it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zerofold.bench import figures
from zerofold.bench.fleet import EngineError, EngineProcesses, Setting
from zerofold.bench.gpt import GPTSize
from zerofold.bench.machine import choose_device, choose_world, describe_machine, select_engines
from zerofold.bench.mixed_engines import MIXED_ENGINES
from zerofold.bench.worker import Ready, TurnResult
from zerofold.observe.output import make_folder_of

REFERENCE = "plain"
UNTIMED_STEPS = 2  # optimizer states are made in the first, and orders are learned
LOSS_TOLERANCE = 5e-2
COMPARED_STEPS = 4  # rounding differs between engines from the first update on, and training on noise is chaotic
SIZES = {
    "cuda": GPTSize(vocab=32768, width=3072, layers=28, heads=24, seq=2048),
    "cpu": GPTSize(vocab=512, width=128, layers=4, heads=4, seq=64),
}
BATCHES = {"cuda": 8, "cpu": 4}


@dataclass
class Record:
    """What one engine showed, over its rounds."""

    seconds: list[float] = field(default_factory=list)
    """Of every timed step; the slowest rank's."""
    losses: list[float] = field(default_factory=list)
    """By step, of the first round: each starts from the same weights. The mean over ranks."""
    peak_bytes: int = 0
    device_peak_bytes: int | None = None
    device_build_peak_bytes: int | None = None
    note: str = ""

    def add(self, ready: Sequence[Ready], results: Sequence[TurnResult]) -> None:
        self.seconds += [max(step) for step in zip(*(result.seconds for result in results), strict=True)]
        self.losses = self.losses or [
            statistics.fmean(step) for step in zip(*(result.losses for result in results), strict=True)
        ]
        self.peak_bytes = max(self.peak_bytes, *(result.peak_bytes for result in results))
        self.device_peak_bytes = _largest(self.device_peak_bytes, *(result.device_peak_bytes for result in results))
        build_peaks = [start.device_build_peak_bytes for start in ready]
        self.device_build_peak_bytes = _largest(self.device_build_peak_bytes, *build_peaks)
        self.note = ready[0].note


@dataclass
class Measurement:
    """Everything a run has seen so far."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    """Engine → median seconds of a step in this round."""
    records: dict[str, Record] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MixedRow:
    """One line of the result. Figures are None where the engine failed, or has not had its turn yet."""

    engine: str
    step_s: float | None = None
    step_s_min: float | None = None
    step_s_max: float | None = None
    over_plain: float | None = None
    over_plain_min: float | None = None
    over_plain_max: float | None = None
    tokens_per_s: float | None = None
    device_peak_gib: float | None = None
    """Highest memory allocated on the GPU during the steps."""
    device_build_peak_gib: float | None = None
    """The same while the engine took over the model, before the first step."""
    host_peak_gib: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    note: str = ""
    error: str | None = None


def measure_turn(engine: str, setting: Setting, measurement: Measurement, *, steps: int) -> None:
    """New processes for one engine, from the first weights to the last step. A failure is noted."""
    try:
        with EngineProcesses(engine, setting) as processes:
            ready = processes.ready()
            results = processes.turn(untimed=UNTIMED_STEPS, timed=steps)
    except EngineError as failure:
        measurement.errors[engine] = str(failure)
        return
    measurement.records.setdefault(engine, Record()).add(ready, results)
    measurement.rounds[-1][engine] = figures.turn_seconds([result.seconds for result in results])


def measure(
    engines: Sequence[str],
    setting: Setting,
    *,
    rounds: int,
    steps: int,
    progress: Callable[[str], None],
    after_turn: Callable[[Measurement], None],
) -> Measurement:
    """All rounds. An engine that failed once is not tried again."""
    measurement = Measurement()
    for index in range(rounds):
        measurement.rounds.append({})
        for engine in figures.there_and_back(engines, index):
            if engine not in measurement.errors:
                progress(f"round {index + 1} of {rounds}: {engine}")
                measure_turn(engine, setting, measurement, steps=steps)
                after_turn(measurement)
    return measurement


def make_row(engine: str, measurement: Measurement, setting: Setting) -> MixedRow:
    record = measurement.records.get(engine)
    if engine in measurement.errors or record is None:
        return MixedRow(engine, error=measurement.errors.get(engine))
    step_s = statistics.median(record.seconds)
    over_plain = figures.ratios(measurement.rounds, engine, REFERENCE)
    return MixedRow(
        engine,
        step_s=round(step_s, 5),
        step_s_min=round(min(record.seconds), 5),
        step_s_max=round(max(record.seconds), 5),
        over_plain=over_plain and round(over_plain.median, 4),
        over_plain_min=over_plain and round(over_plain.low, 4),
        over_plain_max=over_plain and round(over_plain.high, 4),
        tokens_per_s=round(setting.world * setting.batch * setting.size.seq / step_s, 1),
        device_peak_gib=_gib(record.device_peak_bytes),
        device_build_peak_gib=_gib(record.device_build_peak_bytes),
        host_peak_gib=_gib(record.peak_bytes),
        first_loss=round(record.losses[0], 5),
        last_loss=round(record.losses[-1], 5),
        note=record.note,
        error=_why_wrong(record, measurement.records.get(REFERENCE), setting.world),
    )


def _why_wrong(record: Record, reference: Record | None, world: int) -> str | None:
    if reference is None or world > 1:  # alone with its own data, plain PyTorch says nothing about several ranks
        return None
    gap = figures.largest_gap([record.losses[:COMPARED_STEPS]], [reference.losses[:COMPARED_STEPS]])
    if gap <= LOSS_TOLERANCE:
        return None
    return f"does not train as plain PyTorch does: losses of the first steps up to {gap:.2g} apart"


def _largest(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def _gib(count: int | None) -> float | None:
    return None if count is None else round(count / 2**30, 2)


def print_table(console: Console, rows: Sequence[MixedRow], title: str) -> None:
    on_device = any(row.device_peak_gib is not None for row in rows)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("\nengine", no_wrap=True)
    memory = ("GPU\nGiB", "build\nGiB") if on_device else ("host\nGiB",)
    for heading in ("\ns/step", "\nmin-max", "over\nplain", "tokens\n/s", *memory, "first\nloss", "last\nloss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        peaks = (row.device_peak_gib, row.device_build_peak_gib) if on_device else (row.host_peak_gib,)
        table.add_row(
            row.engine,
            _cell(row.step_s, ".3f"),
            "" if row.step_s is None else f"{row.step_s_min:.3f}-{row.step_s_max:.3f}",
            _cell(row.over_plain, ".3f"),
            _cell(row.tokens_per_s, ".0f"),
            *(_cell(peak, ".1f") for peak in peaks),
            _cell(row.first_loss, ".3f"),
            _cell(row.last_loss, ".3f"),
            style="red" if row.error else None,
        )
    console.print(table)
    for row in rows:
        if row.error:
            console.print(f"[red]{row.engine}[/red]  {escape(row.error)}", soft_wrap=True)
        elif row.note:
            console.print(f"{row.engine}  {escape(row.note)}", soft_wrap=True)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def bench_mixed_command(
    engines: Annotated[
        str, typer.Option(help=f"Engines, with commas: {', '.join(MIXED_ENGINES)}. All of them if left out.")
    ] = "",
    nproc: Annotated[int, typer.Option(min=1, help="Ranks per engine.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Every second one in reverse order.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each engine in a round.")] = 5,
    d: Annotated[
        int | None, typer.Option("--d", min=1, help="Width of the model; 3072 on a GPU, 128 on the CPU.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks; 28, or 4.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads; 24, or 4.")] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="Vocabulary; 32768, or 512.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens in a sequence; 2048, or 64.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences per rank and step; 8, or 4.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds an engine may take to start or for a turn.")] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON object to this file, after every turn.")] = None,
) -> None:
    """Time a bf16 training step with fp32 AdamW on every engine, one engine on the device at a time.

    The gradient norm is clipped and activations are recomputed, on all engines. Times are medians over all
    timed steps; "over plain" compares within a round.

    \b
    Examples:
      zerofold bench mixed
      zerofold bench mixed --engines plain,fsdp2,zf3 --d 2048 --layers 24 --heads 16 --out result.json
    """
    try:
        chosen = select_engines(engines, MIXED_ENGINES, always=REFERENCE)
        device = choose_device(device)
        default = SIZES[device]
        size = GPTSize(
            vocab=vocab or default.vocab,
            width=d or default.width,
            layers=layers or default.layers,
            heads=heads or default.heads,
            seq=seq or default.seq,
        )
        setting = Setting(
            world=choose_world(nproc, device, on_cpu=1),
            device=device,
            size=size,
            batch=batch or BATCHES[device],
            dtype="bfloat16",
            mixed=True,
            checkpointing=True,
            timeout=timeout,
        )
        make_folder_of(out)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None

    def summarise(measurement: Measurement) -> dict[str, Any]:
        return {
            "machine": describe_machine(setting),
            "model": {"psi": size.parameters, **asdict(size), "batch": setting.batch},
            "method": {"rounds": rounds, "steps": steps, "untimed": UNTIMED_STEPS, "seconds": measurement.rounds},
            "rows": [asdict(make_row(engine, measurement, setting)) for engine in chosen],
        }

    def write(measurement: Measurement) -> None:
        """After every turn: a run of many minutes may be stopped, and keeps what it had."""
        if out is not None:
            out.write_text(json.dumps(summarise(measurement), indent=2) + "\n")

    with Console(stderr=True).status("starting") as status:
        measurement = measure(chosen, setting, rounds=rounds, steps=steps, progress=status.update, after_turn=write)
    rows = [make_row(engine, measurement, setting) for engine in chosen]
    if as_json:
        typer.echo(json.dumps(summarise(measurement)))
    else:
        title = f"{size.parameters / 1e6:.1f}M parameters, bf16 with fp32 AdamW, {setting.world} rank(s) on {device}, "
        title += f"{setting.batch} sequences of {size.seq} tokens, {rounds} rounds of {steps} steps"
        print_table(Console(), rows, title)
    # A peer may fail; without the reference, or with a row of ours that fails, the run has not done its job.
    if any(row.error and (row.engine == REFERENCE or row.engine.startswith("zf")) for row in rows):
        raise typer.Exit(1)
