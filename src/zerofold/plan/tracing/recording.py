"""Follows every storage that a forward and backward make and drop, and what the kernels between do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from zerofold.plan.shape import Phase
from zerofold.plan.tracing.answers import Answers
from zerofold.plan.tracing.kernels import aten, scratch

BLOCK_OF_CUDA = 512
"""Bytes to a multiple of which torch's CUDA allocator rounds."""


STRIDED = 2.2
"""Times as long as for a row of numbers takes a GPU to go through numbers with gaps, or some of them again and again.
Seen on one H200 in a mixture of experts: 51 GB in 27 ms where copies have 4.1 TB/s."""


class Made(NamedTuple):
    """A storage came to be; `last` is the last dimension of the tensor it was made for."""

    storage: int
    nbytes: int
    last: int


class Dropped(NamedTuple):
    storage: int


class Kernel(NamedTuple):
    """An operator ran: everything in the log before it was there while it did, and `scratch` bytes more."""

    scratch: int
    flops: float
    moved: float
    is_kernel: bool


class Entered(NamedTuple):
    """From here on this unit computes."""

    phase: Phase
    unit: int


class BecameGradient(NamedTuple):
    """A storage turns out to be the gradient of a parameter of this slab."""

    storage: int
    slab: int


class SlabComplete(NamedTuple):
    """All gradients of this slab have arrived, and the engine sends them to the other ranks, in so many chunks."""

    slab: int
    chunks: int


Event = Made | Dropped | Kernel | Entered | BecameGradient | SlabComplete


