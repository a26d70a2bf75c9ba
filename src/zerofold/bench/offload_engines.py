"""The engines of `zerofold bench offload`: bf16 with fp32 AdamW, the states where each engine puts them.

Each gets the same model, in bf16 and on the device. Where an engine updates on the CPU it has all cores to do so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.bench.deepspeed_ops import build_op
from zerofold.bench.engines import BETAS, WEIGHT_DECAY, Step, step_of_deepspeed
from zerofold.bench.gpt import GPT, Block
from zerofold.bench.mixed_engines import LEARNING_RATE, make_adamw, step_with_masters


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the person who runs the bench can set."""

    batch: int
    device: torch.device
    clip: float
    path: str
    """A folder of this run alone, for states on disk."""
    device_limit: int
    """Bytes of the device that an engine with a limit may use."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """An engine that has taken the model over."""

    step: Step
    norm: Callable[[], Tensor | float | None]
    """Of the last step's gradients, before clipping; a tensor is read later, so that it costs the step nothing."""
    read_parameter: Callable[[], Tensor]
    """Some updated parameter: with it, an update that was put off has been done."""
    books: Callable[[], dict[str, Any]] = dict
    """What the engine itself says about its memory."""


class BuildTraining(Protocol):
    def __call__(self, model: GPT, wishes: Wishes) -> Training: ...


@dataclass(frozen=True)
class OffloadEngine:
    build: BuildTraining
    needs: tuple[str, ...] = ()
    """Modules that are imported before the clock of the start runs."""
    ops: tuple[str, ...] = ()
    """Builders of DeepSpeed's ops that it cannot do without, compiled before that clock runs."""
    offloads: bool = True
    uses_disk: bool = False
    is_limited: bool = False
    """It may use a part of the device only."""
    is_large: bool = False
    """It trains a model of its own, which starts on the meta device because no device would hold it."""
    tries_ways: bool = False
    """Its first steps differ: it tries shares of host and device. Others do the same in every step."""


def plain(model: GPT, wishes: Wishes) -> Training:
    """Everything on the device, without any engine."""
    norms: list[Tensor] = []
    step = step_with_masters(model, wishes.clip, norms)
    return Training(step=step, norm=lambda: norms[0], read_parameter=lambda: model.norm.weight)


def fsdp2(model: GPT, wishes: Wishes) -> Training:
    """PyTorch's own CPU offload: parameters, gradients and optimizer states on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model.cpu().float()
    mesh = init_device_mesh(wishes.device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    offload = CPUOffloadPolicy(pin_memory=wishes.device.type == "cuda")
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    optimizer = make_adamw(model.parameters(), fused=True)
    norms: list[Any] = []

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()
        norms[:] = [torch.nn.utils.clip_grad_norm_(model.parameters(), wishes.clip)]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def read_parameter() -> Tensor:
        weight: Any = model.norm.weight  # a DTensor
        local: Tensor = weight.to_local()
        return local

    return Training(step=step, norm=lambda: norms[0].to_local(), read_parameter=read_parameter)


def deepspeed(model: GPT, wishes: Wishes, *, stage: int, optimizer: str, parameters: str | None) -> Training:
    library: Any = importlib.import_module("deepspeed")
    library.init_distributed(dist_backend="nccl" if wishes.device.type == "cuda" else "gloo")
    pinned = wishes.device.type == "cuda"
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": optimizer, "pin_memory": pinned},
    }
    if parameters is not None:
        zero["offload_param"] = {"device": parameters, "pin_memory": pinned}
    if optimizer == "nvme":
        # With fewer buffers its pipeline stops with a bare AssertionError at these sizes.
        pipeline = {"nvme_path": wishes.path, "pipeline_read": True, "pipeline_write": True, "buffer_count": 24}
        zero["offload_optimizer"].update(pipeline)
        zero["sub_group_size"] = 200_000_000
    config = {
        "train_micro_batch_size_per_gpu": wishes.batch,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": wishes.clip,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": 1e-8, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "aio": {
            "block_size": 8 << 20,
            "queue_depth": 16,
            "intra_op_parallelism": 4,
            "single_submit": False,
            "overlap_events": True,
        },
    }
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)
    # Its step returns when the update is done, so there is nothing to wait for but the device.
    step = step_of_deepspeed(engine)
    return Training(step=step, norm=engine.get_global_grad_norm, read_parameter=lambda: torch.zeros(()))


def zerofold(model: GPT, wishes: Wishes, *, offload: Callable[[Wishes], dict[str, Any] | None]) -> Training:
    library: Any = importlib.import_module("zerofold")
    placed = offload(wishes)
    optimizer = make_adamw(model.parameters())
    sharded, optimizer = library.prepare(
        model,
        optimizer,
        stage=3,
        precision="bf16",
        units=Block,
        clip=wishes.clip,
        device=wishes.device,
        **({} if placed is None else {"offload": placed}),
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = sharded(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def books() -> dict[str, Any]:
        snapshot: dict[str, Any] = library.ledger(sharded).snapshot()
        return {name: snapshot[name] for name in ("state_bytes", "tier_bytes", "offload") if name in snapshot}

    return Training(
        step=step,
        norm=lambda: library.last_step(sharded).norm,
        read_parameter=lambda: library.full(sharded.norm.weight),
        books=books,
    )


def _zerofold(offload: Callable[[Wishes], dict[str, Any] | None], *, offloads: bool = True) -> OffloadEngine:
    build = partial(zerofold, offload=offload)
    return OffloadEngine(build, needs=("zerofold",), offloads=offloads, tries_ways=offloads)


def _deepspeed(stage: int, *, optimizer: str = "cpu", parameters: str | None = None) -> OffloadEngine:
    on_disk = optimizer == "nvme"
    return OffloadEngine(
        partial(deepspeed, stage=stage, optimizer=optimizer, parameters=parameters),
        needs=("deepspeed",),
        ops=("CPUAdamBuilder", "AsyncIOBuilder") if on_disk else ("CPUAdamBuilder",),
        uses_disk=on_disk,
    )


def _auto(wishes: Wishes) -> dict[str, Any]:
    return {"optimizer": "auto", "parameters": "auto", "device_limit": wishes.device_limit}


def _auto_with_disk(wishes: Wishes) -> dict[str, Any]:
    return {"optimizer": "auto", "parameters": "auto", "path": wishes.path}


OFFLOAD_ENGINES: Mapping[str, OffloadEngine] = MappingProxyType(
    {
        "plain": OffloadEngine(plain, offloads=False),
        "fsdp2_cpu": OffloadEngine(fsdp2, needs=("torch.distributed.fsdp",)),
        "ds2_cpu": _deepspeed(2),
        "ds3_cpu": _deepspeed(3, parameters="cpu"),
        "ds3_nvme": _deepspeed(3, optimizer="nvme", parameters="cpu"),
        "zf3": _zerofold(lambda _: None, offloads=False),
        "zf3_opt": _zerofold(lambda _: {"optimizer": "host"}),
        "zf3_all": _zerofold(lambda _: {"optimizer": "host", "parameters": "host"}),
        "zf3_auto": replace(_zerofold(_auto), is_limited=True),
        "zf3_nvme": replace(_zerofold(lambda wishes: {"optimizer": "nvme", "path": wishes.path}), uses_disk=True),
        "zf3_large": replace(_zerofold(_auto_with_disk), uses_disk=True, is_large=True),
    }
)


def require_ops(engine: OffloadEngine) -> None:
    """Compile what the engine cannot do without; an error tells which op failed, and why."""
    for name in engine.ops:
        reason = build_op(name)
        if reason is not None:
            raise RuntimeError(reason)
