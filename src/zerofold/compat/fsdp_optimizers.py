"""Optimizers that were built before their model was sharded, in FSDP's faces.

Sharding waits for the first use of the model, but torch's own FSDP shards at once. So a script may take parameters
past the face, from a module inside the model or around it, and give whole ones to its optimizer.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerofold.engine import Engine
from zerofold.optim.attach import put_onto_pieces, recut
from zerofold.sharded import ShardedTensor


def follow_optimizers(engine: Engine) -> None:
    """Until the model is closed, an optimizer that holds whole parameters of it gets the pieces before its next step.

    Each optimizer is looked at once, and again when a group was added.
    """
    looked_at: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()  # with how many groups
    link = ref(engine)  # torch keeps the hook, which must not keep the model

    # A single rank has its gradients as autograd made them, 16-bit, and torch's optimizers want the masters' dtype.
    widens = engine.groups.everyone.size == 1 and engine.precision.is_mixed

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        look(optimizer)
        if widens:
            _widen_gradients(optimizer)

    def look(optimizer: torch.optim.Optimizer) -> None:
        seen = looked_at.get(optimizer)
        if seen == len(optimizer.param_groups):
            return
        alive = link()
        if alive is not None and not alive.schedule.holders:  # inside full_params whole ones are meant
            looked_at[optimizer] = len(optimizer.param_groups)
            if _follow(alive, optimizer) and seen is None:
                recut(optimizer)  # whole states may have been loaded already, and may be later
                optimizer.register_load_state_dict_post_hook(recut)

    stop = finalize(engine, register_optimizer_step_pre_hook(before_step).remove)
    stop.atexit = False
    engine.on_close.append(stop)


def _widen_gradients(optimizer: torch.optim.Optimizer) -> None:
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        gradient = parameter.grad
        if isinstance(gradient, ShardedTensor) and gradient.dtype is not parameter.dtype:
            parameter.grad = ShardedTensor(gradient.local.to(parameter.dtype), gradient.spec)


def follow(optimizer: torch.optim.Optimizer) -> None:
    """The same at once, whichever models the optimizer holds parameters of."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for engine in {Engine.of_parameter(parameter) for parameter in held}:
        if engine is not None and not engine.schedule.holders:
            _follow(engine, optimizer)


def _follow(engine: Engine, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has parameters of this model."""
    faces = engine.faces()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) in faces and faces[id(p)][1] is not p for p in held):
        put_onto_pieces(engine, optimizer)
    return any(id(p) in faces for p in held)
