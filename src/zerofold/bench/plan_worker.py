"""The measuring half of `zerofold bench plan`: one model in one process, all of its runs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerofold as zf
from zerofold.bench.memory import make_finite
from zerofold.bench.meters import Meter, meter_on
from zerofold.bench.plan_models import PlanModel, plan_model
from zerofold.bench.plan_predicted import BUFFER_BYTES, Failed, Rates, Run
from zerofold.launch import one_line
from zerofold.plan.measure import measure_host_seconds
from zerofold.plan.shape import ModelShape
from zerofold.plan.tracing import trace

MEASURED_STEPS = 2
TIMED_STEPS = 5
LEFT_BEHIND = 2**26
"""Bytes of the device that a row may leave to the next one: far below what any prediction is judged by, and more than
the maps of blocks that the fused update keeps for its process, 8 bytes for 2,048 parameters of each division."""


@dataclass(frozen=True, kw_only=True)
class PlanTask:
    model: str
    device: str
    """"cpu" or "cuda"."""
    precision: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run. Seconds of a step: of a rank alone on a GPU, since the profiler slows the CPU that it watches."""

    run: Run
    peak_bytes: int
    step_s: float | None


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds that measuring a model took, by what they went into."""

    model: str
    seconds: dict[str, float]


class _Watch:
    """Adds up where the seconds of a measurement go."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin


def trace_models(names: Sequence[str], device: str, precision: str) -> Iterator[ModelShape | Failed]:
    """As `zerofold plan` does, in a process that measures nothing."""
    torch.set_num_threads(1)  # as where runs on the CPU are measured: there, each thread has a tile of scores
    for name in names:
        try:
            yield _trace(plan_model(name, device), device, precision)
        except Exception as error:  # the other models can be traced all the same
            yield Failed(name, one_line(error))


def _trace(model: PlanModel, device: str, precision: str) -> ModelShape:
    with torch.device("meta"):
        empty, example = model.build(), model.batch(1)
    return trace(
        empty,
        example,
        precision=precision,
        device_like=device,
        buffer_bytes=BUFFER_BYTES[device],
        name=model.name,
    )


def measure_model(task: PlanTask) -> Iterator[Rates | Measured | Spent]:
    """Every run of one model, as soon as it is known; on a GPU the rates of the device before. The model is built once
    for each row and number of ranks, and each of these begins with as little on the device as a new process would.
    """
    torch.set_num_threads(1 if task.device == "cpu" else torch.get_num_threads())
    device = torch.device(task.device, 0) if task.device == "cuda" else torch.device("cpu")
    model, watch = plan_model(task.model, task.device), _Watch()
    if task.device == "cuda" and any(run.world == 1 for run in task.runs):
        with watch.on("rates"):
            yield measure_rates(device, task.precision)
    _clean(device)
    for world, stage in dict.fromkeys((run.world, run.stage) for run in task.runs):
        some = [run for run in task.runs if (run.world, run.stage) == (world, stage)]
        yield from _measure_row(model, some, task, device, watch)
    yield Spent(model=task.model, seconds=watch.seconds)


def _measure_row(
    model: PlanModel, runs: list[Run], task: PlanTask, device: torch.device, watch: _Watch
) -> Iterator[Measured]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=runs[0].world, store=FakeStore())
    meter, seconds = meter_on(device), dict[Run, float | None]()
    with meter.watching():
        for run, spent in _train(model, runs, task, device, meter, watch):
            seconds[run] = spent
            if meter.counts_at_once:
                yield Measured(run=run, peak_bytes=meter.peaks()[_label(run)], step_s=spent)
    with watch.on("clean"):
        dist.destroy_process_group()
        left = _clean(device)
    if left > LEFT_BEHIND:
        raise RuntimeError(f"row {runs[0].stage} left {left} bytes on the device, which the next would be taken for")
    if not meter.counts_at_once:
        with watch.on("read"):
            peaks = meter.peaks()
        for run, spent in seconds.items():
            yield Measured(run=run, peak_bytes=peaks[_label(run)], step_s=spent)


def _clean(device: torch.device) -> int:
    """Bytes that the allocator still counts when nothing is in use any more: what the next row's peaks would show.

    The matrix library's workspaces belong to the process and not to a row. They go as well, so that each row makes
    them in its first step, where a new process would. The context of CUDA itself is no part of the allocator's count.
    """
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def _label(run: Run) -> str:
    return f"batch {run.batch}, checkpointing {run.checkpointing}"


def _train(
    model: PlanModel, runs: list[Run], task: PlanTask, device: torch.device, meter: Meter, watch: _Watch
) -> Iterator[tuple[Run, float | None]]:
    """Each run, when it is over, and the seconds of a step where they are measured."""
    torch.manual_seed(0)
    with watch.on("build"), device:
        module = model.build().train()
    with watch.on("prepare"):
        module, optimizer = zf.prepare(
            module,
            torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True),
            stage=runs[0].stage,
            precision=task.precision,
            device=device,
            buffer_bytes=BUFFER_BYTES[task.device],
        )
    for run in runs:
        model.set_checkpointing(module, run.checkpointing)
        with device:
            batch = model.batch(run.batch)
        with watch.on("first steps"):  # they learn orders, make moments and grow buffers
            _step(module, optimizer, batch, run.world)
        with watch.on("measured steps"), meter.measuring(_label(run)):
            for _ in range(MEASURED_STEPS):
                _step(module, optimizer, batch, run.world)
        spent = None
        if run.world == 1 and device.type == "cuda":
            step = partial(_step, module, optimizer, batch, run.world)
            with watch.on("timed steps"):
                spent = min(_timed(step, device) for _ in range(TIMED_STEPS))
            del step
        del batch
        yield run, spent
    if not optimizer.state:
        raise RuntimeError("the steps made no optimizer states, so there is nothing to measure")
    zf.close(module, gather=False)


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any], world: int) -> None:
    output: Any = module(**batch)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    del output, loss  # as a loop does that goes on to the next step with nothing but numbers
    if world > 1:
        make_finite(optimizer)
    optimizer.step()
    optimizer.zero_grad()


def measure_rates(device: torch.device, precision: str) -> Rates:
    """Of large matrix products, of large copies, and of kernels too small to matter."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    width, elements = (8192, 2**28) if device.type == "cuda" else (512, 2**22)
    one, other = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    product = min(_timed(lambda: one @ other, device) for _ in range(5))
    source = torch.empty(elements, device=device, dtype=dtype)
    target = torch.empty_like(source)
    copied = min(_timed(lambda: target.copy_(source), device) for _ in range(5))
    small = torch.ones(8, device=device)

    def many() -> None:
        for _ in range(200):
            small.add_(1)

    started = min(_timed(many, device) for _ in range(3)) / 200
    return Rates(2 * width**3 / product, 2 * source.nbytes / copied, started, measure_host_seconds(device))


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
