"""Any checkpoint by its path."""

from __future__ import annotations

import os
from pathlib import Path

from zerofold.arguments import path_of
from zerofold.checkpoint.contents import CheckpointError, Contents
from zerofold.checkpoint.foreign import read_foreign
from zerofold.checkpoint.hugging_face import read_hugging_face
from zerofold.checkpoint.manifest import MANIFEST, Manifest
from zerofold.checkpoint.native import is_native, read_native


def open_checkpoint(path: str | os.PathLike[str]) -> Contents:
    """What is there, whoever wrote it. Only headers are read.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> save_file({"w": torch.ones(2, 3)}, folder / "model.safetensors")
    >>> open_checkpoint(folder).tensors["w"].shape
    (2, 3)
    """
    where = path_of("path", path)
    if not where.exists():
        raise CheckpointError(f"{where} does not exist: name the folder that zf.save was given, or another checkpoint")
    if is_native(where):
        return read_native(where)
    for read in (read_foreign, read_hugging_face):  # each gives None for what it does not know
        found = read(where)
        if found is not None:
            return found
    if (where / MANIFEST).is_file():
        Manifest.read(where)  # which tells what is wrong with it
    if where.suffix == ".bin" or (where.is_dir() and any(where.glob("*.bin"))):
        raise CheckpointError(
            f"{where} holds weights as .bin, a pickle, which could run any code when it is read. Convert it once to "
            "safetensors: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    held = f"it holds {_some_of(where)}" if where.is_dir() else "it is a single file"
    raise CheckpointError(
        f"{where} is no checkpoint that is known here ({held}): name what zf.save was given, a folder of Hugging Face, "
        "DeepSpeed or torch.distributed.checkpoint, or a safetensors file"
    )


def _some_of(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "") if names else "nothing"
