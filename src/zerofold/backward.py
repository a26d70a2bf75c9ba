"""When backward begins and ends: that of each unit, and the whole of it.

graph     … node A ─ [ nodes of a unit's forward ] ─ node B … loss
backward      │                                       └─ B is about to run: backward of the unit begins
              └─ A is about to run: it ends, for autograd runs the nodes made last first

A is any node that made an input of the unit, B any that made an output. Where no input has a gradient there is no A,
and the unit's backward ends with the whole. That end is a callback of autograd's engine. The first event queues it: the
root's output where there is one, because inside a reentrant checkpoint a nested backward would end too early.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from zerofold.boundary import Boundary
from zerofold.calls import UnitCall
from zerofold.hook_forms import untraced
from zerofold.reduction_order import ReductionOrder
from zerofold.schedule import Schedule
from zerofold.unit import Unit

CLOSED = (
    "backward came to a forward from before zf.close(model), and the gradients would be neither reduced nor scaled: "
    "call backward before zf.close, or run the forward again"
)


class Backward:
    """Tells schedule, reductions and boundary of one model where backward is."""

    def __init__(
        self,
        schedule: Schedule,
        reductions: ReductionOrder,
        boundary: Boundary,
        *,
        refuse: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        """`refuse` may raise before a backward begins, `check` before gradients are reduced."""
        self._schedule, self._reductions, self._boundary = schedule, reductions, boundary
        self._refuse, self._check = refuse, check
        self.before_release: Callable[[], None] = lambda: None  # of what stayed gathered until backward ends
        self.piecewise: Collection[Unit] = ()  # units that backward enters and leaves many times (zf.accumulate)
        # Forwards of each unit whose backward may still come. Autograd's nodes keep them alive; a dropped graph drops
        # them. By unit: to look through all of them at the end of each would cost the square of their number.
        self._waiting: dict[Unit, WeakSet[UnitCall]] = {}
        self._begun: list[UnitCall] = []
        self._is_under_way = False
        self._is_closed = False
        # Backward may run inside a compiled training step, so what autograd calls is kept out of graphs as well.
        self._begins, self._ends = untraced(self._begin_call), untraced(self._end_call_once)
        self._ends_whole = untraced(self.end)

    def close(self) -> None:
        """Lets go of everything: a graph that somebody still has must keep nothing of the model."""
        for calls in self._waiting.values():
            for call in calls:
                del call.unit
        vars(self).clear()  # the callbacks lead back here, so all would wait for the garbage collector
        self._is_closed = True

    # what forward announces

    def expect(self, call: UnitCall, outputs: Iterable[Tensor]) -> bool:
        """Whether backward may come to this call by one of its outputs; if so, its beginning will be noticed."""
        nodes = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
        for node in nodes:
            node.register_prehook(partial(self._begins, call))
        if nodes:
            self._waiting.setdefault(call.unit, WeakSet()).add(call)
        return bool(nodes)

    def expect_end(self, call: UnitCall, inputs: Iterable[Tensor]) -> None:
        for node in {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}:
            node.register_prehook(partial(self._ends, call))
            call.has_input_gradient = True

    # what autograd does

    def enter(self) -> None:
        """Any event of a backward; the first one begins it."""
        if not self._is_under_way:
            self._refuse()
            self._is_under_way = True
            self._schedule.end_steps()
            self._reductions.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._ends_whole)

    def enter_many(self) -> None:
        """Several backwards of autograd that count as one; `end` or `forget_broken` is called by whoever runs them."""
        self._refuse()
        self._is_under_way = True

    def _begin_call(self, call: UnitCall, gradients: Any) -> None:
        """A node that made one of the call's outputs is about to run."""
        if self._is_closed:
            raise RuntimeError(CLOSED)
        self.enter()
        if not call.begun:
            call.begun = True
            self._begun.append(call)
            self._schedule.before_backward(call.unit)

    def _end_call_once(self, call: UnitCall, gradients: Any) -> None:
        """A node that made one of the call's inputs is about to run. The first such node tells that all nodes of the
        call itself are through."""
        if self._is_closed:
            return  # the graph went past the call: no output of it was reached
        if call.begun and not call.ended and call.unit not in self.piecewise:
            self._end_call(call)

    def _end_call(self, call: UnitCall) -> None:
        call.ended = True
        if torch.is_grad_enabled():
            return  # create_graph: a second backward will read the weights again
        self._schedule.after_backward(call.unit)
        # Another call of the same module may still add to the same gradients.
        if all(other.ended for other in self._waiting.get(call.unit, ())):
            self._reductions.ended(call.unit)

    def end(self) -> None:
        self._is_under_way = False
        self._boundary.end_backward()
        self._forget_begun()
        if not torch.is_grad_enabled():
            self.before_release()
            self._schedule.end_backward()
        self._check()
        self._reductions.end_backward()

    def forget_broken(self) -> None:
        """An exception inside an earlier backward kept its end from being called."""
        if self._is_under_way:
            self._is_under_way = False
            self._boundary.end_backward()
            self._forget_begun()
            self._schedule.end_backward()
            self._reductions.abandon_backward()

    def _forget_begun(self) -> None:
        """A retained graph may run backward again, so its calls start over."""
        for call in self._begun:
            call.begun = call.ended = False
        self._begun.clear()
