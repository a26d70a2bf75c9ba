"""One forward of a unit on one micro-batch, cut out of the graph around it, and computed again for its backward.

forward     glue ─ t ─> | cut | ─ leaf ─> unit ──────> | cut | ─ leaf ─> glue     what the unit saves is dropped
backward    glue <──────  leaf.grad <──── unit again <── leaf.grad <──── glue

The graph between units stays as autograd made it, so whatever code runs there, it is followed exactly.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zerofold.flows import autocast_here, random_numbers_here
from zerofold.nested import map_tensors, tensors_in
from zerofold.sharded import ShardedTensor
from zerofold.unit import Unit

_DEPTH = 6  # a Hugging Face cache: kwargs, cache, layers, layer, its attributes
_SHARED = (Tensor, nn.Module, str, bytes, int, float, type)  # referred to, never copied


class Segment:
    """What one call of a unit needs to be run again, and the gradients at its ends."""

    def __init__(self, unit: Unit, args: Any, kwargs: Any, device: torch.device) -> None:
        self.unit = unit
        self._given = _without_aliases((tuple(args), dict(kwargs)))  # the unit may fill a cache, or pop a keyword
        self._versions = [(tensor, tensor._version) for tensor in tensors_in(self._given) if not tensor.is_inference()]
        self._random, self._autocast = random_numbers_here(device), autocast_here()
        self._inlets: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a tensor of the glue, and the leaf in its place
        self._outlets: list[Tensor] = []
        self._again: list[Tensor] = []
        self._left = {id(tensor) for _, tensor in _left_inside(unit.module)}
        self._dropping = ExitStack()
        self._buffers = [_Buffer(buffer, is_counted) for buffer, is_counted in _buffers_of(unit.module)]

    # the first forward, and the second

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the unit computes with, cut off from where it came from. What it saves is dropped, until `end`."""
        inputs = map_tensors(self._cut_in, args), map_tensors(self._cut_in, kwargs)
        self._dropping.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, self._refuse))
        return inputs

    def inputs_again(self) -> tuple[Any, Any]:
        args, kwargs = map_tensors(self._cut_in, self._given)
        return args, kwargs

    def end(self) -> None:
        self._dropping.close()
        self._buffers = [each for each in self._buffers if each.has_changed]

    def cut_off(self, output: Any) -> Any:
        """The output with a new leaf behind each tensor."""
        for name, tensor in _left_inside(self.unit.module):
            if id(tensor) not in self._left:
                raise RuntimeError(
                    f"unit '{self.unit.name}' leaves a result with a gradient on its module ('{name}'), and "
                    "zf.accumulate runs it on all micro-batches before anybody could read that: return it from the "
                    "unit, or call loss.backward() for each micro-batch instead"
                )
        return map_tensors(self._cut_out, output)

    def note_again(self, output: Any) -> None:
        """The output of the second forward."""
        self._again = []

        def note(tensor: Tensor) -> Tensor:
            if _is_cut(tensor):
                self._again.append(tensor)
            return tensor

        map_tensors(note, output)

    def tensors_around(self) -> Iterator[Tensor]:
        """The tensors of the glue that lead into the unit."""
        return (tensor for tensor, _ in self._inlets.values())

    # backward

    def backward(self) -> dict[int, Tensor]:
        """Computes the unit again and runs its backward; the gradients of `tensors_around`, by id."""
        gradients = [leaf.grad for leaf in self._outlets]
        if all(gradient is None for gradient in gradients):
            return {}
        if any(tensor._version != version for tensor, version in self._versions):
            raise RuntimeError(
                f"an input of unit '{self.unit.name}' was changed in place after the unit took it, so it cannot be "
                "computed again: write `x = x + …` for `x += …`, inplace=False in its modules, or call "
                "loss.backward() for each micro-batch instead of zf.accumulate"
            )
        with self._buffers_before():  # also through backward, which may read them
            again = self._run_again()
            pairs = [pair for pair in zip(again, gradients, strict=True) if pair[1] is not None]
            self._outlets.clear()
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        return {key: leaf.grad for key, (_, leaf) in self._inlets.items() if leaf.grad is not None}

    def _run_again(self) -> list[Tensor]:
        args, kwargs = self._given
        with self._random(), self._autocast(), torch.enable_grad():
            # Past a __call__ of the module's own, which came before the hooks: Hugging Face's would checkpoint again.
            nn.Module.__call__(self.unit.module, *args, **kwargs)
        again, self._again = self._again, []
        if [tensor.shape for tensor in again] != [leaf.shape for leaf in self._outlets]:
            raise RuntimeError(
                f"unit '{self.unit.name}' gave outputs of shapes {[tuple(leaf.shape) for leaf in self._outlets]} in "
                f"forward and {[tuple(tensor.shape) for tensor in again]} when it was computed again: its result must "
                "follow from its inputs, parameters, buffers and torch's random numbers alone"
            )
        return again

    @contextmanager
    def _buffers_before(self) -> Iterator[None]:
        """Buffers that the first forward changed, as it found them; and after the second as the first left them."""
        now = [each.buffer.detach().clone() for each in self._buffers]
        for each in self._buffers:
            each.buffer.data.copy_(each.before)  # `.data`: to others it has not changed
        try:
            yield
        finally:
            for each, values in zip(self._buffers, now, strict=True):
                each.buffer.data.copy_(values)

    def _cut_in(self, tensor: Tensor) -> Tensor:
        if not _is_cut(tensor):
            return tensor
        _, leaf = self._inlets.setdefault(id(tensor), (tensor, tensor.detach().requires_grad_()))
        joint: Tensor = _Joint.apply(leaf)
        return joint

    def _cut_out(self, tensor: Tensor) -> Tensor:
        if not _is_cut(tensor):
            return tensor
        self._outlets.append(tensor.detach().requires_grad_())
        joint: Tensor = _Joint.apply(self._outlets[-1])
        return joint

    def _refuse(self, nothing: None) -> NoReturn:
        raise RuntimeError(
            f"a gradient goes into unit '{self.unit.name}' past its outputs (an auxiliary loss, a recorded hidden "
            "state, a shared cache), which zf.accumulate does not follow: return it from the unit in a tuple, list, "
            "dict or dataclass, or call loss.backward() for each micro-batch instead"
        )


