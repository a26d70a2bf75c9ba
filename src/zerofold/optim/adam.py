"""torch's Adam and AdamW on masters, in one pass over memory: the same groups and states, another kernel."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from zerofold.engine import Engine
from zerofold.optim.onepass import STATE_DTYPES, AdamSettings, AdamTensors, adam
from zerofold.sharded import ShardedParameter, ShardedTensor
from zerofold.slab import Slab

_MOMENTS = ("exp_avg", "exp_avg_sq")


def why_not_one_pass(optimizer: torch.optim.Optimizer) -> str | None:
    """None when the one pass does what this optimizer would do; otherwise what stands against it."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return f"it is for torch.optim.AdamW and Adam, not for {type(optimizer).__name__}"
    for group in optimizer.param_groups:
        for option in ("amsgrad", "capturable", "differentiable"):
            if group.get(option):
                return f"it has no {option}=True"
        for parameter in group["params"]:
            if parameter.dtype not in STATE_DTYPES:
                return f"it has no {parameter.dtype}"
    return None


def update(engine: Engine, optimizer: torch.optim.Optimizer, scale: Tensor | None, clip_value: float | None) -> None:
    """One step of the optimizer on every piece that has a gradient, read times `scale` and at most `clip_value`."""
    places = engine.places()
    before: dict[Slab, int] = {}
    for group in optimizer.param_groups:
        faces = [p for p in group["params"] if isinstance(p, ShardedParameter) and p.grad is not None]
        tensors = []
        for face in faces:
            slab, index = places[id(face)]
            before.setdefault(slab, slab.shard._version)
            tensors.append(_tensors(engine, optimizer, face, slab, index))
        adam(tensors, _settings(group), scale=scale, clip_value=clip_value)
    for slab, version in before.items():  # on every rank, also where it owns nothing of what was changed
        slab.mark_changed()
        if slab.is_kept and slab.dtypes.has_master:
            slab.written(version)


def _tensors(
    engine: Engine, optimizer: torch.optim.Optimizer, face: ShardedParameter, slab: Slab, index: int
) -> AdamTensors:
    state = optimizer.state[face]
    if not state:
        state["step"] = torch.tensor(0.0)
        for name in _MOMENTS:
            state[name] = ShardedTensor(torch.zeros_like(face.local, dtype=engine.precision.moments), face.spec)
    for name in _MOMENTS:  # loaded or handed over: whole, or in another dtype
        held = state[name]
        if not isinstance(held, ShardedTensor) or held.dtype is not engine.precision.moments:
            local = held.local if isinstance(held, ShardedTensor) else face.spec.cut(held).clone()
            state[name] = ShardedTensor(local.to(engine.precision.moments), face.spec)
    if not isinstance(state["step"], Tensor):
        state["step"] = torch.tensor(float(state["step"]))
    if state["step"].device.type != "cpu":  # where a fused torch kernel or a loaded state had it: reading would wait
        state["step"] = state["step"].cpu()
    state["step"] += 1
    step = int(state["step"].item())
    assert isinstance(face.grad, ShardedTensor)
    return AdamTensors(
        face.local,
        face.grad.local,
        state["exp_avg"].local,
        state["exp_avg_sq"].local,
        slab.kept_piece(index),
        step,
        _seed(step, face, slab),
    )


def _settings(group: dict[str, Any]) -> AdamSettings:
    beta1, beta2 = group["betas"]
    return AdamSettings(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group.get("decoupled_weight_decay", False),
        maximize=group["maximize"],
    )


def _seed(step: int, face: ShardedParameter, slab: Slab) -> int:
    """The same on all ranks, so that ranks that update the same element round it alike."""
    return zlib.crc32(f"{step} {slab.place} {face.spec.name}".encode())
