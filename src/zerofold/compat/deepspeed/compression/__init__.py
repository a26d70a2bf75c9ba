"""Of deepspeed.compression the helpers that LoRA code takes from there."""

from __future__ import annotations

from typing import Any

from zerofold.compat.deepspeed.refusals import missing


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
