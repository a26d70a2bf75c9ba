"""ShardedParameter: the global shape in front, this rank's piece behind.

Elementwise arithmetic (single, foreach and fused) runs on the pieces, so any elementwise optimizer works on it
unchanged. Whatever needs the whole tensor raises an error that names `zf.full`. Where parameters have owners, the
piece of the owner is the whole, and inside the step of the attached optimizer every operation runs on it. While a
whole tensor is shown in its place (`show`), everything runs on that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofold.dcp_chunks import block_at, chunk_list, write_items
from zerofold.op_rules import Kind, OpRule, rule_of
from zerofold.refusals import COPYING, PICKLING, WRITING, moved, needs_whole, unreduced, used_up
from zerofold.shard_spec import ShardSpec

aten = torch.ops.aten


class ShardedTensor(torch.Tensor):
    """A tensor of which this rank holds one flat range. Made by zerofold and by ops on other sharded tensors."""

    _local: Tensor
    _spec: ShardSpec
    was_zeroed = False  # by zero_(): for a gradient, the same wish as setting it to None
    is_unreduced = False  # a gradient of which other ranks still hold local sums
    is_original = False  # a gradient as backward left it, and not one that somebody has assigned
    is_cleared = False  # stands for a gradient that is gone
    is_used_up = False  # a gradient whose memory the step has taken for something else
    is_being_read = False  # a gradient, perhaps, by an update under way; it may not be changed before that is over
    known_norm: Tensor | None = None  # of a gradient, taken where it was made, until it is changed
    _whole: Tensor | None = None  # while it is shown

    @staticmethod
    def __new__(cls, local: Tensor, spec: ShardSpec, requires_grad: bool = False) -> ShardedTensor:
        if not isinstance(spec, ShardSpec):
            raise TypeError(f"a {cls.__name__} is made by zf.shard, of a parameter of the model that it is given")
        # Whoever asks a parameter where the model is, as users do before they move a batch there, gets the right answer
        # wherever its piece is kept.
        device = spec.device or local.device
        made = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, dtype=local.dtype, device=device, requires_grad=requires_grad
        )
        made._local, made._spec = local.detach(), spec
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def local(self) -> Tensor:
        """This rank's piece, in memory of the model's state: 1-D, possibly empty, or at its owner all of it."""
        if self.is_used_up:
            raise RuntimeError(used_up(self._spec))
        local = self._local
        self._spec.step.look(local)
        return local

    @property
    def raw_local(self) -> Tensor:
        """`local` without waiting for an update under way: for its size or its kind, or for the update itself."""
        return self._local

    @property
    def spec(self) -> ShardSpec:
        return self._spec

    @property
    def whole(self) -> Tensor | None:
        """What is shown in its place just now."""
        return self._whole

    def show(self, whole: Tensor | None) -> None:
        """From now on whoever holds this sees an ordinary tensor, to read and to change; None ends it.

        Only the tensor given changes: to keep what was written, take this rank's piece of it.
        """
        self._whole = whole

    def untyped_storage(self) -> torch.UntypedStorage:
        """Not the values: something by which tied weights are found, as those do who write files."""
        return self._spec.identity if self._whole is None else self._whole.untyped_storage()

    def data_ptr(self) -> int:
        """Those who ask write to a file from there, as safetensors does, and would report an invalid offset."""
        if self._whole is None:
            raise RuntimeError(f"'{self._spec.name}' {WRITING}")
        return self._whole.data_ptr()

    @property
    def data(self) -> Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        if self._whole is not None and value.shape == self.shape:
            self._whole.copy_(value)
        elif isinstance(value, ShardedTensor) and value is not self and value._spec is self._spec:
            self._local.copy_(value._local)  # made from this one, elementwise
        elif value is not self:  # Module.to sets what it found in place already
            raise RuntimeError(
                f"'{self._spec.name}' {tuple(self.shape)} is cut over ranks, so its data cannot be replaced by a "
                f"tensor of shape {tuple(value.shape)}: copy values of its own shape while it is whole"
            )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_shown = False
        for tensor in _sharded_in(args, kwargs):
            is_shown = is_shown or tensor._whole is not None
            if tensor._spec.step.parked and not tensor.is_cleared:
                tensor._spec.step.look(tensor._local)
        return (_run_on_whole if is_shown else _run_on_pieces)(func, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        if self._whole is not None:
            return f"{type(self).__name__}('{self._spec.name}', shown whole: {self._whole!r})"
        start, stop = self._spec.own
        return (
            f"{type(self).__name__}('{self._spec.name}', shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"this rank holds elements {start}:{stop})"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        loose = self._spec.loose
        copied: Tensor
        if self._whole is not None:
            copied = nn.Parameter(self._whole.clone(), self.requires_grad)
        elif loose is not None:
            spec = replace(self._spec, loose=loose._replace(number=next(loose.numbers)))
            copied = type(self)(self._local.clone(), spec, self.requires_grad)
        else:
            raise RuntimeError(COPYING)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._whole is None and self._spec.loose is not None:
            raise RuntimeError(f"'{self._spec.name}' is cut: save it inside `with zero.GatheredParameters(p)`")
        if self._whole is None:
            raise RuntimeError(PICKLING)
        return nn.Parameter(self._whole, self.requires_grad).__reduce_ex__(protocol)

    # torch.distributed.checkpoint calls these.

    def __create_chunk_list__(self) -> list[Any]:
        return chunk_list(self._spec)

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        return write_items(fqn, self._spec, self._local)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return block_at(index.offset, self._spec, self.local)

    def full_tensor(self) -> Tensor:
        """The whole tensor, on every rank; all ranks must call it (the same as `zf.full`)."""
        if self.is_unreduced:
            raise RuntimeError(unreduced(self._spec))
        if self.is_used_up:
            raise RuntimeError(used_up(self._spec))
        # By what all ranks know: some may have an empty piece, which cannot be away, and would wait for the others.
        self._spec.step.need(*(("parameters",) if isinstance(self, ShardedParameter) else ()))
        if self._spec.is_replicated:
            return self.local.to(self.device, copy=True)
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        flat, comm = whole.view(-1), self._spec.comm
        flat[slice(*self._spec.own)] = self.local.reshape(-1)
        owners = [(rank, held) for rank, held in enumerate(self._spec.ranges) if held[1] > held[0]]
        handles = [comm.broadcast(flat[slice(*held)], rank, unit=self._spec.name) for rank, held in owners]
        for handle in handles:
            handle.wait()
        return whole


class ShardedParameter(ShardedTensor):
    """What a module and an optimizer hold for a parameter whose owner state is cut.

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 64), stage=3)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model(torch.ones(2, 64)).sum().backward(); optimizer.step()
    >>> tuple(zf.full(model.weight).shape)
    (64, 64)
    >>> zf.close(model)
    """

    _is_param = True  # what nn.Parameter's instance check looks for, as for every custom parameter tensor
    behind: weakref.ref[Tensor] | None = None  # the Parameter that autograd knows, whose gradients pass through hooks

    def register_hook(self, hook: Any) -> Any:
        """As on the Parameter that is in the module during forward: the hook gets this rank's own whole gradient."""
        whole = None if self.behind is None else self.behind()
        return super().register_hook(hook) if whole is None else whole.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        whole = None if self.behind is None else self.behind()
        if whole is None:
            return super().register_post_accumulate_grad_hook(hook)
        return whole.register_post_accumulate_grad_hook(hook)