class _Buffer:
    """A buffer of the unit and what it held before the first forward."""

    def __init__(self, buffer: Tensor, is_counted: bool) -> None:
        self.buffer, self.before = buffer, buffer.detach().clone()
        self._version, self._is_counted = buffer._version, is_counted

    @property
    def has_changed(self) -> bool:
        return not self._is_counted or self.buffer._version != self._version


class _Joint(torch.autograd.Function):
    """A leaf's own tensor behind a node, so that what follows may change it in place, as it may any result."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _is_cut(tensor: Tensor) -> bool:
    return tensor.requires_grad and not isinstance(tensor, ShardedTensor)


def _buffers_of(module: nn.Module) -> Iterator[tuple[Tensor, bool]]:
    """Those that a forward may change, each with whether its version tells: batch norm's kernels leave that alone."""
    for inner in module.modules():
        counts = not isinstance(inner, nn.modules.batchnorm._NormBase)
        for buffer in inner.buffers(recurse=False) if inner.training else ():
            if not buffer.is_inference():
                yield buffer, counts


def _left_inside(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Results that a forward has left on modules, and through which backward could come."""
    for inner in module.modules():
        for name, value in vars(inner).items():
            if isinstance(value, (Tensor, list, tuple)) or (isinstance(value, dict) and not name.startswith("_")):
                for tensor in tensors_in(value, 2):
                    if tensor.grad_fn is not None:
                        yield name, tensor


def _without_aliases(value: Any, depth: int = _DEPTH) -> Any:
    """The same tensors in containers and objects of their own, which stay as they are whatever the unit does."""
    if depth == 0 or value is None or isinstance(value, _SHARED):
        return value
    if isinstance(value, (list, tuple)):
        items = [_without_aliases(item, depth - 1) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    try:
        made = copy.copy(value)
    except (TypeError, copy.Error):  # a lock, a module, a handle: nothing that a unit computes with
        return value
    if made is value:
        return value
    if isinstance(made, dict):
        for key, item in list(made.items()):
            dict.__setitem__(made, key, _without_aliases(item, depth - 1))
    for name, item in list(vars(made).items()) if hasattr(made, "__dict__") else ():
        vars(made)[name] = _without_aliases(item, depth - 1)
    return made
