"""Modules by their dotted names."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from zerofold.compat.deepspeed.refusals import missing


def recursive_getattr(model: Any, module_name: str) -> Any:
    """
    >>> from torch import nn
    >>> recursive_getattr(nn.Sequential(nn.Sequential(nn.ReLU())), "0.0")
    ReLU()
    """
    return attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Sequential(nn.ReLU()))
    >>> recursive_setattr(model, "0.0", nn.Tanh())
    >>> model[0][0]
    Tanh()
    """
    *parents, name = module_name.split(".")
    setattr(attrgetter(".".join(parents))(model) if parents else model, name, module)


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
