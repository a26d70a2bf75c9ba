"""The engines that can be simulated: each shards a model and returns a function that trains a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zerofold.access import ledger
from zerofold.prepare import close, prepare
from zerofold.units import UnitChoice, find_units

Loss = Callable[[nn.Module, torch.device], Tensor]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model and how to train it."""

    name: str
    build: Callable[[], nn.Module]
    """Called with the meta device as torch's default."""
    loss: Loss
    """A forward on a batch of its own making, on the device that it is given."""
    batch: int
    """Samples in it."""
    units: UnitChoice = None
    stage: str = "3"
    precision: str | None = "bf16"
    overlap: bool = True
    live_bytes: int | None = None
    buffer_bytes: int | None = None
    clip: float | None = None


@dataclass(frozen=True)
class Ready:
    step: Callable[[], None]
    state_bytes: Callable[[], dict[str, int]]
    close: Callable[[], None]


def zerofold(training: Training, model: nn.Module, device: torch.device, per_node: int) -> Ready:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    stage: int | str = int(training.stage) if training.stage.isdigit() else training.stage
    prepare(
        model,
        optimizer,
        stage=stage,
        precision=training.precision,
        units=training.units,
        mesh=_mesh(device, per_node) if stage in ("hsdp", "hpz") else None,
        overlap=training.overlap,
        live_bytes=training.live_bytes,
        buffer_bytes=training.buffer_bytes,
        clip=training.clip,
        device=device,
        init=_fill,
    )

    def step() -> None:
        training.loss(model, device).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Ready(step, lambda: dict(ledger(model).snapshot()["state_bytes"]), lambda: close(model, gather=False))


def fsdp2(training: Training, model: nn.Module, device: torch.device, per_node: int) -> Ready:
    """torch's own, in the same units, with the same dtypes."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if device.type == "meta":
        raise ValueError("FSDP2 does not run on the meta device: give --device cuda, or cpu for a small model")
    if training.stage not in ("2", "3"):
        raise ValueError(f"FSDP2 has no stage {training.stage}: compare with it at 3, or at 2 (no resharding)")
    if training.precision not in (None, "fp32", "bf16"):
        raise ValueError(f"precision={training.precision!r} is not simulated with FSDP2: use bf16 or fp32")
    is_half = training.precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_half else MixedPrecisionPolicy()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    inner = [module for name, module in find_units(model, training.units).items() if name]
    for module in (*inner, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=training.stage == "3")
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            getattr(parameter, "_local_tensor", parameter).normal_(0, 0.02)
        for buffer in model.buffers():
            buffer.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        training.loss(model, device).backward()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        optimizer.zero_grad()

    return Ready(step, dict, lambda: None)


ENGINES: Mapping[str, Callable[[Training, nn.Module, torch.device, int], Ready]] = MappingProxyType(
    {"zerofold": zerofold, "fsdp2": fsdp2}
)


def _mesh(device: torch.device, per_node: int) -> DeviceMesh:
    world = dist.get_world_size()
    if world % per_node:
        raise ValueError(f"{world} ranks do not divide into nodes of {per_node}, which are the groups of this stage")
    kind = "cuda" if device.type == "cuda" else "cpu"
    return init_device_mesh(kind, (world // per_node, per_node), mesh_dim_names=("across", "inside"))


@torch.no_grad()
def _fill(module: nn.Module) -> None:
    """Small numbers: what a simulation computes is for nobody, but a step with a NaN in it would be skipped."""
    values: Any
    for values in module.parameters(recurse=False):
        values.normal_(0, 0.02) if values.is_floating_point() else values.zero_()
    for values in module.buffers(recurse=False):
        values.zero_()
