"""What a forward and backward really take on the CPU, by the count of torch's own profiler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from zerofold.dealing import choose_dtypes, split
from zerofold.precision import policy_of
from zerofold.units import assign, find_units


def peak_of_step(model: nn.Module, batch: Callable[[], Any]) -> int:
    """The most bytes beside the parameters. Gradients go as in the engine: the last two slabs are on the wire."""
    assigned = assign(model, find_units(model, None))
    choose_dtypes(model, assigned, policy_of("fp32"))
    slabs = [slab for name, entries in assigned.items() for slab in split(name, entries)]
    wire: deque[list[Tensor]] = deque(maxlen=2)
    handles = []

    def arrived(kept: list[Tensor], waiting: set[Tensor], parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        kept.append(gradient)
        waiting.discard(parameter)
        if not waiting:
            wire.append([*kept])
            kept.clear()

    for slab in slabs:
        waiting = {entry.parameter for entry in slab if entry.parameter.requires_grad}
        hook = partial(arrived, [], waiting)
        handles += [parameter.register_post_accumulate_grad_hook(hook) for parameter in [*waiting]]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        example = batch()
        output = model(**example) if isinstance(example, Mapping) else model(*example)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
    for handle in handles:
        handle.remove()
    now = most = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
