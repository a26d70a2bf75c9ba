"""The measuring half of `zerofold bench activation`: each function runs in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

import zerofold as zf
from zerofold.bench.figures import there_and_back
from zerofold.bench.gpt import GPT, Block, GPTSize
from zerofold.bench.meters import meter_on
from zerofold.bench.mixed_engines import CLIP, make_adamw
from zerofold.bench.offload_worker import open_device
from zerofold.bench.plan_predicted import BUFFER_BYTES


@dataclass(frozen=True, kw_only=True)
class Way:
    """Where a step keeps the inputs of its blocks, and whether its logits are ever whole."""

    keep: str = "device"
    contiguous: bool = False
    chunked: bool = True


WAYS = MappingProxyType(
    {
        "logits": Way(chunked=False),
        "device": Way(),
        "contiguous": Way(contiguous=True),
        "host": Way(keep="host"),
    }
)


@dataclass(frozen=True, kw_only=True)
class ActivationTask:
    size: GPTSize
    batch: int
    device: str
    """"cpu" or "cuda"."""
    length: int
    """Tokens in a sequence, at most `size.seq`."""
    loss_tokens: int
    """Whose logits are there at once, where they are not whole."""
    rounds: int = 2
    untimed: int = 3
    """Steps before those that are timed: orders are learned, and host memory is pinned meanwhile."""
    timed: int = 4
    intervals: tuple[int, ...] = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Some steps of one way."""

    way: str
    peak_bytes: int
    kept_bytes: int | None
    """Inputs of blocks after a forward, as the store counts them; None where autograd keeps them."""
    on_device_bytes: int
    """Of those, on the device at that time."""
    after_forward_bytes: int | None
    """All that the device holds after a forward, by its allocator."""
    seconds: tuple[float, ...] | None
    """Of each timed step; None on the CPU, whose memory is counted by a profiler that slows it."""
    loss: float


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """At a length that every way can train."""

    turns: tuple[Turn, ...]
    kept_by_interval: dict[int, int]


@dataclass(frozen=True, kw_only=True)
class Long:
    """One way at a length that not every way can train."""

    ran_out: bool
    losses: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    host_bytes: int = 0


class _Run:
    """A model under ZeRO-3 with AdamW, alone."""

    def __init__(self, task: ActivationTask) -> None:
        self.task = task
        self.device = open_device(task.device, None)
        torch.manual_seed(0)
        self.model = _build(task.size, self.device)
        self.tokens, self.targets = _batch(task, self.device)

    def prepare(self) -> None:
        _, self.optimizer = zf.prepare(
            self.model,
            make_adamw(self.model.parameters()),
            stage=3,
            precision="bf16",
            units=Block,
            clip=CLIP,
            buffer_bytes=BUFFER_BYTES[self.task.device],
        )

    def checkpointed(self, way: Way, every: int = 1) -> zf.Checkpointing:
        self.model.loss_tokens = self.task.loss_tokens if way.chunked else None
        return zf.checkpoint_blocks(self.model, every, keep=way.keep, contiguous=way.contiguous, units=Block)

    def step(self, after_forward: Callable[[], None] | None = None) -> float:
        loss: Tensor = self.model(self.tokens, self.targets)
        if after_forward is not None:
            after_forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def timed_step(self) -> float:
        _synchronize(self.device)
        start = time.perf_counter()
        self.step()
        _synchronize(self.device)
        return time.perf_counter() - start


def measure_fitting(task: ActivationTask) -> Fitting:
    """All ways in one process, on one model: there and back, so that what drifts touches all alike."""
    if task.device == "cpu":
        torch.set_num_threads(1)
    meter = meter_on(torch.device(task.device))
    turns: list[Turn] = []
    labels: list[str] = []
    with meter.watching():
        run = _Run(task)
        run.prepare()
        for index in range(task.rounds):
            for name in there_and_back(list(WAYS), index):
                label = f"{name} {index}"
                labels.append(label)
                checkpointing = run.checkpointed(WAYS[name])
                for _ in range(task.untimed):
                    run.step()
                with meter.measuring(label):
                    run.step()
                turns.append(_turn(name, run, checkpointing))
                checkpointing.remove()
        kept = {every: _kept(run, every) for every in task.intervals}
        zf.close(run.model, gather=False)
        del run
    peaks = meter.peaks()
    found = (_with_peak(turn, peaks[label]) for turn, label in zip(turns, labels, strict=True))
    return Fitting(turns=tuple(found), kept_by_interval=kept)


