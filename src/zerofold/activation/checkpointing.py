"""zf.checkpoint: a function whose inside is forgotten in forward and computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from zerofold.activation.chains import bytes_of, has_bytes
from zerofold.activation.store import CheckpointStore, Place
from zerofold.activation.wishes import check_policy
from zerofold.nested import map_tensors, tensors_in
from zerofold.sharded import ShardedTensor

T = TypeVar("T")
_SELECTIVE = "zerofold selective checkpoint"

Policy = Callable[..., Any] | Sequence[Any]
"""As torch's selective checkpointing takes it: operators whose results are kept, or a function that decides."""


def checkpoint(
    fn: Callable[..., T],
    *args: Any,
    use_reentrant: bool = False,
    policy: Policy | None = None,
    store: CheckpointStore | None = None,
    **kwargs: Any,
) -> T:
    """Runs `fn(*args, **kwargs)`, keeps its inputs alone, and runs it again in backward: the same random numbers, the
    same autocast, the same gradients to the bit.

    use_reentrant  as torch means it: a backward inside the backward
    policy         what of the inside is kept all the same: a list of operators, or a function, as for torch's
                   `create_selective_checkpoint_contexts`; not with use_reentrant
    store          where the inputs wait for backward: a `zf.CheckpointStore`; else on the device, where they are

    Tensors in nested lists, tuples and dicts count as inputs, of keywords too.

    >>> import torch, zerofold as zf
    >>> x = torch.ones(2, requires_grad=True)
    >>> zf.checkpoint(torch.square, x).sum().backward(); x.grad
    tensor([2., 2.])
    """
    check_policy(policy, use_reentrant)
    if store is not None and not isinstance(store, CheckpointStore):
        raise ValueError(
            f'store={store!r}: give a store that several calls share, made once: store = zf.CheckpointStore("host")'
        )
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    tensors: list[Tensor] = []
    run: Callable[..., Any] = _Call(fn, args, kwargs, tensors).run
    # Where no input has a gradient, torch's reentrant way would leave the parameters inside without theirs.
    options: dict[str, Any] = {"use_reentrant": use_reentrant and any(tensor.requires_grad for tensor in tensors)}
    if policy is not None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    result: T
    if store is None:
        result = torch_checkpoint(run, *tensors, **options)
    else:
        result = _untraced()(store, run, tensors, options)
    if policy is not None and not torch.compiler.is_compiling():
        _note_selective(result)
    return result


def is_selective(node: Node) -> bool:
    """Whether a checkpoint with `policy=` ends with this node of a graph: torch computes it again once, and raises in
    a second backward through it.
    """
    marks: Any = node.metadata  # a dict; torch declares a method
    return _SELECTIVE in marks


def _note_selective(result: Any) -> None:
    for tensor in tensors_in(result):
        if tensor.grad_fn is not None:
            marks: Any = tensor.grad_fn.metadata
            marks[_SELECTIVE] = True


class _Call:
    """A function whose arguments are all tensors of the original ones, in a row: there torch looks for devices and
    what to keep. It lives until backward, so after forward it holds none of them itself.
    """

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        """Fills `tensors`."""
        self._fn = fn
        # In forward the caller's own lists and dicts are given on: a function may append to them. What is compiled
        # changes nothing outside, and has no use for it.
        self._original = None if torch.compiler.is_compiling() else (args, kwargs)
        self._places: dict[int, int] = {}
        self._marks: list[Tensor] = []  # whose ids are the keys

        def mark(tensor: Tensor) -> Tensor:
            made = torch.empty(0)
            self._places[id(made)] = len(tensors)
            self._marks.append(made)
            tensors.append(tensor)
            return made

        self._given = map_tensors(mark, (tuple(args), dict(kwargs)))

    def run(self, *tensors: Tensor) -> Any:
        if self._original is not None:
            (args, kwargs), self._original = self._original, None
            return self._fn(*args, **kwargs)

        def given(mark: Tensor) -> Tensor:
            place = self._places.get(id(mark))
            return mark if place is None else tensors[place]  # none: in a list that was filled since

        args, kwargs = map_tensors(given, self._given)
        return self._fn(*args, **kwargs)


def _with_store(store: CheckpointStore, run: Callable[..., Any], tensors: list[Tensor], options: Any) -> Any:
    """Around torch's checkpoint, which saves the inputs as autograd saves tensors."""
    run = partial(_inside, store, run)
    if store.depth:
        return torch_checkpoint(run, *tensors, **options)
    chosen = [tensor for tensor in tensors if is_to_be_kept(tensor)]
    cut = set(map(id, store.to_cut(tensors, chosen)))
    block = store.begin()
    kept = [(tensor, store.put(block, tensor, is_cut=id(tensor) in cut)) for tensor in chosen]
    places = {bytes_of(tensor): place for tensor, place in kept}

    def pack(tensor: Tensor) -> Tensor | Place:
        return places.get(bytes_of(tensor), tensor)

    with saved_tensors_hooks(pack, store.unpack):
        result = torch_checkpoint(run, *tensors, **options)
    for tensor, place in kept:
        place.kept.look(tensor)
    return result


@cache
def _untraced() -> Callable[..., Any]:
    """Out of the sight of torch.compile: a graph may not hold what moves memory. Not made before it is needed, since
    the compiler takes long to load.
    """
    return torch.compiler.disable(_with_store, reason="kept inputs move between graphs")


def _inside(store: CheckpointStore, run: Callable[..., Any], *tensors: Tensor) -> Any:
    store.depth += 1
    try:
        return run(*tensors)
    finally:
        store.depth -= 1


def is_to_be_kept(tensor: Tensor) -> bool:
    """What a block makes for the next. A mask or a table of positions is shared by all, and parameters have a home."""
    if isinstance(tensor, ShardedTensor) or type(tensor) not in (Tensor, nn.Buffer) or not has_bytes(tensor):
        return False
    return tensor.requires_grad and not isinstance(tensor._base, nn.Parameter)
