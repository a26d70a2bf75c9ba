"""What CUDA's allocator holds of the device and nobody uses, kept near what a step needs (M_d of ZeRO-R).

by itself    |block| 1 | 2  | 1 |  3   |  2  |   3   |    segments as large as the tensors they were taken for; a longer
                                                          step fills few of them and takes others, and all of them stay
exchanged    |block|            one segment           |   as much as was ever in use at once: steps are cut from it
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple, Protocol

import torch

OVER = 1.06
"""Of the most that was allocated at once: what may be reserved."""
_ANEW = 1.01
"""Of what was reserved when the cache was exchanged: a model that needs so much again is left alone."""
_SEGMENT = 2 * 2**20  # bytes: CUDA's allocator takes multiples of it
_LEAST = 32 * 2**20


class Books(NamedTuple):
    """Bytes, as the allocator counts them."""

    reserved: int
    most_allocated: int


class Cache(Protocol):
    """Memory that an allocator holds for later."""

    def books(self) -> Books: ...

    def give_back(self) -> None:
        """Segments of which nothing is in use."""

    def take(self, nbytes: int) -> None:
        """One segment, free to be cut."""


class CudaCache:
    """Of torch's allocator, whose peaks stay as they are: `take` comes after `give_back`, up to the most there was."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def books(self) -> Books:
        # torch.cuda.memory_reserved and the like make this dict as well, and a flat one of it.
        found = torch.cuda.memory_stats_as_nested_dict(self._device)
        return Books(found["reserved_bytes"]["all"]["current"], found["allocated_bytes"]["all"]["peak"])

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def take(self, nbytes: int) -> None:
        with suppress(torch.OutOfMemoryError):  # another process was faster: tensors take what there is, one by one
            torch.empty(nbytes, dtype=torch.uint8, device=self._device)


class Reserve:
    """Decides when the cache is given back: each time costs a wait for the device.

    When a step begins with a longer tensor than any since the last time, what is held for shorter ones is of little
    use to it. And when a backward is through, and more is reserved than `OVER` of what was ever allocated at once, the
    cache is exchanged for one segment that fills the reserve up to just that. The first happens some ln(n) times with n
    shapes in a random order; the second each time only if there is 1% more than the last time.

    >>> class Fake:
    ...     reserved, most_allocated = 100 << 20, 200 << 20
    ...     def books(self): return Books(self.reserved, self.most_allocated)
    ...     def give_back(self): self.reserved = 100 << 20
    ...     def take(self, nbytes): self.reserved += nbytes
    >>> cache = Fake()
    >>> reserve = Reserve(cache)
    >>> reserve.begin(512); cache.reserved = 220 << 20; reserve.end()
    >>> reserve.given_back, cache.reserved >> 20
    (2, 200)
    >>> reserve.begin(256); cache.reserved = 205 << 20; reserve.end(); reserve.given_back
    2
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._longest = self._longest_since = 0
        self._most = 0  # allocated; the user may set the allocator's own peak back
        self._found = 0  # reserved, before the last exchange
        self.given_back = 0
        """How often."""

    def begin(self, nbytes: int, *, is_new: bool = False) -> None:
        """A step begins with a tensor of so many bytes. `is_new`: the block of checkpoints is made anew for it."""
        self._longest = max(self._longest, nbytes)
        if is_new or nbytes > self._longest_since:
            self._longest_since = nbytes
            self._give_back()

    def end(self) -> None:
        """Its backward is through: nothing is in use but what stays."""
        reserved, most = self._cache.books()
        self._most = max(self._most, most)
        if reserved <= max(OVER * self._most, _ANEW * self._found):
            return
        self._found = reserved
        self._give_back()
        room = (self._most - self._cache.books().reserved) // _SEGMENT * _SEGMENT
        if room >= _LEAST:
            self._cache.take(room)
        self._longest_since = self._longest  # of that segment every step so far is cut

    def _give_back(self) -> None:
        self._cache.give_back()
        self.given_back += 1