def _turn(name: str, run: _Run, checkpointing: zf.Checkpointing) -> Turn:
    seen: dict[str, int] = {}
    on_gpu = run.device.type == "cuda"

    def look() -> None:
        _synchronize(run.device)
        seen.update(checkpointing.nbytes)
        seen["all"] = torch.cuda.memory_allocated() if on_gpu else 0

    loss = run.step(look)
    seconds = tuple(run.timed_step() for _ in range(run.task.timed)) if on_gpu else None
    is_counted = checkpointing.store is not None
    return Turn(
        way=name,
        peak_bytes=0,
        kept_bytes=seen[WAYS[name].keep] if is_counted else None,
        on_device_bytes=seen["device"],
        after_forward_bytes=seen["all"] if on_gpu else None,
        seconds=seconds,
        loss=loss,
    )


def _with_peak(turn: Turn, peak: int) -> Turn:
    """On the CPU peaks are known only when all is over."""
    return Turn(**{**vars(turn), "peak_bytes": peak})


def _kept(run: _Run, every: int) -> int:
    """Bytes of inputs that a forward keeps, of every so many blocks."""
    found: dict[str, int] = {}
    checkpointing = run.checkpointed(WAYS["host"], every)
    run.step(lambda: found.update(checkpointing.nbytes))
    checkpointing.remove()
    return found["host"]


def measure_working(task: ActivationTask) -> int:
    """The most that forward and backward of a plain model take beside its parameters, checkpoints included, while each
    gradient is dropped as soon as it is there.
    """
    if task.device == "cpu":
        torch.set_num_threads(1)
    meter = meter_on(torch.device(task.device))
    with meter.watching():
        run = _Run(task)
        checkpointing = run.checkpointed(WAYS["device"])
        for parameter in run.model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        for label in ("first", "measured"):  # libraries take their workspaces in the first
            with meter.measuring(f"before {label}"):
                torch.empty(1, device=run.device)
            with meter.measuring(label):
                run.model(run.tokens, run.targets).backward()
        checkpointing.remove()
    peaks = meter.peaks()
    return peaks["measured"] - peaks["before measured"]


def measure_long(task: ActivationTask, name: str) -> Long:
    """Whether one way can train, and how."""
    run = _Run(task)
    run.prepare()
    checkpointing = run.checkpointed(WAYS[name])
    kept: dict[str, int] = {}
    losses, seconds = [], []
    try:
        for _ in range(task.timed):
            _synchronize(run.device)
            start = time.perf_counter()
            losses.append(run.step(lambda: kept.update(checkpointing.nbytes)))
            _synchronize(run.device)
            seconds.append(time.perf_counter() - start)
    except RuntimeError as error:
        # Libraries that find no room for their workspace say so in words of their own.
        if not isinstance(error, torch.OutOfMemoryError) and "ALLOC_FAILED" not in str(error):
            raise
        return Long(ran_out=True, losses=tuple(losses), seconds=tuple(seconds))
    return Long(
        ran_out=False,
        losses=tuple(losses),
        seconds=tuple(seconds),
        peak_bytes=torch.cuda.max_memory_allocated() if run.device.type == "cuda" else None,
        host_bytes=kept["host"],
    )


def _build(size: GPTSize, device: torch.device) -> GPT:
    """In bf16 from the first moment: drawn in fp32 it would take twice the memory once."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return GPT(size)
    finally:
        torch.set_default_dtype(before)


def _batch(task: ActivationTask, device: torch.device) -> tuple[Tensor, Tensor]:
    """One batch for all steps: the loss falls if training works."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, task.size.vocab, (task.batch, task.length + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
