"""`zerofold bench step`: the time of a training step, side by side on every engine.

    round 0   [none][ddp ][fsdp2][zf3 ]        one engine runs at a time, the others wait at a pipe;
    round 1   [ddp ][fsdp2][zf3 ][none]        a ratio compares two turns of the same round,
    round 2   [fsdp2][zf3 ][none][ddp ]        and the result is the median of the ratios.

So a machine that slows down for a while slows both sides of a ratio.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer
from rich.console import Console

from zerofold.bench import figures
from zerofold.bench.engines import ENGINES
from zerofold.bench.fleet import MALLOC_SETTINGS, EngineError, EngineProcesses, Setting
from zerofold.bench.gpt import GPTSize
from zerofold.bench.machine import choose_device, choose_world, describe_machine, select_engines
from zerofold.bench.table import Row, print_table
from zerofold.bench.worker import Ready, TurnResult
from zerofold.observe.output import make_folder_of

REFERENCE = "ddp"
FLOOR = "none"
FIRST_WARMUP_STEPS = 2  # lazily made buffers and optimizer states, then an order that was learned
TURN_WARMUP_STEPS = 1  # the engines before it have emptied the caches
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}  # by dtype
COMPARED_ON_GPU = 4  # steps: sums by atomics come in any order there, and training on random tokens is chaotic
MEMORY_SHARE = 0.8  # of what is available now; the rest is for the system and for estimates that are too low


@dataclass
class Record:
    """What one engine showed, over the batches of engines it took part in."""

    losses: list[list[float]] = field(default_factory=list)
    """By rank and step, of the last batch."""
    peak_bytes: int = 0
    peak_over_start_bytes: int = 0
    device_peak_bytes: int | None = None

    def add_turn(self, ready: Sequence[Ready], results: Sequence[TurnResult]) -> None:
        for losses, result in zip(self.losses, results, strict=True):
            losses.extend(result.losses)
        for start, result in zip(ready, results, strict=True):
            self.peak_bytes = max(self.peak_bytes, result.peak_bytes)
            over_start = result.peak_bytes - start.start_bytes
            self.peak_over_start_bytes = max(self.peak_over_start_bytes, over_start)
            if result.device_peak_bytes is not None:
                self.device_peak_bytes = max(self.device_peak_bytes or 0, result.device_peak_bytes)


@dataclass
class Measurement:
    """Everything a run has seen so far."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    """For each round of each batch: engine → median seconds of a step."""
    records: dict[str, Record] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def measure_batch(
    engines: Sequence[str],
    setting: Setting,
    measurement: Measurement,
    *,
    rounds: int,
    steps: int,
    progress: Callable[[str], None],
) -> None:
    """Run some engines in interleaved rounds. One that fails is noted, and the others go on."""
    alive: dict[str, EngineProcesses] = {}
    ready: dict[str, list[Ready]] = {}
    with ExitStack() as stack:
        for engine in engines:
            alive[engine] = stack.enter_context(EngineProcesses(engine, setting))
        for engine in engines:
            progress(f"starting {engine}")
            try:
                ready[engine] = alive[engine].ready()
            except EngineError as failure:
                measurement.errors[engine] = str(failure)
            else:
                record = measurement.records.setdefault(engine, Record())
                record.losses = [[] for _ in range(setting.world)]
        for index in range(rounds):
            seconds: dict[str, float] = {}
            for engine in figures.rotated(engines, index):
                if engine in measurement.errors:
                    continue
                progress(f"round {index + 1} of {rounds}: {engine}")
                warmup = FIRST_WARMUP_STEPS if index == 0 else TURN_WARMUP_STEPS
                try:
                    results = alive[engine].turn(untimed=warmup, timed=steps)
                except EngineError as failure:
                    measurement.errors[engine] = str(failure)
                    continue
                measurement.records[engine].add_turn(ready[engine], results)
                seconds[engine] = figures.turn_seconds([result.seconds for result in results])
            measurement.rounds.append(seconds)


def make_row(engine: str, measurement: Measurement, dtype: str = "float32") -> Row:
    if engine in measurement.errors:
        return Row(engine, error=measurement.errors[engine])
    record = measurement.records[engine]
    over_ddp = figures.ratios(measurement.rounds, engine, REFERENCE)
    over_none = figures.ratios(measurement.rounds, engine, FLOOR)
    loss_diff = None
    if REFERENCE not in measurement.errors:
        steps = None if record.device_peak_bytes is None else COMPARED_ON_GPU
        reference = [losses[:steps] for losses in measurement.records[REFERENCE].losses]
        loss_diff = figures.largest_gap([losses[:steps] for losses in record.losses], reference)
    differs = engine != FLOOR and loss_diff is not None and loss_diff > LOSS_TOLERANCE[dtype]
    return Row(
        engine,
        over_ddp=_rounded(over_ddp and over_ddp.median, 4),
        over_ddp_min=_rounded(over_ddp and over_ddp.low, 4),
        over_ddp_max=_rounded(over_ddp and over_ddp.high, 4),
        over_none=_rounded(over_none and over_none.median, 4),
        step_ms=_rounded(1e3 * statistics.median(r[engine] for r in measurement.rounds if engine in r), 2),
        peak_mib=_mib(record.peak_bytes),
        peak_over_start_mib=_mib(record.peak_over_start_bytes),
        device_peak_mib=_mib(record.device_peak_bytes),
        loss=_rounded(statistics.fmean(losses[-1] for losses in record.losses), 6),
        loss_diff_ddp=loss_diff,
        error=f"does not train as DDP does: losses up to {loss_diff:.2g} apart" if differs else None,
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _mib(count: int | None) -> float | None:
    return None if count is None else round(count / 2**20, 1)


def _engines_at_once(setting: Setting) -> int:
    """How many engines fit into the memory that is free now, on the host and on the GPUs."""
    rank_bytes = figures.rank_bytes(setting.size, setting.batch)
    fit = MEMORY_SHARE * psutil.virtual_memory().available / (setting.world * rank_bytes)
    if setting.device == "cuda":
        free = min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(setting.world))
        fit = min(fit, MEMORY_SHARE * free / rank_bytes)
    return int(fit)


def bench_step_command(
    engines: Annotated[
        str, typer.Option(help=f"Engines, with commas: {', '.join(ENGINES)}. All of them if left out.")
    ] = "",
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks per engine. Every GPU, or 2 on the CPU, if left out.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each engine in a round.")] = 4,
    d: Annotated[int, typer.Option("--d", help="Width of the model.")] = 512,
    layers: Annotated[int, typer.Option(help="Blocks.")] = 8,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
    vocab: Annotated[int, typer.Option(help="Vocabulary.")] = 8192,
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank and step.")] = 4,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, for parameters and all states.")] = "float32",
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile every block, for all engines.")] = False,
    malloc: Annotated[
        str, typer.Option(help="default, or tuned: the allocator keeps freed memory, for every engine alike.")
    ] = "default",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds an engine may take to start or for a turn.")] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON object to this file as well.")] = None,
) -> None:
    """Time a training step of the same GPT on every engine, side by side.

    One engine runs at a time. Ratios compare turns of the same round; the median of them is the result.

    \b
    Examples:
      zerofold bench step
      zerofold bench step --engines none,ddp,fsdp2,zf3 --out result.json
    """
    notes = Console(stderr=True)
    try:
        chosen = select_engines(engines, ENGINES, always=REFERENCE)
        if malloc not in MALLOC_SETTINGS:
            raise ValueError(f"--malloc must be {' or '.join(MALLOC_SETTINGS)}, not {malloc!r}")
        size = GPTSize(vocab=vocab, width=d, layers=layers, heads=heads, seq=seq)
        if dtype not in LOSS_TOLERANCE:
            raise ValueError(f"--dtype must be {' or '.join(LOSS_TOLERANCE)}, not {dtype!r}")
        device = choose_device(device)
        setting = Setting(
            world=choose_world(nproc, device, on_cpu=2),
            device=device,
            size=size,
            batch=batch,
            dtype=dtype,
            compiled=compiled,
            malloc=malloc,
            timeout=timeout,
        )
        make_folder_of(out)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None

    measurement = Measurement()
    batches = figures.plan_batches(
        chosen,
        [engine for engine in (FLOOR, REFERENCE) if engine in chosen],
        at_once=_engines_at_once(setting),
    )
    with notes.status("starting") as status:
        for number, members in enumerate(batches, 1):
            prefix = f"batch {number} of {len(batches)}, " if len(batches) > 1 else ""

            def progress(text: str, prefix: str = prefix) -> None:
                status.update(prefix + text)

            measure_batch(members, setting, measurement, rounds=rounds, steps=steps, progress=progress)

    rows = [make_row(engine, measurement, dtype) for engine in chosen]
    result = {
        "machine": describe_machine(setting),
        "model": {"psi": size.parameters, **asdict(size), "batch": batch, "dtype": dtype, "compiled": compiled},
        "method": {"rounds": rounds, "steps": steps, "batches": batches},
        "rows": [asdict(row) for row in rows],
    }
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(result))
    else:
        title = f"{size.parameters / 1e6:.1f}M parameters, {setting.world} ranks, {setting.backend}, "
        title += f"{dtype}, {'compiled, ' if compiled else ''}{rounds} rounds of {steps} steps"
        print_table(Console(), rows, title)
    # A peer may fail; without the reference, or with a row of ours that fails, the run has not done its job.
    if any(row.error and (row.engine == REFERENCE or row.engine.startswith("zf")) for row in rows):
        raise typer.Exit(1)
