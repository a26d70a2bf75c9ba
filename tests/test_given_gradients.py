"""Gradients that the user puts into `.grad`, at any stage: they are what the next step takes, as in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import largest_difference
from tests.test_unusual import Averaging, Net, inputs, plain_step
from torch import nn

import zerofold as zf

ROWS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 3},
    {"stage": 2, "cut": "whole"},
    {"stage": 2, "offload": "host"},
    {"stage": 3, "offload": {"optimizer": "host", "parameters": "host"}},
]


def backward(model: nn.Module, step: int) -> None:
    model(inputs(step)).pow(2).mean().backward()


def none_for_some(model: Any, optimizer: Any, step: int) -> None:
    backward(model, step)
    for p in model.layers[step % 2].parameters():
        p.grad = None


def arithmetic(model: Any, optimizer: Any, step: int) -> None:
    backward(model, step)
    for p in model.parameters():
        p.grad = -p.grad * (step + 1)


def whole(model: Any, optimizer: Any, step: int) -> None:
    backward(model, step)
    for p in model.parameters():
        p.grad = zf.full(p.grad) * 0.5


def between_backwards(model: Any, optimizer: Any, step: int) -> None:
    backward(model, step)
    for p in model.parameters():
        p.grad = p.grad * 0.25
    for p in model.layers[0].parameters():
        p.grad = None
    backward(model, step + 9)


def without_backward(model: Any, optimizer: Any, step: int) -> None:
    """The mean is taken by whoever computed it: here the gradient is a number that all ranks know."""
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full(p.shape, 0.1 * number - step)


WAYS = [none_for_some, arithmetic, whole, between_backwards, without_backward]


def difference(way: Any, row: dict[str, Any]) -> float:
    torch.manual_seed(1)
    reference = Net()
    torch.manual_seed(1)
    model = Net()
    averaging = Averaging(adam(reference))
    _, optimizer = zf.prepare(model, adam(model), accumulate=2 if way is between_backwards else 1, **row)
    for step in range(2):
        for each, stepper in ((reference, averaging), (model, optimizer)):
            way(each, stepper, step)
            stepper.step()
            stepper.zero_grad()
    plain_step(reference, averaging, 7)  # and the next backward begins anew
    plain_step(model, optimizer, 7)
    zf.close(model)
    return largest_difference([p.detach() for p in reference.parameters()], [p.detach() for p in model.parameters()])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)


def differences(way: Any) -> dict[str, float]:
    # What waits for the last backward of a step at stage 1 is no gradient yet.
    rows = [row for row in ROWS if way is not between_backwards or row["stage"] > 1]
    return {str(row): difference(way, row) for row in rows}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_put_there_is_what_the_step_takes(ranks: Any, world: int, way: Any) -> None:
    for found in ranks(world, differences, way):
        assert max(found.values()) <= 1e-6, found
