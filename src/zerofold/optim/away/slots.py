"""Memory of the device for chunks that stream through it, how much there is of it, and the end of their way down."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from zerofold.memory import Done
from zerofold.optim.away.chunks import CHUNK

BYTES = 3 * 4 + 2
"""Of an element in a slot: its states, and the copy that forward computes with."""


class IsDown(Done):
    """States that another thread sends down, when it comes to it."""

    def __init__(self, going: Future[torch.cuda.Event]) -> None:
        super().__init__()
        self._going = going

    def wait(self) -> None:
        self._event = self._going.result()
        super().wait()

    def finish(self) -> None:
        self._event = self._going.result()
        super().finish()

    @property
    def is_under_way(self) -> bool:
        return self._going.done()

    @property
    def is_over(self) -> bool:
        if not self.is_under_way:
            return False
        self._event = self._going.result()
        return super().is_over


class Filling:
    """Lets more and more chunks stay on the device, until its memory is used up to a limit.

    What a step takes, with all that lies unused between its blocks, shows when it is over. So the chunks of a step get
    half of what the fullest step so far has left. Below the limit a twentieth of it is left free, and room for another
    block as large as the largest: what was whole for that in one step may have holes in the next. Where memory comes
    closer to the limit all the same, chunks go again.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self._device, self._limit, self._bound = device, limit, limit
        self._given = 0  # bytes of chunks
        self._expected = 0  # to be reserved by a step like the fullest, with what was given since
        self._is_full = self._has_to_wait = False
        self._ran_out: int | None = None  # how often the allocator had when first looked

    def change(self) -> int:
        """In every step but the first, whose gradients were not on the device yet: for how many chunks there is room
        now, or, below 0, how many are too many."""
        if not self._is_full:  # it takes a while to look
            self._bound = self._limit - max(_largest_segment(self._device), self._limit // 20)
        reserved = torch.cuda.memory_reserved(self._device)
        over = reserved - self._bound
        if over > 0 and self._given:
            return -min(-(-over // _state_bytes()), self._given // _state_bytes())
        if self._is_full:
            return 0
        is_first, ran_out = self._ran_out is None, _times_run_out(self._device)
        self._ran_out = ran_out if self._ran_out is None else self._ran_out
        if not self._ran_out:
            # By the peak: less is reserved now where the cache was emptied since, or where this step was a short one.
            reserved = torch.cuda.max_memory_reserved(self._device)
        elif is_first or ran_out > self._ran_out:
            # While the model was built or took its first step all was reserved, and then given back: the peak is the
            # limit, and what is reserved now is not all of a step yet. Later on that means that there is nothing left.
            self._has_to_wait = is_first
            return 0
        self._expected = max(reserved, self._expected)
        return max(0, (self._bound - self._expected) // 2 // _state_bytes())

    def changed(self, count: int, wanted: int) -> None:
        """So many chunks have memory now that had none, or have none any more."""
        self._given += count * _state_bytes()
        self._expected += count * _state_bytes()
        self._is_full |= not self._has_to_wait and (wanted <= 0 or count < wanted)
        self._has_to_wait = False


def _state_bytes() -> int:
    """Of a chunk."""
    return CHUNK * 3 * 4


def _times_run_out(device: torch.device) -> int:
    """How often the allocator found nothing, gave back what it kept unused, and tried again."""
    count: int = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    return count


def _largest_segment(device: torch.device) -> int:
    """Those that grow and shrink by pages have no holes that matter. CUDA's own allocator keeps no list, and raises."""
    if torch.cuda.get_allocator_backend() != "native":
        return 0
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == device.index]
    return max((segment["total_size"] for segment in segments if not segment.get("is_expandable")), default=0)


class Slot:
    """Device memory for one chunk. It comes from a stream's own pool: else it would lie in what activations have left,
    and the next step would have to take as much again for them."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        with torch.cuda.stream(stream):
            self.states = tuple(torch.empty(CHUNK, device=device) for _ in range(3))
        self._others: dict[tuple[str, torch.dtype], Tensor] = {}
        self.free = Done()  # after which it may be filled again

    def room(self, name: str, dtype: torch.dtype) -> Tensor:
        """For gradients that come up, or copies that go down; made when first needed."""
        if (name, dtype) not in self._others:
            self._others[name, dtype] = torch.empty(CHUNK, dtype=dtype, device=self.states[0].device)
        return self._others[name, dtype]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.states, *self._others.values()))
