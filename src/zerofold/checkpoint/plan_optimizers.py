"""What loading would do to optimizers: their groups and states, found by the names of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerofold.checkpoint import states
from zerofold.checkpoint.boxes import own_part
from zerofold.checkpoint.contents import CheckpointError, Contents, OptimizerContents, Stored
from zerofold.checkpoint.plan import Plan, report
from zerofold.checkpoint.positions import named
from zerofold.engine import Engine
from zerofold.nested import map_tensors
from zerofold.optim.probe import scalar_names, state_names
from zerofold.part import Part
from zerofold.sharded import ShardedParameter, ShardedTensor

# How an optimizer computes, and how it was built, not what it does: these stay as they are here.
_OF_THE_MACHINE = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
_OF_ALL_CLASSES = frozenset({"lr", "initial_lr", "betas", "eps", "weight_decay", "momentum"})


def plan_optimizers(
    engine: Engine, optimizers: list[torch.optim.Optimizer], contents: Contents, plan: Plan, *, strict: bool
) -> None:
    """Groups and states, found by the names of parameters: they may be spread over optimizers in another way."""
    if optimizers and not contents.optimizers:
        raise CheckpointError(
            f"{contents.where} holds no optimizer states: pass None as optimizer for the weights alone"
        )
    names, parts = states.names_of(engine), states.parts_of(engine)
    in_order = [names[id(p)] for o in optimizers for group in o.param_groups for p in group["params"] if id(p) in names]
    contents.optimizers = [named(saved, in_order) for saved in contents.optimizers]  # some formats know positions only
    places = {
        name: (saved, group) for saved in contents.optimizers for group in saved.groups for name in group["params"]
    }
    kinds = {saved.kind for saved in contents.optimizers}
    for index, optimizer in enumerate(optimizers):
        needed = _needed(optimizer) if kinds != {type(optimizer).__name__} else frozenset()
        for place, group in enumerate(optimizer.param_groups):
            members = [(p, _saved_name(names[id(p)], contents, places)) for p in group["params"] if id(p) in names]
            there = [places[name] for _, name in members if name in places]
            _plan_group(plan, contents, optimizer, group, there if members else _of_nobody(contents, index, place))
            lost = [names[id(p)] for p, name in members if name not in places]
            if lost:
                report(plan, contents, [f"optimizer state of {lost[0]}"], [], strict=strict)
            for parameter, name in members:
                saved = places[name][0] if name in places else None
                found = {} if saved is None else _states(contents, saved, name, optimizer, needed)
                _plan_state(engine, plan, contents, optimizer, parameter, parts.get(id(parameter)), name, found, group)
    for optimizer, saved in zip(optimizers, contents.optimizers, strict=False):
        if saved.kind == type(optimizer).__name__:
            plan.restores.append(partial(optimizer.state.update, saved.others))


def _of_nobody(contents: Contents, index: int, place: int) -> list[tuple[OptimizerContents, dict[str, Any]]]:
    """A group without parameters, or with empty ones alone, is known by its place: its learning rate is shown too."""
    groups = contents.optimizers[index].groups if index < len(contents.optimizers) else []
    is_there = place < len(groups) and not groups[place]["params"]
    return [(contents.optimizers[index], groups[place])] if is_there else []


def _needed(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """The states of an optimizer that is not of the class that was saved."""
    try:
        return state_names(optimizer)
    except Exception as error:  # the optimizer is the user's: anything may come out of it
        raise CheckpointError(
            f"which states {type(optimizer).__name__} needs could not be found out ({type(error).__name__}: {error}): "
            "load into an optimizer of the class that was saved, or pass None for the weights alone"
        ) from error


def _saved_name(name: str, contents: Contents, places: dict[str, Any]) -> str:
    """A tied parameter may have been known by another of its names."""
    if name in places:
        return name
    first = contents.aliases.get(name, name)
    same = [other for other, known in contents.aliases.items() if known == name]
    return next((other for other in (first, *same) if other in places), name)


def _states(
    contents: Contents,
    saved: OptimizerContents,
    name: str,
    optimizer: torch.optim.Optimizer,
    needed: frozenset[str],
) -> dict[str, Any]:
    found = saved.states.get(name, {})
    kind = type(optimizer).__name__
    if not found or saved.kind == kind:
        return found
    if not needed <= set(found):
        raise CheckpointError(
            f"{contents.where} holds states of {saved.kind or 'another optimizer'} ({', '.join(sorted(found))}), and "
            f"{kind} needs {', '.join(sorted(needed))}: use an optimizer with the same states, or pass None for the "
            "weights alone"
        )
    return {key: value for key, value in found.items() if key in needed}


def _plan_group(
    plan: Plan,
    contents: Contents,
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    found: Iterable[tuple[OptimizerContents, dict[str, Any]]],
) -> None:
    settings = [_settings(saved, optimizer, group, kind) for kind, saved in _distinct(found)]
    for other in settings[1:]:
        if other != settings[0]:
            keys = sorted(key for key in other if other[key] != settings[0].get(key))
            raise CheckpointError(
                f"{contents.where}: parameters that are in one group of {type(optimizer).__name__} here were in groups "
                f"with different {', '.join(keys)} there: make the groups as they were"
            )
    if settings:
        plan.restores.append(lambda: _set_group(group, settings[0]))


def _distinct(found: Iterable[tuple[OptimizerContents, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Each group once, with the class of its optimizer."""
    return list({id(group): (saved.kind, group) for saved, group in found}.values())


