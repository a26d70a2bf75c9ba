"""safe_get_… and safe_set_…: one parameter's fp32 values, gradient and optimizer states, whole or this rank's piece.

By DeepSpeed's rules: all ranks call them alike; what a parameter does not have is None. Parameters are given as the
model shows them, at any stage, or as the optimizer holds them. Gradients are true ones, without a loss scale, between
backward and zero_grad. Setting takes the same whole value on every rank, or each rank's own piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerofold.access import full
from zerofold.agree import agree
from zerofold.engine import Engine
from zerofold.sharded import ShardedTensor
from zerofold.slab import Slab


class _Found(NamedTuple):
    engine: Engine
    slab: Slab
    name: str
    face: Tensor  # what is trained: a sharded parameter, or a whole one


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The whole parameter in fp32, from its masters; None for a parameter that is frozen or that nobody trains.

    >>> import torch, zerofold as zf
    >>> from zerofold.compat.safe import safe_get_full_fp32_param, safe_set_full_fp32_param
    >>> model = zf.shard(torch.nn.Linear(64, 32), stage=3, precision="bf16")
    >>> safe_set_full_fp32_param(model.weight, torch.ones(32, 64))
    >>> safe_get_full_fp32_param(model.weight).sum().item()
    2048.0
    >>> zf.close(model)
    """
    found = _find(param)
    return None if found is None else _fp32(full(found.face))


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Gives the parameter, its masters and their 16-bit copies a value; the next forward uses it."""
    found = _needed(param, "safe_set_full_fp32_param")
    _check_shape(found, value, found.face.shape)
    _set_parameter(found, found.face.detach(), value)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The whole gradient, averaged over the ranks, or None. Local sums that wait for a reduction are reduced first."""
    found = _find(param)
    gradient = None if found is None else _gradient(found)
    return None if gradient is None else full(gradient)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Another gradient in place of the one that backward has left."""
    found = _needed(param, "safe_set_full_grad")
    _check_shape(found, value, found.face.shape)
    _needed_gradient(found).copy_(value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[Tensor], update_func: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """For each parameter that has a gradient, what `update_func(gradient, parameter)` makes of it."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """A state of the optimizer ("exp_avg", …) for the whole parameter; None before the first step has made it.

    >>> import torch, zerofold as zf
    >>> from zerofold.compat.safe import safe_get_full_optimizer_state
    >>> model = torch.nn.Linear(64, 32)
    >>> model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=2)
    >>> model(torch.ones(2, 64)).sum().backward(); optimizer.step()
    >>> tuple(safe_get_full_optimizer_state(model.weight, "exp_avg").shape)
    (32, 64)
    >>> zf.close(model)
    """
    found = _find(param)
    if found is None:
        return None
    if isinstance(found.face, ShardedTensor) and found.face.spec.has_owner:
        return _from_owner(found, optim_state_key)
    state = _state(found, optim_state_key)
    return None if state is None else _fp32(full(state))


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Gives a state of the optimizer another value."""
    found = _needed(param, "safe_set_full_optimizer_state")
    if isinstance(found.face, ShardedTensor) and found.face.spec.has_owner and not found.face.spec.is_owned_here:
        return  # its owner has it all
    state = _needed_state(found, _state(found, optim_state_key), optim_state_key)
    _check_shape(found, value, state.shape)
    found.engine.settle()
    state.copy_(value)


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """A copy of this rank's piece of the fp32 parameter: flat, possibly empty; whole where it is not cut."""
    found = _find(param)
    return None if found is None else _fp32(_local(found.face).clone())


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Gives this rank's piece another value; all ranks call it, each with its own."""
    found = _needed(param, "safe_set_local_fp32_param")
    _check_shape(found, value, _local(found.face).shape)
    _set_parameter(found, _local(found.face), value)


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """A copy of this rank's piece of the averaged gradient, or None."""
    found = _find(param)
    gradient = None if found is None else _gradient(found)
    return None if gradient is None else _local(gradient).clone()


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Another value for this rank's piece of the gradient."""
    found = _needed(param, "safe_set_local_grad")
    piece = _local(_needed_gradient(found))
    _check_shape(found, value, piece.shape)
    piece.copy_(value)


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """A copy of this rank's piece of an optimizer state; None where it has none."""
    found = _find(param)
    state = None if found is None else _state(found, optim_state_key)
    return None if state is None else _fp32(_local(state).clone())


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Another value for this rank's piece of an optimizer state."""
    found = _needed(param, "safe_set_local_optimizer_state")
    piece = _local(_needed_state(found, _state(found, optim_state_key), optim_state_key))
    _check_shape(found, value, piece.shape)
    found.engine.settle()
    piece.copy_(value)


def _find(param: Tensor) -> _Found | None:
    engine = Engine.of_parameter(param)
    place = None if engine is None else engine.places().get(id(param))
    if engine is None or place is None:
        return None
    slab, index = place
    return _Found(engine, slab, slab.entries[index].name, slab.faces[index]) if slab.requires_grad else None


def _needed(param: Tensor, function: str) -> _Found:
    found = _find(param)
    if found is None:
        raise ValueError(
            f"{function}: this parameter of shape {tuple(param.shape)} is not trained here, because it is frozen "
            "or its model is not prepared; frozen ones are changed inside zero.GatheredParameters(p, modifier_rank=0)"
        )
    return found


@torch.no_grad()
def _set_parameter(found: _Found, target: Tensor, value: Tensor) -> None:
    found.engine.settle()
    found.engine.schedule.wait_all()  # a gather under way would bring old values back
    target.copy_(value)
    found.slab.note_versions()
    found.slab.mark_changed()
    found.engine.schedule.refresh()


def _gradient(found: _Found) -> Tensor | None:
    found.engine.end_step()
    found.engine.reductions.flush()
    return found.face.grad


def _needed_gradient(found: _Found) -> Tensor:
    gradient = _gradient(found)
    if gradient is None:
        raise ValueError(f"'{found.name}' has no gradient to change: call this between backward and zero_grad")
    return gradient.detach()


def _state(found: _Found, key: str) -> Tensor | None:
    for optimizer in found.engine.optimizers:
        if optimizer.state.get(found.face):
            state: dict[str, Any] = optimizer.state[found.face]
            if key not in state:
                raise ValueError(f"'{found.name}': the optimizer has no state {key!r}; it has {', '.join(state)}")
            value = state[key]
            return value if isinstance(value, Tensor) else torch.tensor(float(value))
    return None


def _needed_state(found: _Found, state: Tensor | None, key: str) -> Tensor:
    if state is None:
        raise ValueError(f"'{found.name}' has no optimizer state {key!r} yet: it comes with the first step")
    return state


def _from_owner(found: _Found, key: str) -> Tensor | None:
    """Where each parameter has one owner, the other ranks have no state of it and learn from him what there is."""
    state = agree(found.engine.groups.control, lambda: _state(found, key))
    held = None if state is None or _local(state).numel() == 0 else _fp32(_local(state).clone()).cpu()
    everyone = found.engine.groups.control.all_gather_objects(held, unit=found.name)
    whole = next((each for each in everyone if each is not None), None)
    return None if whole is None else whole.to(found.face.device)


def _local(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor.detach()


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor


def _check_shape(found: _Found, value: Tensor, shape: torch.Size) -> None:
    if value.shape != shape:
        raise ValueError(f"'{found.name}' needs a value of shape {tuple(shape)} here, not {tuple(value.shape)}")
