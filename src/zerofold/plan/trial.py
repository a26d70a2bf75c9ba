"""`zerofold plan --run`: some steps of the model on this machine, for what they take the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofold.activation.blocks import checkpoint_blocks
from zerofold.nested import map_tensors
from zerofold.plan.machine import GIB, Machine
from zerofold.plan.memory import memory
from zerofold.plan.point import Point
from zerofold.plan.probe import Step, probe
from zerofold.plan.shape import Launching, ModelShape
from zerofold.plan.sources import Traced
from zerofold.plan.tracing.recording import Recording
from zerofold.plan.tracing.running import start_of_backward
from zerofold.prepare import close, prepare

SAMPLES = 1


def try_here(built: Traced, shape: ModelShape, machine: Machine, point: Point) -> Launching:
    """Trains a model of `built`'s sizes, with random weights, alone on this machine's device for a dozen steps.

    `shape` is what was traced of it, `machine` this one. Only the precision of `point` and whether it recomputes count.

    >>> from zerofold.plan.measure import this_machine
    >>> from zerofold.plan.tracing import trace
    >>> def example(batch): return {"input": torch.ones(batch, 64, device="meta")}
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))
    >>> shape = trace(model, example(1), precision="fp32")
    >>> found = try_here(Traced(model, example, 1), shape, this_machine(), Point(precision="fp32", checkpoint_every=1))
    >>> found.checkpoint_every, found.samples, found.forward > 0
    (1, 1, True)
    """
    if built.example is None:
        raise ValueError("--run needs an example of the model's inputs: let the function return the model and one")
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(f"--run trains on one rank alone, and this is one of {dist.get_world_size()}: plan elsewhere")
    device = torch.device(machine.kind, 0) if machine.kind == "cuda" else torch.device("cpu")
    _check_room(shape, machine, point)
    with _group_of_one(device):
        return _probe(_with_memory(built.model, device), built.example(SAMPLES), point, device)


def _probe(module: nn.Module, example: Any, point: Point, device: torch.device) -> Launching:
    if point.checkpoint_every:
        _recompute(module, point.checkpoint_every)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module, optimizer = prepare(
        module,
        torch.optim.AdamW(trained, lr=0.0, fused=True),  # so that random weights stay as harmless as they are
        stage=0,
        precision=point.precision,
        device=device,
    )
    batch = map_tensors(lambda tensor: _values(tensor, device), example)

    def forward() -> Tensor:
        return start_of_backward(module(**batch), None, Recording(SAMPLES))

    try:
        step = Step(forward, optimizer.step, optimizer.zero_grad)
        return probe(step, device, samples=SAMPLES, checkpoint_every=point.checkpoint_every)
    finally:
        close(module, gather=False)


@contextmanager
def _group_of_one(device: torch.device) -> Iterator[None]:
    """The engine wants a process group, of one rank too. Whoever has one already keeps it."""
    if dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _check_room(shape: ModelShape, machine: Machine, point: Point) -> None:
    alone = Point(stage="0", micro_batch=SAMPLES, checkpoint_every=point.checkpoint_every, precision=point.precision)
    needs, free = memory(shape, machine, alone).device_need, machine.device_memory
    if machine.kind == "cuda":
        free = torch.cuda.mem_get_info()[0]
    if needs > free:
        raise ValueError(
            f"--run: one sample of {shape.name} on one device needs {needs / GIB:.1f} GiB, and {free / GIB:.1f} are "
            "free; leave it out, and the host's time is counted instead of measured"
        )


def _with_memory(model: nn.Module, device: torch.device) -> nn.Module:
    """Small random weights; buffers are zeros, which are positions and frequencies that any model can compute with."""
    module = model.to_empty(device=device).train()
    tie = getattr(module, "tie_weights", None)
    if callable(tie):  # Hugging Face's, whose tables came apart
        tie()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02)
        for buffer in module.buffers():
            buffer.zero_()
    return module


def _recompute(module: nn.Module, interval: int) -> None:
    if interval == 1 and getattr(module, "supports_gradient_checkpointing", False):
        enable: Any = module.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    checkpoint_blocks(module, interval)


def _values(tensor: Tensor, device: torch.device) -> Tensor:
    """Zeros are the number of a token, or of a class, in any model."""
    fill = torch.ones if tensor.is_floating_point() else torch.zeros
    return fill(tensor.shape, dtype=tensor.dtype, device=device)
