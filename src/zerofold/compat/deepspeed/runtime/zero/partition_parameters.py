"""zero.Init, GatheredParameters, and what scripts import beside them."""

from __future__ import annotations

from enum import Enum

from torch import nn

from zerofold.compat.gathered import GatheredParameters
from zerofold.compat.param_status import ZeroParamStatus
from zerofold.compat.zero_init import Init

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
]


class ZeroParamType(Enum):
    """Never set on a parameter here: a ShardedParameter says by its class that it is cut."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Taken and not needed: a unit that uses a parameter of another one is found while it runs.

    >>> import torch
    >>> block = torch.nn.Linear(2, 2)
    >>> register_external_parameter(block, block.weight)
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            "register_external_parameter(module, parameter) wants a torch.nn.Module and a parameter, not "
            f"{type(module).__name__} and {type(parameter).__name__}"
        )


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    register_external_parameter(module, parameter)
