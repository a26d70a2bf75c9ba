"""deepspeed.runtime: the engine, schedules, configs and ZeRO."""

from __future__ import annotations

from typing import Any

from zerofold.compat.deepspeed.refusals import missing
from zerofold.compat.deepspeed.runtime import (
    activation_checkpointing,
    config,
    dataloader,
    engine,
    lr_schedules,
    utils,
    zero,
)

__all__ = ["activation_checkpointing", "config", "dataloader", "engine", "lr_schedules", "utils", "zero"]


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
