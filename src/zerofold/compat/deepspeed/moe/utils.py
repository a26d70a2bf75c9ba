"""Questions about DeepSpeed's expert layers, for a model that has none of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_moe_param(param: Tensor) -> bool:
    """Whether ranks hold different experts in it; never here."""
    return False


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """
    >>> has_moe_layers(nn.Linear(2, 2))
    (False, 0)
    """
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | list[dict[str, Any]] | tuple[dict[str, Any], ...],
    max_group_size: float | None = None,
) -> list[dict[str, Any]]:
    """The groups as they are, since no parameter is an expert's.

    >>> split_params_into_different_moe_groups_for_optimizer({"params": [], "name": "all"})
    [{'params': [], 'name': 'all'}]
    """
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
