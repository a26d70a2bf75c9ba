"""Any checkpoint by its path."""

from __future__ import annotations

import os
from pathlib import Path

from zerofold.checkpoint.contents import CheckpointError, Contents
from zerofold.checkpoint.hugging_face import read_hugging_face


def open_checkpoint(path: str | os.PathLike[str]) -> Contents:
    """What is there, whoever wrote it. Only headers are read.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> save_file({"w": torch.ones(2, 3)}, folder / "model.safetensors")
    >>> open_checkpoint(folder).tensors["w"].shape
    (2, 3)
    """
    where = Path(path)
    if not where.exists():
        raise CheckpointError(f"{where} does not exist")
    # Readers of other formats have their place here, our own first: each knows its files, and gives None for others.
    for read in (read_hugging_face,):
        found = read(where)
        if found is not None:
            return found
    held = f"it holds {_some_of(where)}" if where.is_dir() else "it is a single file"
    raise CheckpointError(f"{where} is no checkpoint that is known here: {held}; safetensors files are one")


def _some_of(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "") if names else "nothing"
