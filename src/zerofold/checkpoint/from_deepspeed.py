"""Checkpoints of DeepSpeed, ZeRO stages 0 to 3, without DeepSpeed.

    latest                                              names the newest folder
    global_step3/mp_rank_00_model_states.pt             stages 0 to 2: the module's weights, names and shapes, counters
    global_step3/zero_pp_rank_0_mp_rank_00_…            stage 3: the same, one for each rank, without weights
    global_step3/[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt    each rank's fp32 masters and moments, flat

    global_step3_universal/zero/<parameter>/fp32.pt …   after ds_to_universal.py: one file for each state

Not read: several model-parallel ranks, pipeline stages, experts. DeepSpeed's ds_to_universal.py merges these.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from zerofold.checkpoint.contents import CheckpointError, Contents, OptimizerContents, Stored, numel
from zerofold.checkpoint.deepspeed_flat import cut_across, read_optimizer, read_partitions
from zerofold.checkpoint.deepspeed_universal import read_universal
from zerofold.checkpoint.ondisk import TensorOnDisk, joined
from zerofold.checkpoint.pickle_names import Inert
from zerofold.checkpoint.positions import by_name
from zerofold.checkpoint.torch_file import load_torch
from zerofold.checkpoint.unpickle import plain

MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER_FILE = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
OTHER_FILE = re.compile(r"layer_.*\.pt|expp_rank_.*\.pt|.*_expert_.*\.pt")
LATEST = ("latest", "latest_universal")
LARGEST_TAG_FILE = 4096
# What DeepSpeed itself puts into the model's file; the rest is what the caller gave to save_checkpoint.
OWN_KEYS = """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
    data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size
    mp_world_size num_experts ds_config ds_version checkpoint_parallel_dimensions universal_checkpoint_info
"""
COUNTERS = ("global_steps", "global_samples")


def is_deepspeed(folder: Path) -> bool:
    return _has_model(folder) or ((tag := _latest(folder)) is not None and _has_model(tag))


def read_deepspeed(folder: Path) -> Contents:
    tag = folder if _has_model(folder) else _latest(folder)
    if tag is None or not tag.is_dir():
        raise CheckpointError(
            f"{folder} is no checkpoint of DeepSpeed: it has no model states, and no file 'latest' that names a folder "
            "beside it; copy the whole checkpoint"
        )
    models, optimizers = _files(tag)
    try:
        return _contents(tag, [_loaded(file) for file in models], [_loaded(file) for file in optimizers])
    except CheckpointError:
        raise
    # By now these are plain dicts and lists, but of any form: what does not fit breaks the walk through them somewhere.
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{tag} is damaged, or written by a DeepSpeed that is not known here ({type(error).__name__}: {error})"
        ) from error


def _has_model(folder: Path) -> bool:
    return folder.is_dir() and any(MODEL_FILE.fullmatch(file.name) for file in folder.iterdir())


def _latest(folder: Path) -> Path | None:
    """The folder that `latest` names: one beside it, so that a file that somebody made cannot lead elsewhere."""
    latest = next((file for name in LATEST if (file := folder / name).is_file()), folder / LATEST[0])
    if not latest.is_file() or latest.stat().st_size > LARGEST_TAG_FILE:
        return None
    tag = latest.read_bytes().decode(errors="replace").strip()
    return folder / tag if re.fullmatch(r"[^/\\\0]+", tag) and tag not in (".", "..") else None


def _files(tag: Path) -> tuple[list[Path], list[Path]]:
    """Model files and optimizer files, each in the order of the ranks."""
    found: tuple[dict[int, Path], dict[int, Path]] = ({}, {})
    for file in sorted(tag.iterdir()):
        if OTHER_FILE.fullmatch(file.name):
            raise CheckpointError(
                f"{file} is of a pipeline stage or an expert, which is not read here: "
                "convert the checkpoint with DeepSpeed's ds_to_universal.py first"
            )
        for files, pattern in zip(found, (MODEL_FILE, OPTIMIZER_FILE), strict=True):
            match = pattern.fullmatch(file.name)
            if match is None:
                continue
            rank = int(match[1] or 0)
            if int(match[2]) or rank in files:
                raise CheckpointError(
                    f"{tag} holds {file.name} beside others: the model was cut over several ranks (tensor "
                    "parallelism), or two runs wrote into one folder; "
                    "convert it with DeepSpeed's ds_to_universal.py first"
                )
            files[rank] = file
    for files in found:
        missing = next((rank for rank in range(len(files)) if rank not in files), None)
        if missing is not None:
            raise CheckpointError(f"{tag} has no file of rank {missing}: copy the whole checkpoint")
    models, optimizers = ([files[rank] for rank in sorted(files)] for files in found)
    if not models:
        raise CheckpointError(f"{tag} has no file with model states: copy the whole checkpoint")
    return models, optimizers


def _loaded(file: Path) -> dict[str, Any]:
    state = load_torch(file)
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} holds no dict of states: it is not what DeepSpeed writes")
    return state


def _contents(tag: Path, models: list[dict[str, Any]], files: list[dict[str, Any]]) -> Contents:
    model, where = models[0], str(tag)
    contents = Contents(where, aliases={str(k): str(v) for k, v in (model.get("shared_params") or {}).items()})
    buffers = set(model.get("buffer_names") or [])
    _add_module(contents, model, buffers)
    ranks = [file["optimizer_state_dict"] for file in files]
    scaler: Any = None
    if ranks:
        _check_count(ranks, len(models), where)
        scaler = ranks[0].get("loss_scaler")
        partitions = read_partitions(ranks, model["param_shapes"], where)
        for number, pieces in enumerate(partitions.masters):
            contents.tensors.update(partitions.cut(number, pieces))
        contents.optimizers.append(read_optimizer(partitions, where))
    elif (tag / "zero").is_dir():
        read_universal(contents, tag / "zero", model["param_shapes"])
    elif model.get("optimizer"):
        scaler = model["optimizer"]
        contents.optimizers.append(_whole_optimizer(contents, model["optimizer"], buffers))
    _add_frozen(contents, models)
    expected = [*contents.aliases.values(), *(name for group in model.get("param_shapes") or [] for name in group)]
    missing = [name for name in expected if name not in contents.tensors]
    if missing:
        raise CheckpointError(
            f"{where} has no weights for {', '.join(missing[:5])}: at stage 3 they are in the optimizer files "
            "(*_optim_states.pt); copy the whole checkpoint"
        )
    config = model.get("ds_config")
    kind = config.get("optimizer", {}).get("type", "") if isinstance(config, dict) else ""
    for optimizer in contents.optimizers:
        optimizer.kind = kind if isinstance(kind, str) else ""
    _add_plain(contents, model, scaler)
    return contents


def _check_count(ranks: list[dict[str, Any]], model_files: int, where: str) -> None:
    count = ranks[0].get("partition_count", len(ranks))
    count = max(count) if isinstance(count, list) else count
    if count != len(ranks) or model_files not in (1, len(ranks)):
        raise CheckpointError(
            f"{where} has {len(ranks)} optimizer files and {model_files} model files, and {count} ranks wrote it: "
            "copy the whole checkpoint"
        )


def _add_module(contents: Contents, model: dict[str, Any], buffers: set[str]) -> None:
    """Buffers and weights of the module. Stage 3 leaves empty tensors where weights were; those come from elsewhere."""
    storages: dict[Any, str] = {}
    partitioned = {name for group in model.get("param_shapes") or [] for name in group}
    for name, stored in (model["module"] or {}).items():
        if not isinstance(stored, TensorOnDisk) or name in contents.aliases:
            continue
        if stored.shape == (0,) and name not in buffers:
            continue
        same = (stored.record.region, stored.begin, stored.shape)
        if numel(stored) and same in storages and name not in partitioned:
            contents.aliases[name] = storages[same]
            continue
        storages[same] = name
        contents.tensors[name] = stored


def _add_frozen(contents: Contents, models: list[dict[str, Any]]) -> None:
    """Parameters that no optimizer has: whole at stage 2, cut like the others at stage 3."""
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        if name not in contents.tensors:
            pieces = [model["frozen_param_fragments"][name] for model in models]
            contents.tensors[name] = joined(pieces, shape, where=f"{name} in {contents.where}")


def _whole_optimizer(contents: Contents, saved: dict[str, Any], buffers: set[str]) -> OptimizerContents:
    """Stage 0: a plain optimizer, or one of DeepSpeed's around it that has fp32 copies of 16-bit weights."""
    inner = saved.get("optimizer_state_dict", saved)
    groups = plain(inner["param_groups"], contents.where)
    model = {name: stored.shape for name, stored in contents.tensors.items() if name not in buffers}
    if "fp32_groups_flat" in saved:
        return _flat_optimizer(contents, saved["fp32_groups_flat"], inner["state"], groups, model)
    masters = dict(enumerate(master for group in saved.get("fp32_groups") or [] for master in group))
    states = {position: dict(state) for position, state in inner["state"].items()}
    for position, master in masters.items():
        states.setdefault(position, {})["master"] = master
    optimizer = by_name(groups, states, model)
    for name, state in optimizer.states.items():
        master = state.pop("master", None)
        if master is not None and name not in contents.tensors:
            raise _unnamed(contents.where)
        if master is not None:
            contents.tensors[name] = master
    return optimizer


