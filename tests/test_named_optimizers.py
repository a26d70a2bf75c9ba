"""The optimizers that a config names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerofold as zf
from zerofold.compat.optimizers import make_optimizer
from zerofold.config import ConfigError


def make(name: str, params: dict[str, Any] | None = None, model: nn.Module | None = None) -> torch.optim.Optimizer:
    model = model or nn.Linear(4, 4)
    return make_optimizer(name, params, model.parameters(), device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("Adam", {}, torch.optim.AdamW),
        ("adam", {"adam_w_mode": True, "torch_adam": True}, torch.optim.AdamW),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW),
        ("Adagrad", {"lr": 0.1}, torch.optim.Adagrad),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD),
        ("Lion", {"betas": [0.9, 0.99]}, zf.Lion),
        ("RMSprop", {"alpha": 0.9}, torch.optim.RMSprop),
    ],
)
def test_the_class_and_its_settings(name: str, params: dict[str, Any], expected: type) -> None:
    optimizer = make(name, params)
    assert type(optimizer) is expected
    group = optimizer.param_groups[0]
    known = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items() if key in group}
    assert {key: group[key] for key in known} == known


def test_what_is_left_out_has_deepspeeds_default() -> None:
    """Its own Adam decays nothing; torch's AdamW does."""
    assert make("AdamW", {"lr": 0.1}).defaults["weight_decay"] == 0.0
    assert make("Adam", {"weight_decay": "auto"}).defaults["weight_decay"] == 0.0
    assert make("AdamW", {"torch_adam": True}).defaults["weight_decay"] == 0.01
    lion = make("Lion", {}).defaults
    assert (lion["lr"], lion["betas"], lion["weight_decay"]) == (1e-3, (0.9, 0.999), 0.0)


def test_groups_keep_their_own_settings() -> None:
    model = nn.Linear(4, 4)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = make_optimizer("AdamW", {"lr": 0.1, "weight_decay": 0.2}, groups, device=torch.device("cpu"))
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.2), (0.1, 0.0)]


def test_muon_takes_matrices() -> None:
    assert type(make("Muon", {"lr": 0.1}, nn.Linear(4, 4, bias=False))) is torch.optim.Muon
    with pytest.raises(ConfigError, match=r"1 of 2 parameters are none \(the first has shape \(4,\)\)"):
        make("Muon")


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("AdamW", {"lrr": 0.1}, 'optimizer.params.lrr: 0.1 is given, .* did you mean "lr"'),
        ("sgd", {}, 'optimizer.type: "sgd" is given, .* did you mean "SGD"'),
        ("ZeroOneAdam", {}, "is refused: it sends compressed gradients"),
        ("MuAdam", {}, "is refused: it belongs to the package mup"),
        ("LBFGS", {}, "is refused: it needs several forwards"),
    ],
)
def test_what_cannot_be_had(name: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(name, params)


def test_nothing_to_train() -> None:
    with pytest.raises(ConfigError, match="AdamW has no parameters; pass model_parameters=model.parameters()"):
        make("AdamW", {}, nn.ReLU())
