"""Memory of the device for chunks that stream through it, and the end of their way down."""

from __future__ import annotations

from concurrent.futures import Future

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
    half of what the one before has left, or what the largest before it would leave beside all chunks: a step of short
    sequences must not use up what the next one of long sequences needs again.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self._device, self._limit = device, limit
        self._steps, self._is_full = 0, False
        self._given = 0  # bytes of chunks
        self._largest = 0  # bytes that a step had in use beside them

    def more(self) -> int:
        """Called in every step: for how many chunks there is room now."""
        self._steps += 1
        if self._is_full:
            return 0
        self._largest = max(self._largest, torch.cuda.max_memory_allocated(self._device) - self._given)
        if self._steps == 1:  # only from then on gradients stay on the device
            return 0
        taken = max(torch.cuda.memory_reserved(self._device), self._largest + self._given)
        count = max(0, (self._limit - taken) // 2 // (CHUNK * BYTES))
        if count:
            torch.cuda.empty_cache()  # else their memory is cut out of large blocks that activations will want again
        self._is_full = not count
        self._given += count * CHUNK * BYTES
        return count


class Slot:
    """Device memory for one chunk."""

    def __init__(self, device: torch.device) -> None:
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
