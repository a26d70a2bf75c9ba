"""Whether an optimizer may work on pieces is found out by trying: one matrix against its flat halves."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

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
    try:
        whole = _steps(optimizer, [start], [[g] for g in gradients])
        halves = _steps(optimizer, start.view(-1).chunk(2), [g.view(-1).chunk(2) for g in gradients])
    except Exception as error:  # the optimizer is the user's: anything may come out of it
        return f"a step on flat pieces raises {type(error).__name__}: {error}"
    if not torch.allclose(whole[0].view(-1), torch.cat(halves), rtol=1e-5, atol=1e-7):
        return "a step on the halves of a matrix differs from a step on the whole"
    return None


def _steps(optimizer: torch.optim.Optimizer, start: Any, gradients: list[Any]) -> list[Tensor]:
    parameters = [torch.nn.Parameter(value.clone()) for value in start]
    twin = _twin(optimizer, parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        twin.step()
    return [parameter.detach() for parameter in parameters]


def _twin(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The same optimizer with the same settings on other parameters, without hooks and without running __init__."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    group = {**optimizer.param_groups[0], "params": parameters}
    for implementation in ("fused", "foreach", "capturable"):
        if group.get(implementation):
            group[implementation] = False
    if isinstance(group.get("lr"), Tensor):
        group["lr"] = float(group["lr"])
    twin.param_groups = [group]
    twin.state = defaultdict(dict)
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.__dict__.pop("step", None)  # LR schedulers put a counting wrapper on the instance
    held = next((p for p in optimizer.param_groups[0]["params"] if optimizer.state.get(p)), None)
    if held is not None:
        for parameter in parameters:
            state = optimizer.state[held].items()
            twin.state[parameter] = {key: _small(value, held, parameter) for key, value in state}
    return twin


def _small(value: Any, held: Tensor, parameter: Tensor) -> Any:
    """A state entry for the small parameter: its own kind of start where the held one has a tensor per element."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == held.shape and value.dim() > 0:
        return torch.full_like(parameter, 0.1, dtype=value.dtype)
    return value.detach().clone().cpu()
