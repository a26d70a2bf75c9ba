"""What each process of `zerofold bench precision` runs: the same training in one precision and stage after another.

The model, the text, the schedule and the validation are those of `zerofold train`; the reference is torch's own
DistributedDataParallel with AdamW and clipping, in fp32.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

import zerofold as zf
from zerofold.launch import Ranks, init_ranks
from zerofold.train.data import ByteText, library_source
from zerofold.train.gpt import GPT, Block, GPTConfig
from zerofold.train.loop import LONGEST_WARMUP, VALIDATION_SEQUENCES, cosine

CLIP = 1.0
AVERAGED_STEPS = 20  # the last ones: the loss of a single batch is noise


@dataclass(frozen=True)
class Case:
    """One training run of the table."""

    precision: str
    stage: int | None
    """None: torch's DistributedDataParallel."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Of zf.Precision, as names of dtypes; without any, the name of the precision says it all."""

    def __str__(self) -> str:
        return f"{self.precision} DDP" if self.stage is None else f"{self.precision}, stage {self.stage}"

    def policy(self) -> Any:
        """What `precision=` gets."""
        if not self.fields:
            return self.precision
        return zf.Precision(**{name: getattr(torch, dtype) for name, dtype in self.fields.items()})


@dataclass(frozen=True, kw_only=True)
class PrecisionTask:
    """What all runs have in common."""

    cases: tuple[Case, ...]
    gpt: GPTConfig
    steps: int
    batch: int
    """Sequences per rank and step."""
    lr: float
    seed: int
    device: str
    """"cpu" or "cuda"."""


@dataclass(frozen=True)
class Outcome:
    """How one run ended on one rank; the losses are means over all ranks."""

    loss: float
    validation_loss: float
    digest: str
    """Of all weights, whole, in fp32."""
    skipped: int | None
    """Steps left out because a gradient was not finite, where the engine tells."""
    seconds: float


def train_cases(task: PrecisionTask) -> list[Outcome]:
    """All runs of one rank, in one process: starting it costs as much as a run."""
    outcomes = []
    with init_ranks(task.device) as ranks:
        torch.set_num_threads(1)
        text = ByteText(library_source(), seq=task.gpt.seq)
        for number, case in enumerate(task.cases, 1):
            try:
                outcome = train_case(case, task, text, ranks)
            except Exception as error:
                raise RuntimeError(f"{case}: {type(error).__name__}: {error}") from error
            outcomes.append(outcome)
            if ranks.rank == 0:
                done = f"{number} of {len(task.cases)}: {case}: loss {outcome.loss:.4f}, {outcome.seconds:.0f} s"
                typer.echo(done, err=True)
    return outcomes


def train_case(case: Case, task: PrecisionTask, text: ByteText, ranks: Ranks) -> Outcome:
    start = time.monotonic()
    rank, world, device = ranks
    torch.manual_seed(task.seed)
    model: nn.Module = GPT(task.gpt).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, betas=(0.9, 0.95), weight_decay=0.1)
    is_ddp = case.stage is None
    if case.stage is None:
        model = nn.parallel.DistributedDataParallel(model)
    else:
        zf.prepare(model, optimizer, stage=case.stage, precision=case.policy(), units=Block, clip=CLIP)
    warmup = max(1, min(LONGEST_WARMUP, task.steps // 10))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup) * cosine(step / task.steps)
    )

    losses: list[Tensor] = []
    for step in range(task.steps):
        batch = text.batch(task.batch, seed=task.seed, step=step, rank=rank)
        loss = model(batch.tokens.to(device), batch.targets.to(device))
        loss.backward()
        if is_ddp:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.detach().double())

    def mean_over_ranks(value: Tensor) -> float:
        total = value.double() / world
        dist.all_reduce(total)
        return total.item()

    outcome = Outcome(
        loss=mean_over_ranks(torch.stack(losses[-AVERAGED_STEPS:]).mean()),
        validation_loss=mean_over_ranks(_validate(model, text, ranks)),
        digest=_digest(model, gather=nullcontext if is_ddp else lambda: zf.full_params(model)),
        skipped=None if is_ddp else _skipped(model),
        seconds=time.monotonic() - start,
    )
    if not is_ddp:
        zf.close(model)
    return outcome


@torch.no_grad()
def _validate(model: nn.Module, text: ByteText, ranks: Ranks) -> Tensor:
    """This rank's part of the held-out text, the same windows for every run."""
    rank, world, device = ranks
    batch = text.validation_batch(max(1, VALIDATION_SEQUENCES // world), rank=rank, world=world)
    model.eval()
    loss: Tensor = model(batch.tokens.to(device), batch.targets.to(device))
    model.train()
    return loss


def _digest(model: nn.Module, *, gather: Callable[[], Any]) -> str:
    """The same for the same bits in all weights."""
    digest = hashlib.sha256()
    with gather(), torch.no_grad():
        for parameter in model.parameters():
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _skipped(model: nn.Module) -> int | None:
    last = zf.last_step(model)
    return None if last is None else last.skipped_total


def relative(value: float, reference: float) -> float:
    """How far a loss is off the reference, of the reference; infinite where it is no number."""
    off = value / reference - 1
    return math.inf if math.isnan(off) else off
