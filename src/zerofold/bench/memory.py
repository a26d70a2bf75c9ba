"""`zerofold bench memory`: what rank 0 of N holds, measured on one device against the formula of the ZeRO paper.

torch's fake process group stands for the other ranks: it answers at once, so the values that arrive are wrong and
the sizes are right. With Ψ parameters in bf16, gradients in bf16 and AdamW in fp32, in bytes:

    stage    parameters   gradients   master + moments
      0          2Ψ           2Ψ           12Ψ
      1          2Ψ           2Ψ           12Ψ/N
      2          2Ψ           2Ψ/N         12Ψ/N
      3          2Ψ/N         2Ψ/N         12Ψ/N
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

import zerofold as zf
from zerofold.bench.gpt import GPT, Block, GPTSize, RandomTokens
from zerofold.bench.machine import choose_device, describe_software, parse_stages
from zerofold.engine import Engine
from zerofold.launch import RankFailed, run_ranks
from zerofold.observe.output import make_folder_of
from zerofold.plan.states import paper_bytes

TOLERANCE = 0.03
SIZES = {
    "cuda": GPTSize(vocab=30720, width=4096, layers=36, heads=32, seq=128),  # 7.5005e9, as in the paper's figure 1
    "cpu": GPTSize(vocab=2048, width=512, layers=4, heads=8, seq=16),
}


@dataclass(frozen=True, kw_only=True)
class MemoryTask:
    stage: int
    world: int
    size: GPTSize
    device: str
    """"cpu" or "cuda"."""
    fused: bool


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one rank held between backward and step, in bytes."""

    resident: int
    """By the allocator of the GPU once temporaries are released; on the CPU by zerofold's ledger."""
    state_bytes: dict[str, int]
    """By the ledger."""
    released: dict[str, int]
    """Temporaries that were there before: gathered parameters, cached and fused buffers, by the ledger."""
    step_peak: int | None
    """By the allocator, over a whole step with everything in place."""
    build_peak: int | None


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """One line of the result; None where the stage failed."""

    stage: int
    formula_gb: float
    resident_gb: float | None = None
    over_percent: float | None = None
    step_peak_gb: float | None = None
    build_peak_gb: float | None = None
    state_gb: dict[str, float] | None = None
    released_gb: dict[str, float] | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.over_percent is not None and self.over_percent <= 100 * TOLERANCE


def hold(task: MemoryTask) -> Held:
    """Train two steps as rank 0 of a fake world, and look between the third backward and its update."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    on_cuda = task.device == "cuda"
    device = torch.device(task.device, 0) if on_cuda else torch.device("cpu")
    dist.init_process_group("fake", rank=0, world_size=task.world, store=FakeStore())
    torch.set_num_threads(1)  # the tensors of a small model are not worth a second one
    torch.manual_seed(0)

    bf16 = torch.bfloat16
    # On the meta device, so that zerofold fills and cuts one unit after another: whole, in fp32, beside its own
    # states, the model would not fit.
    with torch.device("meta"):
        model = GPT(task.size, checkpointing=True).to(bf16)
    model, optimizer = zf.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=task.fused),
        stage=task.stage,
        precision=zf.Precision(parameters=bf16, reduction=bf16, accumulation=bf16),
        units=Block,
        device=device,
    )
    build_peak = torch.cuda.max_memory_allocated() if on_cuda else None
    data = RandomTokens(task.size, batch=1, rank=0, device=device, batches=1)

    def backward() -> None:
        model(*data.at(0)).backward()

    for _ in range(2):  # the first makes the moments, so the second is like all that follow
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        backward()
        make_finite(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    if not optimizer.state:
        raise RuntimeError("the steps made no optimizer states, so there is nothing to measure")
    step_peak = torch.cuda.max_memory_allocated() if on_cuda else None
    backward()
    ledger = zf.ledger(model)
    released = ledger.snapshot()["temporary_bytes"]
    release_temporaries(model, device)
    state_bytes = ledger.snapshot()["state_bytes"]
    return Held(
        resident=torch.cuda.memory_allocated() if on_cuda else sum(state_bytes.values()),
        state_bytes=state_bytes,
        released=released,
        step_peak=step_peak,
        build_peak=build_peak,
    )


def make_finite(optimizer: torch.optim.Optimizer) -> None:
    """What a fake group leaves in a gradient may be anything, and a step with a NaN would be skipped."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                getattr(parameter.grad, "local", parameter.grad).zero_()


def release_temporaries(model: nn.Module, device: torch.device) -> None:
    """What comes and goes within a step, and is no state: the formula leaves it out.

    Gathered units, fused communication buffers, cached blocks, and the scratch memory of the matrix library.
    """
    engine = Engine.of(model)
    engine.schedule.release_all()
    engine.pool.clear()
    engine.cache.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()


