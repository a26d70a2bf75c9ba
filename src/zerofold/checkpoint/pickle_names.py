"""The names that a pickle of a checkpoint may use, and what each stands for here: never the thing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from zerofold.checkpoint.ondisk import Record, TensorOnDisk


class Inert:
    """An object of a class that is not made: the class's name, what it would have been built from, its fields."""

    __slots__ = ("args", "fields", "name")

    def __init__(self, name: str, *args: Any) -> None:
        self.name = name
        self.args = args
        self.fields: dict[str, Any] = {}

    def set_state(self, state: Any) -> None:
        # Some classes pack their state into a tuple; where it is a pair of dicts, the second is of slots.
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.fields.update({str(key): value for key, value in part.items()})
        self.args += tuple(part for part in parts if part is not None and not isinstance(part, dict))

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(frozen=True)
class Known:
    """A name of the table, and what a pickle gets when it calls it."""

    name: str
    make: Callable[..., Any]


@dataclass(frozen=True)
class StorageType:
    """The first part of a storage's description; nothing can be done with it but to ask for its dtype."""

    dtype: torch.dtype | None  # None: bytes, and the tensor says what they are


@dataclass(frozen=True)
class Storage:
    record: Record
    dtype: torch.dtype | None


def _tensor(storage: Any, begin: Any, shape: Any, stride: Any, *rest: Any) -> TensorOnDisk:
    return _described(storage, storage.dtype, begin, shape, stride)


def _tensor_of_bytes(
    storage: Any, begin: Any, shape: Any, stride: Any, needs_grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> TensorOnDisk:
    return _described(storage, dtype, begin, shape, stride)


def _described(storage: Any, dtype: Any, begin: Any, shape: Any, stride: Any) -> TensorOnDisk:
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a storage or a dtype")
    return TensorOnDisk(storage.record, dtype, _whole(begin), _size(shape), _size(stride))


def _first(value: Any, *rest: Any) -> Any:
    """A Parameter is its tensor; whether it needs a gradient is the model's to say."""
    return value


def _tensor_of_type(function: Any, type_: Any, args: Any, state: Any) -> TensorOnDisk:
    if not isinstance(function, Known) or not isinstance(args, tuple):
        raise ValueError("a tensor that is made by something else than torch's own functions")
    made = function.make(*args)
    if not isinstance(made, TensorOnDisk):
        raise ValueError(f"{function.name} where a tensor should be made")
    return made


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"a {type(value).__name__} where a whole number should be")
    return value


def _size(values: Any = ()) -> tuple[int, ...]:
    if not isinstance(values, tuple | list):
        raise ValueError(f"a {type(values).__name__} where a shape should be")
    return tuple(_whole(value) for value in values)


def key_of(key: Any) -> Any:
    """Keys are hashed, and the hash of deeply nested tuples can take for ever: only flat ones."""
    parts = key if isinstance(key, tuple) else (key,)
    if not all(part is None or isinstance(part, str | bytes | int | float | Inert | torch.dtype) for part in parts):
        raise ValueError(f"a key of type {type(key).__name__}")
    return key


def _dict(items: Any = ()) -> dict[Any, Any]:
    pairs = items.items() if isinstance(items, dict) else items
    return {key_of(key): value for key, value in _listed(pairs)}


def _default_dict(factory: Any = None, items: Any = ()) -> dict[Any, Any]:
    return _dict(items)


def _set(items: Any = ()) -> set[Any]:
    return {key_of(item) for item in _listed(items)}


def _listed(items: Any) -> Iterable[Any]:
    if not isinstance(items, list | tuple | type({}.items())):
        raise ValueError(f"a {type(items).__name__} where a list should be")
    return items


def _text_as_bytes(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes in an unknown coding")
    return text.encode("latin1")


def _path(*parts: Any) -> str:
    return str(Path(*(str(part) for part in parts)))


def _not_called(*args: Any) -> Any:
    raise ValueError("a type is called that only names what a tensor or a list is")


DTYPES = """
    float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 complex128
    float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
"""
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": None,
}
MAKERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_bytes,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_type,
    "torch.Size": _size,
    "torch.device": lambda *parts: ":".join(str(part) for part in parts),
    "torch.serialization._get_layout": _first,
    "torch.Tensor": _not_called,
    "torch.nn.parameter.Parameter": _not_called,
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "collections.defaultdict": _default_dict,
    "builtins.dict": _dict,
    "builtins.set": _set,
    "builtins.list": _not_called,
    "builtins.int": _not_called,
    "builtins.float": _not_called,
    "_codecs.encode": _text_as_bytes,
    "pathlib.PosixPath": _path,
    "pathlib.WindowsPath": _path,
    "pathlib._local.PosixPath": _path,
    "pathlib._local.WindowsPath": _path,
}
# numpy renamed the module; files of both are around.
NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
# Classes whose objects hold nothing but fields.
INERT = """
    torch.distributed.checkpoint.metadata.Metadata
    torch.distributed.checkpoint.metadata.MetadataIndex
    torch.distributed.checkpoint.metadata.TensorStorageMetadata
    torch.distributed.checkpoint.metadata.BytesStorageMetadata
    torch.distributed.checkpoint.metadata.ChunkStorageMetadata
    torch.distributed.checkpoint.metadata.TensorProperties
    torch.distributed.checkpoint.metadata.StorageMeta
    torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    torch.distributed.checkpoint.filesystem._StorageInfo
    torch.distributed.checkpoint.filesystem._StoragePrefix
    deepspeed.runtime.zero.config.ZeroStageEnum
    deepspeed.runtime.fp16.loss_scaler.LossScaler
    deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler
    deepspeed.runtime.fp16.loss_scaler.LossScaleConfig
    deepspeed.runtime.fp16.loss_scaler.LossScaleProfile
    deepspeed.utils.tensor_fragment.fragment_address
    argparse.Namespace
    numpy.dtype
"""


def _table() -> Mapping[str, Any]:
    table: dict[str, Any] = {name: Known(name, make) for name, make in MAKERS.items()}
    table |= {name: Known(name, partial(Inert, name)) for name in INERT.split()}
    # An array comes with its type and bytes; `plain` puts them together.
    table |= {f"{module}.scalar": Known("numpy.scalar", partial(Inert, "numpy.scalar")) for module in NUMPY}
    table |= {
        f"{module}._reconstruct": Known("numpy.ndarray", lambda *args: Inert("numpy.ndarray")) for module in NUMPY
    }
    table |= {"numpy.ndarray": Known("numpy.ndarray", _not_called)}
    table |= {f"torch.{name}": StorageType(dtype) for name, dtype in STORAGES.items()}
    table |= {"torch.storage.UntypedStorage": StorageType(None)}
    # A dtype that this torch does not have is refused like any unknown name.
    table |= {f"torch.{name}": getattr(torch, name) for name in DTYPES.split() if hasattr(torch, name)}
    return MappingProxyType(table)


NAMES = _table()
