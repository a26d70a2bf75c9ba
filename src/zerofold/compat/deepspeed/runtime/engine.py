"""The engine's class, for isinstance and annotations, and what makes one."""

from __future__ import annotations

from functools import wraps
from typing import Any

from zerofold.compat.deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from zerofold.compat.engine import DeepSpeedEngine
from zerofold.compat.initialize import initialize as _initialize

__all__ = ["DeepSpeedEngine", "initialize"]


@wraps(_initialize)
def initialize(*args: Any, **kwargs: Any) -> Any:
    engine, optimizer, loader, scheduler = _initialize(*args, **kwargs)
    if optimizer is not None and engine.zero_optimization_partition_weights():
        # Where TRL looks for the hooks that it takes off before it generates.
        optimizer.parameter_offload = DeepSpeedZeRoOffload()  # type: ignore[attr-defined]
    return engine, optimizer, loader, scheduler
