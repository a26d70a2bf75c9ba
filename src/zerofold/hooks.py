"""Module and autograd events become calls of the schedule and the reduction.

forward of a unit    pre-hook: gather; hook: release.
backward of a unit   begins when a node that made one of its outputs is about to run, ends when the nodes that made
                     its inputs are about to run (all of them, or when backward ends).
a gradient           the parameter's own hooks, before and after autograd accumulates it.
end of backward      a callback of the engine, queued by the first event, which is the root output's where there is
                     one: inside reentrant checkpoints a nested backward would end too early.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from zerofold.reduction_order import ReductionOrder
from zerofold.schedule import Schedule, in_backward
from zerofold.unit import Slab, Unit


class Hooks:
    """Installed on every unit of one model; `remove` takes everything off again."""

    def __init__(self, schedule: Schedule, reductions: ReductionOrder) -> None:
        self.schedule, self.reductions = schedule, reductions
        self._handles: list[RemovableHandle] = []
        self._running: list[_UnitCall] = []  # forwards under way, innermost last
        # Forwards whose backward may still come. Autograd's nodes keep them alive; a dropped graph drops them.
        self._waiting: WeakSet[_UnitCall] = WeakSet()
        self._begun: list[_UnitCall] = []  # in this backward
        self._callback_queued = False
        for unit in schedule.units:
            self._install(unit)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _install(self, unit: Unit) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._before_forward(unit, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._after_forward(unit, output)

        self._handles.append(unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        # always_call: a forward that raises, or a recomputation stopped early, must not stay "in use".
        self._handles.append(unit.module.register_forward_hook(after, always_call=True))
        for slab in unit.slabs:
            if slab.gradients is not None:
                for index, parameter in enumerate(slab.parameters):
                    self._install_on_parameter(unit, slab, index, parameter)

    def _install_on_parameter(self, unit: Unit, slab: Slab, index: int, parameter: Tensor) -> None:
        gradients = slab.gradients
        assert gradients is not None

        def before_accumulate(gradient: Tensor) -> None:
            self._enter_backward()
            gradients.before_accumulate(index)

        def after_accumulate(parameter: Tensor) -> None:
            gradients.arrived(index)
            self.reductions.arrived(unit)

        self._handles.append(parameter.register_hook(before_accumulate))
        self._handles.append(parameter.register_post_accumulate_grad_hook(after_accumulate))

    # forward

    def _before_forward(self, unit: Unit, args: Any, kwargs: Any) -> None:
        if unit is self.schedule.root and not in_backward():
            self._forget_broken_backward()
            self.reductions.watch_for_updates()
        call = _UnitCall(unit)
        self._running.append(call)
        self.schedule.before_forward(unit)
        with_grad = [t for t in tensors_in((args, kwargs)) if t.requires_grad] if torch.is_grad_enabled() else []
        nodes = {get_gradient_edge(t).node for t in with_grad}
        call.inputs = call.waiting_for = len(nodes)
        for node in nodes:
            node.register_prehook(self._on_input_gradient(call))

    def _after_forward(self, unit: Unit, output: Any) -> None:
        call = self._running.pop()
        with_grad = [t for t in tensors_in(output) if t.requires_grad] if torch.is_grad_enabled() else []
        for node in {get_gradient_edge(t).node for t in with_grad}:
            node.register_prehook(self._on_output_gradient(call))
        if with_grad:
            self._waiting.add(call)
        self.schedule.after_forward(unit, expects_backward=bool(with_grad))

    # backward

    def _on_output_gradient(self, call: _UnitCall) -> Callable[[Any], None]:
        def begins(gradients: Any) -> None:
            self._enter_backward()
            if not call.begun:
                call.begun = True
                self._begun.append(call)
                self.schedule.before_backward(call.unit)

        return begins

    def _on_input_gradient(self, call: _UnitCall) -> Callable[[Any], None]:
        def ends(gradients: Any) -> None:
            call.waiting_for -= 1
            if call.waiting_for == 0 and call.begun:
                self._end_call(call)

        return ends

    def _end_call(self, call: _UnitCall) -> None:
        call.ended = True
        self.schedule.after_backward(call.unit)
        # Another call of the same module may still add to the same gradients.
        if all(other.ended for other in self._waiting if other.unit is call.unit):
            self.reductions.ready(call.unit)

    def _enter_backward(self) -> None:
        if not self._callback_queued:
            self._callback_queued = True
            self.reductions.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._callback_queued = False
        self.schedule.end_backward()
        self.reductions.end_backward()
        self._forget_begun()

    def _forget_broken_backward(self) -> None:
        """An exception inside an earlier backward kept its end from being called."""
        if self._callback_queued:
            self._callback_queued = False
            self._forget_begun()
            self.schedule.end_backward()
            self.reductions.reducer.finish()
        self._running.clear()

    def _forget_begun(self) -> None:
        """A retained graph may run backward again, so its calls start over."""
        for call in self._begun:
            call.begun, call.ended, call.waiting_for = False, False, call.inputs
        self._begun.clear()


@dataclasses.dataclass(eq=False)
class _UnitCall:
    """One forward of a unit, until its backward is through."""

    unit: Unit
    inputs: int = 0  # nodes that made the inputs
    waiting_for: int = 0  # those that backward has not reached
    begun: bool = False
    ended: bool = False


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from tensors_in(getattr(value, part.name))
