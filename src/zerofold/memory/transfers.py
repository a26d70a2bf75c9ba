"""Copies between a device and the host, beside the device's own work: a stream for each direction.

compute   [ f0     ][ f1     ][ f2     ]        a copy starts when the work it depends on is through,
up           [p1]      [p2]                     and whoever needs it waits for its end on the device,
down                    [g2]      [g1]          not on the host

Where the device is the host, copies are made at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from zerofold.timing import HOST


class Done:
    """The end of work that was set going: for the stream that needs it (`wait`) or for the host (`finish`)."""

    waits_for = HOST

    def __init__(self, event: Any = None) -> None:
        self._event = event

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._event.device).wait_event(self._event)

    def finish(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    @property
    def is_under_way(self) -> bool:
        """Set going, so that `wait` does not hold up the host."""
        return True

    @property
    def is_over(self) -> bool:
        return self._event is None or bool(self._event.query())


class Transfers:
    """The side streams of one model.

    >>> transfers = Transfers(torch.device("cpu"))
    >>> target = torch.zeros(2)
    >>> with transfers.up():
    ...     _ = target.copy_(torch.ones(2))
    >>> target.tolist()
    [1.0, 1.0]
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_async = device.type == "cuda"
        self._up, self._down = (torch.cuda.Stream(device) if self.is_async else None for _ in range(2))

    def up(self) -> AbstractContextManager[None]:
        """Inside, work goes to the stream towards the device, behind what the current stream has to do until now."""
        return self._beside(self._up)

    def down(self) -> AbstractContextManager[None]:
        """The same, towards the host."""
        return self._beside(self._down)

    @contextmanager
    def _beside(self, stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """The current stream waits for what was set going downwards."""
        if self._down is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._down)

    def finish(self) -> None:
        """Returns when all copies are over, in both directions."""
        for stream in (self._up, self._down):
            if stream is not None:
                stream.synchronize()

    def done(self) -> Done:
        """What the current stream has been given until now."""
        if not self.is_async:
            return Done()
        return Done(torch.cuda.current_stream(self.device).record_event())

    def is_used(self, tensor: Tensor) -> None:
        """Its memory may be needed by the current stream after its owner lets go of it."""
        if self.is_async:
            tensor.record_stream(torch.cuda.current_stream(self.device))
