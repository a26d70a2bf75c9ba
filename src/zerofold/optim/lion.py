"""Lion (Chen et al. 2023, arXiv:2302.06675): the sign of a momentum is the update, one state for each element."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Moves every element by lr, in the direction of a momentum; half of AdamW's state. It works on pieces.

    Every update has the size of lr, so take lr 3 to 10 times smaller than for AdamW, and weight_decay as much larger.

    lr            the size of an update, a number or a tensor of one
    betas         how much of the momentum goes into the update, and how much of it is kept
    weight_decay  every step multiplies parameters by 1 - lr * weight_decay, apart from the gradient
    maximize      goes up instead of down
    foreach       whether many tensors share a kernel; None does so where all are on an accelerator

    >>> import torch, zerofold as zf
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> model, optimizer = zf.prepare(model, zf.Lion(model.parameters(), lr=0.25), stage=2)
    >>> before = zf.full(model.weight).clone()
    >>> model(torch.tensor([[1.0, -9.0]])).sum().backward(); optimizer.step()
    >>> zf.full(model.weight) - before
    tensor([[-0.2500,  0.2500]])
    >>> zf.close(model)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, "foreach": foreach}
        super().__init__(params, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters with a gradient; returns what `closure` does, which makes gradients anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            many = group["foreach"]
            if many is None:
                many = all(p.device.type != "cpu" for p in parameters)
            update = _update_many if many else _update_each
            for alike in _by_device_and_dtype(parameters):
                update(
                    alike,
                    [_gradient(p, group["maximize"]) for p in alike],
                    [self._momentum(p) for p in alike],
                    lr=float(group["lr"]),
                    betas=group["betas"],
                    weight_decay=group["weight_decay"],
                )
        return loss

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        momentum: Tensor = state["exp_avg"]
        return momentum


# In both forms the momentum takes the gradient in after the update was made from the two.


def _update_each(
    parameters: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    for parameter, gradient, momentum in zip(parameters, gradients, momenta, strict=True):
        direction = momentum.lerp(gradient, 1 - betas[0]).sign_()
        if weight_decay:
            parameter.mul_(1 - lr * weight_decay)
        parameter.add_(direction, alpha=-lr)
        momentum.lerp_(gradient, 1 - betas[1])


def _update_many(
    parameters: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    directions = torch._foreach_lerp(momenta, gradients, 1 - betas[0])
    torch._foreach_sign_(directions)
    if weight_decay:
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    torch._foreach_add_(parameters, directions, alpha=-lr)
    torch._foreach_lerp_(momenta, gradients, 1 - betas[1])


def _by_device_and_dtype(parameters: list[Tensor]) -> list[list[Tensor]]:
    """A kernel for many tensors takes those of one kind only."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return list(kinds.values())


def _gradient(parameter: Tensor, maximize: bool) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse or gradient.is_complex():
        kind = "sparse" if gradient.is_sparse else "complex"
        raise RuntimeError(
            f"Lion: the gradient of a parameter of shape {tuple(parameter.shape)} is {kind}, and Lion needs real dense "
            "ones: give that parameter to another optimizer"
        )
    return gradient.neg() if maximize else gradient


def _check(settings: dict[str, Any]) -> None:
    lr, betas, decay, foreach = (settings[name] for name in ("lr", "betas", "weight_decay", "foreach"))
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Lion: lr is a tensor of {lr.numel()} elements; give a number, or a tensor of one")
    if isinstance(lr, str) or not 0 <= lr < math.inf:
        raise ValueError(f"Lion: lr={lr!r} must be a finite number of at least 0, for example 1e-4")
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"Lion: betas={betas} must be two numbers from 0 up to 1, such as (0.9, 0.99)")
    if isinstance(decay, str) or not 0 <= decay < math.inf:
        raise ValueError(f"Lion: weight_decay={decay!r} must be a finite number of at least 0")
    if foreach not in (None, True, False):
        raise TypeError(f"Lion: foreach={foreach!r} must be True, False, or None to choose by device")
