"""Tensors inside whatever a module takes and returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

_DEPTH = 4
_PLAIN = (str, bytes, int, float, type, nn.Module)


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts, and in the attributes of other objects."""
    if isinstance(value, Tensor):
        yield value
    elif depth == 0 or value is None or isinstance(value, _PLAIN):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value), depth - 1)


def map_tensors(change: Callable[[Tensor], Tensor], value: Any, depth: int = _DEPTH) -> Any:
    """The same structure with every tensor changed. What holds no changed tensor comes back as it is, not as a copy.

    >>> import torch
    >>> map_tensors(lambda tensor: tensor + 1, {"a": [torch.zeros(1)], "b": "text"})
    {'a': [tensor([1.])], 'b': 'text'}
    """
    if isinstance(value, Tensor):
        return change(value)
    if depth == 0 or value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        items = [map_tensors(change, item, depth - 1) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return _with_items(value, {key: map_tensors(change, item, depth - 1) for key, item in value.items()})
    if dataclasses.is_dataclass(value):
        changed = {name: map_tensors(change, item, depth - 1) for name, item in vars(value).items()}
        return _with_attributes(value, {name: new for name, new in changed.items() if new is not vars(value)[name]})
    return value  # of any other object a copy could be taken for the original: a cache, for instance


def _with_items(value: Any, items: dict[Any, Any]) -> Any:
    changed = {key: new for key, new in items.items() if new is not value[key]}
    if not changed:
        return value
    if not isinstance(value, MutableMapping):
        return items
    made = copy.copy(value)
    for key, new in changed.items():
        made[key] = new  # Hugging Face's outputs keep their attribute of that name in step
    return made


def _with_attributes(value: Any, changed: dict[str, Any]) -> Any:
    if not changed:
        return value
    made = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(made, name, new)  # also where it is frozen
    return made