def _settings(
    saved: dict[str, Any], optimizer: torch.optim.Optimizer, group: dict[str, Any], kind: str
) -> dict[str, Any]:
    """What is to be taken over: of another class only what means the same in all of them."""
    is_same = not kind or kind == type(optimizer).__name__
    taken = {key for key in saved if is_same or (key in _OF_ALL_CLASSES and (key in group or key == "initial_lr"))}
    return {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in saved.items()
        if key in taken - _OF_THE_MACHINE
    }


def _set_group(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        if isinstance(group.get(key), Tensor) and not isinstance(value, Tensor):
            group[key].fill_(value)  # a learning rate that compiled code reads
        elif isinstance(group.get(key), tuple) and isinstance(value, list):
            group[key] = tuple(value)
        else:
            group[key] = value


def _plan_state(
    engine: Engine,
    plan: Plan,
    contents: Contents,
    optimizer: torch.optim.Optimizer,
    parameter: Tensor,
    part: Part | None,
    name: str,
    found: dict[str, Any],
    group: dict[str, Any],
) -> None:
    is_elsewhere = (
        isinstance(parameter, ShardedParameter) and engine.row.has_owners and not parameter.spec.is_owned_here
    )
    state: dict[str, Any] = {}
    for key, value in found.items() if not is_elsewhere else ():
        if not hasattr(value, "read"):
            state[key] = map_tensors(lambda tensor: tensor.to(parameter.device), value)
            continue
        held = optimizer.state.get(parameter, {}).get(key)
        saved = contents.tensor(name)
        dtype = _dtype(value, saved, parameter, held)
        is_number = key == "step" or (not parameter.dim() and key in scalar_names(optimizer))
        if tuple(value.shape) == tuple(parameter.shape if part is None else part.shape) and not is_number:
            state[key], flat, start = _like(parameter, held, dtype)
            value = own_part(value, part)
        else:
            if part is not None and part.is_cut:
                states.check_state_of_part(f"{key} of {name}", value.shape, part)
            on_device = group.get("capturable") or group.get("fused") or key != "step"
            whole = torch.empty(value.shape, dtype=value.dtype, device=parameter.device if on_device else "cpu")
            state[key], flat, start = whole, whole.view(-1), 0
        plan.fill(flat, value, start)
    plan.restores.append(lambda: _set_state(optimizer, parameter, state))


def _like(parameter: Tensor, held: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """A state as the parameter is cut: the tensor, its flat memory, and where that begins. What is there is reused."""
    if isinstance(held, Tensor) and (held.dtype is not dtype or held.shape != parameter.shape):
        held = None
    if not isinstance(parameter, ShardedParameter):
        whole = held if held is not None else torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return whole, whole.detach().view(-1), 0
    spec = parameter.spec
    if not isinstance(held, ShardedTensor) or held.spec is not spec:
        held = ShardedTensor(torch.empty_like(parameter.local, dtype=dtype), spec)
    return held, held.local.reshape(-1), 0 if spec.is_replicated else spec.own[0]


def _set_state(optimizer: torch.optim.Optimizer, parameter: Tensor, state: dict[str, Any]) -> None:
    if state:
        optimizer.state[parameter] = state
    else:
        optimizer.state.pop(parameter, None)


def _dtype(stored: Stored, saved: Stored | None, parameter: Tensor, held: Any) -> torch.dtype:
    """The dtype a state should have: what the optimizer has already, or had with parameters of this dtype."""
    if isinstance(held, Tensor):
        return held.dtype
    if not stored.dtype.is_floating_point or (saved is not None and saved.dtype is parameter.dtype):
        return stored.dtype
    return parameter.dtype
