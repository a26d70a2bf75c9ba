"""Logits of which each rank has some words, and their exact cross-entropy.

Of a row of logits the ranks agree on three numbers: the maximum, the sum of exponentials, the logit of the target.
Whole logits, which are the peak of many models, are nowhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from zerofold.parallel.mesh import TENSOR
from zerofold.traffic import Traffic

ACTIVATIONS = "activations"
"""What the ledger has in place of a unit for them."""


class CutHead(ParallelStyle):
    """After a head was cut by columns: what it gives is known as a part of the words."""

    def __init__(self, words: int) -> None:
        self.words = words

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return CutLogits.of(output, group, self.words)

        module.register_forward_hook(after)
        return module


class CutLogits(Tensor):
    """This rank's words of logits [..., words], which show the shape of the whole.

    They can be reshaped, sliced along other dimensions, cast, and given to F.cross_entropy. Everything else raises,
    since it would take a part for the whole.
    """

    group: dist.ProcessGroup
    words: int  # of the whole
    traffic: Traffic | None = None  # to count in what their loss sends, where nobody else sees it

    @staticmethod
    def of(local: Tensor, group: dist.ProcessGroup, words: int, traffic: Traffic | None = None) -> CutLogits:
        made: CutLogits = local.as_subclass(CutLogits)
        made.group, made.words, made.traffic = group, words, traffic
        return made

    @property
    def local(self) -> Tensor:
        return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args and isinstance(args[0], CutLogits) else None
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        with torch._C.DisableTorchFunctionSubclass():
            if logits is not None and func in _SHAPES:
                return _shape_of(logits, args[1:])
            if func is Tensor.__getitem__ and logits is not None:
                _check_index(logits, args[1])
            if func in _RESHAPED and logits is not None:
                args = (logits, *_translated(logits, args[1:]))
            elif func not in _KEPT and name not in ("__get__", "__set__"):
                raise RuntimeError(
                    f"{name}: these logits are cut over the vocabulary (loss_parallel=True), so a rank has some of the "
                    "words: give them to F.cross_entropy alone, or leave loss_parallel out"
                )
            result = func(*args, **kwargs)
            if logits is None or not isinstance(result, Tensor) or func not in (*_RESHAPED, *_SAME):
                return result
            if not result.ndim or result.shape[-1] != logits.shape[-1]:  # in here, shapes are those of a rank's words
                raise _words_must_stay(logits, name)
        return CutLogits.of(result, logits.group, logits.words, logits.traffic)


_SHAPES = (Tensor.shape.__get__, Tensor.size)  # type: ignore[attr-defined]
_RESHAPED = (Tensor.view, Tensor.reshape)
_SAME = (Tensor.flatten, Tensor.float, Tensor.to, Tensor.contiguous, Tensor.__getitem__, Tensor.detach, Tensor.double)
_KEPT = (
    *_SAME,
    Tensor.as_subclass,
    Tensor.dim,
    Tensor.is_floating_point,
    Tensor.register_hook,
    Tensor.requires_grad_,
    Tensor.untyped_storage,
    Tensor.__repr__,
)
"""What leaves the words where they are."""


def _shape_of(logits: CutLogits, dim: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        whole = torch.Size((*logits.local.shape[:-1], logits.words))
    return whole[dim[0]] if dim else whole


def _translated(logits: CutLogits, sizes: Any) -> tuple[Any, ...]:
    """The sizes of a view, in which the last is that of the words."""
    (sizes,) = sizes if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)) else (sizes,)
    if isinstance(sizes[0], torch.dtype) or sizes[-1] not in (-1, logits.words):
        raise _words_must_stay(logits, f"view{tuple(sizes)}")
    return (*sizes[:-1], logits.local.shape[-1])


def _check_index(logits: CutLogits, index: Any) -> None:
    """The words must all stay: a rank has some of them, and would count from its own first one."""
    items = index if isinstance(index, tuple) else (index,)
    taken = sum(_dims_taken(item) for item in items)
    reaches_words = items[-1] is not Ellipsis and (taken == logits.dim() or any(item is Ellipsis for item in items))
    keeps_them = isinstance(items[-1], slice) and items[-1] == slice(None)
    if reaches_words and not keeps_them:
        raise _words_must_stay(logits, "indexing")


def _dims_taken(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _words_must_stay(logits: CutLogits, what: str) -> RuntimeError:
    return RuntimeError(
        f"{what}: the last dimension of logits that are cut over the vocabulary (loss_parallel=True) has to stay the "
        f"{logits.words} words; to use some of them, leave loss_parallel out"
    )


def _cross_entropy(
    logits: Tensor,  # [..., words] as F.cross_entropy takes it, that is [words] or [tokens, words]
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    cannot = {"weight": weight, "size_average": size_average, "reduce": reduce}
    given = [name for name, value in cannot.items() if value is not None]
    if not isinstance(logits, CutLogits) or given or logits.dim() != 2 or target.is_floating_point():
        raise ValueError(
            f"loss_parallel: cross_entropy takes logits [tokens, words] and the numbers of words as targets, not "
            f"{', '.join(given) or tuple(logits.shape)}: leave loss_parallel out"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    wide = logits.local.to(torch.promote_types(logits.dtype, torch.float32))
    losses: Tensor = _VocabularyCrossEntropy.apply(
        wide, target, logits.group, logits.words, ignore_index, label_smoothing
    )
    if logits.traffic is not None:
        ranks = logits.group.size()
        for numbers in (1, 3):  # of each token: the maximum, and the three sums
            sent = 2 * numbers * target.numel() * (ranks - 1) / ranks
            logits.traffic.add("all_reduce", ACTIVATIONS, TENSOR, sent, wide.element_size())
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Losses per token, the same on every rank; 0 where a token is ignored."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [tokens, this rank's words]
        targets: Tensor,
        group: dist.ProcessGroup,
        words: int,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        start = dist.get_rank(group) * logits.shape[1]
        is_word = (targets >= 0) & (targets < words)
        is_here = (targets >= start) & (targets < start + logits.shape[1])
        index = (targets - start).masked_fill(~is_here, 0).unsqueeze(1)
        top = logits.amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        shifted = logits - top.unsqueeze(1)
        chosen = shifted.gather(1, index).squeeze(1).masked_fill(~is_here, 0)
        exponentials = shifted.exp()
        sums = torch.stack([exponentials.sum(1), chosen, shifted.sum(1)])
        dist.all_reduce(sums, group=group)
        total, chosen, everything = sums
        losses = total.log() - chosen
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (total.log() - everything / words)
        is_ignored = targets == ignore_index
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), index, is_here, is_ignored)
        ctx.words, ctx.smoothing = words, smoothing
        # A target that is no word gives no number, as elsewhere where nobody may wait for the device to look.
        return losses.masked_fill(~is_word, torch.nan).masked_fill(is_ignored, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        softmax, index, is_here, is_ignored = ctx.saved_tensors
        to_logits = softmax - ctx.smoothing / ctx.words if ctx.smoothing else softmax.clone()
        share = is_here.to(softmax.dtype).mul_(ctx.smoothing - 1)
        to_logits.scatter_add_(1, index, share.unsqueeze(1))
        return to_logits.mul_(gradient.masked_fill(is_ignored, 0).unsqueeze(1)), None, None, None, None, None
