"""zf.export: a sharded model as a Hugging Face folder, streamed; and any checkpoint as one."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerofold.agree import agree
from zerofold.arguments import path_of
from zerofold.checkpoint.contents import Contents, Stored
from zerofold.checkpoint.folder import MAX_FILE_BYTES, write_folder
from zerofold.checkpoint.hugging_face import read_json, write_json
from zerofold.checkpoint.whole import dtype_named, live_tensors
from zerofold.engine import Engine

_CONFIGS = ("config.json", "generation_config.json")
_TOKENIZERS = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.*", "merges.txt", "added_tokens.json")


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes the whole model as a Hugging Face folder that `from_pretrained(path)` loads. All ranks must call it.

    Tensors are gathered in pieces of at most 64 MiB and written by the first rank, so no rank ever holds the model.
    Parameters and persistent buffers have their names in `model.state_dict()`; tied ones are written once. The folder
    gets its name when everything was read back from the disk and is what was written; until then, and after an error,
    what had that name is untouched. Only an earlier export is ever replaced.

    dtype           of the parameters, "bf16" for serving; by default that of the masters, usually fp32. Buffers are
                    written as they are
    max_file_bytes  a new file begins when the next tensor would make the last one larger than this

    >>> import tempfile, torch, zerofold as zf
    >>> from safetensors.torch import load_file
    >>> model = zf.shard(torch.nn.Linear(64, 32), stage=3)
    >>> folder = tempfile.mkdtemp()
    >>> zf.export(model, folder, dtype="bf16")
    >>> load_file(folder + "/model.safetensors")["weight"].dtype
    torch.bfloat16
    >>> zf.close(model)
    """
    job, path = Engine.of(model).groups.job, path_of("path", path)
    found = agree(job, lambda: live_tensors(model, dtype=dtype_named(dtype)))
    write_folder(
        path,
        found.tensors,
        aliases=found.aliases,
        max_file_bytes=max_file_bytes,
        control=job,
        complete=partial(_write_config, model, _common_dtype(found.tensors)),
    )


def export_contents(
    contents: Contents,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """The weights of any checkpoint as a Hugging Face folder, on one process; config and tokenizer files go along."""
    wanted = dtype_named(dtype)
    tensors = {name: _Cast(stored, wanted) for name, stored in contents.tensors.items()}
    write_folder(
        path,
        tensors,
        aliases=contents.aliases,
        max_file_bytes=max_file_bytes,
        complete=partial(_copy_beside, Path(contents.where), wanted),
    )


def _common_dtype(tensors: Mapping[str, Stored]) -> torch.dtype | None:
    """What holds every floating-point tensor exactly."""
    dtypes = [stored.dtype for stored in tensors.values()]
    found = [dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1]
    return reduce(torch.promote_types, found) if found else None


def _write_config(model: nn.Module, dtype: torch.dtype | None, folder: Path) -> None:
    """Hugging Face's config.json and generation_config.json, where the model has them.

    A model with adapters has the config of what it adapts: `from_pretrained` would find none of its names and start
    from random weights. Without a config it says so instead.
    """
    inner = getattr(model, "_orig_mod", model)  # torch.compile's
    config: Any = getattr(inner, "config", None)
    if hasattr(inner, "peft_config") or not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    config.architectures = [type(inner).__name__]
    if dtype is not None:
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)
    config.save_pretrained(folder)
    generation: Any = getattr(inner, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)


def _copy_beside(source: Path, dtype: torch.dtype | None, folder: Path) -> None:
    for pattern in (*_CONFIGS, *_TOKENIZERS):
        for file in source.glob(pattern) if source.is_dir() else ():
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    config = folder / "config.json"
    if config.exists() and dtype is not None:
        held = read_json(config)
        key = "torch_dtype" if "torch_dtype" in held else "dtype"  # the older name
        write_json(config, {**held, key: str(dtype).removeprefix("torch.")})


@dataclass(frozen=True)
class _Cast:
    """A stored tensor in another dtype."""

    stored: Stored
    wanted: torch.dtype | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        own = self.stored.dtype
        is_plain = own.is_floating_point and own.itemsize > 1  # 8-bit ones mean nothing without their scales
        return self.wanted if self.wanted is not None and is_plain else own

    def read(self, start: int, stop: int) -> Tensor:
        return self.stored.read(start, stop).to(self.dtype)
