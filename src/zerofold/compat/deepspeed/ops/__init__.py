"""Optimizers under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

from zerofold.compat.deepspeed.ops import adagrad, adam, lion
from zerofold.compat.deepspeed.refusals import missing

__all__ = ["adagrad", "adam", "lion"]


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
