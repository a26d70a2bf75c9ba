"""What a model's step takes the host, measured: how long until all of it is launched.

A GPU computes beside the host, so a call returns when its kernels are queued. For a batch so small that the device is
never far behind, the time until forward and backward return is the host's own, and it is the same for larger batches:

    host     |forward |backward        |  waits  |update|clear| waits |
    device   .f.f..f.f.b.b..b.b..b..b.b|b|       .......u|uuuuuuuuuuu|
                                        ^ drained |      settled      |

The update is that of any batch, and so is what the device waits for in it. With larger batches the host is ahead, and
does a part of it while the device is still in backward. So some steps are taken with a device that has
something else to do first; what is over sooner after that is `ahead`:

    host     |forward |backward        |  waits  |update …      |clear| waits |
    device   .f.f..f.f.b.b..b.b..b..b.b|b|       |occupied|.uuuuuuuu|
                                                          | settled |

A device that is over a thousand kernels behind stops the host, and then this shows the device's time. `drained` tells.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from zerofold.plan.shape import Launching

STEPS = 10
"""That are timed, of which the fastest counts: what else the machine does only slows. The passes and the update may be
those of two steps, for the host waits in between. Their parts are taken together: the fastest of each would add up to
passes that never were."""
_TIMES_BEHIND = 2  # an update is taken so
_CYCLES = 2e9  # of a second of a device, or fewer: then it is occupied for longer


class Step(NamedTuple):
    """A training step in parts, always with the same batch."""

    forward: Callable[[], Tensor]
    """Returns the loss."""
    update: Callable[[], object]
    clear: Callable[[], object]


def probe(step: Step, device: torch.device, *, samples: int, checkpoint_every: int, steps: int = STEPS) -> Launching:
    """Takes some steps. The first two are not timed: they compile, learn orders, and make states and buffers.

    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> parts = Step(lambda: model(torch.ones(1, 4)).sum(), optimizer.step, optimizer.zero_grad)
    >>> found = probe(parts, torch.device("cpu"), samples=1, checkpoint_every=0)
    >>> min(found.forward, found.backward, found.update) > 0, found.drained, found.waits
    (True, 0.0, 0)
    """
    _take(step, device)
    with _waits_counted(device) as count:
        _pass(step)
        waits = count()
    _finish(step, device)
    taken = [_take(step, device)._asdict() for _ in range(steps)]
    found = (Launching(checkpoint_every=checkpoint_every, samples=samples, waits=waits, **each) for each in taken)
    fastest = reduce(Launching.fastest, found)
    if device.type != "cuda":
        return fastest
    behind = min(_settled_behind(step, device, 2 * fastest.settled) for _ in range(_TIMES_BEHIND))
    return replace(fastest, ahead=max(0.0, fastest.settled - behind))


class _Taken(NamedTuple):
    """Seconds of one step."""

    forward: float
    backward: float
    drained: float
    update: float
    clear: float
    settled: float


def _take(step: Step, device: torch.device) -> _Taken:
    _wait(device)
    begin = time.perf_counter()
    loss = step.forward()
    forwarded = time.perf_counter()
    loss.backward()
    del loss
    backwarded = time.perf_counter()
    _wait(device)
    idle = time.perf_counter()
    step.update()
    updated = time.perf_counter()
    step.clear()
    cleared = time.perf_counter()
    _wait(device)
    settled = time.perf_counter()
    return _Taken(
        forward=forwarded - begin,
        backward=backwarded - forwarded,
        drained=idle - backwarded if device.type == "cuda" else 0.0,
        update=updated - idle,
        clear=cleared - updated,
        settled=settled - idle,
    )


def _settled_behind(step: Step, device: torch.device, seconds: float) -> float:
    """From the end of what occupies the device for that long until it is through with an update."""
    _pass(step)
    free, settled = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _wait(device)
    torch.cuda._sleep(int(seconds * _CYCLES))
    free.record()
    step.update()
    step.clear()
    settled.record()
    _wait(device)
    return free.elapsed_time(settled) / 1000


def _pass(step: Step) -> None:
    step.forward().backward()


def _finish(step: Step, device: torch.device) -> None:
    step.update()
    step.clear()
    _wait(device)


@contextmanager
def _waits_counted(device: torch.device) -> Iterator[Callable[[], int]]:
    """By CUDA's own check for calls that wait; on the CPU nothing does."""
    if device.type != "cuda":
        yield lambda: 0
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("synchronizing CUDA operation" in str(each.message) for each in seen)
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
