"""Ways to cut a module for which torch has no ParallelStyle, and what stands between modules that are cut.

A rank's activations are whole, a part of the columns (between a layer cut by columns and one cut by rows), or, with
sequence_parallel, a part of the sequence (between the blocks' layers):

    whole ── norm ──►[ columns │ attention │ rows ]──► sum over ranks ──► whole
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from zerofold.parallel.local import View, Views, cut

WHOLE, SEQUENCE, COLUMNS = Replicate(), Shard(1), Shard(-1)


def placed(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [placement], run_check=False)


def enter(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """What all ranks have alike, and each uses for its part of the work: the gradients are summed."""
    return placed(tensor, mesh, WHOLE).to_local(grad_placements=[Partial()])


def leave(tensor: Tensor, mesh: DeviceMesh, layout: Placement = WHOLE) -> Tensor:
    """Each rank's summand becomes the sum."""
    return placed(tensor, mesh, Partial()).redistribute(placements=[layout]).to_local()


_TOKENS = "hidden_states"
"""What blocks and layers of Hugging Face call their first argument."""


def _with_tokens(change: Callable[[Tensor], Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call, the first of them changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, _TOKENS: change(kwargs[_TOKENS])}


class Several(ParallelStyle):
    """One style after the other on the same module."""

    def __init__(self, *styles: ParallelStyle) -> None:
        self.styles = styles

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in self.styles:
            style.src_data_rank = self.src_data_rank
            module = style._apply(module, device_mesh)
        return module


class SharedInput(ParallelStyle):
    """One DTensor for all layers inside that read the same input: its gradient is summed once, not for each of them."""

    def __init__(self, *names: str) -> None:
        """`names`: of further keyword arguments, beside the first argument."""
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            if args and isinstance(args[0], Tensor):
                args = (placed(args[0], device_mesh, WHOLE), *args[1:])
            tensors = {name: kwargs[name] for name in self.names if isinstance(kwargs.get(name), Tensor)}
            return args, {**kwargs, **{name: placed(tensor, device_mesh, WHOLE) for name, tensor in tensors.items()}}

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class CutLayer(ParallelStyle):
    """A linear layer of any kind by columns or rows; several matrices that are stored as one are each cut."""

    def __init__(
        self, dims: Mapping[str, int | None], *, blocks: int = 1, takes: Placement, gives: Placement | None
    ) -> None:
        """`dims`: along which each parameter is cut; `gives` None leaves the output as it comes, a part of columns."""
        self.dims, self.blocks, self.takes, self.gives = dims, blocks, takes, gives

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        views = {}
        for name, parameter in module.named_parameters(recurse=False):
            dim, shape = self.dims[name], parameter.shape
            if dim is not None:
                shape = cut(parameter, device_mesh, dim, blocks=self.blocks).shape
            views[name] = View(WHOLE if dim is None else Shard(dim), shape)

        def before(module: nn.Module, args: Any) -> Any:
            return (placed(args[0], device_mesh, self.takes), *args[1:])

        def after(module: nn.Module, args: Any, output: DTensor) -> Tensor:
            return (output if self.gives is None else output.redistribute(placements=[self.gives])).to_local()

        Views(device_mesh, views).install(module)
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module


class Experts(ParallelStyle):
    """Experts that are stored in one parameter: every expert is cut by columns, then by rows.

    They compute with ordinary tensors, since kernels for groups of matrices know no others. The router's weights
    multiply each rank's summand, so their gradients are sums over ranks too.
    """

    def __init__(self, columns: str, rows: str, *, keeps_summands: bool = False) -> None:
        """`keeps_summands`: sums over ranks, of the output and of the tokens' gradient, are left to `RoutedTokens`."""
        self.columns, self.rows, self.keeps_summands = columns, rows, keeps_summands

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cut(getattr(module, self.columns), device_mesh, 1, blocks=2)  # gate and up
        cut(getattr(module, self.rows), device_mesh, 2)

        def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            def taken(key: int | str, value: Any) -> Any:
                is_differentiable = isinstance(value, Tensor) and value.is_floating_point()
                is_entered = self.keeps_summands and key in (0, _TOKENS)
                return enter(value, device_mesh) if is_differentiable and not is_entered else value

            entered = tuple(taken(number, value) for number, value in enumerate(args))
            return entered, {name: taken(name, value) for name, value in kwargs.items()}

        def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return placed(output, device_mesh, Partial()) if self.keeps_summands else leave(output, device_mesh)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        return module


class RoutedTokens(ParallelStyle):
    """Around a router and its experts, which need whole tokens, where the stream is a part of the sequence.

                       ┌─► router, alike on all ranks ─► weights ─┐
        whole tokens ──┴─────────────────────────────────────► experts ──► summands ──► sum, a part of the sequence

    The gradient of the tokens is a sum over ranks, made and cut at once. Summands travel as a DTensor: whoever mixes
    them with a tensor that is no summand is told so by torch.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            # Jitter multiplies the tokens in place, which torch refuses for a view made by a function of its own.
            is_changed = module.training and getattr(module, "jitter_noise", 0) > 0

            def entered(tokens: Tensor) -> Tensor:
                return enter(tokens, device_mesh).clone() if is_changed else enter(tokens, device_mesh)

            return _with_tokens(entered, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> Tensor:
            if not isinstance(output, DTensor):
                raise TypeError(
                    f"sequence_parallel: {type(module).__name__} gives {type(output).__name__}, and not the sum of its "
                    "experts: leave sequence_parallel out"
                )
            return output.redistribute(placements=[SEQUENCE]).to_local()

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        return module


class CountedOnce(ParallelStyle):
    """A module that all ranks compute alike, inside one whose input has a gradient summed over ranks: it counts on the
    first."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        is_first = device_mesh.get_local_rank() == 0

        def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            return _with_tokens(lambda tokens: _GradientIf.apply(tokens, is_first), args, kwargs)

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class _GradientIf(torch.autograd.Function):
    """The same numbers, with their gradient or with zeros in its place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient if ctx.counts else torch.zeros_like(gradient), None


class VocabularyRows(ParallelStyle):
    """An embedding of which each rank has some words. With torch's RowwiseParallel every rank would compute the
    gradient of the whole vocabulary and keep its part.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        part = cut(module.weight, device_mesh, 0)
        if module.padding_idx is not None:
            is_here = part.start <= module.padding_idx < part.stop
            module.padding_idx = module.padding_idx - part.start if is_here else None
        elsewhere: list[Tensor] = []  # which words of the call under way other ranks have

        def before(module: nn.Module, args: Any) -> Any:
            words = args[0] - part.start
            is_word = (args[0] >= 0) & (args[0] < part.shape[0])  # what is none stays none, and the lookup says so
            elsewhere[:] = [((words < 0) | (words >= part.stop - part.start)) & is_word]
            return (words.masked_fill(elsewhere[0], 0),)

        def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return leave(output.masked_fill(elsewhere.pop().unsqueeze(-1), 0), device_mesh)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module


class SummedGradients(ParallelStyle):
    """A module that all ranks have alike and use for their own part: some heads, or some of the sequence.

    It computes with ordinary tensors; the gradients of its parameters are summed over the ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        views = {name: View(WHOLE, p.shape, is_local=True) for name, p in module.named_parameters(recurse=False)}
        Views(device_mesh, views).install(module)
        return module


class GatheredSequence(ParallelStyle):
    """Puts together the parts of the sequence that a module gives.

    As a DTensor, the gradient of what layers read may arrive as each rank's summand, and is summed and cut at once.
    """

    def __init__(self, *, as_dtensor: bool) -> None:
        self.as_dtensor = as_dtensor

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            whole = placed(output, device_mesh, SEQUENCE).redistribute(placements=[WHOLE])
            return whole if self.as_dtensor else whole.to_local()

        module.register_forward_hook(after)
        return module


class CutSequence(ParallelStyle):
    """Before the first block: from here on each rank has its part of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut_of(stream: Tensor) -> Tensor:
            length, ranks = stream.shape[1], device_mesh.size()
            if length % ranks:
                raise ValueError(
                    f"sequence_parallel: a sequence of {length} does not divide by tensor={ranks}: pad it to "
                    f"{-(-length // ranks) * ranks}"
                )
            return placed(stream, device_mesh, WHOLE).redistribute(placements=[SEQUENCE]).to_local()

        def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            return _with_tokens(cut_of, args, kwargs)

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class LocalCounts(ParallelStyle):
    """Attributes from which a module reads how many heads or columns it has: this rank's numbers."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.names:
            setattr(module, name, getattr(module, name) // device_mesh.size())
        return module
