"""zero_optimization: which row of the table of placements, in groups of how many ranks, what is offloaded."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from zerofold.config.checking import Checked
from zerofold.config.errors import wrong
from zerofold.config.keys_zero import DEFAULT_BUCKET
from zerofold.memory.buffers import default_buffer_bytes
from zerofold.placement import row

_ZERO = "zero_optimization"
_RATIO = f"{_ZERO}.offload_optimizer.ratio"
_BUCKETS = (f"{_ZERO}.reduce_bucket_size", f"{_ZERO}.allgather_bucket_size")
_ELEMENT_BYTES = 4
LEAST_BUFFER_BYTES = 2**20


class Placed(NamedTuple):
    stage: int | str
    group: int | None


def resolve_stage(checked: Checked, world: int) -> Placed:
    stage: int = checked[f"{_ZERO}.stage"]
    hpz, mics = f"{_ZERO}.zero_hpz_partition_size", f"{_ZERO}.mics_shard_size"
    if checked[hpz] > 1 and checked[mics] > 0:
        raise wrong(mics, checked[mics], "keep one of the two", why="contradicts zero_hpz_partition_size")
    for path, name, least in ((hpz, "hpz", 2), (mics, "hsdp", 1)):
        size = checked[path]
        if size < least:
            continue
        if not row(stage).releases_parameters:
            raise wrong(path, size, f"set {_ZERO}.stage to 3, or leave it out", why="needs stage 3")
        if world % size:
            divisors = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
            raise wrong(path, size, f"choose one of {divisors}", why=f"does not divide {world} ranks")
        checked.map(path, f"stage {name!r} in groups of {size}")
        return Placed(name, size)
    return Placed(stage, None)


def resolve_offload(checked: Checked) -> dict[str, Any]:
    """What the two sections come to, as offload= of zf.shard takes it; empty where both say "none"."""
    placed, found, paths = row(checked[f"{_ZERO}.stage"]), {}, {}
    for section, state, is_cut, stages in (
        ("offload_optimizer", "optimizer", placed.optimizer.is_cut, "1, 2 or 3"),
        ("offload_param", "parameters", placed.parameters.is_cut, "3"),
    ):
        path = f"{_ZERO}.{section}.device"
        where = checked[path]
        if where == "none":
            continue
        if not is_cut:
            fix = f'set {_ZERO}.stage to {stages}, or the device to "none"'
            raise wrong(path, where, fix, why=f"is not possible at stage {placed.name}, where each rank has all of it")
        found[state] = "nvme" if where == "nvme" else "host"
        if where == "nvme":
            paths[f"{_ZERO}.{section}.nvme_path"] = _folder(checked, section)
    if not found:
        return {}
    ratio = checked[_RATIO]
    if found.get("optimizer") == "host" and ratio < 1:
        found["optimizer"] = ratio
    elif _RATIO in checked.given and ratio < 1:
        raise wrong(_RATIO, ratio, "set the device to cpu, or leave the ratio out", why="is a part for the host")
    if "optimizer" not in found:
        found["optimizer"] = found["parameters"]
        checked.map(f"{_ZERO}.offload_param.device", "the optimizer's states, which parameters are made from, go along")
    if paths:
        found["path"] = next(iter(paths.values()))
    for path, folder in paths.items():
        if folder != found["path"]:
            checked.map(path, f"one folder holds all states: {found['path']}")
    for path in (f"{_ZERO}.offload_optimizer.device", f"{_ZERO}.offload_param.device"):
        if checked[path] != "none":
            checked.map(path, f"offload={found}")
    return found


def _folder(checked: Checked, section: str) -> str:
    path = f"{_ZERO}.{section}.nvme_path"
    folder = checked[path]
    if folder in (None, "none"):
        raise wrong(path, folder, 'give a folder on the disk, or set the device to "cpu"', why="for device nvme")
    return str(folder)


def resolve_buffer_bytes(checked: Checked, model: nn.Module | None) -> int:
    """One buffer serves for all; what the config says is an upper bound of it."""
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    if checked.is_auto(_BUCKETS[0]) and hidden:
        checked.settle(_BUCKETS[0], hidden * hidden, "hidden size squared")
    for path in _BUCKETS:
        if checked.is_auto(path):
            checked.settle(path, DEFAULT_BUCKET, "the default")
    given = [path for path in _BUCKETS if path in checked.given]
    elements = min((checked[path] for path in given), default=DEFAULT_BUCKET)
    most = default_buffer_bytes("cuda" if torch.accelerator.is_available() else "cpu")
    found = min(most, max(LEAST_BUFFER_BYTES, elements * _ELEMENT_BYTES))
    for path in given:
        checked.map(path, f"upper bounds of one buffer of {found / 2**20:g} MiB")
    return found
