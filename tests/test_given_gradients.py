"""What users make of gradients, in `.grad` or in hooks, is what the next step takes at any stage, as in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import largest_difference
from tests.ranks import raised
from tests.test_unusual import Averaging, Net, inputs, plain_step
from torch import Tensor, nn

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


def on_the_way(weight: Tensor) -> None:
    weight.register_hook(lambda gradient: gradient * rows_but_one(gradient))


def behind_autograd(weight: Tensor) -> None:
    def change(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(rows_but_one(parameter.grad))

    weight.register_post_accumulate_grad_hook(change)


def put_behind_autograd(weight: Tensor) -> None:
    def change(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * rows_but_one(parameter.grad)

    weight.register_post_accumulate_grad_hook(change)


def rows_but_one(gradient: Tensor) -> Tensor:
    return (torch.arange(len(gradient)) != 1).to(gradient.dtype).unsqueeze(1)


def hooked(way: Any) -> dict[str, float]:
    """Hooks that come after the model was prepared, as those that train some rows of an embedding alone."""
    found = {}
    for row in [{"stage": 0}, *ROWS]:
        torch.manual_seed(1)
        reference = Net()
        torch.manual_seed(1)
        model = Net()
        averaging = Averaging(adam(reference))
        _, optimizer = zf.prepare(model, adam(model), **row)
        for each, stepper in ((reference, averaging), (model, optimizer)):
            way(each.inlet.weight)
            for step in range(2):
                plain_step(each, stepper, step)
        zf.close(model)
        found[str(row)] = largest_difference(list(reference.parameters()), list(model.parameters()))
    return found


@pytest.mark.parametrize("way", [on_the_way, behind_autograd, put_behind_autograd])
def test_hooks_that_come_later_act_at_every_stage(ranks: Any, way: Any) -> None:
    for found in ranks(2, hooked, way):
        assert max(found.values()) <= 1e-6, found


def updates_inside_backward(stage: int) -> None:
    model = zf.shard(Net(), stage=stage)

    def update(parameter: Tensor) -> None:
        parameter.grad = None

    model.inlet.weight.register_post_accumulate_grad_hook(update)
    backward(model, 0)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_hook_that_takes_the_gradient_away_is_named(ranks: Any, stage: int) -> None:
    for error in ranks(1, raised, updates_inside_backward, stage):
        assert "a hook has taken away the gradient of a parameter of shape (32, 32)" in error
