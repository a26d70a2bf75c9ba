"""Lion on plain tensors: the paper's formula, both implementations, its arguments. On pieces: test_parity.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofold as zf

SHAPES = ((5, 7), (3,), (), (0, 4), (64, 33))


def reference(weights: list[Tensor], gradients: list[list[Tensor]], lr: float, b1: float, b2: float, wd: float) -> None:
    """Algorithm 2 of the paper, line by line, without zerofold or torch.optim."""
    momenta = [torch.zeros_like(w) for w in weights]
    for step in gradients:
        for w, m, g in zip(weights, momenta, step, strict=True):
            c = b1 * m + (1 - b1) * g
            w -= lr * (torch.sign(c) + wd * w)
            m.copy_(b2 * m + (1 - b2) * g)


def start(steps: int = 8, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    return weights, [[torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES] for _ in range(steps)]


def run(weights: list[Tensor], gradients: list[list[Tensor]], **settings: Any) -> list[Tensor]:
    parameters = [nn.Parameter(w.clone()) for w in weights]
    optimizer = zf.Lion(parameters, **settings)
    for step in gradients:
        for p, g in zip(parameters, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in parameters]


@pytest.mark.parametrize("foreach", [False, True, None])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.3, 0.6)])
def test_it_is_the_papers(betas: tuple[float, float], weight_decay: float, foreach: bool | None) -> None:
    weights, gradients = start()
    found = run(weights, gradients, lr=1e-2, betas=betas, weight_decay=weight_decay, foreach=foreach)
    raised = run(
        weights,
        [[-g for g in step] for step in gradients],
        lr=1e-2,
        betas=betas,
        weight_decay=weight_decay,
        foreach=foreach,
        maximize=True,
    )
    reference(weights, gradients, 1e-2, *betas, weight_decay)
    for ours, upwards, expected in zip(found, raised, weights, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-14)
        torch.testing.assert_close(upwards, expected, rtol=0, atol=1e-14)


def test_lists_give_the_bits_of_single_tensors() -> None:
    weights, gradients = start(dtype=torch.float32)
    weights[0], gradients = weights[0].double(), [[step[0].double(), *step[1:]] for step in gradients]
    settings: dict[str, Any] = {"lr": torch.tensor(3e-3), "weight_decay": 0.1}
    each, many = (run(weights, gradients, foreach=foreach, **settings) for foreach in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(each, many, strict=True))


def test_groups_state_and_closures() -> None:
    weights, gradients = start()
    parameters = [nn.Parameter(w) for w in weights]
    groups = [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:4]}]
    optimizer = zf.Lion(groups, lr=0.25)
    before = copy.deepcopy(parameters)

    def closure() -> float:
        for p, g in zip(parameters[:3], gradients[0], strict=False):
            p.grad = g.clone()
        return 7.0

    assert optimizer.step(closure) == 7.0
    moved = [(p - b).abs().detach() for p, b in zip(parameters, before, strict=True)]
    assert torch.allclose(moved[0], torch.tensor(0.5).double())
    assert torch.allclose(moved[1], torch.tensor(0.25).double())
    assert len(optimizer.state) == 3  # the fourth has no gradient
    assert all(set(state) == {"exp_avg"} for state in optimizer.state.values())
    twins = copy.deepcopy(parameters)
    twin = zf.Lion([{"params": twins[:1]}, {"params": twins[1:4]}])
    twin.load_state_dict(optimizer.state_dict())
    for held, its in ((parameters, optimizer), (twins, twin)):
        for p, g in zip(held[:4], gradients[1], strict=False):
            p.grad = g.clone()
        its.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, twins, strict=True))


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"lr": -1.0}, ValueError, "lr=-1.0 must be a finite number"),
        ({"lr": float("nan")}, ValueError, "lr=nan"),
        ({"lr": torch.ones(2)}, ValueError, "lr is a tensor of 2 elements"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas=(0.9, 1.0) must be two numbers"),
        ({"betas": 0.9}, ValueError, "betas=0.9 must be two numbers"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay=-0.1"),
        ({"foreach": "yes"}, TypeError, "foreach='yes' must be True, False, or None"),
    ],
)
def test_arguments_are_checked_in_every_group(wrong: dict[str, Any], error: type[Exception], says: str) -> None:
    good, bad = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with pytest.raises(error) as caught:
        zf.Lion([bad], **wrong)
    assert says in str(caught.value)
    optimizer = zf.Lion([good])
    with pytest.raises(error):
        optimizer.add_param_group({"params": [bad], **wrong})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_gradients_it_cannot_take_are_named(kind: str) -> None:
    parameter = nn.Parameter(torch.ones(3, 4, dtype=torch.complex64 if kind == "complex" else torch.float32))
    parameter.grad = torch.ones_like(parameter).to_sparse() if kind == "sparse" else torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match=rf"shape \(3, 4\) is {kind}"):
        zf.Lion([parameter]).step()
