"""Of deepspeed.moe what scripts call whether or not the model has DeepSpeed's experts; there are none here."""

from __future__ import annotations

from typing import Any

from zerofold.compat.deepspeed.refusals import missing


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
