"""What the ranks of a tensor axis send each other, for the ledger.

Torch's DTensors send inside a layer's forward and backward, where nobody asks. A TorchDispatchMode sees every
collective that is started, whoever starts it, but also every other operation, which takes time. So it looks at the
first forward and backward of inputs of each shape, and what it saw counts for all that follow:

    first     forward   mode on                                        every collective is counted as it is started
              backward  mode on around each node of the graph          …
    later     forward   nothing                                        the same again, in one sum
              backward  one hook at the outputs                        …

Autograd's nodes run with the thread state of the call of `backward`, which is the user's: a mode that a hook switches
on ends with its node. Hence the hooks around each of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, register_multi_grad_hook
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from zerofold.nested import tensors_in
from zerofold.parallel.mesh import TENSOR
from zerofold.parallel.vocabulary import ACTIVATIONS, CutLogits
from zerofold.traffic import Traffic

_KEPT = 64  # shapes of inputs that are remembered; of others the first forward and backward are looked at again
_GATHERS, _REDUCES, _SUMS, _SWAPS = "all_gather", "reduce_scatter", "all_reduce", "all_to_all"
_OPERATIONS = {
    "all_reduce": _SUMS,
    "allreduce": _SUMS,
    "all_gather": _GATHERS,
    "allgather": _GATHERS,
    "_allgather_base": _GATHERS,
    "reduce_scatter": _REDUCES,
    "_reduce_scatter_base": _REDUCES,
    "all_to_all": _SWAPS,
    "alltoall": _SWAPS,
    "shard_dim_alltoall": _SWAPS,
    "broadcast": "broadcast",
}
"""By the beginnings of torch's names, of which there are several for each: in place or not, of lists, …"""
_NAMESPACES = ("_c10d_functional", "c10d", "_dtensor")


class Sent(NamedTuple):
    """One collective."""

    operation: str
    elements: float  # that a ring sends for it, per rank
    itemsize: int


class _Seeing(TorchDispatchMode):
    """Tells of every collective of one group."""

    def __init__(self, group: dist.ProcessGroup, tell: Callable[[Sent], None]) -> None:
        super().__init__()
        self._group, self._tell = group, tell

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled is compiled as ever, and its collectives are seen when it runs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # they come first, and make collectives of plain tensors
        if func.namespace in _NAMESPACES and any(_is_group(value, self._group) for value in args):
            found = _sent(func._schema.name.split("::")[1], args, self._group.size())
            if found is not None:
                self._tell(found)
        return func(*args, **(kwargs or {}))


@dataclass
class _Pass:
    """What was seen in a forward and its backward, or in all of a pipeline's step."""

    key: Hashable
    forward: Counter[Sent] = field(default_factory=Counter)
    backward: Counter[Sent] = field(default_factory=Counter)
    backwards: int = 0  # of its graph, so far
    is_whole: bool = False  # its backward is over, or it has none

    def see(self, sent: Sent) -> None:
        self.forward[sent] += 1

    def see_backward(self, sent: Sent) -> None:
        if self.backwards <= 1:  # of a graph that is kept the first one tells
            self.backward[sent] += 1


class TensorTraffic:
    """Counts into `traffic` what a model sends over its tensor axis, as group "tensor".

    What depends on the values of inputs and not on their shapes counts as it was seen first.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self._model, self._group, self._traffic = model, group, traffic
        self._known: OrderedDict[Hashable, _Pass] = OrderedDict()
        self._running: _Pass | None = None
        self._mode: _Seeing | None = None
        self._is_inside = False  # a pipeline's step, which counts for all that runs in it
        self._handles = (
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def around(self, *what: Any) -> Iterator[None]:
        """All that is sent in here, by forwards and backwards in whatever order, follows from the form of `what`."""
        key = (_settings(self._model), form_of(what))
        known, self._is_inside = self._find(key), True
        try:
            if known is not None:
                yield
                self._count(known.forward)
                return
            seen = self._running = _Pass(key, is_whole=True)
            with self._seeing():
                yield
            self._keep(seen)
        finally:
            self._is_inside, self._running = False, None

    def seen(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The same, for another thread than the one that is inside `around`."""
        if self._running is None:
            return run

        def seeing() -> Tensor:
            with self._seeing():
                return run()

        return seeing

    def _seeing(self) -> _Seeing:
        assert self._running is not None
        return _Seeing(self._group, self._telling(self._running.see))

    # a forward of the model, and its backward

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_inside or self._running is not None or torch.compiler.is_compiling():
            return
        key = (model.training, torch.is_grad_enabled(), _settings(model), form_of((args, kwargs)))
        known = self._find(key)
        if known is not None:
            self._running = known
            return
        self._running = _Pass(key, is_whole=not torch.is_grad_enabled())
        self._keep(self._running)
        self._mode = self._seeing()
        self._mode.__enter__()

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        running, mode = self._running, self._mode
        if self._is_inside or running is None:
            return
        self._running = self._mode = None
        if mode is None:
            self._count(running.forward)
        else:
            mode.__exit__(None, None, None)
        if output is None:  # it has raised: what it would have sent is not known
            self._known.pop(running.key, None)
            return
        outputs = list(tensors_in(output))
        for tensor in outputs:
            if isinstance(tensor, CutLogits):
                tensor.traffic = self._traffic  # a loss of these is computed after the forward
        differentiable = [tensor for tensor in outputs if tensor.requires_grad]
        if not differentiable:
            running.is_whole = True
            return
        register_multi_grad_hook(differentiable, self._before_backward(running, mode is not None), mode="any")
        if mode is not None:
            self._look_at_backward([t.grad_fn for t in differentiable if t.grad_fn is not None], running)

    def _before_backward(self, of: _Pass, is_looked_at: bool) -> Callable[[Tensor], None]:
        def before(gradient: Tensor) -> None:
            if is_looked_at:
                of.backwards += 1
            else:
                self._count(of.backward)

        return before

    def _look_at_backward(self, roots: list[Node], seen: _Pass) -> None:
        tell = self._telling(seen.see_backward)
        for node in _nodes(roots):
            mode = _Seeing(self._group, tell)
            node.register_prehook(_entering(mode))
            node.register_hook(_leaving(mode))

    # what is known

    def _find(self, key: Hashable) -> _Pass | None:
        """None where it has to be looked at, also if a backward of the first is still to come."""
        found = self._known.get(key)
        if found is None:
            return None
        self._known.move_to_end(key)
        if found.backwards and torch._C._current_graph_task_id() == -1:
            found.is_whole = True
        return found if found.is_whole else None

    def _keep(self, seen: _Pass) -> None:
        self._known[seen.key] = seen
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)

    def _telling(self, remember: Callable[[Sent], None]) -> Callable[[Sent], None]:
        def tell(sent: Sent) -> None:
            self._traffic.add(sent.operation, ACTIVATIONS, TENSOR, sent.elements, sent.itemsize)
            remember(sent)

        return tell

    def _count(self, all_sent: Mapping[Sent, int]) -> None:
        for sent, times in all_sent.items():
            self._traffic.add(sent.operation, ACTIVATIONS, TENSOR, sent.elements, sent.itemsize, times=times)


