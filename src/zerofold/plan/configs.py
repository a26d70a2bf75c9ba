"""A point as settings that can be used: keyword arguments of `zf.prepare`, and a ds_config.json."""

from __future__ import annotations

from typing import Any

from zerofold.placement import Tier, row
from zerofold.plan.held import Ranks
from zerofold.plan.pipelining import chunks_of
from zerofold.plan.point import Memory, Point

_DEEPSPEED = {Tier.HOST: "cpu", Tier.NVME: "nvme"}
DISK_FOLDER = "/path/on/a/disk"


def native(point: Point, ranks: Ranks, memory: Memory | None = None) -> dict[str, Any]:
    """For `zf.prepare(model, optimizer, **…)`; "mesh" stands for `init_device_mesh` of that shape, or, where it names
    its axes, for `zf.mesh` of those."""
    found: dict[str, Any] = {
        "stage": int(point.stage) if point.stage.isdigit() else point.stage,
        "precision": point.precision,
        "accumulate": point.accumulate,
    }
    placed = row(point.stage)
    has_groups = placed.copy is not None or placed.reduces_across
    if point.tensor * point.pipeline > 1:
        data = ranks.group if has_groups else ranks.data
        axes = {"data": data, "tensor": point.tensor, "pipeline": point.pipeline, "replicate": ranks.data // data}
        found["mesh"] = {axis: size for axis, size in axes.items() if size > 1 or axis == "data"}
    elif has_groups:
        found["mesh"] = [ranks.data // ranks.group, ranks.group]
    if point.contiguous_gradients:
        found["contiguous_gradients"] = True
    offload = _offload(point, memory)
    if offload:
        found["offload"] = offload
    return found


def _offload(point: Point, memory: Memory | None) -> dict[str, Any]:
    if point.auto:
        found: dict[str, Any] = {"optimizer": "auto"}
        if memory is not None:
            lines = ("activation checkpoints", "working activations", "logits", "local gradients")
            # The engine's rule counts one gradient of what stays, so room for the sums beside it must be kept too.
            found["reserve"] = sum(memory.device.get(line, 0) for line in lines) + memory.sums
            if any(memory.disk.values()):
                found["path"] = DISK_FOLDER
        return found
    if not point.tiers.is_offloaded:
        return {}
    tiers = {
        "optimizer": point.tiers.optimizer,
        "gradients": point.tiers.gradients,
        "parameters": point.tiers.parameters,
    }
    chosen: dict[str, Any] = {state: tier.value for state, tier in tiers.items()}
    return chosen | ({"path": DISK_FOLDER} if Tier.NVME in tiers.values() else {})


def ds_config(point: Point, ranks: Ranks) -> dict[str, Any]:
    """The same as a ds_config.json, of a point whose tiers have names (`zerofold.plan.named`); "dp" becomes stage 0."""
    placed = row(point.stage)
    zero: dict[str, Any] = {"stage": 3 if placed.parameters.is_cut else int(point.stage) if point.stage != "dp" else 0}
    if placed.copy is not None:
        zero["zero_hpz_partition_size"] = ranks.group
    elif placed.reduces_across:
        zero["mics_shard_size"] = ranks.group
    tiers = point.tiers
    for key, tier in (("offload_optimizer", tiers.optimizer), ("offload_param", tiers.parameters)):
        if tier is not Tier.DEVICE:
            zero[key] = {"device": _DEEPSPEED[tier]} | ({"nvme_path": DISK_FOLDER} if tier is Tier.NVME else {})
    if point.part < 1:
        zero["offload_optimizer"]["ratio"] = point.part
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": point.micro_batch,
        "gradient_accumulation_steps": point.accumulate,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }
    if point.precision in ("bf16", "fp16"):
        found[point.precision] = {"enabled": True}
    kept = {
        "partition_activations": point.keeps_parts,
        "cpu_checkpointing": point.keeps_away,
        "contiguous_memory_optimization": point.contiguous_checkpoints,
    }
    if any(kept.values()):
        found["activation_checkpointing"] = {key: True for key, is_on in kept.items() if is_on}
    return found


def tensor_arguments(point: Point) -> dict[str, Any]:
    """For `zf.tensor_parallel(model, mesh, **…)`, nothing where it is what `zf.prepare(mesh=…)` does by itself.

    >>> tensor_arguments(Point(tensor=2, sequence_parallel=True)), tensor_arguments(Point(tensor=2))
    ({'sequence_parallel': True}, {})
    """
    wished = {"sequence_parallel": point.sequence_parallel, "loss_parallel": point.loss_parallel}
    return {name: is_on for name, is_on in wished.items() if is_on and point.tensor > 1}


def pipeline_arguments(point: Point) -> dict[str, Any]:
    """For `zf.pipeline(model, mesh, **…)`, nothing where there is one stage.

    >>> pipeline_arguments(Point(pipeline=2, accumulate=4)), pipeline_arguments(Point())
    ({'microbatches': 4, 'schedule': '1f1b'}, {})
    """
    if point.pipeline == 1:
        return {}
    found: dict[str, Any] = {"microbatches": point.accumulate, "schedule": point.schedule}
    return found | ({"chunks_per_rank": chunks_of(point)} if chunks_of(point) > 1 else {})


def checkpoint_arguments(point: Point) -> dict[str, Any]:
    """For `zf.checkpoint_blocks(model, **…)`, nothing where everything is kept; "partition" stands for the mesh.

    >>> checkpoint_arguments(Point(checkpoint_every=2, checkpoints_on="host"))
    {'every': 2, 'keep': 'host'}
    """
    if not point.checkpoint_every:
        return {}
    found: dict[str, Any] = {"every": point.checkpoint_every}
    if point.keeps_away:
        found["keep"] = point.checkpoints_on
    if point.checkpoints_on == Tier.NVME.value:
        found["path"] = DISK_FOLDER
    if point.contiguous_checkpoints:
        found["contiguous"] = True
    return found | ({"partition": True} if point.keeps_parts else {})
