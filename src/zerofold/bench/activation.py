"""`zerofold bench activation`: checkpoints on the host against checkpoints on the device, bytes against what was told.

    all fit        [logits][device][contiguous][host]  and back    peaks, step times, kept bytes
    working        a plain model, gradients dropped                traced bytes, and the paper's formula
    does not fit   [logits][device][host]                          each in a process of its own, which may run out

The length of the last is the plan's: checkpoints on the device need more than there is, on the host they do not.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from zerofold.activation.cross_entropy import TOKENS
from zerofold.bench.activation_plan import find_length, paper, peak_bytes, traced, working_bytes
from zerofold.bench.activation_rows import (
    LongRows,
    Told,
    WayRow,
    as_json,
    is_ok,
    kept_by_allocator,
    print_tables,
    way_rows,
)
from zerofold.bench.activation_worker import WAYS, ActivationTask, Fitting, Long
from zerofold.bench.alone import AloneError, run_alone
from zerofold.bench.gpt import GPTSize
from zerofold.bench.machine import choose_device, describe_software
from zerofold.observe.output import make_folder_of

SIZES = {
    "cuda": GPTSize(vocab=32768, width=3072, layers=28, heads=24, seq=2048),
    "cpu": GPTSize(vocab=2048, width=64, layers=6, heads=2, seq=128),
}
LONG = {  # deep enough that states leave little room: a longer step would take minutes
    "cuda": GPTSize(vocab=32768, width=4096, layers=32, heads=32, seq=32768),
    "cpu": GPTSize(vocab=512, width=64, layers=6, heads=2, seq=256),
}
LOSS_TOKENS = {"cuda": TOKENS, "cpu": 64}
LONG_STEPS = 2
LONG_WAYS = ("logits", "device", "host")
WORKER = "zerofold.bench.activation_worker"


def measure_told(task: ActivationTask, fitting: Fitting, rows: list[WayRow], *, timeout: float) -> list[Told]:
    """Every number of bytes that somebody could have known before the run."""
    shape = traced(task.size, task.length, task.device, loss_tokens=task.loss_tokens)
    told = [
        Told(f"checkpoints, formula, ci = {every}", paper(task.size, task.batch, every).activation_checkpoints, kept)
        for every, kept in fitting.kept_by_interval.items()
    ]
    checkpoints = paper(task.size, task.batch, 1).activation_checkpoints
    by_allocator = kept_by_allocator(fitting)
    if by_allocator is not None:
        told.append(Told("checkpoints, formula, by the allocator", checkpoints, by_allocator))
    working = working_bytes(task.size, shape, task.batch)
    found = run_alone(f"{WORKER}:measure_working", task, timeout=timeout) - checkpoints
    told.append(Told("working memory, traced", working.traced, found))
    told.append(Told("working memory, formula", working.formula, found, is_asked=False))
    whole, chunked = (next(row for row in rows if row.way == way) for way in ("logits", "device"))
    saved = (whole.predicted_bytes - chunked.predicted_bytes, whole.peak_bytes - chunked.peak_bytes)
    told.append(Told("peak saved by chunked cross-entropy, plan", *saved))
    return told


def measure_long(size: GPTSize, batch: int, device: str, length: int | None, *, timeout: float) -> LongRows:
    @cache
    def peak(tokens: int, keep: str) -> int:
        return peak_bytes(traced(size, tokens, device, loss_tokens=LOSS_TOKENS[device]), batch, keep, device)

    try:
        if length is None and device == "cuda":
            length = find_length(peak, torch.cuda.get_device_properties(0).total_memory, size.seq)
        length = length or size.seq
    except ValueError as error:
        return LongRows(length=None, batch=batch, error=str(error))
    task = ActivationTask(
        size=size, batch=batch, device=device, length=length, loss_tokens=LOSS_TOKENS[device], timed=LONG_STEPS
    )
    ways: dict[str, Long] = {}
    for way in LONG_WAYS:
        try:
            ways[way] = run_alone(f"{WORKER}:measure_long", task, way, timeout=timeout)
        except AloneError as error:
            return LongRows(length=length, batch=batch, ways=ways, error=f"{way}: {error}")
    return LongRows(length=length, batch=batch, ways=ways)


def bench_activation_command(
    d: Annotated[
        int | None, typer.Option("--d", min=1, help="Width of the model; 3072 on a GPU, 64 on the CPU.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks; 28, or 6.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads; 24, or 2.")] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="Vocabulary; 32768, or 512.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens in a sequence where all fit; 2048, or 128.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a step.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Every second one in reverse order.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each way in a round.")] = 4,
    long: Annotated[bool, typer.Option(help="Also a length that does not fit, with a larger model.")] = True,
    long_length: Annotated[
        int | None, typer.Option(min=1, help="That length; by default the one that the plan finds.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one process.")] = 300,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON object to this file, after every part.")] = None,
) -> None:
    """Measure activation checkpoints on the device and on the host: peaks, step times, and the bytes that were told.

    A GPT trains alone under ZeRO-3, in bf16 with AdamW; every block is computed again. On the CPU there are no times
    and no end of memory, so it shows bytes alone. The exit code is 1 when a step with checkpoints on the host takes
    over 1.1 times one with them on the device, bytes that were told are off by over 5%, or the long sequences do not
    run out of memory on the device and train with the host.

    \b
    Examples:
      zerofold bench activation
      zerofold bench activation --no-long --d 2048 --layers 24 --heads 16 --out result.json
    """
    try:
        device = choose_device(device)
        default = SIZES[device]
        size = GPTSize(
            vocab=vocab or default.vocab,
            width=d or default.width,
            layers=layers or default.layers,
            heads=heads or default.heads,
            seq=seq or default.seq,
        )
        if long_length is not None and long_length > LONG[device].seq:
            raise ValueError(f"--long-length {long_length}: the model takes {LONG[device].seq} tokens at most")
        make_folder_of(out)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    task = ActivationTask(
        size=size,
        batch=batch,
        device=device,
        length=size.seq,
        loss_tokens=LOSS_TOKENS[device],
        rounds=rounds,
        timed=steps,
    )
    if device == "cpu":
        task = replace(task, rounds=1, untimed=1)
    console = Console(stderr=True)
    result: dict[str, Any] = {
        "machine": describe_software(device),
        "model": {"psi": size.parameters, **asdict(size), "batch": batch},
    }
    try:
        with console.status("where all fit"):
            fitting: Fitting = run_alone(f"{WORKER}:measure_fitting", task, timeout=timeout)
            shapes = {
                chunked: traced(size, size.seq, device, loss_tokens=task.loss_tokens if chunked else None)
                for chunked in (False, True)
            }
            predicted = {
                name: peak_bytes(shapes[way.chunked], batch, way.keep, device, contiguous=way.contiguous)
                for name, way in WAYS.items()
            }
            rows = way_rows(fitting, predicted)
            told = measure_told(task, fitting, rows, timeout=timeout)
    except AloneError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    _write(out, {**result, **as_json(rows, told, None)})
    longer = LongRows(length=None, batch=batch)
    if long:
        with console.status("a length that does not fit"):
            longer = measure_long(LONG[device], batch, device, long_length, timeout=timeout)
    is_judged = long and device == "cuda"
    result |= as_json(rows, told, longer if long else None)
    result["ok"] = is_ok(rows, told, longer if is_judged else None) and longer.error is None
    _write(out, result)
    if json_wanted:
        typer.echo(json.dumps(result))
    else:
        title = f"{size.parameters / 1e6:.1f}M parameters, bf16 with AdamW, {device}, "
        title += f"{batch} sequences of {size.seq} tokens"
        print_tables(Console(), title, rows, told, longer)
    if not result["ok"]:
        raise typer.Exit(1)


def _write(out: Path | None, result: dict[str, Any]) -> None:
    """After every part: a run of minutes may be stopped, and keeps what it had."""
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")
