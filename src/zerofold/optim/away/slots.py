"""Memory of the device for chunks that stream through it, and the end of their way down."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import Tensor

from zerofold.memory import Done
from zerofold.optim.away.chunks import CHUNK


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
