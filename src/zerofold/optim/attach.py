"""Puts an existing optimizer onto this rank's pieces: the same object, with its groups, schedule and state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zerofold.engine import Engine
from zerofold.optim.checks import check_groups, check_kind
from zerofold.optim.probe import scalar_states
from zerofold.optim.step import Step, StepOptions
from zerofold.sharded import ShardedParameter, ShardedTensor


def attach_optimizer(engine: Engine, optimizer: torch.optim.Optimizer, options: StepOptions) -> None:
    put_onto_pieces(engine, optimizer)
    engine.optimizers.append(optimizer)
    if options.scheduler is not None:
        engine.schedulers.append(options.scheduler)
    step = Step(engine, optimizer, options)
    _ask_grad_scalers(engine, optimizer)
    known = len(optimizer.param_groups), engine.changes.count

    def take_in_groups() -> None:
        nonlocal known
        now = len(optimizer.param_groups), engine.changes.count
        if now != known:  # a group was added, or parameters were cut anew
            check_groups(optimizer, engine.faces())
            check_kind(engine, optimizer)
            put_onto_pieces(engine, optimizer)
            known = now

    def before_step(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        engine.end_step()  # of another optimizer, or one that raised
        take_in_groups()
        itself, *positional = args
        closure = kwargs.get("closure", positional[0] if positional else None)
        if closure is None:
            step.begin()
            return None
        # The closure runs backward inside the step, so what belongs between the two must run at its end.
        rest = {key: value for key, value in kwargs.items() if key != "closure"}
        return (itself, _between(engine.end_step, closure, step.begin), *positional[1:]), rest

    def after_step(*_: Any) -> None:
        step.end()

    hooks = [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_step_post_hook(after_step),
        # A state dict from elsewhere has whole tensors; each rank keeps its range of them.
        optimizer.register_load_state_dict_post_hook(recut),
    ]
    engine.groups_taken_in.append(take_in_groups)
    engine.on_close.append(partial(_end, optimizer, hooks))


def _end(optimizer: torch.optim.Optimizer, hooks: list[RemovableHandle]) -> None:
    for hook in hooks:  # which know the engine
        hook.remove()
    if _pieces(optimizer):  # else it may train the model again, closed or sharded anew
        optimizer.register_step_pre_hook(_refuse_closed)


def _pieces(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)]


def _refuse_closed(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # Somebody may have given it other parameters since, and a model that has sharded them.
    if any(Engine.of_parameter(piece) is None for piece in _pieces(optimizer)):
        raise RuntimeError(
            "the model of this optimizer was closed, so a step would change nothing: build a new optimizer on the "
            "model's parameters"
        )


def _ask_grad_scalers(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """To hand their verdict over and leave the step to the optimizer, where each rank sees a part of the gradients.

    By itself a torch.amp.GradScaler skips `optimizer.step()` where it found an overflow, and the other ranks would wait
    for that one. `Step` refuses it, on all of them.
    """
    is_set = getattr(optimizer, "_step_supports_amp_scaling", False)  # as torch's fused optimizers have it
    are_sharded = all(isinstance(p, ShardedParameter) for group in optimizer.param_groups for p in group["params"])
    if engine.groups.model is None or are_sharded or is_set:
        return
    vars(optimizer)["_step_supports_amp_scaling"] = True
    engine.on_close.append(lambda: vars(optimizer).pop("_step_supports_amp_scaling", None))


def put_onto_pieces(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Puts the faces into the groups, with whatever state the optimizer has for the parameters they stand for."""
    faces = engine.faces()
    scalars = scalar_states(optimizer)
    for group in optimizer.param_groups:
        before = list(group["params"])
        group["params"][:] = [faces[id(p)][1] if id(p) in faces else p for p in before]  # LBFGS keeps the list
        for old, new in zip(before, group["params"], strict=True):
            if old in optimizer.state:
                optimizer.state[new] = _cut_state(optimizer.state.pop(old), new, scalars)
        _keep_many_tensor_kernels(group)


def recut(optimizer: torch.optim.Optimizer) -> None:
    """Of states that are whole, as a state dict from elsewhere has them, this rank's pieces."""
    scalars = scalar_states(optimizer)
    for parameter, state in optimizer.state.items():
        state.update(_cut_state(state, parameter, scalars))


def _between(
    before: Callable[[], None], closure: Callable[[], Any], afterwards: Callable[[], None]
) -> Callable[[], Any]:
    def run() -> Any:
        before()  # a second call must find all gradients, to clear them
        loss = closure()
        afterwards()
        return loss

    return run


def _cut_state(state: dict[str, Any], face: Tensor, scalars: frozenset[str]) -> dict[str, Any]:
    if not isinstance(face, ShardedParameter):
        return state

    def cut(key: str, value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            if value.spec is face.spec:
                return value
            value = value.full_tensor()  # the parameter was cut anew; all ranks come here
        if not isinstance(value, Tensor) or value.shape != face.shape or key in scalars:
            return value
        return ShardedTensor(face.spec.cut(value.to(face.dtype)).clone(), face.spec)

    return {key: cut(key, value) for key, value in state.items()}


def _keep_many_tensor_kernels(group: dict[str, Any]) -> None:
    """On an accelerator torch picks foreach kernels by itself, but only for its own tensor types: ask for them."""
    unset = group.get("foreach", False) is None and not group.get("fused")
    if unset and any(isinstance(p, ShardedParameter) and p.device.type != "cpu" for p in group["params"]):
        group["foreach"] = True
