"""A copy of a rank's file in host memory, taken while training goes on.

The copy needs the states unchanged. They change in the optimizer's step only, so it runs under the next forward and
backward; that step waits for what is left of it. Memory comes in blocks, pinned where there is an accelerator: one
large pinned tensor would be rounded up to a power of two.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from zerofold.checkpoint.contents import CheckpointError
from zerofold.checkpoint.files import CHUNK_BYTES, FileLayout, Image

BLOCK_BYTES = 4 * CHUNK_BYTES


class Staging:
    """Host memory for one copy; kept between saves."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: list[Tensor] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def reserve(self, nbytes: int) -> None:
        with self._lock:
            while self.nbytes < nbytes:
                pinned = self.device.type != "cpu"
                self._blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned))

    def range(self, start: int, stop: int) -> list[Tensor]:
        """The memory from byte `start` to `stop`, in as many views as it has blocks."""
        found = []
        while start < stop:
            block, at = divmod(start, BLOCK_BYTES)
            size = min(stop - start, BLOCK_BYTES - at)
            found.append(self._blocks[block][at : at + size])
            start += size
        return found


class Snapshot:
    """The bytes of a file to be, on their way into staging memory."""

    def __init__(self, layout: FileLayout, staging: Staging) -> None:
        self._layout, self._staging = layout, staging
        self._copied = threading.Event()
        self._event: Any = None
        self._versions = [part.tensor._version for part in layout.parts]
        self._is_settled = False
        self._changed: str | None = None
        staging.reserve(layout.nbytes)
        self._put(0, torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
        if staging.device.type != "cpu":
            self._start_on_device()

    def _start_on_device(self) -> None:
        """Beside the stream that computes: what is in its queue already comes first, what follows need not wait."""
        stream = torch.Stream(self._staging.device)
        stream.wait_stream(torch.accelerator.current_stream(self._staging.device))
        with stream:
            self._copy()
            self._event = torch.Event(self._staging.device)
            self._event.record(stream)

    def copy(self) -> None:
        """In the background: returns when all is in host memory."""
        try:
            self._copy() if self._event is None else self._event.synchronize()
            if not self._is_settled:
                self._check()
        finally:
            self._copied.set()
        if self._changed is not None:
            raise CheckpointError(
                f"'{self._changed}' was changed by hand while it was being copied: change states in an optimizer's "
                "step or inside `with zf.full_params(model)`, or wait for the save first"
            )

    def settle(self) -> None:
        """The states may change after this."""
        if self._event is None:
            self._copied.wait()
        elif not self._is_settled:
            self._check()
            self._is_settled = True
            torch.accelerator.current_stream(self._staging.device).wait_event(self._event)

    def _check(self) -> None:
        """Whoever changes a state by rights has it settled first."""
        for part, version in zip(self._layout.parts, self._versions, strict=True):
            if part.tensor._version != version:
                self._changed = part.name
                return

    def _copy(self) -> None:
        for start, data in Image(self._layout).within(0, self._layout.nbytes):
            self._put(start, data)

    def _put(self, start: int, data: Tensor) -> None:
        done = 0
        for target in self._staging.range(start, start + data.numel()):
            target.copy_(data[done : done + target.numel()], non_blocking=True)
            done += target.numel()

    def chunk(self, number: int) -> list[Any]:
        stop = min((number + 1) * CHUNK_BYTES, self._layout.nbytes)
        return [part.numpy() for part in self._staging.range(number * CHUNK_BYTES, stop)]
