"""The engines of `zerofold bench mixed`: they compute in bf16, and AdamW keeps masters and moments in fp32.

Each gets the same model in bf16 and clips the gradient norm at the same value. What each does by itself otherwise
(in which dtype it reduces, when it casts, which kernel updates) is its own choice, and part of what is measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.bench.deepspeed_ops import build_op
from zerofold.bench.engines import BETAS, WEIGHT_DECAY, Engine, Step, deepspeed_step, plain_step
from zerofold.bench.gpt import GPT, Block

LEARNING_RATE = 1e-4
CLIP = 1.0


def make_adamw(parameters: Iterable[Tensor], **kernel: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, **kernel)


def plain(model: GPT, *, batch: int, device: torch.device) -> Step:
    return step_with_masters(model, CLIP, norms=[])


def step_with_masters(model: GPT, clip: float, norms: list[Tensor]) -> Step:
    """Plain PyTorch without communication: masters beside the model, cast there and back. `norms` gets the last one."""
    parameters: list[Tensor] = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = make_adamw(masters, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()
        norms[:] = [torch.nn.utils.clip_grad_norm_(parameters, clip)]
        for parameter, master in zip(parameters, masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None  # one by one, so that both forms of all gradients never exist together
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        optimizer.zero_grad()
        return loss.detach()

    return step


def fsdp2(model: GPT, *, batch: int, device: torch.device) -> Step:
    """fp32 parameters, cast to bf16 where they are gathered; gradients are reduced in bf16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model.float()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = make_adamw(model.parameters(), fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def deepspeed(model: GPT, *, batch: int, device: torch.device, stage: int) -> Step:
    library: Any = importlib.import_module("deepspeed")
    library.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")
    settings: dict[str, Any] = {
        "lr": LEARNING_RATE,
        "betas": list(BETAS),
        "eps": 1e-8,
        "weight_decay": WEIGHT_DECAY,
    }
    if _why_not_own_adam(device) is not None:
        settings |= {"torch_adam": True, "fused": True}
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": settings},
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    return deepspeed_step(library, model, config)


def _why_not_own_adam(device: torch.device) -> str | None:
    """None where DeepSpeed's own GPU kernel can be used."""
    return build_op("FusedAdamBuilder") if device.type == "cuda" else "its own is for GPUs"


def _which_adam(device: torch.device) -> str:
    why_not = _why_not_own_adam(device)
    return "updates with its own FusedAdam" if why_not is None else f"updates with fused AdamW of torch: {why_not}"


def zerofold(model: GPT, *, batch: int, device: torch.device, stage: int) -> Step:
    library: Any = importlib.import_module("zerofold")
    sharded, optimizer = library.prepare(
        model, make_adamw(model.parameters()), stage=stage, precision="bf16", units=Block, clip=CLIP
    )
    return plain_step(sharded, optimizer)


MIXED_ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "plain": Engine(plain),
        "fsdp2": Engine(fsdp2, needs=("torch.distributed.fsdp",)),
        **{
            f"ds{stage}": Engine(partial(deepspeed, stage=stage), needs=("deepspeed",), note=_which_adam)
            for stage in (0, 1, 3)
        },
        **{f"zf{stage}": Engine(partial(zerofold, stage=stage), needs=("zerofold",)) for stage in (0, 1, 2, 3)},
    }
)
