"""The training loop, as a user of the library would write it: only the public face of zerofold is used."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections import deque
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

import zerofold as zf
from zerofold.observe.predicted import Workload
from zerofold.observe.run_files import METRICS_FILE
from zerofold.train.alone import alone_in
from zerofold.train.amounts import flops_per_token, workload
from zerofold.train.batching import batched, planned_batching
from zerofold.train.data import ByteText, library_source
from zerofold.train.gpt import GPT, Block, generate
from zerofold.train.options import TrainOptions
from zerofold.train.progress import Reporter, Status, printable
from zerofold.train.signals import StopSignals, first_of
from zerofold.train.spread import cut, loss_of_pipeline, reader, step_of_pipeline
from zerofold.train.state import REPORT_EVERY, RunState

LONGEST_WARMUP = 20  # steps
VALIDATION_SEQUENCES = 64
KEEP = 2  # checkpoints
PROMPT = b"def "
MEASURED = ("step_seconds", "mfu", "time", "peak_bytes")
"""What `zf.Run` adds to a line of metrics."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended; the same on every rank."""

    steps: int
    tokens: int
    seconds: float
    first_loss: float
    loss: float
    validation_loss: float | None
    sample: bytes
    stopped_by: int | None
    """The signal that ended it before it was complete."""
    checkpoint: Path | None
    """The last one."""


def train(options: TrainOptions, rank: int, world: int, device: torch.device) -> Result:
    """One rank's part of a run. Rank 0 reports."""
    # From here on, since a rank that a signal ends while the others set up would leave them waiting.
    alone = alone_in(options.out) if rank == 0 else nullcontext()
    with StopSignals() as signals, alone, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the checkpoint .* was not saved")  # `save` says it, once
        training = Training(options, rank, world, device)
        gc.collect()  # or what goes in cycles by now, with its memory, would stay as well
        gc.freeze()  # what is there now stays: to look through it again and again stops every thread for 0.2 s
        if rank != 0:
            return training.run(None, signals)
        with Reporter(plain=options.plain, steps=options.step_limit) as reporter:
            training.recorded.files.config(training.description())
            reporter.say(training.introduction())
            result = training.run(reporter, signals)
            reporter.end_bar()
            if result.stopped_by is None:
                reporter.say(summary(result, options, training.ending))
    return result