def _flat_optimizer(
    contents: Contents, flat: list[Stored], states: dict[int, Any], groups: Any, model: dict[str, tuple[int, ...]]
) -> OptimizerContents:
    where, paddings = contents.where, [0] * len(model)
    if len(flat) != 1 or numel(flat[0]) != sum(numel(contents.tensors[name]) for name in model):
        raise _unnamed(where)
    contents.tensors.update(cut_across(flat, model, paddings, tail=0, where=where))
    cut = {
        key: cut_across([value], model, paddings, tail=0, where=where) if value.shape else dict.fromkeys(model, value)
        for key, value in states.get(0, {}).items()
    }
    by_parameter = {name: {key: tensors[name] for key, tensors in cut.items()} for name in model}
    return OptimizerContents([{**groups[0], "params": list(model)}], by_parameter)


def _unnamed(where: str) -> CheckpointError:
    return CheckpointError(
        f"{where} numbers its fp32 weights and does not name them, and their shapes fit several parameters: "
        "save it again with ZeRO stage 1, which names them"
    )


def _add_plain(contents: Contents, model: dict[str, Any], scaler: Any) -> None:
    where = contents.where
    extra = {key: plain(value, where) for key, value in model.items() if key not in OWN_KEYS.split()}
    extra |= {key: model[key] for key in COUNTERS if key in model}
    contents.plain["extra"] = extra
    if model.get("lr_scheduler"):
        contents.plain["scheduler"] = plain(model["lr_scheduler"], where)
    fields = scaler.fields if isinstance(scaler, Inert) else scaler or {}
    if fields.get("cur_scale", 1) != 1 or fields.get("dynamic") or fields.get("dynamic_loss_scale"):
        contents.plain["scaler"] = {
            "value": float(fields["cur_scale"]),
            "tolerated": int(fields.get("cur_hysteresis", 1)) - 1,
            "clean": int(fields.get("cur_iter", 0)) - int(fields.get("last_overflow_iter", -1)) - 1,
            "skipped": int(model.get("skipped_steps", 0)),
            "skipped_in_a_row_at_minimum": 0,
        }
