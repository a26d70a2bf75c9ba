"""Functions that run in turns: each in a thread of its own, one at a time, switched only where they ask for it."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class FlowCancelled(Exception):
    """Raised where a flow has stopped, so that it unwinds."""


class Flow(Generic[T]):
    """A call of `run` that goes on with `resume` and rests from `stop`, which it calls itself, until the next.

    >>> flow = Flow(lambda: [flow.stop(), "done"][1])
    >>> flow.resume(); flow.is_over
    False
    >>> flow.resume(); flow.is_over, flow.take_result()
    (True, 'done')
    """

    def __init__(self, run: Callable[[], T]) -> None:
        self._turn, self._rest = threading.Semaphore(0), threading.Semaphore(0)
        self._is_running = self._is_cancelled = self.is_over = False
        self._result: T | None = None
        self._error: BaseException | None = None
        context, torch_state = contextvars.copy_context(), torch_state_here()

        def body() -> None:
            self._turn.acquire()
            try:
                if not self._is_cancelled:
                    with torch_state():
                        self._result = context.run(run)
            except BaseException as error:
                self._error = error
            self.is_over = True
            self._rest.release()

        self._thread = threading.Thread(target=body, name="micro-batch", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Runs it until it stops or ends, and raises what it raised."""
        self._is_running = True
        self._turn.release()
        self._wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def stop(self) -> None:
        """Called inside the flow: gives the turn back, and returns when it is resumed."""
        self._rest.release()
        self._turn.acquire()
        if self._is_cancelled:
            raise FlowCancelled("another micro-batch has failed")

    def cancel(self) -> None:
        """Lets it unwind from where it stopped."""
        self._is_cancelled = True
        if self._is_running:  # the wait for it was interrupted from the keyboard
            self._wait()
        while not self.is_over:
            self._is_running = True
            self._turn.release()
            self._wait()

    def take_result(self) -> T:
        """Of a flow that is over. It is not kept: a loss would keep its graph."""
        self._thread.join()
        result, self._result = self._result, None
        return result  # type: ignore[return-value]  # it is there, since nothing was raised

    def _wait(self) -> None:
        self._rest.acquire()
        self._is_running = False


def torch_state_here() -> Callable[[], ExitStack]:
    """What torch keeps by thread, as it is now; to be entered in another thread."""
    autocast, grad = autocast_here(), torch.is_grad_enabled()
    default = torch.get_default_device()
    stream = torch.cuda.current_stream() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def enter() -> ExitStack:
        stack = autocast()
        stack.enter_context(torch.set_grad_enabled(grad))
        if stream is not None:
            stack.enter_context(torch.cuda.stream(stream))  # and its device
        if default.type != "cpu":
            stack.enter_context(default)
        return stack

    return enter


def autocast_here() -> Callable[[], ExitStack]:
    """The autocast settings as they are now; to be entered later or in another thread."""
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    settings = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
    caches = torch.is_autocast_cache_enabled()

    def enter() -> ExitStack:
        stack = ExitStack()
        for kind, dtype, enabled in settings:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=caches))
        return stack

    return enter


def random_numbers_here(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """The state of the random numbers as it is now; to be entered later, and left without a trace."""
    on_cuda = device.type == "cuda"
    state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(device) if on_cuda else None

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_cuda else []))
        torch.set_rng_state(state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
        return stack

    return enter
