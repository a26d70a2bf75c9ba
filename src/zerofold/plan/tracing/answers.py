"""What operators give for tensors without memory, remembered: equal blocks ask the same again and again.

torch finds the shapes of most results in Python, at up to a millisecond an operator. What comes out depends on the
operator and on the shapes, strides and dtypes that go in, so of a model with 32 equal blocks one has to be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Made(NamedTuple):
    """A new tensor that an operator gives."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def again(self) -> Tensor:
        made: Tensor = torch.ops.aten.empty_strided.default(self.shape, self.stride, dtype=self.dtype, device="meta")
        return made


class _Answer(NamedTuple):
    form: type | None
    """What holds the results where there are several."""
    made: tuple[_Made | None, ...]
    work: Any


class Answers:
    """Results and costs of operators by what they are asked. Good for one trace: models differ in little but shapes.

    >>> answers, ones = Answers(), torch.ones(2, 3, device="meta")
    >>> asked = answers.key(torch.ops.aten.add.Tensor, (ones, ones), {})
    >>> answers.find(asked) is None, answers.keep(asked, (ones, ones), ones + ones, "an addition")
    (True, None)
    >>> found, work = answers.find(asked)
    >>> found.shape, found.device.type, work
    (torch.Size([2, 3]), 'meta', 'an addition')
    """

    def __init__(self) -> None:
        self._known: dict[Any, _Answer | None] = {}

    def key(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """None where the operator may write to its inputs, return one of them, or have values to look at."""
        schema = func._schema
        if schema.is_mutable or any(result.alias_info is not None for result in schema.returns):
            return None
        try:
            parts: list[Any] = [func]
            for each in (*args, *kwargs.items()):
                _describe(each, parts.append)
            return tuple(parts)
        except _HasValues:
            return None

    def find(self, key: Any) -> tuple[Any, Any] | None:
        """What the operator returns, made anew, and its work."""
        known = self._known.get(key) if key is not None else None
        if known is None:
            return None
        results = [None if made is None else made.again() for made in known.made]
        return (results[0] if known.form is None else known.form(results)), known.work

    def keep(self, key: Any, inputs: Sequence[Tensor], results: Any, work: Any) -> None:
        """Unless the results share memory with the inputs or each other, as some do whose schema says nothing of it."""
        if key is None or key in self._known:
            return
        several = type(results) in (tuple, list)
        leaves = list(results) if several else [results]
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            return
        self._known[key] = None  # so that what cannot be remembered is looked at once
        taken = {tensor.untyped_storage()._cdata for tensor in inputs}
        made: list[_Made | None] = []
        for leaf in leaves:
            if leaf is None:
                made.append(None)
                continue
            if type(leaf) is not Tensor or not leaf.is_meta or leaf.untyped_storage()._cdata in taken:
                return
            again = _Made(tuple(leaf.shape), leaf.stride(), leaf.dtype)
            if leaf.storage_offset() or again.again().untyped_storage().nbytes() != leaf.untyped_storage().nbytes():
                return
            taken.add(leaf.untyped_storage()._cdata)
            made.append(again)
        self._known[key] = _Answer(type(results) if several else None, tuple(made), work)


class _HasValues(Exception):
    """Something other than shapes goes into the operator."""


def _describe(value: Any, add: Callable[[Any], None]) -> None:
    """Types as well: 1, 1.0 and True are equal, and what an operator makes of them is not."""
    if isinstance(value, Tensor):
        if not value.is_meta or value.is_complex() or value.layout is not torch.strided:
            raise _HasValues
        add(value.dtype)
        add(value.shape)
        add(value.stride())
    elif isinstance(value, _PLAIN):
        add(type(value))
        add(value)
    elif isinstance(value, (tuple, list)):
        add(len(value))
        for each in value:
            _describe(each, add)
    else:
        raise _HasValues
