"""Checkpointed blocks get no cache: computed again, a block would write its keys and values into it twice.

Hugging Face's own checkpointing leaves caches out where they are passed by keyword. GPT-2 passes its cache by position,
so here a block's signature is asked for the names of what comes by position. The model then returns a cache that is
empty. One that was filled before is no cache that can be left out: without it, other numbers would come.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

_BY_NAME: dict[str, Any] = {"use_cache": False, "past_key_values": None, "past_key_value": None, "layer_past": None}


class NoCaches:
    """What some blocks that are called alike are called with, without caches.

    A cache is known by its name in the signature, or because it is one, whatever its name. A block of Hugging Face's
    that says it only reads its cache keeps it.

    >>> import torch
    >>> class Block(nn.Module):
    ...     def forward(self, x, past_key_values=None, mask=None, use_cache=False): ...
    >>> NoCaches([Block()]).of((1, "a cache", 2), {"use_cache": True})
    ((1, None, 2), {'use_cache': False})
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # Asked once, and not in each call, which may be compiled.
        self._names = _positional(modules[0])
        self._layer = next((each.layer_idx for each in modules[0].modules() if hasattr(each, "layer_idx")), 0)
        self._only_reads = all(getattr(module, "_can_checkpoint_with_cache", False) for module in modules)

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = (*self._names, *[""] * (len(args) - len(self._names)))
        taken = tuple(self._without(name, value) for name, value in zip(names, args, strict=False))
        return taken, {name: self._without(name, value) for name, value in kwargs.items()}

    def _without(self, name: str, value: Any) -> Any:
        if value is None or (self._only_reads and name != "use_cache"):
            return value
        if name not in _BY_NAME and not _is_cache(value):
            return value
        if name != "use_cache" and _is_filled(value, self._layer):
            raise ValueError(
                f"checkpoint_blocks: {name}= is filled already, and a checkpointed block gets no cache: give the whole "
                "sequence instead, or call remove() on what checkpoint_blocks returned"
            )
        return _BY_NAME.get(name)


def _positional(module: nn.Module) -> list[str]:
    """Names of the parameters that may come by position; none where nobody can tell."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in parameters if each.kind in by_position]


def _is_cache(value: Any) -> bool:
    """Of Hugging Face's classes; where nobody has loaded them, there are none."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def _is_filled(value: Any, layer: Any) -> bool:
    """For this layer: where others are not checkpointed, they may have filled it in this forward."""
    if isinstance(value, (tuple, list)):
        return any(isinstance(each, Tensor) for each in value)
    rows = getattr(getattr(value, "self_attention_cache", value), "layers", ())
    length = getattr(rows[layer], "get_seq_length", None) if isinstance(layer, int) and layer < len(rows) else None
    return length is not None and bool(length() > 0)
