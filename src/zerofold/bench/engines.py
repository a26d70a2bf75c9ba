"""The engines that `zerofold bench` compares: each takes a model and returns a function that trains a step.

All of them run AdamW with the same settings, fused, in fp32; where they know units, a Block is one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofold.bench.gpt import GPT, Block

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1

Step = Callable[[Tensor, Tensor], Tensor]
"""Tokens and targets in; the loss of this rank's batch out, after forward, backward and update."""


class Build(Protocol):
    def __call__(self, model: GPT, *, batch: int, device: torch.device) -> Step: ...


@dataclass(frozen=True)
class Engine:
    """How to set an engine up, and the modules that are imported before its memory is measured."""

    build: Build
    needs: tuple[str, ...] = ()
    note: Callable[[torch.device], str] = lambda _: ""
    """After the build: a choice it made by itself that a reader should know of."""


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _ddp_model(model: GPT, device: torch.device) -> nn.Module:
    device_ids = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=device_ids)


def no_communication(model: GPT, *, batch: int, device: torch.device) -> Step:
    """Every rank trains its own model alone: the floor, not a training method."""
    return plain_step(model, _adamw(model.parameters()))


def ddp(model: GPT, *, batch: int, device: torch.device) -> Step:
    wrapped = _ddp_model(model, device)
    return plain_step(wrapped, _adamw(wrapped.parameters()))


def ddp_zero_redundancy(model: GPT, *, batch: int, device: torch.device) -> Step:
    """DDP with PyTorch's own ZeRO-1 optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = _ddp_model(model, device)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(),
        torch.optim.AdamW,
        lr=LEARNING_RATE,
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )
    return plain_step(wrapped, optimizer)


def fsdp2(model: GPT, *, batch: int, device: torch.device, reshard_after_forward: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return plain_step(model, _adamw(model.parameters()))


def deepspeed(model: GPT, *, batch: int, device: torch.device, stage: int) -> Step:
    library: Any = importlib.import_module("deepspeed")
    library.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": LEARNING_RATE,
                "betas": list(BETAS),
                "eps": 1e-8,
                "weight_decay": WEIGHT_DECAY,
                "torch_adam": True,  # its own kernels would have to be compiled on the spot
                "fused": True,
            },
        },
        "gradient_clipping": 0.0,  # left out, it clips at 1.0, and no other engine here does
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed_step(library, model, config)


def deepspeed_step(library: Any, model: GPT, config: dict[str, Any]) -> Step:
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)
    return step_of_deepspeed(engine)


def step_of_deepspeed(engine: Any) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def zerofold(model: GPT, *, batch: int, device: torch.device, stage: int) -> Step:
    library: Any = importlib.import_module("zerofold")
    sharded, optimizer = library.prepare(model, _adamw(model.parameters()), stage=stage, units=Block)
    return plain_step(sharded, optimizer)


ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "none": Engine(no_communication),
        "ddp": Engine(ddp),
        "zro": Engine(ddp_zero_redundancy, needs=("torch.distributed.optim",)),
        "fsdp2": Engine(partial(fsdp2, reshard_after_forward=True), needs=("torch.distributed.fsdp",)),
        "fsdp2_z2": Engine(partial(fsdp2, reshard_after_forward=False), needs=("torch.distributed.fsdp",)),
        **{f"ds{stage}": Engine(partial(deepspeed, stage=stage), needs=("deepspeed",)) for stage in (1, 2, 3)},
        **{f"zf{stage}": Engine(partial(zerofold, stage=stage), needs=("zerofold",)) for stage in (0, 1, 2, 3)},
    }
)