def form_of(value: Any, depth: int = 4) -> Hashable:
    """Equal for arguments that lead to the same collectives: of tensors the shape, of other things the value.

    >>> form_of({"x": torch.zeros(2, 3), "cache": None, "scale": 0.5})
    (('x', (2, 3), torch.float32, False), ('cache', None), ('scale', 'float'))
    """
    if isinstance(value, Tensor):
        return (*_shape(value), value.requires_grad)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if depth and isinstance(value, Mapping):
        return tuple((str(name), *_flat(form_of(item, depth - 1))) for name, item in value.items())
    if depth and isinstance(value, (list, tuple)):
        return tuple(form_of(item, depth - 1) for item in value)
    return type(value).__name__


def _flat(form: Hashable) -> tuple[Hashable, ...]:
    return form if isinstance(form, tuple) else (form,)


def _shape(tensor: Tensor) -> tuple[Hashable, ...]:
    return tuple(tensor.shape), tensor.dtype


def _settings(model: nn.Module) -> Hashable:
    """What else decides on what is sent: autocast, and blocks that are computed again."""
    kind = next((p.device.type for p in model.parameters()), "cpu")
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return autocast, id(getattr(model, "_zerofold_checkpointing", None))


def _nodes(roots: list[Node]) -> Iterator[Node]:
    """All nodes of a graph but those of leaves, which outlive it and start nothing over this axis."""
    seen, left = set(roots), list(roots)
    while left:
        node = left.pop()
        if not hasattr(node, "variable"):
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)


def _entering(mode: _Seeing) -> Callable[[Any], None]:
    def enter(gradients: Any) -> None:
        mode.__enter__()

    return enter


def _leaving(mode: _Seeing) -> Callable[[Any, Any], None]:
    def leave(inputs: Any, outputs: Any) -> None:
        mode.__exit__(None, None, None)

    return leave


def _is_group(value: Any, group: dist.ProcessGroup) -> bool:
    """Torch names a group by its name, as an object, or wrapped for its dispatcher."""
    if isinstance(value, str):
        return value == group.group_name
    if isinstance(value, dist.ProcessGroup):
        return value.group_name == group.group_name
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return dist.ProcessGroup.unbox(value).group_name == group.group_name
    return False


def _sent(name: str, args: tuple[Any, ...], ranks: int) -> Sent | None:
    """What a ring sends for a call of torch's operation of that name, as `Comm` counts it."""
    operation = next((known for start, known in _OPERATIONS.items() if name.startswith(start)), None)
    if operation is None:
        return None
    tensors = [list(tensors_in(value)) for value in args]
    given = [each for each in tensors if each]
    if not given or not given[-1][0].is_floating_point():  # whole numbers are what ranks compare before they begin
        return None
    # With an output before the input (c10d's own), the larger one is the whole; else there is the input alone.
    sizes = [sum(tensor.numel() for tensor in each) for each in given]
    whole = max(sizes)
    if operation == _GATHERS and len(given) == 1:
        whole *= ranks
    rounds = 2 if operation == _SUMS else 1
    return Sent(operation, rounds * whole * (ranks - 1) / ranks, given[-1][0].element_size())
