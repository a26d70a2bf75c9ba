"""`zerofold bench update`: the one-pass AdamW beside the separate passes it stands for, and beside a plain copy.

    round 0   [copy][one pass][no copy][separate]        all on the same tensors, in one process;
    round 1   [one pass][no copy][separate][copy]        a ratio compares two turns of the same round

A copy moves bytes as fast as the device can, so its rate is the most an update can have.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from zerofold.bench import figures
from zerofold.optim.onepass import AdamSettings, AdamTensors, adam

DEFAULT_PARAMS = {"cuda": 1e9, "cpu": 3e7}
TENSOR_ELEMENTS = 10_000_000  # a matrix of 3072 × 3072 or so: what a model of that size is made of
COPIED_ELEMENTS = 250_000_000  # at most: more says nothing new
WARMUP_TURNS = 2  # kernels are compiled, pages touched
COPY, ONE_PASS, ONE_PASS_ALONE, SEPARATE = "plain copy", "one pass", "one pass, no copy", "separate passes"
SETTINGS = AdamSettings(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


@dataclass(frozen=True)
class Contender:
    run: Callable[[], None]
    total_bytes: int
    """Read and written."""


@dataclass(frozen=True)
class UpdateRow:
    name: str
    ms: float
    ms_min: float
    ms_max: float
    gb_per_s: float
    share_of_copy: float
    over_one_pass: float
    over_one_pass_min: float
    over_one_pass_max: float


def make_contenders(params: int, device: str) -> dict[str, Contender]:
    """bf16 parameters and gradients, fp32 masters and moments, and a clip coefficient on the device."""
    sizes = [TENSOR_ELEMENTS] * (params // TENSOR_ELEMENTS)
    sizes += [params % TENSOR_ELEMENTS] if params % TENSOR_ELEMENTS else []
    masters = [torch.randn(size, device=device) for size in sizes]
    gradients = [torch.randn(size, device=device).bfloat16() for size in sizes]
    exp_avgs = [torch.zeros(size, device=device) for size in sizes]
    exp_avg_sqs = [torch.zeros(size, device=device) for size in sizes]
    copies = [master.bfloat16() for master in masters]
    fp32_gradients = [torch.zeros(size, device=device) for size in sizes]  # kept, so that no allocation is timed
    scale = torch.tensor(0.5, device=device)
    steps = [torch.tensor(100.0, device=device) for _ in sizes]
    states = list(zip(masters, gradients, exp_avgs, exp_avg_sqs, copies, strict=True))
    with_copies = [AdamTensors(*tensors, step=100, seed=0) for tensors in states]
    alone = [each._replace(copy=None) for each in with_copies]
    source = torch.zeros(min(params, COPIED_ELEMENTS), device=device)
    target = torch.zeros_like(source)

    def separate() -> None:
        torch._foreach_copy_(fp32_gradients, gradients)
        torch._foreach_mul_(fp32_gradients, scale)
        torch._fused_adamw_(
            masters,
            fp32_gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            lr=SETTINGS.lr,
            beta1=SETTINGS.beta1,
            beta2=SETTINGS.beta2,
            weight_decay=SETTINGS.weight_decay,
            eps=SETTINGS.eps,
            amsgrad=False,
            maximize=False,
        )
        torch._foreach_copy_(copies, masters)

    return {
        COPY: Contender(lambda: _drop(target.copy_(source)), 8 * source.numel()),
        # Gradient 2, master and moments 4 each way, copy 2.
        ONE_PASS: Contender(lambda: adam(with_copies, SETTINGS, scale=scale), 28 * params),
        ONE_PASS_ALONE: Contender(lambda: adam(alone, SETTINGS, scale=scale), 26 * params),
        # Cast 2 + 4, clip 4 + 4, update 16 + 12, cast back 4 + 2.
        SEPARATE: Contender(separate, 48 * params),
    }


def _drop(_: Tensor) -> None:
    """For the type checker: a copy returns its target."""


def seconds_of(run: Callable[[], None], device: str) -> float:
    if device != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(contenders: dict[str, Contender], device: str, rounds: int) -> list[dict[str, float]]:
    """For each round: name → seconds."""
    for contender in list(contenders.values()) * WARMUP_TURNS:
        seconds_of(contender.run, device)
    return [
        {name: seconds_of(contenders[name].run, device) for name in figures.rotated(list(contenders), index)}
        for index in range(rounds)
    ]


def make_rows(contenders: dict[str, Contender], rounds: list[dict[str, float]]) -> list[UpdateRow]:
    rows = []
    for name, contender in contenders.items():
        times = [each[name] for each in rounds]
        shares = [contender.total_bytes / each[name] / (contenders[COPY].total_bytes / each[COPY]) for each in rounds]
        over = figures.ratios(rounds, name, ONE_PASS)
        assert over is not None
        rows.append(
            UpdateRow(
                name,
                ms=1e3 * statistics.median(times),
                ms_min=1e3 * min(times),
                ms_max=1e3 * max(times),
                gb_per_s=contender.total_bytes / statistics.median(times) / 1e9,
                share_of_copy=statistics.median(shares),
                over_one_pass=over.median,
                over_one_pass_min=over.low,
                over_one_pass_max=over.high,
            )
        )
    return rows


def bench_update_command(
    params: Annotated[
        float | None, typer.Option(help="Parameters, as 1e9. That many on a GPU, 3e7 on the CPU, if left out.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 10,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads on the CPU. torch's number if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Time the AdamW update in one pass and in separate passes, beside a plain copy.

    Ratios compare turns of the same round; the median of them is the result.

    \b
    Examples:
      zerofold bench update
      zerofold bench update --params 1e8 --device cpu --threads 1
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    count = DEFAULT_PARAMS.get(device, 0) if params is None else params
    if device not in DEFAULT_PARAMS or (device == "cuda" and not torch.cuda.is_available()):
        typer.echo(f"error: --device {device}: use auto, cpu, or cuda where torch sees a GPU", err=True)
        raise typer.Exit(2)
    if not (math.isfinite(count) and count >= 1):
        typer.echo(f"error: --params {count}: use 1 or more", err=True)
        raise typer.Exit(2)
    if threads is not None:
        torch.set_num_threads(threads)
    contenders = make_contenders(int(count), device)
    seen = measure(contenders, device, rounds)
    rows = make_rows(contenders, seen)
    if as_json:
        machine = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
        }
        result = {"machine": machine, "params": int(count), "rounds": seen, "rows": [asdict(row) for row in rows]}
        typer.echo(json.dumps(result))
        return
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print_table(Console(), rows, f"AdamW of {count:.3g} parameters, {where}, {rounds} rounds")


def print_table(console: Console, rows: list[UpdateRow], title: str) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in ("\nms", "\nmin-max", "\nGB/s", "of\ncopy", "over one\npass", "\nmin-max"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.ms:.1f}",
            f"{row.ms_min:.1f}-{row.ms_max:.1f}",
            f"{row.gb_per_s:.0f}" if row.gb_per_s >= 100 else f"{row.gb_per_s:.1f}",
            f"{row.share_of_copy:.0%}",
            f"{row.over_one_pass:.2f}",
            f"{row.over_one_pass_min:.2f}-{row.over_one_pass_max:.2f}",
        )
    console.print(table)