def _run_on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of what is shown whole, the tensor that is shown; other sharded tensors then come by themselves."""
    rule = rule_of(func)
    result = func(*(_whole_of(value) for value in args), **{key: _whole_of(value) for key, value in kwargs.items()})
    if not rule.written:
        return result
    changed = [kwargs.get(place) if isinstance(place, str) else args[place] for place in rule.written]
    return changed[0] if rule.returns_written else None


def _whole_of(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_whole_of(item) for item in value]
    return value._whole if isinstance(value, ShardedTensor) and value._whole is not None else value


def _draw(func: Any, tensor: ShardedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The same random numbers as for the whole tensor, rank 0's for all; so initialisers may run on what is cut."""
    whole = torch.empty(tensor._spec.shape, dtype=tensor.dtype, device=tensor.device)
    func(whole, *args, **kwargs)
    tensor._spec.comm.broadcast(whole.view(-1), 0, unit=tensor._spec.name).wait()
    tensor._local.copy_(tensor._spec.cut(whole))
    return tensor


def _run_on_pieces(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs what gives the same pieces on every rank as it would cut from the whole; refuses the rest."""
    if func is aten.constant_pad_nd.default and not any(args[1]):
        func, args, kwargs = aten.clone.default, args[:1], {}  # Transformers pads tied heads' biases, mostly by nothing
    rule, sharded = rule_of(func), list(_sharded_in(args, kwargs))
    first = sharded[0]
    if func is aten._to_copy.default and (isinstance(first, ShardedParameter) or first.is_cleared):
        raise RuntimeError(moved(first._spec))  # Module.to and its kin, which go through parameters and gradients
    if rule.kind is Kind.SAME_DATA:
        return ShardedTensor(first._local, first._spec)
    for tensor in _sharded_in(args, kwargs):  # each by its own model: an average has no update, what it follows has one
        if tensor._spec.step.is_under_way and not tensor.is_cleared:
            tensor._spec.step.look(tensor._local)
    changed = [kwargs.get(place) if isinstance(place, str) else args[place] for place in rule.written]
    written = [tensor for each in changed for tensor in (each if isinstance(each, (list, tuple)) else (each,))]
    _wait_for_readers(written)
    if any(tensor.is_used_up for tensor in sharded):
        _zero_used_up(rule, sharded)
        return args[0] if rule.returns_written else None
    if (rule.draws or rule.summarises) and args[0] is first and first._spec.loose is not None:
        if rule.draws:
            return _draw(func, first, args[1:], kwargs)
        return func(first.full_tensor(), *args[1:], **kwargs)
    runs_whole = all(_is_whole(tensor._spec) for tensor in sharded)
    is_norm = func is aten.linalg_vector_norm.default and len(args) < 3 and first._spec.step.joins_norms
    if rule.kind is Kind.REFUSED and not runs_whole and not is_norm:
        raise RuntimeError(needs_whole(func, first._spec))
    if not rule.zeroes:
        for tensor in sharded:
            if tensor.is_unreduced:
                raise RuntimeError(unreduced(tensor._spec))
    if not runs_whole:
        if is_norm:
            return _norm_over_ranks(first, *args[1:])
        _refuse_whole_targets(func, written, first)
    if rule.kind is Kind.ELEMENTWISE and not runs_whole:
        local_args = tuple(_piece_of(value, func, first._spec) for value in args)
        local_kwargs = {key: _piece_of(value, func, first._spec) for key, value in kwargs.items()}
    else:
        local_args = tuple(_local_of(value) for value in args)
        local_kwargs = {key: _local_of(value) for key, value in kwargs.items()}
    result = func(*local_args, **local_kwargs)
    for tensor in written:  # inner tensors do not count changes made below autograd by themselves
        if isinstance(tensor, ShardedTensor):
            torch.autograd.graph.increment_version(tensor._local)
            tensor.was_zeroed |= rule.zeroes
            tensor.known_norm = None
    if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
        _tell_all(args[1], first._spec)
    if changed:
        return changed[0] if rule.returns_written else None
    if rule.kind is Kind.LISTS:
        return [_like(piece, like) for piece, like in zip(result, args[0], strict=True)]
    return _like(result, first) if rule.kind is Kind.ELEMENTWISE else result


def _wait_for_readers(written: list[Any]) -> None:
    """An update under way may still read a gradient that is about to be changed."""
    for tensor in written:
        if isinstance(tensor, ShardedTensor) and not tensor.is_cleared and tensor.is_being_read:
            tensor._spec.step.settle()
            tensor.is_being_read = False


def _zero_used_up(rule: OpRule, sharded: list[ShardedTensor]) -> None:
    """Gradients whose memory the step has taken can only be cleared: that is noted, and nothing written there."""
    if not rule.zeroes:
        raise RuntimeError(used_up(sharded[0]._spec))
    for tensor in sharded:
        tensor.was_zeroed = True
        if not tensor.is_used_up:
            tensor._local.zero_()
            tensor.known_norm = None


def _refuse_whole_targets(func: Any, written: list[Any], first: ShardedTensor) -> None:
    """A whole parameter with a cut gradient would be updated in this rank's range only, unnoticed by the others."""
    for tensor in written:
        if isinstance(tensor, Tensor) and not isinstance(tensor, ShardedTensor) and tensor.dim() > 0:
            raise RuntimeError(
                f"{func._schema.name.split('::')[1]} would change a whole tensor by the cut '{first._spec.name}': an "
                "optimizer built on whole parameters must be attached with zf.attach(model, optimizer); other code "
                "can use zf.full"
            )


def _tell_all(found_inf: Tensor, spec: ShardSpec) -> None:
    """One verdict for all ranks, those with other parts of the model too: each then changes its loss scale by it."""
    spec.comm.all_reduce(found_inf, unit="found_inf", op=dist.ReduceOp.MAX).wait()
    if spec.step.model is not None:
        told = found_inf.cpu()
        spec.step.model.all_reduce(told, unit="found_inf", op=dist.ReduceOp.MAX).wait()
        found_inf.copy_(told)


def _norm_over_ranks(tensor: ShardedTensor, order: float = 2.0) -> Tensor:
    """The same number on all ranks. In double, so that how the tensor is cut does not show."""
    takes_largest = order == float("inf")
    sizes = tensor._local.reshape(-1).abs().double()
    if takes_largest:
        total = sizes.max() if sizes.numel() else sizes.new_zeros(())
    else:
        total = sizes.pow(order).sum()
    op = dist.ReduceOp.MAX if takes_largest else dist.ReduceOp.SUM
    tensor._spec.comm.all_reduce(total, unit="gradient norm", op=op).wait()
    return (total if takes_largest else total.pow(1 / order)).to(tensor.dtype)


def _is_whole(spec: ShardSpec) -> bool:
    return spec.is_replicated or (spec.step.is_open and spec.is_owned_here)


def _like(result: Any, source: Any) -> Any:
    """A result that is cut as its source was; one of another shape (it met a wider tensor) belongs to no cut."""
    if not isinstance(result, Tensor) or not isinstance(source, ShardedTensor):
        return result
    return ShardedTensor(result, source._spec) if result.shape == source._local.shape else result


def _local_of(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_local_of(item) for item in value]
    return value._local if isinstance(value, ShardedTensor) else value


def _piece_of(value: Any, func: Any, spec: ShardSpec) -> Any:
    if isinstance(value, ShardedTensor):
        if value._spec is not spec and value._spec.ranges != spec.ranges:
            raise RuntimeError(
                f"{func}: '{spec.name}' and '{value._spec.name}' are cut differently; take zf.full of both first"
            )
        return value._local
    if isinstance(value, Tensor) and value.dim() > 0:
        if value.shape != spec.shape:
            raise RuntimeError(
                f"{func}: '{spec.name}' has shape {tuple(spec.shape)} and is cut over ranks, the other tensor has "
                f"shape {tuple(value.shape)}; broadcasting needs the whole: use zf.full"
            )
        return spec.cut(value)  # a whole tensor meets a cut one: each rank takes its own range of it
    if isinstance(value, (list, tuple)):
        return type(value)(_piece_of(item, func, spec) for item in value)
    return value


def _sharded_in(args: Any, kwargs: Any) -> Iterator[ShardedTensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _sharded_in(value, {})