def judge(task: MemoryTask, held: Held | None, error: str | None = None) -> StageMemory:
    formula = paper_bytes(task.size.parameters, task.stage, task.world).total
    if held is None:
        return StageMemory(stage=task.stage, formula_gb=_gb(formula), error=error)
    return StageMemory(
        stage=task.stage,
        formula_gb=_gb(formula),
        resident_gb=_gb(held.resident),
        over_percent=round(100 * (held.resident / formula - 1), 3),
        step_peak_gb=None if held.step_peak is None else _gb(held.step_peak),
        build_peak_gb=None if held.build_peak is None else _gb(held.build_peak),
        state_gb={name: _gb(count) for name, count in held.state_bytes.items()},
        released_gb={name: _gb(count) for name, count in held.released.items()},
    )


def measure_stage(task: MemoryTask) -> StageMemory:
    """In a process of its own: memory of another stage could stay behind."""
    try:
        (held,) = run_ranks(hold, 1, task)
    except RankFailed as error:
        return judge(task, None, str(error))
    return judge(task, held)


def _gb(count: float) -> float:
    """In 1e9 bytes, as the paper counts; six digits, for models small enough to try on the CPU."""
    return round(count / 1e9, 6)


def print_table(console: Console, results: Sequence[StageMemory], title: str) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("\nstage")
    names = next((list(result.state_gb) for result in results if result.state_gb), [])
    for heading in ("formula\nGB", "resident\nGB", "\nover", "step\npeak", *(f"of it\n{name}" for name in names)):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        states = [] if result.state_gb is None else [_digits(count) for count in result.state_gb.values()]
        table.add_row(
            str(result.stage),
            _digits(result.formula_gb),
            _digits(result.resident_gb),
            "" if result.over_percent is None else f"{result.over_percent:+.2f}%",
            _digits(result.step_peak_gb),
            *states,
            style=None if result.ok else "red",
        )
    console.print(table)
    for result in results:
        if result.error:
            console.print(f"[red]stage {result.stage}[/red]  {escape(result.error)}", soft_wrap=True)


def _digits(count: float | None) -> str:
    return "" if count is None else f"{count:.2f}" if count >= 1 else f"{count:.5f}"


def bench_memory_command(
    stages: Annotated[str, typer.Option(help="Stages, with commas.")] = "0,1,2,3",
    world: Annotated[int, typer.Option(min=1, help="N: ranks of the fake world, of which rank 0 is real.")] = 64,
    d: Annotated[int | None, typer.Option("--d", min=1, help="Width; 4096 on a GPU, 512 on the CPU.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks; 36, or 4.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads; 32, or 8.")] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="Vocabulary; 30720, or 2048.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens in a step; 128, or 16.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    fused: Annotated[
        bool | None,
        typer.Option(help="AdamW's fused kernel, which needs no memory of its own; on a GPU if left out."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON object to this file, after every stage.")] = None,
) -> None:
    """Measure what one rank of 64 holds at each stage, against the formula of the ZeRO paper.

    One device is enough: the other ranks are fake. On a GPU the allocator tells, for 7.5e9 parameters; on the CPU
    zerofold's ledger, for a small model. The exit code is 1 when a stage holds over 3% more than the formula.

    \b
    Examples:
      zerofold bench memory
      zerofold bench memory --stages 2,3 --world 8 --d 2048 --layers 24 --heads 16
    """
    try:
        chosen = parse_stages(stages)
        device = choose_device(device)
        default = SIZES[device]
        size = GPTSize(
            vocab=vocab or default.vocab,
            width=d or default.width,
            layers=layers or default.layers,
            heads=heads or default.heads,
            seq=seq or default.seq,
        )
        make_folder_of(out)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    use_fused = device == "cuda" if fused is None else fused
    results: list[StageMemory] = []
    summary: dict[str, Any] = {}
    with Console(stderr=True).status("starting") as status:
        for stage in chosen:
            status.update(f"stage {stage}")
            results.append(
                measure_stage(MemoryTask(stage=stage, world=world, size=size, device=device, fused=use_fused))
            )
            summary = {
                "machine": describe_software(device),
                "model": {"psi": size.parameters, **asdict(size)},
                "world": world,
                "fused": use_fused,
                "stages": [{**asdict(result), "ok": result.ok} for result in results],
            }
            if out is not None:
                out.write_text(json.dumps(summary, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        print_table(Console(), results, f"{size.parameters / 1e9:.4g}e9 parameters, rank 0 of {world}, {device}")
    if not all(result.ok for result in results):
        raise typer.Exit(1)
