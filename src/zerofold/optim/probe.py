"""Whether an optimizer may work on pieces, or on some of the parameters, is found out by trying."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ROWS, _COLUMNS, _STEPS = 6, 10, 3


def why_not_elementwise(optimizer: torch.optim.Optimizer) -> str | None:
    """None when pieces give the same update as the whole; otherwise what happened.

    >>> weight = torch.nn.Parameter(torch.ones(4, 4))
    >>> why_not_elementwise(torch.optim.AdamW([weight])) is None
    True
    >>> why_not_elementwise(torch.optim.Adafactor([weight]))
    'a step on the halves of a matrix differs from a step on the whole'
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.rand(_ROWS, _COLUMNS, generator=generator) + 0.5
    gradients = [torch.rand(_ROWS, _COLUMNS, generator=generator) - 0.5 for _ in range(_STEPS)]
    for group in optimizer.param_groups:  # one optimizer may treat its groups by different rules
        try:
            whole = _steps(optimizer, group, [start], [[g] for g in gradients])
            halves = _steps(optimizer, group, start.view(-1).chunk(2), [g.view(-1).chunk(2) for g in gradients])
        except Exception as error:  # the optimizer is the user's: anything may come out of it
            return f"a step on flat pieces raises {type(error).__name__}: {error}"
        if not torch.allclose(whole[0].view(-1), torch.cat(halves), rtol=1e-5, atol=1e-7):
            return "a step on the halves of a matrix differs from a step on the whole"
    return None


def why_not_by_parameter(optimizer: torch.optim.Optimizer) -> str | None:
    """None when each parameter's update depends on that parameter alone; otherwise what happened.

    >>> weight = torch.nn.Parameter(torch.ones(4, 4))
    >>> why_not_by_parameter(torch.optim.Adafactor([weight])) is None
    True
    """
    generator = torch.Generator().manual_seed(0)
    starts = [torch.rand(_ROWS, _COLUMNS, generator=generator) + 0.5 for _ in range(2)]
    gradients = [[torch.rand(_ROWS, _COLUMNS, generator=generator) - 0.5 for _ in range(2)] for _ in range(_STEPS)]
    for group in optimizer.param_groups:
        try:
            together = _steps(optimizer, group, starts, gradients)
            first = _steps(optimizer, group, starts[:1], [step[:1] for step in gradients])
            second = _steps(optimizer, group, starts[1:], [step[1:] for step in gradients])
        except Exception as error:  # the optimizer is the user's: anything may come out of it
            return f"a step on a matrix raises {type(error).__name__}: {error}"
        if not all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(together, first + second, strict=True)):
            return "a step on two matrices differs from a step on each of them"
    return None


