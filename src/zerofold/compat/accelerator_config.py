"""A ds_config.json in the place of an Accelerator's own options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zerofold.config import ConfigError, Settings, read, resolve
from zerofold.configured import Config, announce, shard_arguments

_STEPS = "gradient_accumulation_steps"
OF_ACCELERATE = (
    "what Accelerate has beyond its training loop is in its own Accelerator, which runs on zerofold with a "
    "DeepSpeedPlugin under `zerofold launch --as-deepspeed`"
)
_FIXES = {
    "fsdp_plugin": "stage 3 shards as FSDP does; give units= for its wrapping policy",
    "log_with": "make trackers of your own where accelerator.is_main_process",
    "project_config": "give project_dir=",
    "gradient_accumulation_plugin": "give gradient_accumulation_steps=",
    "dataloader_config": "give split_batches= and even_batches= themselves",
}


class Found(NamedTuple):
    options: dict[str, Any]
    """For zf.shard and zf.attach."""
    accumulate: int
    settings: Settings


def refuse_others(others: Mapping[str, Any]) -> None:
    """What Accelerate's own takes besides, but for what is not set.

    >>> refuse_others({"fsdp_plugin": None})
    """
    for name, value in others.items():
        if value is not None:
            raise TypeError(f"zf.Accelerator has no {name}=: {_FIXES.get(name, OF_ACCELERATE)}")


def config_of(config: Config | None, plugin: Any) -> Config | None:
    """The config that was given, or that of Accelerate's DeepSpeedPlugin.

    >>> config_of({"zero_optimization": {"stage": 2}}, None)
    {'zero_optimization': {'stage': 2}}
    """
    if plugin is None:
        return config
    if config is not None:
        raise ConfigError("config= and deepspeed_plugin= are both given: give one of them")
    found = getattr(plugin, "deepspeed_config", None) or getattr(plugin, "hf_ds_config", None)
    found = getattr(found, "config", found)
    if not isinstance(found, Mapping):
        raise TypeError(f"deepspeed_plugin: a {type(plugin).__name__} has no deepspeed_config; pass config= instead")
    return found


def options_of(
    config: Config,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    device: torch.device,
    accumulate: int,
    batch: int | None,
) -> Found:
    """`accumulate` and `batch`, the Accelerator's and the loader's, count where the config leaves them open."""
    given = dict(read(config))
    if given.get(_STEPS, "auto") == "auto" and accumulate > 1:
        given[_STEPS] = accumulate
    settings = resolve(given, world=dist.get_world_size(), device=device, model=model, batch=batch)
    if accumulate not in (1, settings.accumulate):
        raise ConfigError(
            f"{_STEPS}={accumulate}, but the config comes to {settings.accumulate}: leave one of them out"
        )
    passed = optimizers[0] if optimizers else None
    announce(settings, passed, has_engine=False)
    options = {**shard_arguments(settings, passed), "clip": settings.clip}
    if options.get("offload") is not None and settings.accumulate > 1:
        options["offload"] = {**options["offload"], "sums": True}  # the loop itself says which backward ends a step
    if settings.precision is not None:  # as with mixed_precision=: a loss outside the model meets fp32
        options["precision"] = replace(settings.precision, outputs=torch.float32)
    return Found(options, settings.accumulate, settings)
