"""The measuring half of `zerofold bench plan`: one model in one process, all of its runs."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
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
from zerofold.bench.plan_predicted import BUFFER_BYTES, Rates, Run, peak_bytes, step_seconds
from zerofold.plan.measure import measure_host_seconds
from zerofold.plan.shape import ModelShape
from zerofold.plan.tracing import trace

MEASURED_STEPS = 2
TIMED_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class PlanTask:
    model: str
    device: str
    """"cpu" or "cuda"."""
    precision: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One run, predicted and measured. Seconds of a rank alone on a GPU: the profiler slows the CPU that it watches."""

    model: str
    parameters: int
    run: Run
    predicted_bytes: int
    measured_bytes: int
    predicted_s: float | None = None
    measured_s: float | None = None

    @property
    def off(self) -> float:
        """What the prediction is over what was measured; negative where it is under."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def time_off(self) -> float | None:
        if self.predicted_s is None or self.measured_s is None:
            return None
        return self.predicted_s / self.measured_s - 1


def measure_model(task: PlanTask) -> list[Compared]:
    """Every run of one model: it is built once for each row and number of ranks."""
    torch.set_num_threads(1 if task.device == "cpu" else torch.get_num_threads())
    device = torch.device(task.device, 0) if task.device == "cuda" else torch.device("cpu")
    model = plan_model(task.model, task.device)
    with torch.device("meta"):
        empty, example = model.build(), model.batch(1)
    shape = trace(
        empty,
        example,
        precision=task.precision,
        device_like=task.device,
        buffer_bytes=BUFFER_BYTES[task.device],
        name=task.model,
    )
    del empty
    is_timed = task.device == "cuda" and any(run.world == 1 for run in task.runs)
    rates = measure_rates(device, task.precision) if is_timed else None
    results: dict[Run, Compared] = {}
    for world, stage in dict.fromkeys((run.world, run.stage) for run in task.runs):
        some = [run for run in task.runs if (run.world, run.stage) == (world, stage)]
        for run, found in _measure_row(model, some, task, device).items():
            results[run] = _compare(task, shape, run, found, rates)
    return [results[run] for run in task.runs]


def _compare(task: PlanTask, shape: ModelShape, run: Run, found: tuple[int, float], rates: Rates | None) -> Compared:
    is_timed = run.world == 1 and rates is not None
    return Compared(
        model=task.model,
        parameters=shape.parameters,
        run=run,
        predicted_bytes=peak_bytes(shape, run, task.precision, task.device),
        measured_bytes=found[0],
        predicted_s=step_seconds(shape, run, task.precision, task.device, rates) if is_timed and rates else None,
        measured_s=found[1] if is_timed else None,
    )


def _measure_row(
    model: PlanModel, runs: list[Run], task: PlanTask, device: torch.device
) -> dict[Run, tuple[int, float]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=runs[0].world, store=FakeStore())
    meter = meter_on(device)
    with meter.watching():
        seconds = _train(model, runs, task, device, meter)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    peaks = meter.peaks()
    return {run: (peaks[_label(run)], seconds[run]) for run in runs}


def _label(run: Run) -> str:
    return f"batch {run.batch}, checkpointing {run.checkpointing}"


def _train(model: PlanModel, runs: list[Run], task: PlanTask, device: torch.device, meter: Meter) -> dict[Run, float]:
    torch.manual_seed(0)
    with device:
        module = model.build().train()
    module, optimizer = zf.prepare(
        module,
        torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True),
        stage=runs[0].stage,
        precision=task.precision,
        device=device,
        buffer_bytes=BUFFER_BYTES[task.device],
    )
    seconds = {}
    for run in runs:
        model.set_checkpointing(module, run.checkpointing)
        with device:
            batch = model.batch(run.batch)
        _step(module, optimizer, batch, run.world)  # the first learns orders, makes moments and grows buffers
        with meter.measuring(_label(run)):
            for _ in range(MEASURED_STEPS):
                _step(module, optimizer, batch, run.world)
        seconds[run] = math.nan
        if run.world == 1 and device.type == "cuda":
            step = partial(_step, module, optimizer, batch, run.world)
            seconds[run] = min(_timed(step, device) for _ in range(TIMED_STEPS))
            del step
        del batch
    if not optimizer.state:
        raise RuntimeError("the steps made no optimizer states, so there is nothing to measure")
    zf.close(module, gather=False)
    return seconds


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
