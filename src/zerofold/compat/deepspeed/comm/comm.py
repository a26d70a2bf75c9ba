"""deepspeed.comm.comm, where DeepSpeed's own code lives; the names are those of deepspeed.comm."""

from __future__ import annotations

from typing import Any

from zerofold.compat.deepspeed import comm
from zerofold.compat.deepspeed.comm import init_distributed

__all__ = ["init_distributed"]


def __getattr__(name: str) -> Any:
    return getattr(comm, name)
