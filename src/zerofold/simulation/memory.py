"""Bytes of tensors that are alive, now and at the peak, whether they have memory or are on the meta device.

Tensors are seen when an operation takes or returns them. A storage that is resized behind torch's back, as sharding
does with gathered parameters, is looked at again: when an operation touches it, when a collective starts, and, if it
has ever been seen to change, before a new peak is believed.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class _Seen:
    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int


class LiveBytes:
    """Counts the storages of one kind of device.

    >>> live = LiveBytes("cpu")
    >>> one = torch.zeros(100); live.see(one); live.see(one[:10])
    >>> other = torch.zeros(50); live.see(other)
    >>> del other
    >>> live.now, live.peak
    (400, 600)
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._seen: dict[int, _Seen] = {}
        self._resized: set[int] = set()  # those that have changed their size
        self.now = self.peak = 0

    def see(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device_type:
            return
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._seen.get(key)
        if known is None:
            # A storage keeps its Python object for as long as it lives itself, so its end is the object's.
            self._seen[key] = _Seen(weakref.ref(storage, lambda _: self._gone(key)), nbytes)
            self._add(nbytes)
        elif known.nbytes != nbytes:
            self._resized.add(key)
            self._look_at_resized()

    def look(self) -> None:
        """At all of them."""
        for key in [key for key, seen in self._seen.items() if self._change(seen)]:
            self._resized.add(key)
        self._look_at_resized()

    def start_again(self) -> None:
        """The peak from now on."""
        self.look()
        self.peak = self.now

    def _gone(self, key: int) -> None:
        known = self._seen.pop(key, None)
        self._resized.discard(key)
        if known is not None:
            self.now -= known.nbytes

    def _change(self, seen: _Seen) -> int:
        storage = seen.storage()
        return 0 if storage is None else storage.nbytes() - seen.nbytes

    def _look_at_resized(self) -> None:
        """All at once: one that has lost its memory may not be there together with one that has just got some."""
        change = 0
        for key in self._resized:
            seen = self._seen[key]
            by = self._change(seen)
            seen.nbytes += by
            change += by
        self.now += change
        self.peak = max(self.peak, self.now)

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        if self.now > self.peak:
            self._look_at_resized()


def tensors_in(value: Any) -> list[Tensor]:
    """Of an operation's arguments or results: lists are at most two deep."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
