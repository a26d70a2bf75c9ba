"""`zerofold verify`: every stage against torch DDP and the plain torch optimizer, on real processes.

Three claims are checked for each stage: the weights are DDP's, the elements sent are within the ZeRO bound,
and the states take no more bytes than the formula. Elements are counted around the functions of
torch.distributed, and the bytes of the states are looked up in the tensors themselves as well: zerofold's own
figures are never trusted alone.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import zerofold as zf
from zerofold.bench.figures import largest
from zerofold.bench.gpt import GPT, Block, GPTSize, RandomTokens
from zerofold.bench.wire import count_elements
from zerofold.launch import RankFailed, init_ranks, run_ranks
from zerofold.plan.states import Widths, elements_sent, state_bytes

# Sides in multiples of 32 elements, so that no parameter needs padding to a cache line.
SIZE = GPTSize(vocab=256, width=64, layers=3, heads=4, seq=32)
BATCH = 4
STAGES = (0, 1, 2, 3)
VOLUME_SLACK = 1.005
BYTES_SLACK = 1.01
ALIGNMENT_BYTES = 128
"""What the padding of one parameter may cost in each of its tensors."""
STATE_TENSORS = 4
"""Parameter, gradient, two moments."""
CLOSE = 1e-6
"""Sums over three or more ranks depend on their order, and DDP's is not a rank-ordered one."""


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters, gradients and optimizer states, by the storages behind them, each counted once."""
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    owners = [*model.parameters(), *grouped]
    states = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [owner.grad for owner in owners if owner.grad is not None]
    storages: dict[int, int] = {}
    for tensor in (*owners, *gradients, *states):
        if isinstance(tensor, Tensor):
            storage = getattr(tensor, "local", tensor).untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every rank does; the same for all."""

    steps: int = 10
    stages: tuple[int, ...] = STAGES
    optimizer: str = "adamw"
    device_type: str = "cpu"
    size: GPTSize = SIZE


@dataclass(frozen=True)
class Training:
    """What one rank saw of one training run."""

    losses: list[float]
    elements_per_step: float
    held_bytes: int
    """States between the last backward and the last update, counted from outside."""
    ledger_bytes: int
    """The same by zerofold's ledger."""


@dataclass(frozen=True)
class RankReport:
    """One stage on one rank, against DDP on the same rank."""

    training: Training
    max_abs_diff: float
    loss_diff: float


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """One stage, seen from all ranks: the worst weights, losses and bytes, the mean traffic."""

    stage: int
    max_abs_diff: float
    comm_elements_per_psi: float
    comm_bound_per_psi: float
    state_bytes: int
    formula_bytes: int
    loss_diff: float
    ok: bool


def make_optimizer(name: str, parameters: Iterable[nn.Parameter], world: int) -> torch.optim.Optimizer:
    """One tensor at a time, the form whose arithmetic is the same for a piece as for the whole.

    Fused kernels treat the ends of a tensor differently, and a piece has other ends; torch picks foreach kernels,
    which round differently, for plain parameters only.
    """
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2, foreach=False, fused=False)
    # Where sums differ in the last bit: with a tiny eps, Adam makes a step of the noise of a zero gradient.
    eps = 1e-8 if world <= 2 else 1e-4
    return torch.optim.AdamW(
        parameters, lr=1e-3, betas=(0.9, 0.95), eps=eps, weight_decay=0.1, foreach=False, fused=False
    )


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: RandomTokens,
    *,
    steps: int,
    ledger_bytes: Callable[[], int] = lambda: 0,
) -> Training:
    """Train, and count over all steps but the first, where buffers are made and orders are learned.

    A stage that fetches parameters after its step may do so during the next forward. From one step's start to
    a later one's, as many of these fetches fall into the window as there are steps in it.
    """
    losses: list[float] = []
    held, by_ledger = 0, 0

    def run_step(step: int) -> None:
        nonlocal held, by_ledger
        loss = model(*data.at(step))
        loss.backward()
        if step == steps - 1:  # between backward and update all three states exist
            held, by_ledger = held_bytes(model, optimizer), ledger_bytes()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    run_step(0)
    with count_elements() as wire:
        for step in range(1, steps):
            run_step(step)
    return Training(losses, wire.elements / (steps - 1), held, by_ledger)


def compare_with_ddp(task: Task, rank: int, world: int, device: torch.device) -> list[RankReport]:
    """Train on DDP, then on each stage, from the same weights and on the same data. One rank's part of it."""

    def fresh() -> tuple[GPT, torch.optim.Optimizer]:
        torch.manual_seed(0)
        with device:
            model = GPT(task.size)
        return model, make_optimizer(task.optimizer, model.parameters(), world)

    data = RandomTokens(task.size, batch=BATCH, rank=rank, device=device)
    plain, optimizer = fresh()
    reference = train(nn.parallel.DistributedDataParallel(plain), optimizer, data, steps=task.steps)
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}

    reports = []
    for stage in task.stages:
        model, optimizer = zf.prepare(*fresh(), stage=stage, units=Block)
        by_ledger = functools.partial(_ledger_bytes, model)
        training = train(model, optimizer, data, steps=task.steps, ledger_bytes=by_ledger)
        with zf.full_params(model), torch.no_grad():
            diffs = [(p - expected[name]).abs().max().item() for name, p in model.named_parameters()]
        zf.close(model)
        loss_diffs = [abs(ours - ddp) for ours, ddp in zip(training.losses, reference.losses, strict=True)]
        reports.append(RankReport(training, largest(diffs), largest(loss_diffs)))
    return reports


