"""zf.cross_entropy: the loss of a language model's head without its logits, which are the peak of many models.

            vocabulary ───────────►
tokens  [ tile ][ tile ][ tile ]      a tile of logits is made, used and dropped; of a row of tiles the
   │    [ tile ]  …                   log-sum-exp stays, one number per token. Backward makes each tile
   ▼                                  again, and knows its softmax at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.part import group_of, part_of

_REDUCTIONS = ("mean", "sum", "none")
TOKENS, VOCABULARY = 2048, 16384
"""A tile of 128 MiB in fp32: large enough for full speed of matrix units, small beside any model's activations."""


def cross_entropy(
    hidden: Tensor,  # [..., width]
    weight: Tensor,  # [vocabulary, width]
    targets: Tensor,  # [...]
    *,
    bias: Tensor | None = None,
    chunk: int = TOKENS,
    vocabulary_chunk: int = VOCABULARY,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)`, exact, with the logits of at most `chunk`
    tokens and `vocabulary_chunk` words in memory at a time.

    The log-sum-exp is in fp32. Backward computes the logits again, a third more work in the head. Call it inside the
    forward of the model that has the weight, which then is gathered like any other: `zf.cross_entropy(x,
    self.head.weight, targets)`; tied embeddings too. With reduction="none" the losses have the shape of `targets`.
    Where tensor parallelism has cut the weight over the vocabulary, each rank computes the logits of its words, and
    the ranks tell each other three numbers per token.

    >>> import torch, zerofold as zf
    >>> hidden, weight = torch.ones(3, 4), torch.zeros(8, 4)
    >>> zf.cross_entropy(hidden, weight, torch.tensor([0, 5, -100])).exp()
    tensor(8.)
    """
    _check(hidden, weight, targets, bias, chunk, vocabulary_chunk, label_smoothing, reduction)
    words, device = _Words.of(weight), hidden.device.type
    if _knows_autocast(device) and torch.is_autocast_enabled(device) and hidden.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(device)  # fp64 is left as it is by autocast, too
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    _check_dtypes(hidden, weight, bias)
    tiles = _Tiles(chunk, vocabulary_chunk, ignore_index, label_smoothing, words)
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    losses: Tensor = _LinearCrossEntropy.apply(rows, weight, bias, wanted, tiles)
    if reduction == "none":
        return losses.view(targets.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (wanted != ignore_index).sum()


class _Words(NamedTuple):
    """Of the vocabulary, those that this rank has."""

    start: int
    total: int  # in the vocabulary
    group: dist.ProcessGroup | None  # of those who have the others

    @staticmethod
    def of(weight: Tensor) -> _Words:
        part, group = part_of(weight), group_of(weight)
        if part is None or part.dim is None:
            return _Words(0, len(weight), None)
        if part.dim != 0 or part.blocks != 1 or group is None:
            raise ValueError(
                f"cross_entropy: the weight is a part of {tuple(part.shape)} along dimension {part.dim}: cut a head "
                "over its words, dimension 0, by zf.tensor_parallel"
            )
        return _Words(part.start, part.shape[0], group)


class _Tiles(NamedTuple):
    tokens: int
    words: int
    ignore_index: int
    smoothing: float
    here: _Words


class _Ranges(NamedTuple):
    """Of one tile."""

    tokens: slice
    words: slice


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, words: slice) -> Tensor:
    """In the dtype of the head, as F.linear rounds them, then fp32 (or wider)."""
    part = torch.nn.functional.linear(hidden, weight[words], None if bias is None else bias[words])
    return part.to(torch.promote_types(part.dtype, torch.float32))


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses per token; 0 where a token is ignored."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, tiles: _Tiles
    ) -> Tensor:
        with _without_autocast(hidden.device.type):
            rows = [_row(hidden, weight, bias, targets, tiles, tokens) for tokens in _tokens(hidden, tiles)]
        losses, sums = zip(*rows, strict=True)
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat(sums))
        ctx.tiles = tiles
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # torch's once_differentiable would give constants where only the weights vary
            raise RuntimeError(
                "cross_entropy: its gradients cannot be differentiated again (create_graph=True): use F.cross_entropy "
                "of the logits there"
            )
        hidden, weight, bias, targets, sums = ctx.saved_tensors
        tiles: _Tiles = ctx.tiles
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = sums.dtype
        # Sums over tiles are fp32, or each of them would be rounded.
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wants_weight else None
        to_bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if wants_bias else None
        gradient = gradient.masked_fill(targets == tiles.ignore_index, 0)
        group = tiles.here.group
        with _without_autocast(hidden.device.type):
            for tokens in _tokens(hidden, tiles):
                part = hidden[tokens]
                row = torch.zeros(part.shape, dtype=wide, device=part.device) if wants_hidden else None
                for words in _words(weight, tiles):
                    ranges = _Ranges(tokens, words)
                    tile = _logits(part, weight, bias, words).sub_(sums[tokens, None]).exp_()
                    to_logits = _to_logits(tile, targets, gradient, tiles, ranges).to(hidden.dtype)
                    del tile
                    if row is not None:
                        row += to_logits @ weight[words]
                    if to_weight is not None:
                        to_weight[words] += to_logits.T @ part
                    if to_bias is not None:
                        to_bias[words] += to_logits.sum(0, dtype=wide)
                    del to_logits
                if row is not None and group is not None:
                    dist.all_reduce(row, group=group)
                if to_hidden is not None and row is not None:
                    to_hidden[tokens] = row
        to_weight = None if to_weight is None else to_weight.to(weight.dtype)
        to_bias = None if to_bias is None else to_bias.to(bias.dtype)
        return to_hidden, to_weight, to_bias, None, None


def _row(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, tiles: _Tiles, tokens: slice
) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exps of some tokens."""
    part, wanted = hidden[tokens], targets[tokens]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    sums = torch.full(wanted.shape, -torch.inf, dtype=wide, device=part.device)
    chosen, total = torch.zeros_like(sums), torch.zeros_like(sums)
    for words in _words(weight, tiles):
        tile = _logits(part, weight, bias, words)
        is_here, index = _inside(wanted - tiles.here.start, words)
        chosen += tile.gather(1, index[:, None])[:, 0].masked_fill_(~is_here, 0)
        if tiles.smoothing:
            total += tile.sum(1)
        sums = torch.logaddexp(sums, tile.logsumexp(1))
        del tile
    vocabulary = tiles.here.total
    if tiles.here.group is not None:
        sums, chosen, total = _over_ranks(sums, chosen, total, tiles.here.group)
    losses = sums - chosen
    if tiles.smoothing:
        losses = (1 - tiles.smoothing) * losses + tiles.smoothing * (sums - total / vocabulary)
    is_word = (wanted >= 0) & (wanted < vocabulary)
    if part.device.type == "cpu" and not bool((is_word | (wanted == tiles.ignore_index)).all()):
        raise ValueError(f"cross_entropy: a target is none of the {vocabulary} words: give 0 to {vocabulary - 1}")
    # Elsewhere to look would wait for the device; a loss that is no number is seen.
    return losses.masked_fill_(~is_word, torch.nan).masked_fill_(wanted == tiles.ignore_index, 0), sums


def _over_ranks(sums: Tensor, chosen: Tensor, total: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Of all words, given those of each rank's own."""
    top = sums.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    told = torch.stack([(sums - top).exp(), chosen, total])
    dist.all_reduce(told, group=group)
    return top + told[0].log(), told[1], told[2]


def _to_logits(softmax: Tensor, targets: Tensor, gradient: Tensor, tiles: _Tiles, ranges: _Ranges) -> Tensor:
    """The gradient of a tile of logits, in the memory of its softmax."""
    is_here, index = _inside(targets[ranges.tokens] - tiles.here.start, ranges.words)
    if tiles.smoothing:
        softmax -= tiles.smoothing / tiles.here.total
    share = is_here.to(softmax.dtype).mul_(tiles.smoothing - 1)
    return softmax.scatter_add_(1, index[:, None], share[:, None]).mul_(gradient[ranges.tokens, None])


def _inside(targets: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Which targets are among these words, and where; 0 for the others."""
    is_here = (targets >= words.start) & (targets < words.stop)
    return is_here, (targets - words.start).masked_fill_(~is_here, 0)


def _tokens(hidden: Tensor, tiles: _Tiles) -> Iterator[slice]:
    """At least one, though it be empty."""
    return _pieces(max(1, len(hidden)), tiles.tokens)


def _words(weight: Tensor, tiles: _Tiles) -> Iterator[slice]:
    return _pieces(len(weight), tiles.words)


def _pieces(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _knows_autocast(device: str) -> bool:
    """The meta device, on which plans are made, does not."""
    return torch.amp.is_autocast_available(device)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if _knows_autocast(device) else nullcontext()


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    chunk: int,
    vocabulary_chunk: int,
    label_smoothing: float,
    reduction: str,
) -> None:
    given = {"hidden": hidden, "weight": weight, "targets": targets} | ({} if bias is None else {"bias": bias})
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"cross_entropy: {name} is a {type(value).__name__}: give a torch.Tensor")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"cross_entropy: hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit: give "
            "[..., width] and [vocabulary, width]"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"cross_entropy: targets {tuple(targets.shape)} are to have a word for each of hidden's "
            f"{tuple(hidden.shape[:-1])} places"
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"cross_entropy: targets are {targets.dtype}: give the numbers of words, as torch.int64")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"cross_entropy: bias {tuple(bias.shape)} is to be {tuple(weight.shape[:1])}, as the weight")
    if not all(isinstance(each, int) and each >= 1 for each in (chunk, vocabulary_chunk)):
        raise ValueError(
            f"cross_entropy: chunk={chunk!r}, vocabulary_chunk={vocabulary_chunk!r}: give whole numbers, at least 1"
        )
    if not isinstance(label_smoothing, (int, float)) or not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"cross_entropy: label_smoothing={label_smoothing!r}: give a number from 0 to 1")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"cross_entropy: reduction={reduction!r}: use one of {', '.join(_REDUCTIONS)}")


def _check_dtypes(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """After autocast, which gives all of them the same."""
    if not hidden.is_floating_point():
        raise ValueError(f"cross_entropy: hidden is {hidden.dtype}: give what the last block made, in floating point")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.dtype is not hidden.dtype:
            raise ValueError(
                f"cross_entropy: hidden is {hidden.dtype}, and {name} is {value.dtype}: give both in one dtype "
                f"(hidden.to({name}.dtype)), or use torch.autocast"
            )
