"""The optimizer and the scheduler that a config names: which there are, their parameters, and what "auto" is there."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from zerofold.config.checking import Checked, take
from zerofold.config.errors import ConfigError, shown, unknown, wrong
from zerofold.config.kinds import (
    ANYTHING,
    AUTO,
    FLAG,
    REAL,
    TEXT,
    Kind,
    Mismatch,
    choice,
    either,
    list_of,
    number,
    whole,
)
from zerofold.config.settings import Component

REQUIRED = inspect.Parameter.empty


class Param(NamedTuple):
    kind: Kind
    default: Any = REQUIRED


_RATE = either(number(0.0), list_of(number(0.0)))
_WARMUP = {
    "warmup_num_steps": Param(whole(0), 1000),
    "warmup_type": Param(choice("log", "linear"), "log"),
    "last_batch_iteration": Param(whole(-1), -1),
}

SCHEDULES: dict[str, dict[str, Param]] = {
    "WarmupLR": {"warmup_min_lr": Param(_RATE, 0.0), "warmup_max_lr": Param(_RATE, None), **_WARMUP},
    "WarmupDecayLR": {
        # 0 is what the Trainer writes when it only evaluates; a schedule that is used refuses it.
        "total_num_steps": Param(whole(0)),
        "warmup_min_lr": Param(_RATE, 0.0),
        "warmup_max_lr": Param(_RATE, 0.001),
        **_WARMUP,
    },
    "WarmupCosineLR": {
        "total_num_steps": Param(whole(0)),
        "warmup_min_ratio": Param(number(0.0, most=1.0), 0.0),
        "cos_min_ratio": Param(number(0.0, most=1.0), 0.0001),
        **_WARMUP,
    },
    "OneCycle": {
        "cycle_min_lr": Param(_RATE),
        "cycle_max_lr": Param(_RATE),
        "decay_lr_rate": Param(REAL, 0.0),
        "cycle_first_step_size": Param(whole(1), 2000),
        "cycle_second_step_size": Param(whole(0), None),
        "cycle_first_stair_count": Param(whole(0), 0),
        "cycle_second_stair_count": Param(whole(0), None),
        "decay_step_size": Param(whole(0), 0),
        "cycle_momentum": Param(FLAG, True),
        "cycle_min_mom": Param(_RATE, 0.8),
        "cycle_max_mom": Param(_RATE, 0.9),
        "decay_mom_rate": Param(REAL, 0.0),
        "last_batch_iteration": Param(whole(-1), -1),
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": Param(_RATE, 0.001),
        "lr_range_test_step_size": Param(whole(1), 2000),
        "lr_range_test_step_rate": Param(REAL, 1.0),
        "lr_range_test_staircase": Param(FLAG, False),
        "last_batch_iteration": Param(whole(-1), -1),
    },
}
"""DeepSpeed's schedules with their arguments and defaults."""


def _true(value: Any) -> bool:
    if value is not True:
        raise Mismatch
    return True


_ADAM_EXTRAS = {
    "torch_adam": Param(FLAG, False),
    "adam_w_mode": Param(FLAG, True),
    "bias_correction": Param(Kind("true, since torch's Adam always corrects the bias", _true), True),
    "fp32_optimizer_states": Param(Kind("true; 16-bit moments are zf.Precision(moments=torch.bfloat16)", _true), True),
    "set_grad_none": Param(Kind("true, since cleared gradients are always None", _true), True),
}
_LION = {
    "lr": Param(number(0.0), 1e-3),
    "betas": Param(list_of(number(0.0, most=1.0), 2), (0.9, 0.999)),
    "weight_decay": Param(number(0.0), 0.0),
}
_COMPRESSED = "it sends compressed gradients, and zerofold sends them as they are; use AdamW"
_MUP = "it belongs to the package mup; build it yourself and pass it as optimizer="

REFUSED_OPTIMIZERS = {
    "lamb": "it needs the norm of each whole parameter, and shards have pieces; use AdamW",
    "onebitadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP,
    "lbfgs": "it needs several forwards in one step; use AdamW",
    "sparseadam": "gradients are reduced as dense tensors; use AdamW",
}
_OTHER_NAMES = {"learning_rate": "lr", "epsilon": "eps"}
_BY_ANY_CASE = {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "lion": "Lion", "muon": "Muon"}
_KINDS = {
    "lr": number(0.0),
    "betas": list_of(number(0.0, most=1.0), 2),
    "eps": either(number(0.0), list_of(number(0.0))),
    "weight_decay": number(0.0),
    "momentum": number(0.0),
}


def optimizer_name(name: Any, path: str = "optimizer.type") -> str:
    """The name as torch.optim spells it, or "Lion"; a ConfigError for one that cannot be had.

    >>> optimizer_name("adamw")
    'AdamW'
    """
    take(name, TEXT, path)
    refusal = REFUSED_OPTIMIZERS.get(name.lower())
    if refusal is not None:
        raise ConfigError(f"{path}: {shown(name)} is refused: {refusal}")
    name = _BY_ANY_CASE.get(name.lower(), name)
    if name not in _known_optimizers():
        raise unknown(path, name, name, _known_optimizers(), what="optimizer")
    return name


