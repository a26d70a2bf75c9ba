"""Checkpoints that others wrote."""

from __future__ import annotations

from pathlib import Path

from zerofold.checkpoint.contents import CheckpointError, Contents
from zerofold.checkpoint.from_dcp import is_dcp, read_dcp
from zerofold.checkpoint.from_deepspeed import is_deepspeed, read_deepspeed


def read_foreign(folder: str | Path) -> Contents | None:
    """What is in a folder of torch.distributed.checkpoint or DeepSpeed; None where it is neither."""
    folder = Path(folder)
    try:
        if is_dcp(folder):
            return read_dcp(folder)
        if is_deepspeed(folder):
            return read_deepspeed(folder)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename or folder}: {error.strerror or error}") from error
    return None
