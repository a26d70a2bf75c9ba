"""The training loop, as a user of the library would write it: only the public face of zerofold is used."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import asdict, dataclass
from statistics import fmean

import torch
import torch.distributed as dist

import zerofold as zf
from zerofold.train.data import ByteText, library_source
from zerofold.train.gpt import GPT, Block, generate
from zerofold.train.options import METRICS_FILE, TrainOptions
from zerofold.train.progress import Reporter, Status, printable

REPORT_EVERY = 10  # steps; the loss and the speed shown are means over as many
LONGEST_WARMUP = 20  # steps
VALIDATION_SEQUENCES = 64
PROMPT = b"def "


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended; the same on every rank, but for the seconds."""

    steps: int
    tokens: int
    seconds: float
    first_loss: float
    loss: float
    validation_loss: float
    sample: bytes


def train(options: TrainOptions, rank: int, world: int, device: torch.device) -> Result:
    """One rank's part of a run. Rank 0 reports."""
    training = Training(options, rank, world, device)
    if rank != 0:
        return training.run(None)
    with Reporter(options.out, plain=options.plain, steps=options.step_limit) as reporter:
        reporter.config(training.description())
        reporter.say(training.introduction())
        result = training.run(reporter)
        reporter.end_bar()
        reporter.say(summary(result, options))
    return result


class Training:
    def __init__(self, options: TrainOptions, rank: int, world: int, device: torch.device) -> None:
        self.options, self.rank, self.world, self.device = options, rank, world, device
        self.text = ByteText(library_source(), seq=options.gpt.seq)
        torch.manual_seed(options.seed)
        model = GPT(options.gpt).to(device)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.progress = 0.0
        limit = options.step_limit
        warmup = LONGEST_WARMUP if limit is None else max(1, min(LONGEST_WARMUP, limit // 10))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / warmup) * cosine(self.progress)
        )
        self.model, self.optimizer = zf.prepare(
            model,
            optimizer,
            stage=options.stage,
            precision=options.precision,
            units=Block,
            clip=1.0,
            scheduler=self.scheduler,
        )
        self.ledger = zf.ledger(self.model)
        self.snapshot = self.ledger.snapshot()

    def run(self, reporter: Reporter | None) -> Result:
        """Train until the steps or the minutes are used up."""
        start = time.monotonic()
        step, losses, durations = 0, deque[float](maxlen=REPORT_EVERY), deque[float](maxlen=REPORT_EVERY)
        first_loss, validation_loss = math.nan, None
        while self.progress < 1:
            step_start = time.monotonic()
            lr = float(self.scheduler.get_last_lr()[0])
            with zf.explain_oom(self.model):
                own_loss = self.step(step)
            step += 1
            # Every rank needs rank 0's clock, or one could stop while another waits for it in a collective.
            done = self.options.progress(step, time.monotonic() - start)
            loss, self.progress = self.agree(own_loss, done)
            if not math.isfinite(loss):
                raise RuntimeError(f"the loss is {loss} at step {step}: use a smaller learning rate (--lr)")
            losses.append(loss)
            durations.append(time.monotonic() - step_start)
            if step == 1:
                first_loss = loss
            if step % self.options.validate_every == 0 or self.progress >= 1:
                validation_loss = self.validate()
            if reporter is not None and (step % REPORT_EVERY == 0 or self.progress >= 1):
                status = Status(
                    step=step,
                    progress=self.progress,
                    seconds=time.monotonic() - start,
                    loss=fmean(losses),
                    validation_loss=validation_loss,
                    lr=lr,
                    tokens=step * self.tokens_per_step,
                    tokens_per_second=self.tokens_per_step / fmean(durations),
                    state_bytes=self.snapshot["state_bytes"],
                    comm_bytes=self.snapshot["comm_bytes"],
                    skipped_steps=self.skipped_steps,
                )
                reporter.show(status)
        assert validation_loss is not None  # the last step validates
        return Result(
            steps=step,
            tokens=step * self.tokens_per_step,
            seconds=time.monotonic() - start,
            first_loss=first_loss,
            loss=fmean(losses),
            validation_loss=validation_loss,
            sample=self.sample(),
        )

    def step(self, number: int) -> torch.Tensor:
        """One batch, one update; this rank's loss."""
        options = self.options
        batch = self.text.batch(options.batch, seed=options.seed, step=number, rank=self.rank)
        loss: torch.Tensor = self.model(batch.tokens.to(self.device), batch.targets.to(self.device))
        loss.backward()
        self.optimizer.step()
        self.snapshot = self.ledger.snapshot()  # before the gradients go, so that they are seen
        self.optimizer.zero_grad()
        return loss.detach()

    @property
    def skipped_steps(self) -> int:
        info = zf.last_step(self.model)
        return 0 if info is None else info.skipped_total

    def agree(self, own_loss: torch.Tensor, done: float) -> tuple[float, float]:
        """The mean loss of all ranks, and how far the run is by the clock of rank 0."""
        numbers = torch.stack([own_loss.double() / self.world, own_loss.new_tensor(done).double()])
        if self.rank != 0:
            numbers[1] = 0
        dist.all_reduce(numbers)
        loss, progress = numbers.tolist()
        return loss, progress

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss on held-out text, the same windows every time."""
        each = max(1, VALIDATION_SEQUENCES // self.world)
        batch = self.text.validation_batch(each, rank=self.rank, world=self.world)
        self.model.eval()
        loss = self.model(batch.tokens.to(self.device), batch.targets.to(self.device))
        self.model.train()
        return self.agree(loss, 0.0)[0]

    def sample(self) -> bytes:
        options = self.options
        self.model.eval()
        # Gathered once for all the bytes, instead of once for each.
        with zf.full_params(self.model, masters=False):
            length, seq = options.sample_bytes, options.gpt.seq
            text = generate(self.model, PROMPT, length, seq=seq, seed=options.seed, device=self.device)
        self.model.train()
        return text

    @property
    def tokens_per_step(self) -> int:
        return self.options.batch * self.options.gpt.seq * self.world

    def description(self) -> dict[str, object]:
        """What config.json holds: enough to run it again."""
        return {
            **asdict(self.options),
            "parameters": self.parameters,
            "world": self.world,
            "device": str(self.device),
            "torch": torch.__version__,
            "zerofold": zf.__version__,
        }

    def introduction(self) -> str:
        millions = self.parameters / 1e6
        megabytes = (len(self.text.training) + len(self.text.validation)) / 1e6
        return (
            f"Training a GPT of {millions:.1f}M parameters on {megabytes:.1f} MB of Python source: "
            f"stage {self.options.stage}, {self.options.precision}, {self.world} "
            f"rank{'s' if self.world > 1 else ''} on {self.device.type}. Run folder: {self.options.out}"
        )


def cosine(progress: float) -> float:
    """From 1 down to a tenth over the run."""
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def summary(result: Result, options: TrainOptions) -> str:
    return (
        f"\nA sample of what it writes:\n\n{printable(result.sample)}\n\n"
        f"Loss {result.first_loss:.3f} at the start, {result.loss:.3f} at the end, "
        f"{result.validation_loss:.3f} on text it has not seen.\n"
        f"{result.steps} steps, {result.tokens:,} tokens, {result.seconds:.0f} s. "
        f"Metrics: {options.out / METRICS_FILE}"
    )
