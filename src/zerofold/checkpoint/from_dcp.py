"""Checkpoints of torch.distributed.checkpoint, as FSDP2, torchtitan and `dcp.save` write them.

    .metadata        a pickle: which tensors there are, in which boxes, and in which file each box lies
    __0_0.distcp     files of torch.save, one after another: a box of a tensor, or a value, each
    __1_0.distcp

Boxes are N-dimensional: FSDP cuts the first dimension, tensor parallelism any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from zerofold.checkpoint.contents import CheckpointError, Contents, OptimizerContents, Stored, numel
from zerofold.checkpoint.ondisk import Box, Boxed, Region, TensorOnDisk
from zerofold.checkpoint.pickle_names import Inert
from zerofold.checkpoint.positions import by_name
from zerofold.checkpoint.torch_file import load_pickle, load_torch
from zerofold.checkpoint.unpickle import plain

METADATA = ".metadata"
# Accelerate, and the Trainer of transformers with it, writes two checkpoints side by side.
ACCELERATE_MODEL, ACCELERATE_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
# What a model, an optimizer and the rest are usually called in the dict that was saved.
MODEL_KEYS = ("model", "module", "model_state_dict", "state_dict", "network", "net")
SCHEDULER_KEYS = ("scheduler", "lr_scheduler")

Keys = tuple[str | int, ...]


def is_dcp(folder: Path) -> bool:
    return (folder / METADATA).is_file() or (folder / ACCELERATE_MODEL / METADATA).is_file()


def read_dcp(folder: Path) -> Contents:
    if (folder / METADATA).is_file():
        return _read(folder)
    contents = _read(folder / ACCELERATE_MODEL)
    if (folder / ACCELERATE_OPTIMIZER / METADATA).is_file():
        contents.optimizers = _read(folder / ACCELERATE_OPTIMIZER).optimizers
    return contents


def _read(folder: Path) -> Contents:
    file = folder / METADATA
    try:
        items = _items(folder, load_pickle(file))
        return _contents(folder, items)
    except CheckpointError:
        raise
    # The metadata is plain data by now, but of any form: what does not fit breaks the walk through it somewhere.
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} is damaged or of an unknown form ({type(error).__name__}: {error}); "
            "use another copy of the checkpoint"
        ) from error


@dataclass(frozen=True)
class Value:
    """Something that is no tensor; read when it is needed."""

    region: Region

    def load(self) -> Any:
        return plain(load_torch(self.region), str(self.region.path))


Item = Boxed | Value


def _items(folder: Path, metadata: Any) -> dict[Keys, Item]:
    """All that was saved, by its place in the nested dict, in the order of that dict."""
    fields = _fields(metadata, "Metadata")
    places: dict[tuple[str, tuple[int, ...] | None], Region] = {}
    files: dict[str, Region] = {}  # looked at once each: there are many more pieces than files
    for index, info in fields["storage_data"].items():
        key = _fields(index, "MetadataIndex")
        places[key["fqn"], key.get("offset")] = _region(folder, key["fqn"], _fields(info, "_StorageInfo"), files)
    described = fields["state_dict_metadata"]
    nested: Mapping[str, Any] = fields.get("planner_data") or {}
    order = [name for name in nested if name in described] + [name for name in described if name not in nested]
    items: dict[Keys, Item] = {}
    for name in order:
        keys = tuple(nested[name]) if name in nested else (name,)
        if not all(isinstance(key, str | int) for key in keys):
            raise ValueError(f"the place of {name} is no list of keys")
        if described[name].name.endswith(".BytesStorageMetadata"):
            items[keys] = Value(_place(folder, places, name, None))
        else:
            items[keys] = _tensor(folder, name, _fields(described[name], "TensorStorageMetadata"), places)
    return items


def _tensor(folder: Path, name: str, fields: dict[str, Any], places: dict[Any, Region]) -> Boxed:
    shape = _sizes(fields["size"])
    dtype = fields["properties"].args[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype")
    boxes = {}
    for chunk in fields["chunks"]:
        box = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _sizes(box["offsets"]), _sizes(box["sizes"])
        if any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a piece of {name} lies outside of it")
        region = _place(folder, places, name, offsets)
        if math.prod(sizes) * dtype.itemsize > region.length:
            raise ValueError(f"a piece of {name} does not fit into the bytes that it should be in")
        boxes[offsets] = Box(offsets, sizes, cache(partial(_open, region, name)))
    return Boxed(shape, dtype, tuple(boxes.values()), where=f"{name} in {folder}")


def _open(region: Region, name: str) -> Stored:
    found = load_torch(region)
    if not isinstance(found, TensorOnDisk):
        raise CheckpointError(f"{region.path} is damaged: it holds no tensor where a piece of {name} should be")
    return found


def _region(folder: Path, name: str, info: dict[str, Any], files: dict[str, Region]) -> Region:
    if info.get("transform_descriptors"):
        raise CheckpointError(
            f"{name} in {folder} went through {info['transform_descriptors']} when it was saved, which cannot be "
            "undone here: load it with the same storage reader and save it without"
        )
    path = info["relative_path"]
    if info["offset"] < 0 or info["length"] < 0:
        raise ValueError(f"{name} has no place in {path}")
    if path not in files:
        # A file that somebody made must not lead out of its folder.
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise CheckpointError(f"{folder / METADATA} refers to {path}, outside of the checkpoint: refused")
        files[path] = Region.whole(folder / path)
    return files[path].part(info["offset"], info["length"])


def _place(folder: Path, places: dict[Any, Region], name: str, offsets: tuple[int, ...] | None) -> Region:
    if (name, offsets) not in places:
        raise CheckpointError(f"{folder / METADATA} does not say where {name} is: use another copy of the checkpoint")
    return places[name, offsets]


def _fields(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, Inert) or not value.name.endswith(f".{kind}"):
        raise ValueError(f"{str(value)[:60]} where a {kind} should be")
    return value.fields


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int and 0 <= size < 2**62 for size in value):
        raise ValueError(f"{str(value)[:60]} where a shape should be")
    return value


def _contents(folder: Path, items: dict[Keys, Item]) -> Contents:
    items = _unflattened(items)
    roots = _optimizer_roots(items)
    rest = {keys: item for keys, item in items.items() if not any(keys[: len(root)] == root for root in roots)}
    model = _model_root(folder, rest)
    inside = {keys: item for keys, item in rest.items() if keys[: len(model)] == model and isinstance(item, Boxed)}
    tensors: dict[str, Stored] = {
        ".".join(str(key) for key in keys[len(model) :]): item
        for keys, item in inside.items()
        if isinstance(item, Boxed)
    }
    contents = Contents(str(folder), tensors)
    for root in roots:
        below = {keys[len(root) :]: item for keys, item in items.items() if keys[: len(root)] == root}
        contents.optimizers.append(_optimizer(below, {name: stored.shape for name, stored in tensors.items()}))
    extra = _nested({keys: item for keys, item in rest.items() if keys not in inside})
    for key in SCHEDULER_KEYS:
        if isinstance(extra, dict) and key in extra:
            contents.plain["scheduler"] = extra.pop(key)
    if extra:
        contents.plain["extra"] = extra
    return contents


def _unflattened(items: dict[Keys, Item]) -> dict[Keys, Item]:
    """Optimizers that were flattened before they were saved (torchtitan does), with their levels again.

    "state.a.weight.exp_avg"    →  "state", "a.weight", "exp_avg"
    "param_groups.a.weight.lr"  →  "param_groups", "a.weight", "lr"
    """
    flat = {keys[:-1] for keys in items if isinstance(keys[-1], str) and keys[-1].startswith("param_groups.")}
    result: dict[Keys, Item] = {}
    for keys, item in items.items():
        head, _, rest = str(keys[-1]).partition(".")
        name, _, last = rest.rpartition(".")
        known = keys[:-1] in flat and head in ("state", "param_groups") and name
        result[(*keys[:-1], head, name, last) if known else keys] = item
    return result


def _optimizer_roots(items: dict[Keys, Item]) -> list[Keys]:
    """Where there are param_groups, there is an optimizer."""
    roots = {keys[: keys.index("param_groups")]: None for keys in items if "param_groups" in keys}
    return list(roots)


def _model_root(folder: Path, items: dict[Keys, Item]) -> Keys:
    """The dict that holds the model: one with a usual name, or the only one with tensors."""
    tensors = [keys for keys, item in items.items() if isinstance(item, Boxed)]
    for keys in tensors:
        for length, key in enumerate(keys[:-1], 1):
            if key in MODEL_KEYS:
                return keys[:length]
    roots = list({keys[:-1]: None for keys in tensors})
    if len(roots) > 1 and () not in roots:
        raise CheckpointError(
            f"{folder} holds tensors under {', '.join('.'.join(map(str, root)) for root in roots[:8])}, and none of "
            f"them is called {', '.join(MODEL_KEYS[:4])}: save the model under one of these names"
        )
    return () if () in roots or not roots else roots[0]


def _optimizer(items: dict[Keys, Item], model: dict[str, tuple[int, ...]]) -> OptimizerContents:
    states: dict[Any, dict[str, Any]] = {}
    for keys, item in items.items():
        if keys[0] == "state" and len(keys) > 2:
            name = ".".join(str(key) for key in keys[2:])
            states.setdefault(keys[1], {})[name] = item.load() if isinstance(item, Value) else item
    groups = _nested({keys[1:]: item for keys, item in items.items() if keys[0] == "param_groups"})
    if isinstance(groups, dict) and all(isinstance(key, str) for key in groups):
        groups = _by_settings(groups)
    elif isinstance(groups, dict):
        groups = [groups[number] for number in sorted(groups)]
    if all(type(position) is int for group in groups for position in group["params"]):
        return by_name(groups, {int(position): state for position, state in states.items()}, model)
    return OptimizerContents(groups, {str(name): state for name, state in states.items()})


def _by_settings(settings: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of the parameters that have the same settings, where each has its own."""
    groups: dict[str, dict[str, Any]] = {}
    for name, own in settings.items():
        groups.setdefault(repr(own), {**own, "params": []})["params"].append(name)
    return list(groups.values())


def _nested(items: dict[Keys, Item]) -> Any:
    """Values, and tensors that belong to no model, back in the dicts that they came from; a list has whole numbers."""
    result: dict[Any, Any] = {}
    for keys, item in items.items():
        loaded = item.load() if isinstance(item, Value) else item.read(0, numel(item)).view(item.shape)
        if not keys:
            return loaded
        place = result
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = loaded
    return result
