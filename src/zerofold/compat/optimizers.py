"""The optimizer that a config names, built on a model's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zerofold.config.components import check_params, optimizer_name, optimizer_params
from zerofold.config.errors import ConfigError
from zerofold.config.kinds import AUTO
from zerofold.optim.lion import Lion

_ADAMS = ("Adam", "AdamW")
_DEFAULTS_OF_ITS_OWN = (*_ADAMS, "Lion")  # other than torch's, or zerofold's
_DEEPSPEED_ONLY = ("torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states", "set_grad_none")


def make_optimizer(
    name: str,
    params: Mapping[str, Any] | None,
    model_parameters: Iterable[Any],
    *,
    device: torch.device,
) -> torch.optim.Optimizer:
    """The optimizer by its name in a config, with the config's parameters.

    `model_parameters` are parameters or parameter groups. "Adam" means decoupled weight decay, as it does for
    DeepSpeed, unless adam_w_mode is false. Any other class of torch.optim goes by its own name. A ConfigError says
    what is wrong.

    >>> import torch
    >>> model = torch.nn.Linear(4, 4)
    >>> device = torch.device("cpu")
    >>> type(make_optimizer("Adam", {"lr": 1e-4}, model.parameters(), device=device)).__name__
    'AdamW'
    >>> make_optimizer("AdamW", {"learning_rate": 1e-4}, model.parameters(), device=device)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    zerofold.config.errors.ConfigError: optimizer.params.learning_rate: 0.0001 is given, ... did you mean "lr"?
    """
    name = optimizer_name(name)
    known = optimizer_params(name, of_torch=(params or {}).get("torch_adam") is True)
    given = check_params(params or {}, known, "optimizer.params")
    kept = {key: value for key, value in given.items() if value != AUTO and key not in _DEEPSPEED_ONLY}
    if name in _DEFAULTS_OF_ITS_OWN:
        kept = {key: known[key].default for key in ("lr", "betas", "weight_decay")} | kept
    if "betas" in kept:
        kept["betas"] = tuple(kept["betas"])
    groups = list(model_parameters)
    if not groups:
        raise ConfigError(f"optimizer.type: {name} has no parameters; pass model_parameters=model.parameters()")
    if name == "Lion":
        return Lion(groups, **kept)
    if name in _ADAMS:
        name = "AdamW" if name == "AdamW" or given.get("adam_w_mode", True) else "Adam"
    if name == "Muon":
        _check_matrices(groups)
    if kept.get("fused") and device.type not in ("cpu", "cuda", "mps", "xpu"):
        raise ConfigError(f"optimizer.params.fused: true is not possible on {device.type}; leave it out")
    built: torch.optim.Optimizer = getattr(torch.optim, name)(groups, **kept)
    return built


def _check_matrices(groups: list[Any]) -> None:
    parameters: list[Tensor] = [
        p for group in groups for p in (group["params"] if isinstance(group, dict) else [group])
    ]
    others = [tuple(parameter.shape) for parameter in parameters if parameter.ndim != 2]
    if others:
        raise ConfigError(
            f"optimizer.type: Muon updates matrices, and {len(others)} of {len(parameters)} parameters are none (the "
            f"first has shape {others[0]}); build Muon on the matrices and AdamW on the rest, and zf.attach both"
        )