def scalar_states(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Names of states that are one number per parameter, told apart where a parameter has more than one element."""
    scalars = {"step"}
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor) and parameter.dim() > 0:
            scalars |= {key for key, value in state.items() if isinstance(value, Tensor) and value.dim() == 0}
    return frozenset(scalars)


def state_names(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """The states that this optimizer keeps for a parameter, found by a step.

    >>> weight = torch.nn.Parameter(torch.ones(4, 4))
    >>> sorted(state_names(torch.optim.AdamW([weight])))
    ['exp_avg', 'exp_avg_sq', 'step']
    """
    return frozenset(_states_of_a_step(optimizer))


def scalar_names(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Those of them that are one number per parameter.

    >>> weight = torch.nn.Parameter(torch.ones(4, 4))
    >>> sorted(scalar_names(torch.optim.NAdam([weight])))
    ['mu_product', 'step']
    """
    found = _states_of_a_step(optimizer)
    return frozenset(key for key, value in found.items() if not isinstance(value, Tensor) or value.dim() == 0)


class Keeps(NamedTuple):
    """What an optimizer keeps of a parameter."""

    numbers: int
    """For each element."""
    nbytes: int
    """Besides, whatever its size."""


def keeps(optimizer: torch.optim.Optimizer) -> Keeps:
    """Found by a step; as AdamW has it where that cannot be taken.

    >>> weight = [torch.nn.Parameter(torch.ones(4, 4))]
    >>> keeps(torch.optim.SGD(weight)), keeps(torch.optim.NAdam(weight)), keeps(torch.optim.AdamW(weight, amsgrad=True))
    (Keeps(numbers=0, nbytes=0), Keeps(numbers=2, nbytes=8), Keeps(numbers=3, nbytes=4))
    """
    try:
        found = [value for value in _states_of_a_step(optimizer).values() if isinstance(value, Tensor)]
    except Exception:  # the optimizer is the user's: anything may come out of it
        return Keeps(2, 4)
    scalars = [value for value in found if value.dim() == 0]
    return Keeps(len(found) - len(scalars), sum(value.nbytes for value in scalars))


def _states_of_a_step(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        start, gradient = torch.ones(_ROWS, _COLUMNS), torch.ones(_ROWS, _COLUMNS)
        (parameter,), state = _stepped(optimizer, group, [start], [[gradient]])
        found |= state[parameter]
    return found


def _steps(optimizer: torch.optim.Optimizer, group: dict[str, Any], start: Any, gradients: list[Any]) -> list[Tensor]:
    return [parameter.detach() for parameter in _stepped(optimizer, group, start, gradients)[0]]


class _Stepped(NamedTuple):
    parameters: list[torch.nn.Parameter]
    state: Any


def _stepped(optimizer: torch.optim.Optimizer, group: dict[str, Any], start: Any, gradients: list[Any]) -> _Stepped:
    """From no states, since those it has may be of another kind for another shape, or have come from elsewhere. Only
    where it makes them in __init__ (Adagrad), which no twin runs, from the like of what it has."""
    try:
        return _run(_twin(optimizer, group, start), gradients)
    except Exception:
        held = [p for p in group["params"] if optimizer.state.get(p)]
        if not held:
            raise
        twin = _twin(optimizer, group, start)
        _give_states(optimizer, max(held, key=lambda p: p.dim()), twin)
        return _run(twin, gradients)


def _run(twin: torch.optim.Optimizer, gradients: list[Any]) -> _Stepped:
    parameters = twin.param_groups[0]["params"]
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        twin.step()
    return _Stepped(parameters, twin.state)


def _twin(optimizer: torch.optim.Optimizer, like: dict[str, Any], start: Any) -> torch.optim.Optimizer:
    """The same optimizer with one group's settings on other parameters, without hooks and without running __init__."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    group = {**like, "params": [torch.nn.Parameter(value.clone()) for value in start]}
    for implementation in ("fused", "foreach", "capturable"):
        if group.get(implementation):
            group[implementation] = False
    if "lr" in group:
        group["lr"] = 0.01  # the user's may be a tensor, or 0 before a warm-up, which would show nothing
    twin.param_groups = [group]
    twin.state = defaultdict(dict)
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.__dict__.pop("step", None)  # LR schedulers put a counting wrapper on the instance
    return twin


def _give_states(optimizer: torch.optim.Optimizer, held: Any, twin: torch.optim.Optimizer) -> None:
    scalars = scalar_states(optimizer)
    for parameter in twin.param_groups[0]["params"]:
        twin.state[parameter] = {
            key: _small(value, parameter, per_element=key not in scalars and value.shape == held.shape)
            if isinstance(value, Tensor)
            else value
            for key, value in optimizer.state[held].items()
        }


def _small(value: Tensor, parameter: Tensor, *, per_element: bool) -> Tensor:
    """A state entry for the small parameter, whose dtype states of 16 bits or of float64 take as well."""
    if not per_element:
        return value.detach().clone().cpu()
    return torch.full_like(parameter, 0.1, dtype=None if value.is_floating_point() else value.dtype)
