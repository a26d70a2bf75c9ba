"""Which modules a wrapping policy picks. Policies are torch's own, or anything that is called in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# Containers: nobody calls their forward, so nothing would gather what they hold.
NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def picked(model: nn.Module, policy: Any) -> dict[nn.Module, dict[str, Any]]:
    """The modules inside `model` that the policy wants wrapped, each with options of its own (most have none).

    >>> import functools
    >>> from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    >>> len(picked(model, ModuleWrapPolicy({nn.Linear})))
    2
    >>> len(picked(model, functools.partial(size_based_auto_wrap_policy, min_num_params=80)))
    1
    """
    if policy is None:
        return {}
    if hasattr(policy, "_run_policy"):
        found: dict[nn.Module, dict[str, Any]] = policy._run_policy(model, ignored_modules=set(), root_kwargs={})
    elif callable(policy):
        found = {}
        for child in model.children() if _asks(policy, model, recurse=True, numel=_numel(model)) else ():
            _walk(child, policy, found)
    else:
        raise TypeError(
            f"auto_wrap_policy={policy!r} must be a function (module, recurse, nonwrapped_numel) -> bool, a "
            "functools.partial of one, a ModuleWrapPolicy or a CustomPolicy"
        )
    return {
        module: options
        for module, options in found.items()
        if module is not model and not isinstance(module, NEVER_CALLED) and _numel(module)
    }


def _walk(module: nn.Module, policy: Callable[..., bool], found: dict[nn.Module, dict[str, Any]]) -> int:
    """Asks about what is inside first; returns how many parameters have been picked."""
    if module in found:  # held in two places
        return _numel(module)
    total = _numel(module)
    if not _asks(policy, module, recurse=True, numel=total):
        return 0
    taken = sum(_walk(child, policy, found) for child in module.children())
    if _asks(policy, module, recurse=False, numel=total - taken):
        found[module] = {}
        return total
    return taken


def _asks(policy: Callable[..., bool], module: nn.Module, *, recurse: bool, numel: int) -> bool:
    return bool(policy(module=module, recurse=recurse, nonwrapped_numel=numel))


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in nn.Module.parameters(module))
