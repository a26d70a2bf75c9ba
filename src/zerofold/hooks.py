"""Module and autograd events become calls of the schedule and the reduction.

forward of a unit    pre-hook: gather; hook: release. A module inside a unit that is called by itself (model.embed(x),
                     a method other than forward) stands for its unit.
backward of a unit   hooks on the nodes of autograd that made its inputs and outputs: see `backward`.
a gradient           the parameter's own hooks, before and after autograd accumulates it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zerofold.backward import Backward
from zerofold.boundary import Boundary
from zerofold.calls import Accumulation, Calls, UnitCall
from zerofold.comm import CommError
from zerofold.face_gradient import FaceGradient
from zerofold.hook_forms import InnerHook, unit_hook, untraced
from zerofold.nested import tensors_in
from zerofold.reduction_order import ReductionOrder
from zerofold.schedule import Schedule, in_backward
from zerofold.sharded import ShardedTensor
from zerofold.slab import Slab
from zerofold.unit import Unit


class Hooks:
    """Installed on every unit of one model; `end` takes everything off again."""

    def __init__(
        self,
        schedule: Schedule,
        reductions: ReductionOrder,
        boundary: Boundary,
        backward: Backward,
        before_anything: Callable[[], None],
    ) -> None:
        """`before_anything` runs before each outermost forward."""
        self.schedule, self.reductions, self.boundary, self.backward = schedule, reductions, boundary, backward
        self._before_anything = before_anything
        self._handles: list[RemovableHandle] = []
        self._modules: dict[Unit, list[nn.Module]] = {}
        self._unit_of: dict[nn.Module, Unit] = {}  # units themselves, and modules that hold their parameters
        # The same two on all modules: with others on each block, torch.compile would make a graph for each.
        self._inner_hooks = InnerHook(self._before_inner), InnerHook(self._after_inner)
        hook = unit_hook()
        self._root_hooks = hook(self._before_inner), hook(self._after_inner)
        self._calls = Calls()
        self._accumulation: Accumulation | None = None
        self._is_in_pipeline = False  # between the first forward and the last backward of a pipeline's step
        self._outermost: set[Unit] = set()  # units whose last call came from the user, not from a module around them
        self.out_of_memory: Callable[[BaseException | None], None] = lambda error: None  # called with it
        self.weight = 1.0  # of this rank's gradients among all ranks'; another one inside zf.join
        backward.before_release = self._forget_lent
        for unit in schedule.units:
            self._install(unit)
            for slab in unit.slabs:
                self.install_on(unit, slab)

    def end(self) -> None:
        """Takes everything off and lets go of the model."""
        for handle in self._handles:
            handle.remove()
        self.backward.close()
        vars(self).clear()  # hooks lead back here, so all would wait for the garbage collector

    def _install(self, unit: Unit) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            return self._before_forward(unit, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return self._after_forward(unit, output)

        self._unit_of[unit.module] = unit
        hook = unit_hook()
        self._handles.append(unit.module.register_forward_pre_hook(hook(before), prepend=True, with_kwargs=True))
        # always_call: a forward that raises, or a recomputation stopped early, must not stay "in use".
        self._handles.append(unit.module.register_forward_hook(hook(after), always_call=True))

    def install_on(self, unit: Unit, slab: Slab) -> None:
        self._modules.clear()
        for index, parameter in enumerate(slab.parameters):
            if slab.requires_grad:
                self._install_on_parameter(slab, index, parameter)
        for module in {module: None for entry in slab.entries for module, _ in entry.sites}:
            if unit.releases and module not in self._unit_of:
                self._unit_of[module] = unit
                # A block is to be one graph, so its modules have hooks that vanish from it. The root's forward breaks
                # into several at its units anyway, and torch.compile may come upon a hook of its modules by itself.
                before, after = self._root_hooks if unit is self.schedule.root else self._inner_hooks
                # Without options: torch.compile would guard on the number of a hook that has one.
                self._handles.append(module.register_forward_pre_hook(before, prepend=True))
                self._handles.append(module.register_forward_hook(after))

    def _before_inner(self, module: nn.Module, args: Any) -> Any:
        """Before a module that holds parameters of a unit: it may be called without the unit.

        While torch.compile traces, this does nothing, so that the graph around it stays whole.
        """
        if torch.compiler.is_compiling():
            return None
        unit = self._unit_of[module]
        # Of several micro-batches under way one may have the unit in use while another calls a module inside it.
        is_in_use = self.schedule.is_in_use(unit) and not (self._accumulation is not None and self._is_outside())
        if is_in_use or (unit in self._calls.lent and self.schedule.is_kept(unit)):
            return None
        if self._calls.inner is module:
            self._calls.inner = None  # its last call raised
        is_outermost = self._enter_forward()
        self._calls.inner = module if is_outermost else self._calls.inner
        self._calls.lent[unit] = module
        self.schedule.lend(unit)
        unit.check_in_place()
        return self.boundary.enter(args, {})[0] if is_outermost else None

    def _after_inner(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or self._calls.lent.get(self._unit_of[module]) is not module:
            return None
        unit = self._unit_of[module]
        del self._calls.lent[unit]
        is_outermost = self._calls.inner is module
        self._calls.inner = None if is_outermost else self._calls.inner
        self._refuse_views_of_parameters(unit, output)
        if not self._await_backward(UnitCall(unit), output):
            self.schedule.take_back(unit)  # otherwise it stays until backward ends
        return self.boundary.leave(output, module.modules(), is_recomputed=False) if is_outermost else None

    def _install_on_parameter(self, slab: Slab, index: int, parameter: Tensor) -> None:
        def before_accumulate(gradient: Tensor) -> Tensor | None:
            self.backward.enter()
            behind = parameter._post_accumulate_grad_hooks
            if behind is not None and len(behind) > 1:  # a user's own come first, while the gradient is here
                behind[arrival.id] = behind.pop(arrival.id)
            self.boundary.check_scaled()
            slab.gradients.before_accumulate(index)
            if self.weight == 1.0:
                return None
            return gradient * self.weight if self.weight else torch.zeros_like(gradient)

        def after_accumulate(parameter: Tensor) -> None:
            slab.gradients.arrived(index)
            self.reductions.arrived(slab)

        self._handles.append(parameter.register_hook(untraced(before_accumulate)))
        arrival = parameter.register_post_accumulate_grad_hook(untraced(after_accumulate))
        self._handles.append(arrival)

    # forward

    def _is_outside(self) -> bool:
        """No forward is under way: a call is the user's own, not one module's of another."""
        calls = self._calls
        return not (calls.running or calls.inner is not None or in_backward() or self.schedule.retraces)

    def _forget_inner(self) -> None:
        """At a new beginning: with no unit's forward under way, a call of an inner module that is still noted has
        raised."""
        if not self._calls.running:
            self._calls.inner = None

    def _enter_forward(self) -> bool:
        """Whether it is an outermost one."""
        if not self._is_outside():
            return False
        if self._is_in_pipeline:  # all was looked at when its step began
            return True
        if self._accumulation is None:  # otherwise that of other micro-batches, which is not over
            self.backward.forget_broken()
        self.schedule.end_steps()
        self.reductions.watch_for_updates()
        self._before_anything()
        return True

    def _before_forward(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if unit is self.schedule.root and self._calls.running and not in_backward() and not _is_inside(unit.module):
            # Ctrl-C in an earlier forward: torch calls hooks behind exceptions, and that is none to it.
            self._calls = Calls()
            self.schedule.forget_forward()
        if unit is self.schedule.root:
            self._forget_inner()
        call = UnitCall(unit)
        if not in_backward():
            call.is_outermost = self._enter_forward()
            self._outermost.add(unit) if call.is_outermost else self._outermost.discard(unit)
        else:  # recomputed: as it was the first time
            call.is_outermost = not self._calls.running and unit in self._outermost
        if call.is_outermost:
            args, kwargs = self.boundary.enter(args, kwargs)
        self._calls.running.append(call)
        is_cut_out = self._accumulation is not None and self._accumulation.arrive(unit)
        self.schedule.before_forward(unit)
        unit.check_in_place()
        if is_cut_out:
            assert self._accumulation is not None
            call.is_cut_out = True
            return self._accumulation.enter(unit, args, kwargs)
        if not torch.is_grad_enabled():
            return args, kwargs
        if any(_is_leaf_with_grad(value) for value in (*args, *kwargs.values())):
            args = tuple(_behind_a_node(value) for value in args)
            kwargs = {key: _behind_a_node(value) for key, value in kwargs.items()}
        self.backward.expect_end(call, tensors_in((args, kwargs)))
        return args, kwargs

    def _after_forward(self, unit: Unit, output: Any) -> Any:
        if isinstance(sys.exc_info()[1], CommError):
            self._calls.running.clear()  # raised by the forward; to wait for what is under way would raise it again
            return None
        if isinstance(sys.exc_info()[1], torch.OutOfMemoryError):
            self.out_of_memory(sys.exc_info()[1])
        if not self._calls.running:
            return None  # it was refused before it began
        call = self._calls.running.pop()
        self._refuse_views_of_parameters(unit, output)
        if call.is_cut_out and self._accumulation is not None:
            output = self._accumulation.leave(output)
            self.schedule.after_forward(unit, expects_backward=True, keep=False)
            return self.boundary.leave(output, (), is_recomputed=False) if call.is_outermost else output
        awaits = self._await_backward(call, output)
        keep = torch.is_grad_enabled() and not awaits and output is not None and call.might_get_gradients()
        self.schedule.after_forward(unit, expects_backward=awaits, keep=keep)
        if not call.is_outermost:
            return None
        return self.boundary.leave(output, unit.module.modules(), is_recomputed=in_backward())

    def _await_backward(self, call: UnitCall, output: Any) -> bool:
        """Whether anything that came out may lead backward into the call; if so, it will be noticed."""
        outputs = list(tensors_in(output)) if torch.is_grad_enabled() else []
        # Results left on modules (auxiliary losses) take part in backward like outputs.
        outputs += [t for module in self._modules_of(call.unit) for t in _left_on(module)] if outputs else []
        return self.backward.expect(call, outputs)

    def _modules_of(self, unit: Unit) -> list[nn.Module]:
        """The modules of a unit without those of units inside it, which have been looked at by then."""
        if unit not in self._modules:
            inner = {other.module for other in self.schedule.units if other is not unit}
            self._modules[unit] = list(_without(unit.module, inner))
        return self._modules[unit]

    def _refuse_views_of_parameters(self, unit: Unit, output: Any) -> None:
        """After the forward their memory is gone, and reading them would crash the process."""
        released = [slab for slab in unit.slabs if slab.is_temporary] if unit.releases else []
        own = {slab.storage.tensor.untyped_storage()._cdata for slab in released}
        for tensor in tensors_in(output) if own else ():
            if not isinstance(tensor, ShardedTensor) and tensor.untyped_storage()._cdata in own:
                raise RuntimeError(
                    f"unit '{unit.name or 'root'}' returns a view of a parameter of shape {tuple(tensor.shape)}, whose "
                    "memory is released after its forward: return a clone, or choose units that contain the caller"
                )

    # all micro-batches of a step at once

    def begin_accumulation(self, accumulation: Accumulation) -> None:
        self._forget_inner()
        if self._accumulation is not None or not self._enter_forward():
            raise RuntimeError(
                "zf.accumulate was called inside a forward or a backward of the same model: call it outside"
            )
        self.backward.enter_many()
        # They are gone through piece by piece, and there is no saying which piece is the last.
        self._accumulation, self.backward.piecewise = accumulation, accumulation.glue
        self.reductions.begin_accumulation(late=accumulation.glue)

    @property
    def is_accumulating(self) -> bool:
        """Inside zf.accumulate."""
        return self._accumulation is not None

    def end_accumulation(self, *, is_complete: bool, waits: bool = True) -> None:
        self._accumulation, self.backward.piecewise, self._calls = None, (), Calls()
        self.schedule.end_accumulation()
        if is_complete:
            with torch.no_grad():
                self.backward.end()
        elif waits:
            self.backward.forget_broken()

    @contextmanager
    def resumed(self, calls: Calls) -> Iterator[None]:
        """What comes now belongs to another flow of forwards."""
        self._calls, before = calls, self._calls
        try:
            yield
        finally:
            self._calls = before

    # a pipeline's step: forwards and backwards of all micro-batches, in the order of its schedule

    def begin_pipeline(self, *, trains: bool = True) -> None:
        self._forget_inner()
        if self._is_in_pipeline or self._accumulation is not None or not self._enter_forward():
            raise RuntimeError(
                "a pipeline's step was called inside a forward or a backward of its model: call it outside"
            )
        if trains:
            self.backward.enter_many()
        self._is_in_pipeline = True
        if trains:
            self.boundary.expect_scaled()
            self.reductions.begin_pipeline()

    def take_assigned_gradients(self) -> None:
        """Those that came past autograd's accumulation, as a zero-bubble schedule's do: `p.grad` was simply set."""
        for unit in self.schedule.units:
            for slab in unit.trainable_slabs:
                for index, parameter in enumerate(slab.parameters):
                    if parameter.grad is not None and not isinstance(parameter.grad, FaceGradient):
                        slab.gradients.arrived(index)

    def end_pipeline(self, *, is_complete: bool = True, trains: bool = True, waits: bool = True) -> None:
        self._is_in_pipeline = False
        if not trains:
            return
        if is_complete:
            with torch.no_grad():
                self.backward.end()
        elif waits:
            self._calls = Calls()
            self.backward.forget_broken()

    def _forget_lent(self) -> None:
        self._calls.lent.clear()


def _is_inside(module: nn.Module) -> bool:
    """Whether a call of the module is under way around the one that begins."""
    frame: FrameType | None = sys._getframe()
    calls = 0
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module:
            calls += 1
        frame = frame.f_back
    return calls > 1


def _is_leaf_with_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_leaf


def _behind_a_node(value: Any) -> Any:
    """A leaf's own node runs as early as it can, so it tells nothing about the call; a view's node runs in turn."""
    return value.view_as(value) if _is_leaf_with_grad(value) and not isinstance(value, ShardedTensor) else value


def _without(module: nn.Module, others: set[nn.Module]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if child not in others:
            yield from _without(child, others)


def _left_on(module: nn.Module) -> list[Tensor]:
    return [value for value in vars(module).values() if isinstance(value, Tensor)]