class Training:
    def __init__(self, options: TrainOptions, rank: int, world: int, device: torch.device) -> None:
        self.options, self.rank, self.world, self.device = options, rank, world, device
        shares = options.shares(world)
        self.batching = planned_batching(options, shares, world, device)
        self.shares = batched(shares, self.batching)
        self.text = ByteText(library_source(), seq=options.gpt.seq)
        self.mesh = options.degrees.mesh(world, device)
        self.reader = reader(self.mesh, rank)
        self.samples = zf.Samples(
            self.text.windows,
            batch=math.prod(self.shares),
            micro=self.shares.micro,
            seed=options.seed,
            rank=self.reader,
            ranks=self.shares.ranks,
        )
        torch.manual_seed(options.seed)
        model = GPT(options.gpt).to(device)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.pipe = cut(model, self.mesh, self.shares.accumulate)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.state = RunState()
        limit = options.step_limit
        warmup = LONGEST_WARMUP if limit is None else max(1, min(LONGEST_WARMUP, limit // 10))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / warmup) * cosine(self.progress)
        )
        self.model = model
        _, self.optimizer = zf.prepare(
            model if self.pipe is None else self.pipe,
            optimizer,
            mesh=self.mesh,
            stage=options.stage,
            offload=options.offload_wish,
            precision=options.precision,
            units=Block,
            clip=1.0,
            scheduler=self.scheduler,
            accumulate=self.shares.accumulate if self.pipe is None else 1,  # a pipeline reduces once, at the end
        )
        self.checkpointing = None
        if options.checkpoint_every:
            self.checkpointing = self.checkpointed(options.checkpoint_every)
        self.checkpoint: Path | None = None
        if self.is_to_resume():
            self.state = RunState(**zf.load(self.model, self.optimizer, options.checkpoints, data=self.samples))
        self.ledger = zf.ledger(self.model)
        self.snapshot = self.ledger.snapshot()
        self.recorded = zf.Run(
            options.out,
            self.model,
            after=self.state.step,
            workload=self.workload if device.type == "cuda" or self.mesh is not None else None,
            flops_per_step=flops_per_token(options.gpt, self.parameters) * self.tokens_per_step / world,
            csv=options.csv,
            tensorboard=options.tensorboard,
            prometheus=options.prometheus,
            wandb=options.wandb,
        )
        self.ending: list[str] = []
        """What rank 0 has to say of where the time went, when it is over."""

    def checkpointed(self, every: int) -> zf.Checkpointing:
        """Inputs wait where the options or the plan say. Only the plan asks tensor ranks for the gathers of parts."""
        keep, in_parts = self.options.keep, self.options.keep == "auto"
        if self.batching is not None:
            keep, in_parts = self.batching.keep, self.batching.partition
        path = self.options.offload_path if keep in ("nvme", "auto") else None
        return zf.checkpoint_blocks(self.model, every, keep=keep, path=path, partition=self.mesh if in_parts else None)

    def workload(self) -> Workload:
        """As it was at the end: where inputs wait may have been chosen in between."""
        store = None if self.checkpointing is None else self.checkpointing.store
        return workload(self.options, self.shares.micro, "device" if store is None else store.tier.value)

    def is_to_resume(self) -> bool:
        """As rank 0 sees the folder: ranks on other machines may see it later."""
        seen = [self.options.resume and self.options.last_checkpoint is not None]
        dist.broadcast_object_list(seen, src=0)
        return seen[0]

    @property
    def progress(self) -> float:
        return self.options.progress(self.state.step, self.state.seconds)

    def run(self, reporter: Reporter | None, signals: StopSignals) -> Result:
        """Train until the steps or the minutes are used up, or a signal has come."""
        state, options = self.state, self.options
        start = time.monotonic() - state.seconds
        durations, stopped_by = deque[float](maxlen=REPORT_EVERY), None
        while self.progress < 1 and stopped_by is None:
            step_start = time.monotonic()
            lr = float(self.scheduler.get_last_lr()[0])
            with zf.explain_oom(self.model):
                own_loss = self.step()
            self.recorded.count(self.tokens_per_step)
            # Every rank needs rank 0's clock, and all must stop at the same step, or one could stop while another
            # waits for it in a collective.
            loss, seconds, *counts = self.agree(own_loss, time.monotonic() - start, signals.counts)
            state.step, state.seconds = state.step + 1, seconds
            stopped_by = None if self.progress >= 1 else first_of(counts)
            if not math.isfinite(loss):
                raise RuntimeError(f"the loss is {loss} at step {state.step}: use a smaller learning rate (--lr)")
            state.add_loss(loss)
            durations.append(time.monotonic() - step_start)
            if state.step % options.validate_every == 0 or self.progress >= 1:
                with self.recorded.pause():
                    state.validation_loss = self.validate()
            is_last = self.progress >= 1 or stopped_by is not None
            if reporter is not None and (state.step % REPORT_EVERY == 0 or self.progress >= 1):
                status = self.status(lr, fmean(durations))
                reporter.show(replace(status, **self.measured(status)))
            if options.save_every and (is_last or state.step % options.save_every == 0):
                with self.recorded.pause():
                    self.save(reporter, background=not is_last)
        self.ending = self.recorded.close()
        return Result(
            steps=state.step,
            tokens=state.step * self.tokens_per_step,
            seconds=state.seconds,
            first_loss=state.first_loss,
            loss=state.loss,
            validation_loss=state.validation_loss,
            sample=b"" if stopped_by else self.sample(),
            stopped_by=stopped_by,
            checkpoint=self.checkpoint,
        )

    def step(self) -> torch.Tensor:
        """One update from this rank's part of the next samples; its mean loss."""
        if self.pipe is not None:
            mean = step_of_pipeline(self.pipe, self.text, self.samples.indices, self.device)
        else:
            mean = self.micro_batches()
        self.optimizer.step()
        self.samples.step()
        if self.is_to_report:
            self.snapshot = self.ledger.snapshot()  # before the gradients go, so that they are seen
        self.optimizer.zero_grad()
        return mean

    def micro_batches(self) -> torch.Tensor:
        mean = torch.zeros((), device=self.device)
        for indices in self.samples.indices:
            batch = self.text.window_batch(indices)
            loss: torch.Tensor = self.model(batch.tokens.to(self.device), batch.targets.to(self.device))
            loss = loss / self.samples.accumulate
            loss.backward()
            mean += loss.detach()
        return mean

    @property
    def is_to_report(self) -> bool:
        """After the step under way. Only a clock can end a run at any other step."""
        step = self.state.step + 1
        return step % REPORT_EVERY == 0 or step == self.options.step_limit or self.options.minutes is not None

    def save(self, reporter: Reporter | None, *, background: bool) -> None:
        """A disk that is full for a while does not end the run: it is said, and the next save tries again."""
        for _ in range(2):  # the first try may raise what went wrong with the save before, in the background
            try:
                self.checkpoint = zf.save(
                    self.model,
                    self.optimizer,
                    self.options.checkpoints,
                    tag=f"step-{self.state.step:08d}",
                    extra=self.state.saved(self.ledger.snapshot()["comm_bytes"]),
                    data=self.samples,
                    keep=KEEP,
                    background=background,
                ).path
                return
            except zf.CheckpointError as error:
                problem = error
                if reporter is not None:
                    reporter.say(f"No checkpoint: {error}")
        if not background:
            raise problem

    def status(self, lr: float, seconds_per_step: float) -> Status:
        state = self.state
        return Status(
            step=state.step,
            progress=self.progress,
            seconds=state.seconds,
            loss=state.loss,
            validation_loss=state.validation_loss,
            lr=lr,
            tokens=state.step * self.tokens_per_step,
            tokens_per_second=self.tokens_per_step / seconds_per_step,
            state_bytes=self.snapshot["state_bytes"],
            comm_bytes=state.sent_with(self.snapshot["comm_bytes"]),
            skipped_steps=self.skipped_steps,
        )

    def measured(self, status: Status) -> dict[str, Any]:
        """Writes a line of metrics, and returns what was measured for it."""
        values = {name: value for name, value in asdict(status).items() if name not in MEASURED}
        line = self.recorded.line(values, self.snapshot)
        return {name: line[name] for name in MEASURED}

    @property
    def skipped_steps(self) -> int:
        info = zf.last_step(self.model)
        return 0 if info is None else info.skipped_total

    def agree(self, own_loss: torch.Tensor, seconds: float, counts: list[int]) -> list[float]:
        """The mean loss of all ranks, the clock of rank 0, and how many ranks have got each signal."""
        numbers = torch.tensor([0.0, seconds if self.rank == 0 else 0.0, *counts], dtype=torch.float64)
        numbers = numbers.to(own_loss.device)
        numbers[0] = own_loss.double() / self.world
        dist.all_reduce(numbers)
        agreed: list[float] = numbers.tolist()
        return agreed

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss on held-out text, the same windows every time."""
        _, ranks, accumulate = self.shares
        each = max(1, VALIDATION_SEQUENCES // ranks)
        if self.pipe is not None:
            each = max(1, each // accumulate) * accumulate
        batch = self.text.validation_batch(each, rank=self.reader, world=ranks)
        self.model.eval()
        if self.pipe is not None:
            loss = loss_of_pipeline(self.pipe, batch, self.device)
        else:
            loss = self.model(batch.tokens.to(self.device), batch.targets.to(self.device))
        self.model.train()
        return self.agree(loss, 0.0, [])[0]

    def sample(self) -> bytes:
        """Nothing where the blocks are on several ranks: each byte would have to go through all of them."""
        options = self.options
        if self.pipe is not None:
            return b""
        self.model.eval()
        # Gathered once for all the bytes, instead of once for each.
        with zf.full_params(self.model, masters=False):
            length, seq = options.sample_bytes, options.gpt.seq
            text = generate(self.model, PROMPT, length, seq=seq, seed=options.seed, device=self.device)
        self.model.train()
        return text

    @property
    def tokens_per_step(self) -> int:
        return math.prod(self.shares) * self.options.gpt.seq

    def description(self) -> dict[str, object]:
        """What config.json holds: enough to run it again."""
        return {
            **asdict(self.options),
            "batch": self.shares.micro,
            "at_once": self.shares.micro,
            "accumulate": self.shares.accumulate,
            "global_batch": math.prod(self.shares),
            "parameters": self.parameters,
            "world": self.world,
            "device": str(self.device),
            "torch": torch.__version__,
            "zerofold": zf.__version__,
        }

    def introduction(self) -> str:
        millions = self.parameters / 1e6
        megabytes = (len(self.text.training) + len(self.text.validation)) / 1e6
        micro, ranks, accumulate = self.shares
        many = f" x {accumulate} batches" if accumulate > 1 else ""
        went_on = f", going on after step {self.state.step}" if self.state.step else ""
        degrees = self.options.degrees
        of_ranks = f"{ranks} {'data-parallel ' if degrees.of_model > 1 else ''}rank{'s' if ranks > 1 else ''}"
        tables = "".join(f"{table}\n" for table in (self.mesh, self.pipe) if table is not None)
        if self.batching is not None:
            tables += f'keep="auto": {self.batching.sentence}.\n'
        return tables + (
            f"Training a GPT of {millions:.1f}M parameters on {megabytes:.1f} MB of Python source: "
            f"{degrees.stage_in_words(self.world)}, {self.options.precision}, {of_ranks} on {self.device.type}, "
            f"{math.prod(self.shares)} sequences a step ({micro} x {of_ranks}{many}){went_on}. "
            f"Run folder: {self.options.out}"
        )


def cosine(progress: float) -> float:
    """From 1 down to a tenth over the run."""
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def summary(result: Result, options: TrainOptions, ending: list[str]) -> str:
    # A run that goes on with nothing left to do has not looked.
    unseen = "" if result.validation_loss is None else f", {result.validation_loss:.3f} on text it has not seen"
    sample = f"\nA sample of what it writes:\n\n{printable(result.sample)}\n\n" if result.sample else "\n"
    return (
        f"{sample}"
        f"Loss {result.first_loss:.3f} at the start, {result.loss:.3f} at the end{unseen}.\n"
        f"{result.steps} steps, {result.tokens:,} tokens, {result.seconds:.0f} s. "
        f"Metrics: {options.out / METRICS_FILE}; a page that shows them: zerofold report {options.out}\n"
        + "\n".join(ending)
    ).rstrip()
