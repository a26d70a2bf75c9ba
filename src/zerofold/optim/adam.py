"""torch's Adam and AdamW on masters, in one pass over memory: the same groups and states, another kernel."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerofold.engine import Engine
from zerofold.gradients_away import AwayGradients
from zerofold.optim.away import DeviceMemory, updates_of
from zerofold.optim.away.chunks import Piece, Scaling
from zerofold.optim.away.early import SlabWork
from zerofold.optim.onepass import STATE_DTYPES, AdamSettings, AdamTensors, adam
from zerofold.sharded import ShardedParameter, ShardedTensor
from zerofold.slab import Slab

_MOMENTS = ("exp_avg", "exp_avg_sq")


def why_not_one_pass(
    optimizer: torch.optim.Optimizer, faces: Mapping[int, tuple[str, Tensor]] | None = None
) -> str | None:
    """None when the one pass does what this optimizer would do; otherwise what stands against it.

    `faces` of a model, by which those parameters go that the optimizer still holds whole, and in 16 bits: updated are
    the masters.
    """
    # A class that only sets other defaults steps as its parent does. torch wraps the step of each class it meets.
    own = inspect.unwrap(type(optimizer).step)
    if not isinstance(optimizer, torch.optim.Adam) or own is not inspect.unwrap(torch.optim.Adam.step):
        return f"it is for torch.optim.AdamW and Adam, not for {type(optimizer).__name__}"
    for group in optimizer.param_groups:
        for option in ("amsgrad", "capturable", "differentiable"):
            if group.get(option):
                return f"it has no {option}=True"
        for parameter in group["params"]:
            _, face = (faces or {}).get(id(parameter), ("", parameter))
            is_updated = face.requires_grad or face.grad is not None
            if is_updated and face.dtype not in STATE_DTYPES:
                return f"it has no {face.dtype}"
    return None


def update(engine: Engine, optimizer: torch.optim.Optimizer, scale: Tensor | None, clip_value: float | None) -> None:
    """One step of the optimizer on every piece that has a gradient, read times `scale` and at most `clip_value`.

    Offloaded states are updated later: who needs them waits for that.
    """
    places, is_first = engine.places(), engine.is_offloaded and engine.updates is None
    memory = DeviceMemory.now(engine.device) if is_first else None
    before: dict[Slab, int] = {}
    away: dict[Slab, list[tuple[int, Piece]]] = {}
    for group in optimizer.param_groups:
        faces = [p for p in group["params"] if isinstance(p, ShardedParameter) and p.grad is not None]
        tensors, settings = [], _settings(group)
        for face in faces:
            slab, index = places[id(face)]
            if slab.is_away:
                made = _piece(engine, optimizer, face, slab, index, settings)
                away.setdefault(slab, []).extend((index, piece) for piece in made)
                continue
            before.setdefault(slab, slab.version)
            tensors.append(_tensors(engine, optimizer, face, slab, index))
        adam(tensors, settings, scale=scale, clip_value=clip_value)
    for slab, version in before.items():  # on every rank, also where it owns nothing of what was changed
        slab.mark_changed()
        if slab.is_kept and slab.dtypes.has_master:
            slab.written(version)
    if away:
        dtype = engine.precision.moments
        scaling = Scaling(None if scale is None or scale.item() == 1.0 else scale.item(), clip_value)
        ordered = [slab for slab in engine.slabs() if slab in away]  # as forward will need them
        updates = updates_of(engine, memory)  # which the first time says which parameters stream through the device
        work = [
            (
                slab,
                [piece._replace(streams=_streams(slab, index, piece)) for index, piece in away[slab]],
                (slab.moment("exp_avg", dtype), slab.moment("exp_avg_sq", dtype)),
            )
            for slab in ordered
        ]
        alone = len(engine.optimizers) == 1  # else nobody knows which of them steps next
        updates.submit(work, scaling, partial(_upcoming, engine, optimizer, clip_value) if alone else None)


def _upcoming(
    engine: Engine, optimizer: torch.optim.Optimizer, clip_value: float | None, slab: Slab
) -> SlabWork | None:
    """What the next step will do to a slab if its gradients stay what they are; changes nothing."""
    if engine.is_swapped or engine.before_change:  # a copy of the states as they are now may be under way
        return None
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    pieces = []
    for index, (face, piece) in enumerate(zip(slab.faces, slab.layout.pieces(slab.place), strict=True)):
        gradient, state, group = face.grad, optimizer.state.get(face), groups.get(id(face))
        if not isinstance(gradient, ShardedTensor) or not piece.size:
            continue
        if group is None or not state or not all(_is_ready(state.get(name), slab, name) for name in _MOMENTS):
            return None
        if gradient.form.device != slab.home.device or index not in slab.streamed:
            return None
        assert isinstance(face, ShardedParameter)
        step = int(state["step"]) + 1
        seed = _seed(step, face, slab)
        flat = gradient.form.detach().reshape(-1)
        pieces.append(Piece(piece.shard_start, piece.shard_stop, flat, _settings(group), step, seed, streams=True))
    dtype = engine.precision.moments
    return SlabWork(pieces, (slab.moment("exp_avg", dtype), slab.moment("exp_avg_sq", dtype)), clip_value)


def _streams(slab: Slab, index: int, piece: Piece) -> bool:
    """By its share; or because its gradient is on the device, from where the host would have to fetch it."""
    return index in slab.streamed or (bool(slab.streamed) and piece.gradient.device.type != "cpu")


def _piece(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    face: ShardedParameter,
    slab: Slab,
    index: int,
    settings: AdamSettings,
) -> list[Piece]:
    """What is to be done to a parameter of which this rank has a piece, if it has one."""
    piece = slab.layout.pieces(slab.place)[index]
    step = _ready_state(engine, optimizer, face, slab, index)
    assert isinstance(face.grad, ShardedTensor)
    gradient = face.grad.form.detach().reshape(-1)
    if isinstance(slab.gradients, AwayGradients):
        slab.gradients.use_up(index)  # on every rank: one that has no piece of it must not wait where others raise
    face.grad.is_being_read = not face.grad.is_used_up
    if not piece.size:
        return []
    return [Piece(piece.shard_start, piece.shard_stop, gradient, settings, step, _seed(step, face, slab))]


def _tensors(
    engine: Engine, optimizer: torch.optim.Optimizer, face: ShardedParameter, slab: Slab, index: int
) -> AdamTensors:
    step = _ready_state(engine, optimizer, face, slab, index)
    state = optimizer.state[face]
    assert isinstance(face.grad, ShardedTensor)
    return AdamTensors(
        face.local,
        face.grad.local.to(face.local.device),
        state["exp_avg"].local,
        state["exp_avg_sq"].local,
        slab.kept_piece(index),
        step,
        _seed(step, face, slab),
    )


def _ready_state(
    engine: Engine, optimizer: torch.optim.Optimizer, face: ShardedParameter, slab: Slab, index: int
) -> int:
    """The moments of a parameter are there, in their dtype and memory; the number of this step for it."""
    state, dtype = optimizer.state[face], engine.precision.moments
    if not state:
        state["step"] = torch.tensor(0.0)
    for name in _MOMENTS:
        held = state.get(name)
        if _is_ready(held, slab, name):
            continue
        if slab.is_away:
            engine.step.look(slab.master)  # which may have begun to be updated
            room = face.spec.shaped(slab.new_moment(name, dtype, index))
        else:
            room = torch.zeros_like(face.form, dtype=dtype)
        if held is not None:  # loaded or handed over: whole, in another dtype, or in other memory
            room.copy_(held.local if isinstance(held, ShardedTensor) else face.spec.cut(held))
        state[name] = ShardedTensor(room, face.spec)
    if not isinstance(state["step"], Tensor):
        state["step"] = torch.tensor(float(state["step"]))
    if state["step"].device.type != "cpu":  # where a fused torch kernel or a loaded state had it: reading would wait
        state["step"] = state["step"].cpu()
    state["step"] += 1
    return int(state["step"].item())


def _is_ready(held: object, slab: Slab, name: str) -> bool:
    """A moment is in its dtype and in its memory."""
    if not isinstance(held, ShardedTensor) or held.dtype is not slab.home.precision.moments:
        return False
    if not slab.is_away:
        return held.form.device == slab.master.device
    own = slab.moments.get(name)
    return own is not None and held.form.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()


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
