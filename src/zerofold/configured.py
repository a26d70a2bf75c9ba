"""What a config says, as arguments for zf.shard and zf.attach."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zerofold.compat.schedulers import make_scheduler
from zerofold.config import ConfigError, Settings, read, resolve
from zerofold.optim.cost import update_cost
from zerofold.optim.probe import why_not_elementwise
from zerofold.parallel.mesh import Mesh

# They speak of what happens in a step, and without an engine there is nobody to tell.
_OF_THE_ENGINE = (
    *("tensorboard", "csv_monitor", "wandb", "flops_profiler", "comms_logger", "checkpoint"),
    "activation_checkpointing",
    *("wall_clock_breakdown", "memory_breakdown", "steps_per_print"),
)

Config = str | os.PathLike[str] | Mapping[str, Any]


def configured(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, also: Mapping[str, Any]) -> Settings:
    """The settings for a model whose optimizer is there already. `also`: arguments that the config speaks of too."""
    for name, value in also.items():
        if value is not None:
            raise ConfigError(f"{name}={value!r} and config= are both given: change the config, or take {name}= out")
    real = next((p.device for p in model.parameters() if not p.is_meta), None)
    device = real or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    settings = resolve(read(config), world=dist.get_world_size(), device=device, model=model)
    announce(settings, optimizer, has_engine=False)
    return settings


def announce(settings: Settings, passed: torch.optim.Optimizer | None = None, *, has_engine: bool = True) -> None:
    """Once, on rank 0: the batch, what "auto" became, what has another form here, and what only an engine does."""
    if dist.get_rank() != 0:
        return
    lines = settings.table()
    left = [] if has_engine else [name for name in _OF_THE_ENGINE if settings.resolved.get(name)]
    if not has_engine and settings.autocast is not None:
        left.append("torch_autocast")
    if left:
        lines.append(f"{', '.join(left)}: only the engine of zf.initialize does this; nothing comes of it here")
    if settings.dump_state:
        lines.append(json.dumps(settings.resolved, indent=2, default=str))
    if settings.optimizer is not None and passed is not None:
        name = type(passed).__name__
        lines.append(f"optimizer: the {name} that was passed counts, not the {settings.optimizer.type} of the config")
    print(*lines, sep="\n", flush=True)


def shard_arguments(
    settings: Settings, optimizer: torch.optim.Optimizer | None, mesh: Mesh | None = None
) -> dict[str, Any]:
    """For zf.shard; an optimizer that works on whole matrices only, as Muon does, gets whole parameters."""
    if mesh is not None and settings.group is not None:
        raise ConfigError(
            f"groups of {settings.group} ranks (mics_shard_size, zero_hpz_partition_size) and a mesh are both given: "
            "take the key out"
        )
    found: dict[str, Any] = {
        "stage": settings.stage,
        "precision": settings.precision,
        "mesh": _mesh(settings) if mesh is None else mesh,
        "buffer_bytes": settings.buffer_bytes,
        "overlap": settings.overlap,
    }
    if settings.offload:
        found["offload"] = dict(settings.offload)
    if optimizer is not None and settings.stage in (1, 2, 3) and why_not_elementwise(optimizer) is not None:
        found |= {"cut": "whole", "cost": update_cost(optimizer)}
    return found


def scheduler_of(settings: Settings, optimizer: torch.optim.Optimizer) -> Any:
    if settings.scheduler is None:
        return None
    return make_scheduler(settings.scheduler.type, settings.scheduler.params, optimizer)


def _mesh(settings: Settings) -> DeviceMesh | None:
    if settings.group is None:
        return None
    shape = (dist.get_world_size() // settings.group, settings.group)
    return init_device_mesh(settings.device_type, shape, mesh_dim_names=("across", "inside"))
