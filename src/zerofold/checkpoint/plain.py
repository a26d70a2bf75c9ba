"""Plain data to JSON and back, exactly. Nothing else is taken, and nothing is executed when it is read.

JSON knows neither tuples, bytes nor keys that are no text; such values become an object with one key that starts with
"$". Tensors go where the other tensors go and leave their name behind.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from zerofold.checkpoint.contents import CheckpointError
from zerofold.sharded import ShardedTensor

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON holds it; its tensors are added to `tensors` under names that begin with `where`.

    >>> found: dict[str, Tensor] = {}
    >>> encode({"betas": (0.9, 0.95), 3: b"x", "mask": torch.ones(2)}, "extra", found)
    {'$dict': [['betas', {'$tuple': [0.9, 0.95]}], [3, {'$bytes': 'eA=='}], ['mask', {'$tensor': "extra['mask']"}]]}
    >>> list(found)
    ["extra['mask']"]
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, ShardedTensor):
        raise TypeError(f"{where} is a sharded tensor: save zf.full(tensor) instead")
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise TypeError(f"{where} is a {value.layout} tensor, which has no place in a file: save it as a dense one")
        # A copy: the caller may change his while it is being written.
        return {"$tensor": _put(value.detach().clone(), where, tensors)}
    if isinstance(value, numpy.ndarray):
        try:
            array = torch.from_numpy(value.copy())
        except TypeError as error:
            raise TypeError(f"{where} is a numpy array of {value.dtype}, which has no place in a file") from error
        return {"$array": _put(array, where, tensors)}
    if isinstance(value, numpy.generic):
        return encode(value.item(), where, tensors)
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value)}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, (set, frozenset)):
        return {"$set": [encode(item, f"{where}{{}}", tensors) for item in sorted(value, key=repr)]}
    if isinstance(value, dict):
        pairs = [(key, encode(item, f"{where}[{key!r}]", tensors)) for key, item in value.items()]
        if isinstance(value, Counter):
            return {"$counter": [[encode(key, where, tensors), item] for key, item in pairs]}
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$dict": [[encode(key, where, tensors), item] for key, item in pairs]}
    raise TypeError(
        f"{where} is a {type(value).__name__}: checkpoints hold plain data (numbers, text, bytes, lists, tuples, "
        "dicts, tensors, numpy arrays), so that nothing is executed on load: turn it into such, as vars(args) and "
        "str(path) do"
    )


def _put(tensor: Tensor, where: str, tensors: dict[str, Tensor]) -> str:
    """Its name: what is in a set, and keys that look alike, would have one name between them."""
    while where in tensors:
        where += "'"
    tensors[where] = tensor
    return where


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """What `encode` was given; `tensor` fetches one by its name."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, held),) = value.items()
        if key.startswith("$"):
            return _special(key, held, tensor)
    return {key: decode(item, tensor) for key, item in value.items()}


def _special(key: str, held: Any, tensor: Callable[[str], Tensor]) -> Any:
    if key == "$float":
        return float(held)
    if key == "$tensor":
        return tensor(held)
    if key == "$array":
        return tensor(held).numpy()
    if key == "$bytes":
        return base64.b64decode(held, validate=True)
    if key == "$dtype" and held in _DTYPES:
        return _DTYPES[held]
    if key == "$tuple":
        return tuple(decode(item, tensor) for item in held)
    if key == "$set":
        return {decode(item, tensor) for item in held}
    if key in ("$dict", "$counter"):
        pairs = {decode(name, tensor): decode(item, tensor) for name, item in held}
        return Counter(pairs) if key == "$counter" else pairs
    raise CheckpointError(f"plain data of kind '{key}' is not known: the checkpoint is from a newer zerofold")
