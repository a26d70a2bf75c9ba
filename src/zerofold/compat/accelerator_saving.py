"""save_state and load_state: all that an Accelerator has prepared, in one checkpoint of zerofold's own."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofold.access import full
from zerofold.checkpoint.export import export
from zerofold.checkpoint.load import load
from zerofold.checkpoint.save import save
from zerofold.compat.accelerator_data import PreparedLoader
from zerofold.compat.accelerator_steps import Micro, PreparedOptimizer, PreparedScheduler

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Saved:
    """Models, optimizers, schedulers, loaders and the user's own objects, together in a folder."""

    _micro: Micro

    def __init__(self, project_dir: str | os.PathLike[str] | None) -> None:
        self._has_warned = False
        self.project_dir = None if project_dir is None else Path(project_dir)
        self._models: list[nn.Module] = []
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[PreparedScheduler] = []
        self._loaders: list[PreparedLoader] = []
        self._custom: list[Any] = []

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Objects of yours that `save_state` is to save; their state must be plain data."""
        for each in objects:
            if not all(callable(getattr(each, name, None)) for name in ("state_dict", "load_state_dict")):
                raise ValueError(
                    f"register_for_checkpointing: {type(each).__name__} needs state_dict and load_state_dict"
                )
        self._custom += objects

    def save_state(self, output_dir: str | os.PathLike[str] | None = None) -> str:
        """Writes all that was prepared or registered, and the random generators; all ranks must call it.

        Without a folder, into the next project_dir/checkpoints/checkpoint_N. Loads with any number of ranks.
        """
        self._warn_of_partial_gradients()
        folder = Path(output_dir) if output_dir is not None else self._next_folder()
        extra = {"objects": [each.state_dict() for each in self._custom]}
        for index, (model, where) in enumerate(self._places(folder)):
            is_first = index == 0
            save(
                model,
                self._optimizers_of(model),
                where,
                tag="state",
                extra=extra if is_first else None,
                scheduler=self._schedulers if is_first else None,
                data=_Positions(self._loaders) if is_first and self._loaders else None,
            )
        return str(folder)

    def _warn_of_partial_gradients(self) -> None:
        pending = self._micro.pending
        if pending and not self._has_warned and dist.get_rank() == 0:
            warnings.warn(
                f"save_state in the middle of a step: {pending} of its {self._micro.accumulate} micro-batches are "
                "done, and a run that resumes here leaves their gradients out; save where "
                "accelerator.sync_gradients is True",
                stacklevel=3,
            )
            self._has_warned = True

    def load_state(self, input_dir: str | os.PathLike[str] | None = None) -> None:
        """Brings everything back to where `save_state` was called; a loader's next pass goes on at its next batch."""
        folder = Path(input_dir) if input_dir is not None else self._last_folder()
        for index, (model, where) in enumerate(self._places(folder)):
            is_first = index == 0
            extra = load(
                model,
                self._optimizers_of(model),
                where,
                scheduler=self._schedulers if is_first else None,
                data=_Positions(self._loaders) if is_first and self._loaders else None,
            )
            for each, state in zip(self._custom, extra.get("objects", ()), strict=True) if is_first else ():
                each.load_state_dict(state)

    def save_model(
        self, model: nn.Module, save_directory: str | os.PathLike[str], max_shard_size: int | str = "10GB"
    ) -> None:
        """The whole weights as safetensors files, with the model's config where it has one; all ranks must call it."""
        export(model, save_directory, max_file_bytes=_bytes(max_shard_size))

    def save(self, obj: Any, f: Any) -> None:
        """torch.save on rank 0."""
        if dist.get_rank() == 0:
            torch.save(obj, f)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The model itself: zerofold wraps nothing around it. Its parameters are whole inside `zf.full_params`."""
        return model if keep_torch_compile else getattr(model, "_orig_mod", model)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole tensors in host memory on rank 0, nothing on the others; all ranks must call it."""
        found = {}
        for name, value in model.state_dict().items():
            whole = full(value) if isinstance(value, Tensor) else value
            if dist.get_rank() == 0:
                found[name] = whole.cpu() if isinstance(whole, Tensor) else whole
        return found

    def _optimizers_of(self, model: nn.Module) -> list[torch.optim.Optimizer] | None:
        return [each.optimizer for each in self._optimizers if each._model is model] or None

    def _places(self, folder: Path) -> list[tuple[nn.Module, Path]]:
        if not self._models:
            raise ValueError("there is no prepared model to save or load: call accelerator.prepare(model, ...) first")
        if len(self._models) == 1:
            return [(self._models[0], folder)]
        return [(model, folder / f"model_{index}") for index, model in enumerate(self._models)]

    def _folders(self) -> tuple[Path, list[int]]:
        if self.project_dir is None:
            raise ValueError("no folder: pass one, or make the Accelerator with project_dir=")
        parent = self.project_dir / "checkpoints"
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            names = [re.fullmatch(r"checkpoint_(\d+)", path.name) for path in parent.glob("checkpoint_*")]
            found = [sorted(int(name[1]) for name in names if name is not None)]
        dist.broadcast_object_list(found, 0)
        return parent, found[0]

    def _next_folder(self) -> Path:
        parent, numbers = self._folders()
        return parent / f"checkpoint_{numbers[-1] + 1 if numbers else 0}"

    def _last_folder(self) -> Path:
        parent, numbers = self._folders()
        if not numbers:
            raise ValueError(f"there is no checkpoint in {parent}: pass the folder to load from")
        return parent / f"checkpoint_{numbers[-1]}"


class _Positions:
    """Where all loaders are, as one."""

    def __init__(self, loaders: list[PreparedLoader]) -> None:
        self._loaders = loaders

    def state_dict(self) -> dict[str, Any]:
        return {"loaders": [loader.state_dict() for loader in self._loaders]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["loaders"]) != len(self._loaders):
            raise ValueError(
                f"{len(state['loaders'])} data loaders were saved, and {len(self._loaders)} are prepared here"
            )
        for loader, held in zip(self._loaders, state["loaders"], strict=True):
            loader.load_state_dict(held)


def _bytes(size: int | str) -> int:
    """
    >>> _bytes("5GB")
    5000000000
    """
    found = re.fullmatch(r"(\d+)\s*([KMG]?I?B?)", str(size).strip().upper())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"max_shard_size={size!r} must be a number of bytes, or text such as '5GB'")
    return int(found[1]) * _UNITS[found[2]]
