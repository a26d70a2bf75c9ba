"""Whole fp32 weights from a checkpoint folder: of zerofold, and of DeepSpeed, whose format it reads too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerofold.checkpoint.contents import CheckpointError, Contents, numel
from zerofold.checkpoint.export import export_contents
from zerofold.checkpoint.open import open_checkpoint

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Every parameter and buffer of a checkpoint that `engine.save_checkpoint(checkpoint_dir)` wrote, on the CPU.

    >>> import tempfile, torch, zerofold.compat.deepspeed as deepspeed
    >>> config = {"train_batch_size": 1, "gradient_clipping": 1.0, "optimizer": {"type": "Adam"}}
    >>> engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 1), config=config)
    train_batch_size 1 = 1 per rank x 1 accumulated x 1 rank
    >>> folder = tempfile.mkdtemp()
    >>> _ = engine.save_checkpoint(folder)
    >>> sorted(get_fp32_state_dict_from_zero_checkpoint(folder))
    ['bias', 'weight']
    >>> engine.destroy()
    """
    _check_frozen(exclude_frozen_parameters)
    contents = _open(checkpoint_dir, tag)
    state = {name: _whole(stored) for name, stored in contents.tensors.items()}
    return state | {alias: state[kept] for alias, kept in contents.aliases.items()}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """The model, on the CPU, with the weights of a checkpoint."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """The weights of a checkpoint as files: safetensors in pieces, or one pytorch_model.bin."""
    _check_frozen(exclude_frozen_parameters)
    if safe_serialization:
        contents = _open(checkpoint_dir, tag)
        export_contents(contents, output_dir, dtype=torch.float32, max_file_bytes=_bytes(max_shard_size))
        return
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    path = Path(output_dir)
    path.mkdir(parents=True, exist_ok=True)
    torch.save(state, path / "pytorch_model.bin")


def _check_frozen(exclude: bool) -> None:
    if exclude:
        raise ValueError(
            "exclude_frozen_parameters=True: a checkpoint does not say which parameters were frozen; write it with "
            "engine.save_checkpoint(folder, exclude_frozen_parameters=True), and it has none"
        )


def _open(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> Contents:
    folder = Path(checkpoint_dir)
    latest = folder / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    path = folder if tag is None else folder / tag
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: name the folder that save_checkpoint was given, and its tag")
    return open_checkpoint(path)


def _whole(stored: Any) -> Tensor:
    tensor: Tensor = stored.read(0, numel(stored)).view(stored.shape)
    return tensor.float() if tensor.is_floating_point() else tensor


def _bytes(size: str | int) -> int:
    """
    >>> _bytes("5GB"), _bytes(10)
    (5000000000, 10)
    """
    if isinstance(size, int):
        return size
    for unit in sorted(_UNITS, key=len, reverse=True):
        if size.upper().endswith(unit):
            return int(float(size[: -len(unit)]) * _UNITS[unit])
    raise ValueError(f"max_shard_size={size!r} must be a number of bytes, or end in {', '.join(_UNITS)}: '5GB'")