@dataclass
class Recording:
    """The log of one forward and backward."""

    samples: int
    events: list[Event] = field(default_factory=list)
    kept_inputs: int = 0
    """Bytes of the inputs of checkpointed blocks that were there when forward ended."""
    recomputes: bool = False
    """Some block was computed again in backward."""
    notes: list[str] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """While it is on, storages that tensors get are logged, and when they go. Those of `known` tensors are not."""

    def __init__(
        self, recording: Recording, device: str, known: Sequence[Tensor], answers: Answers | None = None
    ) -> None:
        super().__init__()
        self._remembered = answers or Answers()
        self.recording, self._device = recording, device
        self._ids: dict[int, int] = {}  # of storages that are there: by where they are, their number in the log
        self._known = {_where(tensor) for tensor in known}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._answers: dict[int, int] = {}  # what a tensor's only value is, where that is known
        self._count = 0
        self.sizes: dict[int, int] = {}  # by number, for storages that are there

    def adopt(self, tensors: Iterator[Tensor]) -> None:
        """Tensors that were made before and count all the same: the batch."""
        for tensor in tensors:
            self._follow(tensor)

    def number_of(self, tensor: Tensor) -> int | None:
        """Of a tensor's storage, in the log."""
        return self._ids.get(_where(tensor))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        asked = None if self._has_answer(func, args) else self._remembered.key(func, args, kwargs)
        if (found := self._remembered.find(asked)) is not None:
            results, work = found
            for tensor in results if isinstance(results, (tuple, list)) else (results,):
                if tensor is not None:
                    self._follow(tensor)
            self.recording.events.append(work)
            return results
        results = self._answer(func, args, kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        for tensor in outputs:
            self._follow(tensor)
        work = self._work(func, args, kwargs, results, inputs, outputs)
        self._remembered.keep(asked, inputs, results, work)
        self.recording.events.append(work)
        return results

    def _has_answer(self, func: Any, args: Sequence[Any]) -> bool:
        """Whether `_answer` may know something about what comes out, besides its shape."""
        packet = func.overloadpacket
        if packet is aten.sum:
            return bool(args[0].dtype is torch.bool)
        return packet in _ASK_FOR_VALUES or (packet is aten.eq and _where(args[0]) in self._answers)

    def _answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an operator. A few ask for values, which are answered as for a batch without padding, whose tokens go
        to all experts alike: all of a mask is set, and nothing in it stands out."""
        packet = func.overloadpacket
        if packet is aten._local_scalar_dense and _where(args[0]) in self._answers:
            self.recording.notes.append("the model looks for padding; the batch is taken to have none")
            return self._answers[_where(args[0])]
        if packet is aten.bincount and args[0].is_meta and (size := [*args, None, 0][2] or kwargs.get("minlength")):
            self.recording.notes.append("tokens go to all experts alike")
            return torch.empty(size, dtype=torch.int64, device="meta")
        if packet is aten._grouped_mm and args[0].is_meta and args[0].dtype is not torch.bfloat16:
            # Without memory torch knows it for bf16 alone; devices compute it in others as well.
            left, right, *rest = args
            return func(left.bfloat16(), right.bfloat16(), *rest, **kwargs).to(left.dtype)
        results = func(*args, **kwargs)
        if packet in (aten.all, aten.any):
            self._answers[_where(results)] = packet is aten.all
        elif packet is aten.sum and args[0].dtype is torch.bool and not results.dim():
            self._answers[_where(results)] = args[0].numel()
        elif packet is aten.eq and _where(args[0]) in self._answers and not isinstance(args[1], Tensor):
            self._answers[_where(results)] = self._answers[_where(args[0])] == args[1]
        return results

    def _work(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        results: Any,
        inputs: list[Any],
        outputs: list[Any],
    ) -> Kernel:
        there = {_where(tensor) for tensor in inputs}
        is_view = not func._schema.is_mutable and all(_where(tensor) in there for tensor in outputs)
        if is_view or func.overloadpacket in _ONLY_ALLOCATE:
            return Kernel(0, 0, 0, False)
        extra = scratch(self._device, func, args)
        count = _formula(func)
        if count is not None:
            return Kernel(extra, float(count(*args, **kwargs, out_val=results)), 0, True)
        moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
        slower = STRIDED if self._device == "cuda" and _has_strides(func, inputs, outputs) else 1
        return Kernel(extra, 0, slower * moved, True)

    def _follow(self, tensor: Tensor) -> None:
        storage, where = tensor.untyped_storage(), _where(tensor)
        if where in self._ids or where in self._known or not storage.nbytes():
            return
        self._count += 1
        number = self._ids[where] = self._count
        block = BLOCK_OF_CUDA if self._device == "cuda" else 1
        self.sizes[number] = nbytes = -(-storage.nbytes() // block) * block

        def drop(reference: Any) -> None:
            del self._ids[where], self._references[number], self.sizes[number]
            self._answers.pop(where, None)
            self.recording.events.append(Dropped(number))

        self._references[number] = weakref.ref(storage, drop)
        self.recording.events.append(Made(number, nbytes, tensor.shape[-1] if tensor.dim() else 1))


_ASK_FOR_VALUES = (aten._local_scalar_dense, aten.bincount, aten._grouped_mm, aten.all, aten.any)
"""Those that `Recorder._answer` knows something about."""
_ONLY_ALLOCATE = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)


def _has_strides(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """An operator on each number by itself whose tensors are not all as one long row. Where all are turned alike, they
    are."""
    if torch.Tag.pointwise not in func.tags or not outputs:
        return False
    shape, strides = outputs[0].shape, outputs[0].stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    large = [tensor for tensor in (*inputs, *outputs) if tensor.numel() > 1]
    return span != outputs[0].numel() or any((tensor.shape, tensor.stride()) != (shape, strides) for tensor in large)


def _where(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _formula(func: Any) -> Callable[..., Any] | None:
    """How the operator's flops are counted; None for those that are bound by memory."""
    packet = func.overloadpacket
    return _OWN_FORMULAS.get(packet) or flop_registry.get(packet)


def _attention_flops(query: Tensor, key: Tensor, *rest: Any, out_val: Any, **kwargs: Any) -> float:
    """Scores and their product with the values. torch's own formula knows grouped heads since 2.13 only."""
    batch, heads, length, head = query.shape
    return 4.0 * batch * heads * length * key.shape[2] * head


def _attention_backward_flops(gradient: Tensor, query: Tensor, key: Tensor, *rest: Any, **kwargs: Any) -> float:
    """Five products: the scores once more, and the gradients of scores, values, queries and keys."""
    return 2.5 * _attention_flops(query, key, out_val=None)


def _grouped_flops(left: Tensor, right: Tensor, *rest: Any, out_val: Tensor, **kwargs: Any) -> float:
    """Rows of `left` are dealt out to the groups of `right` [groups, width, out]; or, for the gradient of `right`, the
    columns of `left` and the rows of `right` are."""
    return 2.0 * left.shape[-2] * left.shape[-1] * right.shape[-1]


_OWN_FORMULAS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention: _attention_flops,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    aten._grouped_mm: _grouped_flops,
}
