"""Several micro-batches in the order that moves the fewest bytes: all of them through one unit, then the next unit.

              unit 0          unit 1          loss            unit 1          unit 0
micro-batch   0  1  2  3      0  1  2  3      0  1  2  3      0  1  2  3      0  1  2  3
parameters    [ gathered ]    [ gathered  . . .  if they fit . . . . . . ]    [ gathered ]
gradients                                                     add up   reduce add up   reduce

Each micro-batch runs the user's own code in a flow of its own, which stops where a unit is called until the others
have come there too. The graph is cut at the units (`segments`), so that backward can go unit by unit as well.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zerofold.calls import Calls
from zerofold.comm import CommError
from zerofold.engine import Engine
from zerofold.flows import Flow
from zerofold.schedule import in_backward
from zerofold.segments import Segment
from zerofold.unit import Unit

Model = TypeVar("Model", bound=nn.Module)
Batch = TypeVar("Batch")

_PLAIN = (bool, int, float, str)


def accumulate(model: Model, loss_fn: Callable[[Model, Batch], Tensor], batches: Iterable[Batch]) -> Tensor:
    """The gradients of the mean loss of all `batches`, and that mean: forward and backward of a whole step.

    It takes the place of `for batch in batches: (loss_fn(model, batch) / len(batches)).backward()`, with the same
    gradients. There, every micro-batch gathers each unit's parameters, or fetches them from the host or a disk, and
    reduces its gradients; here that happens once a step. `loss_fn(model, batch)` is called once for each batch and
    returns a scalar. What was given to `prepare(accumulate=…)` makes no difference to what is reduced: this is all of a
    step, and reduces, unless it is inside `no_sync`. Memory for offloaded gradients is planned by it all the same.

    Each unit keeps its inputs for all micro-batches, and is computed again in backward, as under activation
    checkpointing; checkpointing of the model's own around its units (`use_reentrant=False`) costs nothing more, and
    none is needed. Losses and the logits behind them exist for one micro-batch at a time. With one rank gradients are
    equal to the bit to the loop's; what ranks reduce once instead of once per micro-batch, and parameters that are used
    in several places, are added in another order. Random numbers come in another order too.

    The loss function must be an ordinary function of model and batch: code between units runs for all micro-batches
    in turns, each in its own thread. A model that keeps something on itself between its units is noticed, and runs
    one micro-batch after the other, with a warning. A gradient that enters a unit past its outputs is refused.

    >>> import torch, zerofold as zf
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    >>> model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    >>> loss = zf.accumulate(model, lambda model, batch: model(batch).square().mean(), torch.randn(4, 2, 8))
    >>> optimizer.step(); optimizer.zero_grad()
    >>> loss.shape
    torch.Size([])
    >>> zf.close(model)
    """
    engine = Engine.of(model)
    if not callable(loss_fn) or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise TypeError(
            f"zf.accumulate(model, loss_fn, batches): loss_fn is a {type(loss_fn).__name__} and batches a "
            f"{type(batches).__name__}: give a function (model, batch) -> loss, and a list of micro-batches"
        )
    micro_batches = list(batches)
    if not micro_batches:
        raise ValueError("zf.accumulate: batches is empty: give at least one micro-batch")
    if not torch.is_grad_enabled():
        raise RuntimeError("zf.accumulate runs backward, so it cannot be called inside torch.no_grad()")
    if engine.boundary.micro_batches is not None:
        raise ValueError(
            f"zf.accumulate: gradients of this model are already divided by gradient_accumulation_steps="
            f"{engine.boundary.micro_batches()}: set it to 1, since zf.accumulate takes all micro-batches of a step"
        )
    losses: list[Callable[[], Tensor]] = [partial(loss_fn, model, batch) for batch in micro_batches]
    if engine.inside is None:
        return _Accumulation(engine, losses).run()
    with engine.inside.around("accumulate", model.training, micro_batches):
        return _Accumulation(engine, [engine.inside.seen(loss) for loss in losses]).run()


class _MicroBatch:
    """One call of the loss function."""

    def __init__(self, loss: Callable[[], Tensor]) -> None:
        self.flow = Flow(loss)
        self.calls = Calls()
        self.waits_for: Unit | None = None
        self.segments: list[Segment] = []  # in the order they ran; backward takes them off the end
        self._first_use: dict[int, Segment] = {}
        self._pending: dict[int, Tensor] = {}  # gradients of tensors that earlier segments take as well
        self._passed_again: set[Segment] = set()  # whose glue has nodes that a later part of backward passes too

    def add(self, segment: Segment) -> None:
        self.segments.append(segment)
        for tensor in segment.tensors_around():
            self._first_use.setdefault(id(tensor), segment)

    def backward_from(self, loss: Tensor) -> None:
        """To the last segment."""
        seen: set[Any] = set()
        for segment in self.segments:  # backward comes to the first one last
            if _meets(self._ready_after(segment), seen):
                self._passed_again.add(segment)
        loss.backward(retain_graph=_meets([loss], seen))

    def backward(self) -> None:
        """Through the last segment that is left, and the graph in front of it."""
        segment = self.segments.pop()
        for key, gradient in segment.backward().items():
            earlier = self._pending.get(key)
            self._pending[key] = gradient if earlier is None else earlier + gradient
        ready = self._ready_after(segment)
        pairs = [(tensor, self._pending.pop(id(tensor))) for tensor in ready if id(tensor) in self._pending]
        if pairs:
            # A graph that is kept goes all the same, once nobody refers to it.
            keep = segment in self._passed_again
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs], retain_graph=keep)

    def _ready_after(self, segment: Segment) -> list[Tensor]:
        """Tensors of the glue whose gradients are complete when backward has come through the segment.

        All units that take one come after its first use.
        """
        return [tensor for tensor in segment.tensors_around() if self._first_use[id(tensor)] is segment]


class _Accumulation:
    """One call of `accumulate`; the hooks tell it where units are called."""

    def __init__(self, engine: Engine, losses: list[Callable[[], Tensor]]) -> None:
        self._hooks, self._schedule, self._reductions = engine.hooks, engine.schedule, engine.reductions
        self._device = engine.groups.gather.device
        cut = [unit for unit in engine.units[1:] if not _is_around_another(unit, engine.units)]
        self.glue = [unit for unit in engine.units if unit not in cut]
        inside = {module for unit in cut for module in unit.module.modules()}
        self._glue_modules = [(name, m) for name, m in engine.model.named_modules() if m not in inside]
        self._functions = losses
        self._micro_batches: list[_MicroBatch] = []
        self._current: _MicroBatch
        self._left: list[Any] = []  # on modules around the units, when the current one got its turn
        self._segment: Segment | None = None  # being computed
        self._recomputed: Segment | None = None
        self._stops, self._has_warned = True, False
        self._losses: list[Tensor] = []

    def run(self) -> Tensor:
        self._hooks.begin_accumulation(self)
        try:
            self._micro_batches = [_MicroBatch(loss) for loss in self._functions]
            self._forward()
            self._schedule.retraces = True
            self._backward()
        except BaseException as error:
            for micro_batch in self._micro_batches:
                with self._hooks.resumed(micro_batch.calls):
                    micro_batch.flow.cancel()
            # After a failed collective, waiting for what is under way would only fail again.
            self._hooks.end_accumulation(is_complete=False, waits=not isinstance(error, CommError))
            raise
        self._hooks.end_accumulation(is_complete=True)
        return torch.stack(self._losses).mean()

    def _forward(self) -> None:
        self._schedule.before_forward(self._schedule.root)  # all micro-batches use it, so it stays until the end
        for micro_batch in self._micro_batches:
            self._go_on(micro_batch)
        while waiting := [each for each in self._micro_batches if each.waits_for is not None]:
            # Where they wait for different units, those that left one out wait for those that did not.
            unit = min((each.waits_for for each in waiting if each.waits_for is not None), key=lambda unit: unit.index)
            self._schedule.before_forward(unit)
            for micro_batch in waiting:
                if micro_batch.waits_for is unit:
                    self._go_on(micro_batch)
            self._schedule.after_forward(unit, expects_backward=True, keep=False)

    def _go_on(self, micro_batch: _MicroBatch) -> None:
        """To the next unit, or through the loss and back to the last unit."""
        self._current, micro_batch.waits_for = micro_batch, None
        self._left = _left_on(self._glue_modules)
        with self._hooks.resumed(micro_batch.calls):
            micro_batch.flow.resume()
        if not micro_batch.flow.is_over:
            return
        loss = micro_batch.flow.take_result()
        _check(loss)
        micro_batch.backward_from(loss / len(self._micro_batches))
        self._losses.append(loss.detach())

    def _backward(self) -> None:
        left = Counter(segment.unit for each in self._micro_batches for segment in each.segments)
        while remaining := [each for each in self._micro_batches if each.segments]:
            unit = max((each.segments[-1].unit for each in remaining), key=lambda unit: unit.index)
            self._schedule.before_backward(unit)
            for micro_batch in remaining:
                if micro_batch.segments[-1].unit is unit:
                    self._recomputed = micro_batch.segments[-1]
                    micro_batch.backward()
                    left[unit] -= 1
            self._schedule.after_backward(unit)
            if not left[unit]:
                self._reductions.ended(unit)

    # called by the hooks

    def arrive(self, unit: Unit) -> bool:
        """A unit is called; whether it is cut out here. Before it is, this waits for its turn."""
        if unit in self.glue or self._segment is not None or not torch.is_grad_enabled():
            return False
        if in_backward():
            self._warn(f"unit '{unit.name}' is recomputed inside backward: checkpoint with use_reentrant=False")
            return False
        if self._recomputed is None and self._stops:
            changed = _first_change(self._glue_modules, self._left)
            if changed is None:
                self._current.waits_for = unit
                self._current.flow.stop()
            else:
                self._stops = False  # others would find there what belongs to this one
                self._warn(f"'{changed}' was set on the model between its units: keep it in a local variable")
        return True

    def enter(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        segment = self._recomputed
        if segment is not None:
            self._segment = segment
            return segment.inputs_again()
        segment = self._segment = Segment(unit, args, kwargs, self._device)
        inputs = segment.begin(args, kwargs)
        self._current.add(segment)
        return inputs

    def leave(self, output: Any) -> Any:
        """`output` is None when the unit has raised."""
        segment, self._segment = self._segment, None
        assert segment is not None
        if self._recomputed is None:
            segment.end()
            return None if output is None else segment.cut_off(output)
        self._recomputed = None
        segment.note_again(output)
        return output

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"zf.accumulate moves parameters once per micro-batch, not once a step: {why}", stacklevel=2)


def _meets(tensors: list[Tensor], seen: set[Any]) -> bool:
    """Adds the nodes of the graph behind `tensors` to those that were seen; whether some of them were."""
    nodes: set[Any] = set()
    left: list[Any] = [tensor.grad_fn for tensor in tensors]
    has_met = False
    while left:
        node = left.pop()
        if node is None or node in nodes or type(node).__name__ == "AccumulateGrad":  # which keeps nothing
            continue
        if node in seen:
            has_met = True
            continue
        nodes.add(node)
        left += [following for following, _ in node.next_functions]
    seen |= nodes
    return has_met


def _is_around_another(unit: Unit, units: list[Unit]) -> bool:
    inside = set(unit.module.modules())
    return any(other.module in inside for other in units if other is not unit)


def _left_on(modules: list[tuple[str, nn.Module]]) -> list[Any]:
    """Attributes of modules, with the sizes of containers among them."""
    return [
        (f"{path}.{name}".lstrip("."), value, len(value) if isinstance(value, (list, dict, set)) else 0)
        for path, module in modules
        for name, value in vars(module).items()
    ]


def _first_change(modules: list[tuple[str, nn.Module]], before: list[Any]) -> str | None:
    """The name of an attribute that is no longer what it was."""
    known = {name: (value, size) for name, value, size in before}
    for name, value, size in _left_on(modules):
        old, old_size = known.get(name, (None, 0))
        if size != old_size or (value is not old and not (isinstance(value, _PLAIN) and value == old)):
            return name
    return None


def _check(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"zf.accumulate: loss_fn returned {what}: it must return a scalar loss (loss.mean())")
    if not loss.requires_grad:
        raise ValueError(
            "zf.accumulate: loss_fn returned a loss without a graph: it was detached, computed under torch.no_grad, or "
            "no parameter it depends on is trained"
        )
