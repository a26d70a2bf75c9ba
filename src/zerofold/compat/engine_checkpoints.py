"""Checkpoints of an engine: DeepSpeed's calls and layout of names, zerofold's format.

save_dir/latest                 names the newest
save_dir/global_step100/        a checkpoint of zf.save: loads at any number of ranks and any stage
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofold.checkpoint.around import SchedulersDifferError
from zerofold.checkpoint.contents import CheckpointError, numel
from zerofold.checkpoint.from_dcp import is_dcp
from zerofold.checkpoint.from_deepspeed import is_deepspeed
from zerofold.checkpoint.load import load
from zerofold.checkpoint.manifest import candidates, is_checkpoint, named_latest, write_durably
from zerofold.checkpoint.save import save
from zerofold.checkpoint.whole import live_tensors
from zerofold.config import Settings
from zerofold.engine import Engine

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
RESOLVED = "ds_config.resolved.json"
_OURS = "engine"  # beside client_state in what a checkpoint holds for us


class Checkpoints:
    """The part of an engine that saves and loads."""

    module: nn.Module
    settings: Settings
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    micro_steps: int
    global_steps: int
    gradient_accumulation_steps: Callable[[], int]
    _boundary: bool | None
    _count_to_boundary: Callable[[], None]

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes save_dir/tag, "global_step7" by default; all ranks must call it. See `zf.save` for what it holds.

        client_state is plain data of yours (numbers, text, lists, dicts, tensors), which load_checkpoint gives back.
        """
        if not save_dir:
            raise ValueError(f"save_dir={save_dir!r} must name a folder for checkpoints")
        self._tell_of_unfinished_step()
        counters = {name: getattr(self, name) for name in _COUNTERS}
        extra = {_OURS: counters, "client_state": dict(client_state or {})}
        save(
            self.module,
            self.optimizer,
            save_dir,
            extra=extra,
            scheduler=self.lr_scheduler,
            tag=self._agreed(str(tag) if tag is not None else f"global_step{counters['global_steps']}"),
            latest=save_latest,
            trainable_only=exclude_frozen_parameters,
        )
        if dist.get_rank() == 0:
            keep_config(self.settings.resolved, Path(save_dir))
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads load_dir/tag, or the newest that is whole; returns its path and the client_state it was saved with.

        It may have been written by zerofold or by DeepSpeed, at any stage and number of ranks. Without a tag, a folder
        that holds no checkpoint gives (None, None) and a warning, since a first run often begins that way.
        """
        if custom_load_fn is not None:
            raise ValueError(
                "custom_load_fn is not supported: load with load_module_only=True, or change weights inside "
                "`with zf.full_params(engine.module)`"
            )
        folder = Path(load_dir)
        if tag is None and not _holds_any(folder):
            if dist.get_rank() == 0:
                warnings.warn(f"{folder} holds no checkpoint: nothing was loaded", stacklevel=2)
            return None, None
        path = folder if tag is None else folder / str(tag)
        optimizer = self.optimizer if load_optimizer_states and not load_module_only else None
        scheduler = self.lr_scheduler if load_lr_scheduler_states and not load_module_only else False
        try:
            extra = load(self.module, optimizer, path, scheduler=scheduler, strict=load_module_strict)
        except SchedulersDifferError as differs:
            extra = load(self.module, optimizer, path, scheduler=False, strict=load_module_strict)
            if dist.get_rank() == 0:
                warnings.warn(f"{differs}. The rest was loaded", stacklevel=2)
        counters, client_state = _parted(extra)
        if not load_module_only:
            for name in _COUNTERS:
                setattr(self, name, int(counters.get(name, getattr(self, name))))
            self.micro_steps = self.global_steps * self.gradient_accumulation_steps()  # whole steps, whatever was saved
            self._count_to_boundary()
        latest = named_latest(folder)
        return str(folder / latest if tag is None and latest is not None else path), client_state

    def _tell_of_unfinished_step(self) -> None:
        begun = self.micro_steps % self.gradient_accumulation_steps()
        if begun and self._boundary is None and dist.get_rank() == 0:
            warnings.warn(
                f"the checkpoint is taken {begun} micro-batch(es) into a step of {self.gradient_accumulation_steps()}; "
                "their gradients are not in it, and a run that goes on from it begins that step anew",
                stacklevel=3,
            )

    def _agreed(self, tag: str) -> str:
        """Rank 0's tag, and what the config says about ranks that name another."""
        tags = Engine.of(self.module).groups.control.all_gather_objects(tag)
        others = {rank: other for rank, other in enumerate(tags) if other != tags[0]}
        if others and self.settings.tag_validation != "Ignore":
            rank, other = next(iter(others.items()))
            message = (
                f"the ranks name different checkpoints: rank 0 '{tags[0]}', rank {rank} '{other}'. A tag must be the "
                "same on all ranks"
            )
            if self.settings.tag_validation == "Fail":
                raise ValueError(f"{message} (checkpoint.tag_validation is 'Fail')")
            if dist.get_rank() == 0:
                warnings.warn(f"{message}; it is saved as '{tags[0]}'", stacklevel=3)
        return tags[0]

    def module_state_dict(self, *, exclude_frozen_parameters: bool = False, **_: Any) -> dict[str, Tensor] | None:
        """Whole tensors in the dtype of computation: on every rank where parameters are whole, else on rank 0."""
        return self._whole_state_dict(exclude_frozen=exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        if not self.settings.gather_16bit_on_save:
            raise ValueError(
                "zero_optimization.stage3_gather_16bit_weights_on_model_save is false, so whole weights are not "
                "gathered: set it to true, or use zf.export(engine.module, folder), which gathers piece by piece"
            )
        return self._whole_state_dict(exclude_frozen=exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def _whole_state_dict(self, *, exclude_frozen: bool) -> dict[str, Tensor] | None:
        """On the host, one tensor gathered at a time; tied ones are one tensor under all their names."""
        core = Engine.of(self.module)
        dtype = core.precision.parameters if core.precision.is_mixed else None
        live = live_tensors(self.module, dtype=dtype)
        trained = {name for name, p in self.module.named_parameters(remove_duplicate=False) if p.requires_grad}
        keeps = not core.row.parameters.is_cut or dist.get_rank() == 0
        found: dict[str, Tensor] = {}
        names = dict(self.module.named_parameters(remove_duplicate=False))
        for name, stored in live.tensors.items():
            others = [alias for alias, kept in live.aliases.items() if kept == name]
            if exclude_frozen and not trained.intersection([name, *others]) and name in names:
                continue
            whole = stored.read(0, numel(stored)).view(stored.shape)
            if keeps:
                found |= dict.fromkeys([name, *others], whole.cpu())
        return found if keeps else None

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes whole weights into one file, by rank 0; all ranks must call it. False if the config forbids it.

        A name that ends in .safetensors is written as such. `zf.export` streams, and needs no rank to hold the model.
        """
        core = Engine.of(self.module)
        path = Path(save_dir) / save_filename
        if core.row.parameters.is_cut and not self.settings.gather_16bit_on_save:
            if dist.get_rank() == 0:
                warnings.warn(
                    f"{path} was not written: zero_optimization.stage3_gather_16bit_weights_on_model_save is false",
                    stacklevel=2,
                )
            return False
        state = self._whole_state_dict(exclude_frozen=exclude_frozen_parameters)
        error: str | None = None
        if dist.get_rank() == 0:
            assert state is not None
            try:
                _write(state, path)
            except OSError as failed:
                error = f"{path} could not be written: {failed}"
        error = core.groups.control.all_gather_objects(error)[0]
        if error is not None:
            raise CheckpointError(error)
        return True

    save_fp16_model = save_16bit_model


def _write(state: dict[str, Tensor], path: Path) -> None:
    """Under its name only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        once = {id(tensor): (name, tensor) for name, tensor in reversed(state.items())}  # it refuses shared memory
        save_file({name: tensor.contiguous() for name, tensor in once.values()}, temporary, {"format": "pt"})
    else:
        torch.save(state, temporary)
    os.replace(temporary, path)


def keep_config(resolved: Mapping[str, Any], folder: Path) -> None:
    """The config as it was resolved, beside what else a run leaves behind."""
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / RESOLVED, (json.dumps(resolved, indent=2, default=str) + "\n").encode())


def _holds_any(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    return any(is_checkpoint(found) for found in candidates(folder)) or is_dcp(folder) or is_deepspeed(folder)


def _parted(extra: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our counters and the user's data; DeepSpeed's own checkpoints hold both side by side."""
    if _OURS in extra and "client_state" in extra:
        return extra[_OURS], extra["client_state"]
    counters = {name: extra[name] for name in _COUNTERS if name in extra}
    return counters, {name: value for name, value in extra.items() if name not in counters}
