"""A device on the host whose streams are threads: what is given to them happens later, each after a random while.

So an order that nobody asked for does not come about by itself, as it does where streams do all at once. What computes
on no stream of its own is the main stream's, and happens at once.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zerofold.optim import onepass

CPU = torch.device("cpu")
LONGEST = 1e-3  # seconds


class LateDevice:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[LateStream] = []
        self._current = threading.local()
        self.main = MainStream()

    @property
    def fakes(self) -> dict[str, Any]:
        """Of torch.cuda."""
        return {
            "Stream": self._make_stream,
            "Event": LateEvent,
            "stream": self._on,
            "current_stream": lambda *_: self._of_thread(),
            "set_device": lambda _: None,
            "synchronize": lambda *_: self._synchronize(),
            "empty_cache": self._synchronize,
        }

    def adam(self, *args: Any, **kwargs: Any) -> None:
        self._of_thread().put(partial(onepass.adam, *args, **kwargs))

    def close(self) -> None:
        for stream in self.streams:
            stream.put(None)
        for stream in self.streams:
            stream.thread.join()

    def _make_stream(self, *_: Any) -> LateStream:
        self.streams.append(LateStream(self.random))
        return self.streams[-1]

    def _of_thread(self) -> Any:
        return getattr(self._current, "stream", self.main)

    @contextmanager
    def _on(self, stream: LateStream) -> Iterator[None]:
        before, self._current.stream = self._of_thread(), stream
        try:
            with _Later(stream):
                yield
        finally:
            self._current.stream = before

    def _synchronize(self) -> None:
        for stream in self.streams:
            stream.record_event().synchronize()


class MainStream:
    def put(self, work: Callable[[], object]) -> None:
        work()

    def wait_event(self, event: LateEvent) -> None:
        event.synchronize()

    def wait_stream(self, stream: Any) -> None:
        stream.record_event().synchronize()

    def record_event(self) -> LateEvent:
        event = LateEvent()
        event.record(self)
        return event


class LateStream(MainStream):
    def __init__(self, chance: random.Random) -> None:
        self._random, self._work = chance, SimpleQueue[Callable[[], object] | None]()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def put(self, work: Callable[[], object] | None) -> None:
        self._work.put(work)

    def wait_event(self, event: LateEvent) -> None:
        self.put(event.recorded.wait)  # as it was recorded until now

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def _serve(self) -> None:
        torch.set_num_threads(1)
        with torch.no_grad():
            while (work := self._work.get()) is not None:
                if self._random.random() < 0.5:
                    time.sleep(self._random.random() * LONGEST)
                work()


class LateEvent:
    def __init__(self, **_: Any) -> None:
        self.device, self.recorded = CPU, threading.Event()
        self.recorded.set()  # as one that was never recorded
        self._is_recorded = False

    def record(self, stream: Any) -> None:
        self.recorded, self._is_recorded = threading.Event(), True
        stream.put(self.recorded.set)

    def synchronize(self) -> None:
        assert self.recorded.wait(20), "a stream waits for what never comes"

    def query(self) -> bool:
        return self.recorded.is_set()

    def elapsed_time(self, end: LateEvent) -> float:
        if not (self._is_recorded and end._is_recorded):
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return 1.0


class _Later(TorchFunctionMode):
    """Copies go to the stream; what makes memory and views is done at once."""

    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.copy_:
            return func(*args, **(kwargs or {}))
        self._stream.put(partial(func, *args))
        return args[0]