def _ledger_bytes(model: nn.Module) -> int:
    return sum(zf.ledger(model).snapshot()["state_bytes"].values())


def judge(stage: int, reports: Sequence[RankReport], task: Task) -> StageResult:
    """Whether a stage, as the ranks report it, keeps its three promises."""
    world, psi = len(reports), task.size.parameters
    diff = largest(report.max_abs_diff for report in reports)
    sent = sum(report.training.elements_per_step for report in reports) / world / psi
    bound = elements_sent(stage, world)
    by_ledger = max(report.training.ledger_bytes for report in reports)
    held = max(report.training.held_bytes for report in reports)
    widths = Widths.of("fp32", moments=2 if task.optimizer == "adamw" else 0)
    formula = math.ceil(state_bytes(psi, stage, world, widths=widths).total)
    padding = ALIGNMENT_BYTES * STATE_TENSORS * len(list(GPT(task.size).parameters()))
    return StageResult(
        stage=stage,
        max_abs_diff=diff,
        comm_elements_per_psi=round(sent, 6),
        comm_bound_per_psi=round(bound, 6),
        state_bytes=by_ledger,
        formula_bytes=formula,
        loss_diff=largest(report.loss_diff for report in reports),
        ok=(
            diff <= (0.0 if world <= 2 else CLOSE)
            and sent <= bound * VOLUME_SLACK
            and max(by_ledger, held) <= formula * BYTES_SLACK + padding
        ),
    )


def verify_rank(task: Task) -> list[RankReport]:
    """What each process of `zerofold verify` runs."""
    with init_ranks(task.device_type) as (rank, world, device):
        return compare_with_ddp(task, rank, world, device)


def verify(task: Task, nproc: int) -> list[StageResult]:
    """Start the processes and judge every stage by what they report."""
    by_rank = run_ranks(verify_rank, nproc, task)
    by_stage = zip(*by_rank, strict=True)
    return [judge(stage, reports, task) for stage, reports in zip(task.stages, by_stage, strict=True)]


def print_table(console: Console, results: Sequence[StageResult], title: str) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("stage")
    for heading in ("weights off DDP", "sent / Ψ", "bound", "state bytes", "formula", "losses off DDP"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for result in results:
        table.add_row(
            str(result.stage),
            f"{result.max_abs_diff:.1g}",
            f"{result.comm_elements_per_psi:.4f}",
            f"{result.comm_bound_per_psi:.4f}",
            f"{result.state_bytes:,}",
            f"{result.formula_bytes:,}",
            f"{result.loss_diff:.1g}",
            "[green]✓[/green]" if result.ok else "[red]✗[/red]",
        )
    console.print(table)


def _parse_stages(text: str) -> tuple[int, ...]:
    stages = tuple(part.strip() for part in text.split(",") if part.strip())
    for stage in stages:
        if stage not in map(str, STAGES):
            raise ValueError(f"there is no stage {stage!r}; choose from {', '.join(map(str, STAGES))}")
    if not stages:
        raise ValueError("--stages names no stage")
    return tuple(int(stage) for stage in stages)


def verify_command(
    nproc: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 10,
    stages: Annotated[str, typer.Option(help="Stages, with commas.")] = "0,1,2,3",
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, not a table.")] = False,
) -> None:
    """Check every stage against torch DDP: the weights, the elements sent, the bytes of the states.

    \b
    Examples:
      zerofold verify
      zerofold verify --nproc 4 --stages 2,3 --optimizer sgd --json
    """
    try:
        if optimizer not in ("adamw", "sgd"):
            raise ValueError(f"--optimizer must be adamw or sgd, not {optimizer!r}")
        # A rank needs a GPU of its own; with fewer the processes share the CPU.
        device_type = "cuda" if torch.cuda.device_count() >= nproc else "cpu"
        chosen = _parse_stages(stages)
        task = Task(steps=steps, stages=chosen, optimizer=optimizer, device_type=device_type)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    try:
        results = verify(task, nproc)
    except RankFailed as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None

    psi = task.size.parameters
    ok = all(result.ok for result in results)
    if as_json:
        summary = {"world": nproc, "psi": psi, "optimizer": optimizer, "steps": steps}
        typer.echo(json.dumps({**summary, "stages": [asdict(result) for result in results], "ok": ok}))
    else:
        title = f"{psi:,} parameters, {nproc} processes, {optimizer}, {steps} steps against torch DDP"
        print_table(Console(), results, title)
    if not ok:
        raise typer.Exit(1)
