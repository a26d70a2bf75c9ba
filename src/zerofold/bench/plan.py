"""`zerofold bench plan`: what the plan predicts against what runs take, on models that nothing was fitted to.

Rank 0 of 8 trains beside torch's fake process group, which answers at once: the values that arrive are wrong and the
sizes are right. A rank alone is timed as well.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from zerofold.bench.machine import choose_device, describe_software, parse_stages
from zerofold.bench.plan_models import NAMES, plan_model
from zerofold.bench.plan_predicted import Beforehand, Compared, Failed, Rates, Run, peak_bytes, step_time
from zerofold.bench.plan_table import MEDIAN, TIME, WORST, print_table
from zerofold.bench.plan_timing import PROBED, Busy
from zerofold.bench.plan_worker import News, PlanTask, Spent, measure_model, trace_models
from zerofold.bench.streams import Stream, StreamFailed
from zerofold.observe.output import make_folder_of
from zerofold.plan.shape import Launching, ModelShape

BATCHES = {"cuda": (2, 8), "cpu": (2, 4)}
PRECISION = {"cuda": "bf16", "cpu": "fp32"}


def all_runs(stages: Sequence[int], world: int, batches: Sequence[int], *, alone: bool) -> tuple[Run, ...]:
    rows = [(world, stage) for stage in stages] + ([(1, 0)] if alone else [])
    return tuple(
        Run(stage=stage, world=ranks, batch=batch, checkpointing=checkpointing)
        for ranks, stage in rows
        for batch in batches
        for checkpointing in (False, True)
    )


Told = Compared | Beforehand | Busy | Spent | Failed


def compare_models(
    names: Sequence[str], device: str, runs: tuple[Run, ...], *, times_only: bool = False, profiles: bool = False
) -> Iterator[Told]:
    """One model after the other has the device to itself. Beside it another process traces, and the next one starts.

    tracer    imports | gpt | llama | t5 | vit | mixtral |
    gpt       imports | runs            |
    llama             | imports, waits  | runs            |
    t5                                  | imports, waits  | …

    Where nothing but times is wanted, which another busy process on the same machine would change, all traces are made
    before, at once, and all processes wait from the beginning.
    """
    precision = PRECISION[device]
    tasks = [
        PlanTask(model=name, device=device, precision=precision, runs=runs, times_only=times_only, profiles=profiles)
        for name in names
    ]
    with ExitStack() as processes:

        def start(function: Callable[..., Iterable[Any]], *arguments: object) -> Stream[Any]:
            return processes.enter_context(Stream(function, *arguments))

        groups = [[name] for name in names] if times_only else [list(names)]
        tracers = [start(trace_models, group, device, precision) for group in groups]
        for tracer in tracers:
            tracer.begin()
        waiting = [start(measure_model, task) for task in (tasks if times_only else tasks[:1])]
        shapes: Iterator[ModelShape | Failed] = chain.from_iterable(tracers)
        if times_only:
            shapes = iter(list(shapes))
        for index, task in enumerate(tasks):
            measuring = waiting[index]
            measuring.begin()
            if index + 1 == len(waiting) < len(tasks):
                waiting.append(start(measure_model, tasks[index + 1]))
            try:
                yield from _compare_model(task, measuring, next(shapes))
            except StreamFailed as error:
                yield Failed(task.model, str(error))
            measuring.end()  # before the next one begins: its memory must be gone


def _compare_model(task: PlanTask, measuring: Iterable[News | Spent], shape: ModelShape | Failed) -> Iterator[Told]:
    if isinstance(shape, Failed):
        yield shape
        return
    rates: Rates | None = None
    for news in measuring:
        match news:
            case Rates():
                rates = news
            case Launching():
                shape = replace(shape, launched=(*shape.launched, news))
                if rates is not None:
                    yield Beforehand(task.model, rates, shape.launched)
            case Spent() | Busy():
                yield news
            case _:
                predicted = None
                if news.step_s is not None and rates is not None:
                    predicted = step_time(shape, news.run, task.precision, task.device, rates)
                yield Compared(
                    model=task.model,
                    parameters=shape.parameters,
                    run=news.run,
                    predicted_bytes=peak_bytes(shape, news.run, task.precision, task.device),
                    measured_bytes=news.peak_bytes,
                    predicted_s=None if predicted is None else predicted.seconds,
                    measured_s=news.step_s,
                    parts=None if predicted is None else predicted.parts,
                )


@dataclass
class Gathered:
    """All that has come so far."""

    results: list[Compared] = field(default_factory=list)
    before: dict[str, Beforehand] = field(default_factory=dict)
    profiles: list[Busy] = field(default_factory=list)
    spent: dict[str, dict[str, float]] = field(default_factory=dict)
    """What the bench itself took."""
    errors: dict[str, str] = field(default_factory=dict)

    def add(self, news: Told) -> None:
        match news:
            case Compared():
                self.results.append(news)
            case Beforehand():
                self.before[news.model] = news
            case Busy():
                self.profiles.append(news)
            case Spent():
                self.spent[news.model] = news.seconds
            case Failed():
                self.errors[news.model] = news.message

    def summarise(self, device: str) -> dict[str, Any]:
        """The JSON object; `ok` is False where a run is missing or too far off."""
        off = [abs(result.off) for result in self.results if result.off is not None]
        time_off = [abs(result.time_off) for result in self.results if result.time_off is not None]
        is_close = not off or (max(off) <= WORST and statistics.median(off) <= MEDIAN)
        is_in_time = all(value <= TIME for value in time_off)
        return {
            "machine": describe_software(device),
            "precision": PRECISION[device],
            "beforehand": {
                model: {"rates": each.rates._asdict(), "launching": [asdict(found) for found in each.launching]}
                for model, each in self.before.items()
            },
            "runs": [{**asdict(result), "off": result.off, "time_off": result.time_off} for result in self.results],
            "profiles": [asdict(each) for each in self.profiles],
            "worst": max(off, default=None),
            "median": statistics.median(off) if off else None,
            "time_worst": max(time_off, default=None),
            "time_median": statistics.median(time_off) if time_off else None,
            "spent_s": self.spent,
            "errors": self.errors,
            "ok": bool(off or time_off) and is_close and is_in_time and not self.errors,
        }


def bench_plan_command(
    only: Annotated[str, typer.Option(help="Models, with commas; all five if left out.")] = ",".join(NAMES),
    stages: Annotated[str, typer.Option(help="Rows, with commas.")] = "0,1,2,3",
    world: Annotated[int, typer.Option(min=2, help="Ranks of the fake world, of which rank 0 is real.")] = 8,
    batches: Annotated[str, typer.Option(help="Samples in a step, with commas; 2,8 on a GPU, 2,4 on the CPU.")] = "",
    alone: Annotated[bool, typer.Option(help="A rank alone as well; on a GPU it is timed.")] = True,
    times_only: Annotated[
        bool, typer.Option("--times-only", help="A rank alone and nothing else, timed on the CPU too; no peaks.")
    ] = False,
    profiles: Annotated[
        bool, typer.Option("--profile", help="One more step of each timed run for how long its kernels ran, by name.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON object to this file, after every run.")] = None,
) -> None:
    """Compare predicted with measured peaks and step times, over models, rows, batches and checkpointing.

    Each model runs in a process of its own: large on a GPU in bf16, where the allocator counts; tiny on the CPU in
    fp32, where torch's profiler does. Times are predicted from the device's rates and from what the host takes to
    launch steps of one sample, both measured before. The exit code is 1 when a peak is off by over 5%, the median of
    all by over 2%, or a step time by over 15%.

    \b
    Examples:
      zerofold bench plan
      zerofold bench plan --only gpt,llama --stages 3 --json
      zerofold bench plan --times-only --profile --out times.json
    """
    try:
        chosen = parse_stages(stages)
        device = choose_device(device)
        names = [name.strip() for name in only.split(",") if name.strip()]
        if not names:
            raise ValueError(f"--only names no model; the models are {', '.join(NAMES)}")
        for name in names:
            plan_model(name, device)
        samples = _parse_batches(batches) or BATCHES[device]
        make_folder_of(out)
        _check_times(samples, times_only=times_only, alone=alone, profiles=profiles, device=device)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    runs = all_runs(() if times_only else chosen, world, samples, alone=alone)
    found, summary = Gathered(), dict[str, Any]()
    with Console(stderr=True).status("starting") as status:
        for news in compare_models(names, device, runs, times_only=times_only, profiles=profiles):
            found.add(news)
            if isinstance(news, Compared):
                done = sum(each.model == news.model for each in found.results)
                status.update(f"{news.model}: {done} of {len(runs)} runs")
            summary = found.summarise(device)
            if out is not None:
                _write_whole(out, json.dumps(summary, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        print_table(Console(), found.results, summary)
    if not summary["ok"]:
        raise typer.Exit(1)


def _parse_batches(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise ValueError(f"--batches has {part!r}; give numbers of samples, with commas")
    return tuple(int(part) for part in parts)


def _check_times(samples: Sequence[int], *, times_only: bool, alone: bool, profiles: bool, device: str) -> None:
    is_timed = alone and (times_only or device == "cuda")
    if times_only and not alone:
        raise ValueError("--times-only with --no-alone leaves nothing: a rank alone is what is timed")
    if profiles and not is_timed:
        raise ValueError("--profile has no timed run to look at; add --times-only")
    if is_timed and PROBED in samples:
        raise ValueError(
            f"--batches has {PROBED}, from which the host's time is measured beforehand: a prediction for the same "
            "batch would be none; give others, or --no-alone"
        )


def _write_whole(path: Path, text: str) -> None:
    """A bench that is killed while it writes leaves what it had written before."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)
