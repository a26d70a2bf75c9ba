"""What a parameter wears while its memory is away or on its way.

Reading a freed storage crashes the process, and reading one that is being refilled gives old numbers. So for that
time the Parameter's class is swapped for one that lets metadata pass, waits for data on its way, and raises for
data that is gone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# fmt: off
_METADATA_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "is_leaf", "grad_fn",
    "_version", "output_nr", "is_sparse", "is_cuda", "is_cpu", "is_meta", "is_quantized", "is_nested",
    "retains_grad", "_backward_hooks",
)
_METADATA_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous",
    "is_floating_point", "is_complex", "get_device", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook", "untyped_storage", "__len__", "__hash__",
)
# fmt: on


def _metadata() -> frozenset[Any]:
    getters = [getattr(torch.Tensor, name) for name in _METADATA_ATTRIBUTES]
    accessors = [access for getter in getters for access in (getter.__get__, getattr(getter, "__set__", None))]
    deleter = getattr(torch.Tensor.grad, "__delete__", None)
    methods = [getattr(torch.Tensor, name) for name in _METADATA_METHODS]
    return frozenset([*accessors, deleter, *methods]) - {None}


class GuardedParameter(nn.Parameter):
    """A Parameter whose data must be asked for. `guard` puts it on, `unguard` takes it off."""

    _arrive: Callable[[], None]
    _whole: Tensor | None = None  # stands in for the data, while somebody has all of it elsewhere
    _plain_class: type
    _metadata = _metadata()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in cls._metadata:
            args, kwargs = _present(args), {key: _present(value) for key, value in kwargs.items()}
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        self._arrive()  # and from here on it is a plain Parameter
        return copy.deepcopy(self, memo)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Parameter(shape={tuple(self.shape)}, dtype={self.dtype}, data away from this rank)"


def guard(parameter: Tensor, arrive: Callable[[], None]) -> None:
    """From now on, touching the data calls `arrive` first; it unguards the parameter or raises."""
    if not isinstance(parameter, GuardedParameter):
        plain_class = type(parameter)
        parameter.__class__ = GuardedParameter
        parameter._plain_class = plain_class  # type: ignore[attr-defined]
    parameter._arrive = arrive  # type: ignore[attr-defined]


def unguard(parameter: Tensor) -> None:
    if isinstance(parameter, GuardedParameter):
        parameter.__class__ = parameter._plain_class


def stand_in(parameter: Tensor, whole: Tensor | None) -> None:
    """Until it is called with None, what touches the data of a guarded parameter gets `whole` in its place."""
    parameter._whole = whole  # type: ignore[attr-defined]


def _present(value: Any) -> Any:
    """Arguments whose data may be touched."""
    if isinstance(value, GuardedParameter):
        if value._whole is not None:
            return value._whole
        value._arrive()
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Tensor, list, tuple)) for item in value):
        return type(value)(map(_present, value)) if type(value) in (list, tuple) else [_present(item) for item in value]
    return value
