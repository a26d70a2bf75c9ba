"""From a config to Settings: checked key by key, then each "auto" found, then what belongs together compared."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zerofold.config.batch import MICRO, STEPS, TRAIN, resolve_batch
from zerofold.config.checking import Checked, check
from zerofold.config.components import resolve_optimizer, resolve_scheduler
from zerofold.config.dtypes import resolve_autocast, resolve_precision
from zerofold.config.errors import ConfigError, wrong
from zerofold.config.keys import Note, Old, Section
from zerofold.config.keys_training import TABLE
from zerofold.config.kinds import AUTO
from zerofold.config.settings import (
    CommsLogger,
    FileMonitor,
    FlopsProfiler,
    Settings,
    WandbMonitor,
)
from zerofold.config.stages import resolve_buffer_bytes, resolve_offload, resolve_stage

_CLIP = "gradient_clipping"
_USUAL_CLIP = 1.0
_GATHER_ON_SAVE = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
_OLD_SECTIONS = {"bfloat16": "bf16"}


def resolve(
    config: Mapping[str, Any],
    *,
    world: int,
    device: torch.device,
    model: nn.Module | None = None,
    batch: int | None = None,
    steps: int | None = None,
) -> Settings:
    """Everything a config says, for this many ranks, this device and this model; a ConfigError where it cannot be.

    batch   micro-batch size, where a data loader tells it and the config does not
    steps   length of training in optimizer steps, for a schedule whose total_num_steps is "auto"

    >>> import torch
    >>> config = {"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}, "train_batch_size": "auto"}
    >>> settings = resolve(config, world=4, device=torch.device("cpu"), batch=2)
    >>> settings.stage, settings.precision, settings.train_batch
    (3, None, 8)
    """
    renamed, notes = _with_new_names(config)
    checked = check(renamed, TABLE)
    checked.notes[:0] = notes
    numbers = resolve_batch(checked, world=world, batch=batch)
    placed = resolve_stage(checked, world)
    offload = resolve_offload(checked)
    optimizer = resolve_optimizer(checked)
    scheduler = resolve_scheduler(checked, optimizer, steps)
    precision = resolve_precision(checked, device=device, model=model, optimizer=optimizer)
    buffer_bytes = resolve_buffer_bytes(checked, model)
    clip = _resolve_clip(checked)
    if checked.is_auto(_GATHER_ON_SAVE):
        checked.settle(_GATHER_ON_SAVE, True, "whole weights are written when they are asked for")
    _settle_the_rest(checked)
    overlap = checked["zero_optimization.overlap_comm"]
    return Settings(
        stage=placed.stage,
        group=placed.group,
        precision=precision,
        autocast=resolve_autocast(checked),
        train_batch=numbers.train,
        micro_batch=numbers.micro,
        accumulate=numbers.accumulate,
        managed_accumulation=checked["managed_gradient_accumulation"],
        clip=clip,
        optimizer=optimizer,
        scheduler=scheduler,
        offload=offload,
        buffer_bytes=buffer_bytes,
        overlap=True if overlap is None else overlap,
        activation_checkpointing=checked.section("activation_checkpointing"),
        gather_16bit_on_save=checked[_GATHER_ON_SAVE],
        tag_validation=checked["checkpoint.tag_validation"],
        dataloader_drop_last=checked["dataloader_drop_last"],
        monitors=_monitors(checked),
        steps_per_print=_steps_per_print(checked),
        wall_clock_breakdown=checked["wall_clock_breakdown"],
        memory_breakdown=checked["memory_breakdown"],
        throughput=checked["timers.throughput.enabled"],
        dump_state=checked["dump_state"],
        flops_profiler=_flops_profiler(checked),
        comms_logger=_comms_logger(checked),
        device_type=device.type,
        world=world,
        notes=checked.notes,
        resolved=_resolved(renamed, checked),
    )


def _with_new_names(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Note]]:
    if not isinstance(config, Mapping):
        raise ConfigError(f"the config is {config!r}; give a dict, or what zerofold.config.read made of a file")
    renamed, notes = dict(config), []
    for old, new in _OLD_SECTIONS.items():
        if old in renamed:
            if new in renamed:
                raise wrong(old, renamed[old], "keep one of the two", why=f"is an old name of {new}, also given")
            renamed[new] = renamed.pop(old)
            notes.append(Note(old, config[old], "mapped", f"an old name of {new}"))
    return renamed, notes


def _resolve_clip(checked: Checked) -> float | None:
    if checked.is_auto(_CLIP):
        checked.settle(_CLIP, _USUAL_CLIP, "what Hugging Face's Trainer uses")
    elif _CLIP not in checked.given:
        checked.values[_CLIP] = _USUAL_CLIP
        text = f"not given, so {_USUAL_CLIP}, which is DeepSpeed's default; 0 switches it off"
        checked.notes.append(Note(_CLIP, None, "honoured", text))
    return checked[_CLIP] or None


def _settle_the_rest(checked: Checked) -> None:
    """Keys that have no effect here, and a note that says so: their defaults stand in for "auto"."""
    for path, value in checked.values.items():
        if value == AUTO:
            checked.values[path] = checked.defaults.get(path)


def _steps_per_print(checked: Checked) -> int | None:
    steps = checked["steps_per_print"]
    return None if steps is None or steps == math.inf else int(steps)


def _monitors(checked: Checked) -> tuple[FileMonitor | WandbMonitor, ...]:
    found: list[FileMonitor | WandbMonitor] = []
    for kind in ("tensorboard", "csv_monitor"):
        section = checked.section(kind)
        if section["enabled"]:
            found.append(FileMonitor(kind, section["output_path"], section["job_name"]))
    section = checked.section("wandb")
    if section["enabled"]:
        found.append(WandbMonitor(section["project"], section["group"], section["team"]))
    return tuple(found)


def _flops_profiler(checked: Checked) -> FlopsProfiler | None:
    section = checked.section("flops_profiler")
    if not section["enabled"]:
        return None
    return FlopsProfiler(
        section["profile_step"],
        section["module_depth"],
        section["top_modules"],
        section["detailed"],
        section["output_file"],
    )


def _comms_logger(checked: Checked) -> CommsLogger | None:
    section = checked.section("comms_logger")
    if not section["enabled"]:
        return None
    return CommsLogger(section["verbose"], () if section["prof_all"] else tuple(section["prof_ops"]))


def _resolved(config: Mapping[str, Any], checked: Checked) -> dict[str, Any]:
    """The user's own config, in its own shape: only what was "auto" or left open is written in."""
    found = {**config, **{key: checked[key] for key in (TRAIN, MICRO, STEPS, _CLIP)}}
    return _without_autos(found, TABLE, "", checked)


def _without_autos(section: Mapping[str, Any], table: Section | None, path: str, checked: Checked) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in section.items():
        here = f"{path}.{name}" if path else name
        spec = table.keys.get(name) if table is not None else None
        if isinstance(value, bool) and isinstance(spec, Section) and spec.short is not None:
            found[name] = spec.short(value)
        elif isinstance(value, Mapping):
            found[name] = _without_autos(value, spec if isinstance(spec, Section) else None, here, checked)
        elif value == AUTO:
            # Refused sections may say "auto" as long as that leaves them off.
            found[name] = checked.values.get(spec.new if isinstance(spec, Old) else here, False)
        else:
            found[name] = copy.deepcopy(value)
    return found
