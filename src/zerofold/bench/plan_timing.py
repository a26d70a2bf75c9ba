"""Times in `zerofold bench plan`: what a prediction is made from, and the runs that it is compared with.

In the same process: what the device reaches with large products, large copies and tiny kernels; and what the host takes
to launch a step of the model as it was prepared, with `PROBED` samples, with and without recomputation. A machine that
others use as well is slower for seconds at a time, so these steps and those of the runs that are predicted take turns.
Nothing of the runs, which have other batches, goes into a prediction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from zerofold.bench.plan_models import PlanModel
from zerofold.bench.plan_predicted import Rates, Run
from zerofold.plan.probe import Step, probe
from zerofold.plan.shape import Launching

PROBED = 1
"""Samples of the steps that tell what the host takes. No run that is compared may have as many."""
TURNS, STEPS = 4, 4
"""Of a prediction's steps and of each run's, the fastest counts: so many steps in so many turns."""
_REPEATS = 10  # of what a rate is the fastest of
_LONGEST = 40  # kernels that a profile names


@dataclass(frozen=True, kw_only=True)
class Busy:
    """One more step of a run, under torch's profiler: seconds in which kernels ran, and the longest by their names."""

    model: str
    run: Run
    device_s: float
    kernels: Mapping[str, float]


def _loss(module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Of our GPT, which returns it, and of Hugging Face's models, which have it in their output."""
    output: Any = module(**batch)
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


class Times(NamedTuple):
    launching: list[Launching]
    """With and without recomputation, as far as runs have it."""
    seconds: dict[Run, float]
    """Of a step of each run."""


def time_in_turns(
    model: PlanModel,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    runs: Sequence[Run],
    device: torch.device,
) -> Times:
    """Of a prepared model."""
    launching, seconds = dict[bool, Launching](), dict.fromkeys(runs, math.inf)
    with device:
        batches = {samples: model.batch(samples) for samples in (PROBED, *(run.batch for run in runs))}

    def step(samples: int) -> Step:
        return Step(partial(_loss, module, batches[samples]), optimizer.step, optimizer.zero_grad)

    for _ in range(TURNS):
        for again in dict.fromkeys(run.checkpointing for run in runs):
            model.set_checkpointing(module, again)
            found = probe(step(PROBED), device, samples=PROBED, checkpoint_every=int(again), steps=STEPS)
            launching[again] = found.fastest(launching.get(again, found))
            for run in (run for run in runs if run.checkpointing == again):
                whole = partial(take_whole, step(run.batch))
                whole()  # the step before had another shape
                seconds[run] = min(seconds[run], *(timed(whole, device) for _ in range(STEPS)))
    return Times(list(launching.values()), seconds)


def take_whole(step: Step) -> None:
    step.forward().backward()
    step.update()
    step.clear()


_AWAKE_SECONDS, _PAUSE = 0.5, 0.005
"""A GPU that had nothing to do for a while begins with slow clocks: half of its rates were measured so. One that does
nothing but large products for a second has to slow down again: 586e12 flops were measured so, where the products of a
model's step had 800e12. So it works, and pauses."""


def measure_rates(device: torch.device, precision: str) -> Rates:
    """Of large matrix products, of large copies, and of kernels too small to matter."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    width, elements = (8192, 2**28) if device.type == "cuda" else (512, 2**22)
    one, other = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> float:
        time.sleep(_PAUSE if device.type == "cuda" else 0)
        return timed(lambda: one @ other, device)

    awake = time.perf_counter() + (_AWAKE_SECONDS if device.type == "cuda" else 0)
    while time.perf_counter() < awake:
        multiply()
    product = min(multiply() for _ in range(_REPEATS))
    source = torch.empty(elements, device=device, dtype=dtype)
    target = torch.empty_like(source)
    copied = min(timed(lambda: target.copy_(source), device) for _ in range(_REPEATS))
    small = torch.ones(8, device=device)

    def many() -> None:
        for _ in range(200):
            small.add_(1)

    started = min(timed(many, device) for _ in range(_REPEATS)) / 200
    return Rates(2 * width**3 / product, 2 * source.nbytes / copied, started)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """From an idle device to an idle device."""
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def busy(model: str, run: Run, step: Callable[[], object], device: torch.device) -> Busy:
    """On the CPU, seconds in which operators ran."""
    on_cuda = device.type == "cuda"
    step()
    _wait(device)
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiled:
        step()
        _wait(device)
    seconds = seconds_by_kernel(profiled.key_averages(), on_cuda=on_cuda)
    longest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:_LONGEST]
    return Busy(model=model, run=run, device_s=sum(seconds.values()), kernels={name: seconds[name] for name in longest})


def seconds_by_kernel(events: Iterable[Any], *, on_cuda: bool) -> dict[str, float]:
    """From a profile. On a GPU the calls that launch kernels are in it as well, and ranges that somebody named: these
    are no kernels."""
    seconds: dict[str, float] = {}
    for event in events:
        if event.is_user_annotation or (on_cuda and event.device_type != DeviceType.CUDA):
            continue
        taken = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        seconds[event.key] = seconds.get(event.key, 0.0) + taken * 1e-6
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