def optimizer_params(name: str, *, of_torch: bool = False) -> dict[str, Param]:
    """The parameters of an optimizer, by the name that `optimizer_name` gave, with DeepSpeed's defaults.

    They are torch's but for its own Adam and Lion; `of_torch` is the config's torch_adam.

    >>> optimizer_params("AdamW")["weight_decay"].default
    0.0
    """
    if name == "Lion":
        return _LION
    signature = inspect.signature(getattr(torch.optim, name).__init__).parameters
    own = {key: Param(_kind(key, it.default), it.default) for key, it in signature.items() if key not in _NOT_PARAMS}
    if name not in ("Adam", "AdamW"):
        return own
    if not of_torch:
        own["weight_decay"] = own["weight_decay"]._replace(default=0.0)
    return {**own, **_ADAM_EXTRAS}


def scheduler_params(name: Any, path: str = "scheduler.type") -> dict[str, Param]:
    """The parameters of a schedule: one of DeepSpeed's, or of torch.optim.lr_scheduler."""
    take(name, TEXT, path)
    if name in SCHEDULES:
        return SCHEDULES[name]
    found = getattr(torch.optim.lr_scheduler, name, None)
    if not (inspect.isclass(found) and issubclass(found, torch.optim.lr_scheduler.LRScheduler)):
        names = [*SCHEDULES, *torch.optim.lr_scheduler.__all__]
        raise unknown(path, name, name, names, what="schedule")
    signature = inspect.signature(found.__init__).parameters
    return {key: Param(_kind(key, it.default), it.default) for key, it in signature.items() if key not in _NOT_PARAMS}


def check_params(given: Mapping[str, Any], params: Mapping[str, Param], path: str) -> dict[str, Any]:
    """What was given, each of its kind; "auto" where it stands still does. Unknown and missing ones are refused.

    >>> check_params({"lr": 1}, optimizer_params("Lion"), "optimizer.params")
    {'lr': 1.0}
    """
    taken = {}
    for name, value in given.items():
        here = f"{path}.{name}"
        if name not in params:
            if name == "max_grad_norm":
                raise wrong(here, value, "use gradient_clipping", why="is no parameter of an optimizer")
            raise unknown(here, name, value, params, what="parameter", meant=_OTHER_NAMES.get(name))
        is_left_out = value is None and params[name].default is None
        taken[name] = value if is_left_out or value == AUTO else take(value, params[name].kind, here)
    missing = [name for name, param in params.items() if param.default is REQUIRED and name not in given]
    if missing:
        first = missing[0]
        raise ConfigError(f"{path}.{first}: nothing is given; add {shown(first)}, {params[first].kind.words}")
    return taken


def resolve_optimizer(checked: Checked) -> Component | None:
    if checked["optimizer.type"] is None:
        if "optimizer.params" in checked.given:
            raise wrong("optimizer.type", None, 'name one, such as "AdamW"')
        return None
    name = optimizer_name(checked["optimizer.type"])
    given = checked["optimizer.params"] or {}
    params = optimizer_params(name, of_torch=given.get("torch_adam") is True)
    given = check_params(given, params, "optimizer.params")
    for key in [key for key, value in given.items() if value == AUTO]:
        default = params[key].default
        given[key] = list(default) if isinstance(default, tuple) else default
        checked.settle(f"optimizer.params.{key}", given[key], f"the default of {name}")
    return Component(checked["optimizer.type"], given)


def resolve_scheduler(checked: Checked, optimizer: Component | None, steps: int | None) -> Component | None:
    """`steps`: the length of training in optimizer steps, where someone knows it."""
    name = checked["scheduler.type"]
    if name is None:
        if "scheduler.params" in checked.given:
            raise wrong("scheduler.type", None, f"name one of {', '.join(SCHEDULES)}")
        return None
    params = scheduler_params(name)
    given = check_params(checked["scheduler.params"] or {}, params, "scheduler.params")
    total = given.get("total_num_steps", steps)
    for key in [key for key, value in given.items() if value == AUTO]:
        here = f"scheduler.params.{key}"
        value, text = _scheduler_auto(key, params[key], optimizer, steps if total == AUTO else total)
        if value is REQUIRED:
            raise wrong(here, AUTO, f"give {params[key].kind.words}", why="cannot be found by itself")
        given[key] = value
        checked.settle(here, value, text)
    return Component(name, given)


def _scheduler_auto(key: str, param: Param, optimizer: Component | None, total: int | None) -> tuple[Any, str]:
    if key == "total_num_steps":
        return (REQUIRED, "") if total is None else (total, "the length of training")
    if key == "warmup_max_lr":
        rate = None if optimizer is None else optimizer.params.get("lr")
        if rate is None and optimizer is not None:
            rate = optimizer_params(optimizer_name(optimizer.type))["lr"].default
        return rate, "the optimizer's lr"
    if key == "warmup_num_steps":
        return (100, "the usual") if total is None else (max(1, total // 100), f"1% of {total} steps")
    return param.default, "the schedule's default"


_NOT_PARAMS = ("self", "params", "optimizer", "args", "kwargs")


def _known_optimizers() -> list[str]:
    found = [
        name
        for name in dir(torch.optim)
        if inspect.isclass(it := getattr(torch.optim, name))
        and issubclass(it, torch.optim.Optimizer)
        and it is not torch.optim.Optimizer
        and name.lower() not in REFUSED_OPTIMIZERS
    ]
    return [*found, "Lion"]


def _kind(name: str, default: Any) -> Kind:
    if name in _KINDS:
        return _KINDS[name]
    if isinstance(default, bool):
        return FLAG
    return REAL if isinstance(default, float) else ANYTHING
