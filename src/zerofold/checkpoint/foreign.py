"""Checkpoints that others wrote."""

from __future__ import annotations

from pathlib import Path

from zerofold.checkpoint.contents import Contents
from zerofold.checkpoint.from_dcp import is_dcp, read_dcp
from zerofold.checkpoint.from_deepspeed import is_deepspeed, read_deepspeed


def read_foreign(folder: str | Path) -> Contents | None:
    """What is in a folder of torch.distributed.checkpoint or DeepSpeed; None where it is neither."""
    folder = Path(folder)
    if is_dcp(folder):
        return read_dcp(folder)
    if is_deepspeed(folder):
        return read_deepspeed(folder)
    return None
