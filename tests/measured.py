"""What a forward and backward really take on the CPU, by the count of torch's own profiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from zerofold.units import assign, find_units


def peak_of_step(model: nn.Module, batch: Callable[[], Any]) -> int:
    """The most bytes beside the parameters. Gradients go as in the engine: when their unit has all of them."""
    units = find_units(model, None)
    kept: dict[str, list[Tensor]] = {}
    handles = []

    def arrived(unit: str, waiting: set[Tensor], parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        kept.setdefault(unit, []).append(gradient)
        waiting.discard(parameter)
        if not waiting:
            kept[unit].clear()

    for unit, entries in assign(model, units).items():
        trained = [entry.parameter for entry in entries if entry.parameter.requires_grad]
        waiting = set(trained)
        for parameter in trained:
            handles.append(parameter.register_post_accumulate_grad_hook(partial(arrived, unit, waiting)))
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
