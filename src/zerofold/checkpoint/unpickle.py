"""Reads pickles without running anything that they name.

A pickle is a program. This reader knows the few instructions that lay out plain data, and the table of names in
pickle_names.py. Each name stands for code of ours that builds a description: a tensor becomes a `TensorOnDisk`, an
object of a known class an `Inert` that only holds fields. Any other name is refused, and nothing but an entry of the
table is ever called.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy
import torch

from zerofold.checkpoint.contents import CheckpointError, numel
from zerofold.checkpoint.ondisk import Record, TensorOnDisk
from zerofold.checkpoint.pickle_names import NAMES, Inert, Known, Storage, StorageType, key_of

DEEPEST = 100  # nested containers; a deeper one is no data that anybody saved
# The instructions that torch and DCP use: no text forms, no extension registry, no bytearray of a given size.
INSTRUCTIONS = """
    PROTO FRAME STOP MARK POP POP_MARK DUP MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE
    BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES
    BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT GLOBAL STACK_GLOBAL
    BINPERSID
"""
# The Python form of the unpickler: the C form sets aside as much memory as one number in the file tells it to.
PythonUnpickler: Any = pickle._Unpickler


class _Reader(PythonUnpickler):
    def __init__(self, data: bytes, where: str, storage: Callable[[str], Record] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        # Pickles of protocol 2 use the names of Python 2.
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full not in NAMES:
            raise CheckpointError(
                f"refused to load {full} from {self._where}: only tensors and plain data are read from a checkpoint. "
                "If you trust the file, load it with torch.load(weights_only=False), drop that object and save again"
            )
        return NAMES[full]

    def persistent_load(self, pid: Any) -> Storage:
        kind, type_, key, *_ = pid
        if kind != "storage" or not isinstance(type_, StorageType) or not isinstance(key, str) or self._storage is None:
            raise ValueError("a reference to something that is no storage of this file")
        return Storage(self._storage(key), type_.dtype)

    def load_call(self) -> None:
        args, function = self.stack.pop(), self.stack[-1]
        if not isinstance(function, Known) or type(args) is not tuple:
            raise ValueError(f"a call of {function!r}"[:100])
        self.stack[-1] = function.make(*args)

    def load_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Inert):
            target.set_state(state)
        elif not isinstance(target, dict | TensorOnDisk):  # what torch pins to a state_dict or a tensor is not needed
            raise ValueError(f"fields for {target!r}"[:100])

    def load_items(self) -> None:
        items = self.pop_mark()
        self._fill(items)

    def load_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def _fill(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise ValueError(f"items for a {type(target).__name__}")
        target.update((key_of(key), value) for key, value in zip(items[::2], items[1::2], strict=True))

    # What the base class looks instructions up in; one that is not here ends the reading.
    dispatch = MappingProxyType(
        {getattr(pickle, name)[0]: PythonUnpickler.dispatch[getattr(pickle, name)[0]] for name in INSTRUCTIONS.split()}
        | {
            pickle.REDUCE[0]: load_call,
            pickle.NEWOBJ[0]: load_call,
            pickle.BUILD[0]: load_state,
            pickle.SETITEM[0]: load_item,
            pickle.SETITEMS[0]: load_items,
        }
    )


def unpickle(data: bytes, where: str, storage: Callable[[str], Record] | None = None) -> Any:
    """What the pickle describes; `storage` finds the bytes of a storage by its key."""
    try:
        return _Reader(data, where, storage).load()
    except CheckpointError:
        raise
    # Bytes that anyone may have written can break the reader in any way. It all means the same.
    except Exception as error:
        what = str(error) or "it ends early"
        raise CheckpointError(
            f"{where} is damaged or no checkpoint ({type(error).__name__}: {what}); use another copy of the checkpoint"
        ) from error


def plain(value: Any, where: str) -> Any:
    """The same as plain data: tensors read, objects as dicts of their fields, one-valued ones (enums) as their value.

    Something that occurs at several places is made once, as pickles can hold a doubling of doublings.
    """
    return _plain(value, where, {}, 0)


def _plain(value: Any, where: str, made: dict[int, Any], depth: int) -> Any:
    if depth > DEEPEST:
        raise CheckpointError(f"{where} nests data more than {DEEPEST} deep: it is damaged or made to harm")
    if id(value) in made:
        return made[id(value)]
    result: Any = value
    if isinstance(value, TensorOnDisk):
        result = value.read(0, numel(value)).view(value.shape)
    elif isinstance(value, Inert) and value.name in ("numpy.ndarray", "numpy.scalar"):
        result = _from_numpy(value, where)
    elif isinstance(value, Inert) and value.fields:
        result = {key: _plain(field, where, made, depth + 1) for key, field in value.fields.items()}
    elif isinstance(value, Inert):
        result = _plain(value.args[0] if len(value.args) == 1 else value.args, where, made, depth + 1)
    elif isinstance(value, dict):
        result = {_plain(k, where, made, depth + 1): _plain(v, where, made, depth + 1) for k, v in value.items()}
    elif isinstance(value, list | tuple):
        result = type(value)(_plain(item, where, made, depth + 1) for item in value)
    elif value is not None and not isinstance(value, str | bytes | int | float | complex | set | torch.dtype):
        raise CheckpointError(f"{where} holds {value!r} where data should be")
    if isinstance(value, TensorOnDisk | Inert | dict | list | tuple):
        made[id(value)] = result
    return result


def _from_numpy(value: Inert, where: str) -> Any:
    """An array of plain numbers, or one number as Python has it."""
    try:
        if value.name == "numpy.scalar":
            shape, kind, data = (), *value.args
        else:
            _version, shape, kind, by_column, data = value.args
        if not isinstance(kind, Inert) or not isinstance(data, bytes) or not re.fullmatch("[biuf][1248]", kind.args[0]):
            raise ValueError("an array of something else than numbers")
        order = next((arg for arg in kind.args[1:] if arg in ("<", ">", "|")), "|")
        array = numpy.frombuffer(data, dtype=numpy.dtype(order + kind.args[0]))
        if value.name == "numpy.scalar":
            return array.reshape(()).item()
        return array.reshape(shape, order="F" if by_column else "C").copy()
    except (IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} holds data of numpy that is not read here ({error})") from error
