"""The measuring half of `zerofold bench plan`: one model in one process, all of its runs."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
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
from zerofold.bench.plan_timing import Busy, busy, measure_rates, time_in_turns
from zerofold.launch import one_line
from zerofold.plan.shape import Launching, ModelShape
from zerofold.plan.tracing import trace

MEASURED_STEPS = 2
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
    times_only: bool = False
    """No peaks; and a CPU, which their profiler would slow, is timed too."""
    profiles: bool = False
    """One more step of each timed run, after all of them."""

    def times(self, run: Run) -> bool:
        return run.world == 1 and (self.device == "cuda" or self.times_only)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run. Seconds of a step where it was timed: of a rank alone."""

    run: Run
    peak_bytes: int | None
    step_s: float | None


News = Rates | Launching | Measured | Busy
"""What is measured: rates and launching are told before the runs that they predict."""


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


def measure_model(task: PlanTask) -> Iterator[News | Spent]:
    """Every run of one model, as soon as it is known; of those that are timed, what their prediction needs first. The
    model is built once for each row and number of ranks, and each of these begins with as little on the device as a new
    process would.
    """
    torch.set_num_threads(1 if task.device == "cpu" else torch.get_num_threads())
    device = torch.device(task.device, 0) if task.device == "cuda" else torch.device("cpu")
    model, watch = plan_model(task.model, task.device), _Watch()
    if any(task.times(run) for run in task.runs):
        with watch.on("rates"):
            yield measure_rates(device, task.precision)
    _clean(device)
    for world, stage in dict.fromkeys((run.world, run.stage) for run in task.runs):
        some = [run for run in task.runs if (run.world, run.stage) == (world, stage)]
        yield from _measure_row(model, some, task, device, watch)
    yield Spent(model=task.model, seconds=watch.seconds)


def _measure_row(
    model: PlanModel, runs: list[Run], task: PlanTask, device: torch.device, watch: _Watch
) -> Iterator[News]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=runs[0].world, store=FakeStore())
    meter, found = None if task.times_only else meter_on(device), list[Measured]()
    with nullcontext() if meter is None else meter.watching():
        for news in _train(model, runs, task, device, meter, watch):
            if not isinstance(news, Measured) or meter is None:
                yield news
            elif meter.counts_at_once:
                yield replace(news, peak_bytes=meter.peaks()[_label(news.run)])
            else:
                found.append(news)
    with watch.on("clean"):
        dist.destroy_process_group()
        left = _clean(device)
    if left > LEFT_BEHIND:
        raise RuntimeError(f"row {runs[0].stage} left {left} bytes on the device, which the next would be taken for")
    if meter is not None and found:
        with watch.on("read"):
            peaks = meter.peaks()
        yield from (replace(each, peak_bytes=peaks[_label(each.run)]) for each in found)


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
    model: PlanModel, runs: list[Run], task: PlanTask, device: torch.device, meter: Meter | None, watch: _Watch
) -> Iterator[Launching | Measured | Busy]:
    """Each run, when it is over, without its peak: that is the meter's."""
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
    timed_runs = [run for run in runs if task.times(run)]
    for run in runs:
        model.set_checkpointing(module, run.checkpointing)
        with device:
            batch = model.batch(run.batch)
        with watch.on("first steps"):  # they learn orders, make moments and grow buffers
            _step(module, optimizer, batch, run.world)
        with watch.on("measured steps"), nullcontext() if meter is None else meter.measuring(_label(run)):
            for _ in range(MEASURED_STEPS):
                _step(module, optimizer, batch, run.world)
        del batch
        if run not in timed_runs:
            yield Measured(run=run, peak_bytes=None, step_s=None)
    if timed_runs:
        with watch.on("timed steps"):
            found = time_in_turns(model, module, optimizer, timed_runs, device)
        yield from found.launching
        for run, seconds in found.seconds.items():
            yield Measured(run=run, peak_bytes=None, step_s=seconds)
    for run in timed_runs if task.profiles else ():  # at the end: a profiler that has run once may slow what follows
        model.set_checkpointing(module, run.checkpointing)
        with device:
            batch = model.batch(run.batch)
        with watch.on("profiles"):
            profiled = busy(model.name, run, partial(_step, module, optimizer, batch, run.world), device)
        del batch
        yield profiled
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
