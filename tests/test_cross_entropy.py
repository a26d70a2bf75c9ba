"""zf.cross_entropy is F.cross_entropy of a linear layer, in any chunks, on every stage, without the logits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zerofold as zf
from measured import peak_of_step

VOCABULARY, WIDTH = 50, 16


def inputs(dtype: torch.dtype, bias: bool) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(3, 11, WIDTH), torch.randn(VOCABULARY, WIDTH) * 0.5, *([torch.randn(VOCABULARY)] * bias)]
    targets = torch.randint(0, VOCABULARY, (3, 11))
    targets[0, :4] = -100
    return [tensor.to(dtype).requires_grad_() for tensor in made], targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1), targets.flatten(), **options
    )


CASES = list(itertools.product([False, True], [0.0, 0.1, 1.0], ["mean", "sum", "none"]))


@pytest.mark.parametrize(("bias", "smoothing", "reduction"), CASES)
@pytest.mark.parametrize(("chunk", "words"), [(7, 13), (1, VOCABULARY), (2048, 16384)])
def test_losses_and_gradients(bias: bool, smoothing: float, reduction: str, chunk: int, words: int) -> None:
    for dtype, most in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        tensors, targets = inputs(dtype, bias)
        hidden, weight, *rest = tensors
        options: dict[str, Any] = {
            "label_smoothing": smoothing,
            "reduction": reduction,
            "bias": rest[0] if rest else None,
        }
        expected = plain(hidden, weight, targets, **options)
        found = zf.cross_entropy(hidden, weight, targets, chunk=chunk, vocabulary_chunk=words, **options)
        assert found.shape == (targets.shape if reduction == "none" else ())
        torch.testing.assert_close(found.flatten(), expected.flatten(), rtol=most, atol=most)
        pull = torch.randn_like(expected)  # not all ones: gradients are weighted by what comes from above
        theirs = torch.autograd.grad(expected, tensors, pull)
        ours = torch.autograd.grad(found, tensors, pull.view_as(found))
        for mine, reference in zip(ours, theirs, strict=True):
            assert (mine - reference).abs().max() <= most * max(1.0, reference.abs().max().item())


def test_bf16_is_as_near_to_the_truth_as_torch() -> None:
    """Its gradients are sums of chunks, in fp32: no further from those of fp64 than torch's own."""
    tensors, targets = inputs(torch.bfloat16, bias=True)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    truth = torch.autograd.grad(plain(exact[0], exact[1], targets, bias=exact[2]), exact)
    theirs = torch.autograd.grad(plain(tensors[0], tensors[1], targets, bias=tensors[2]), tensors)
    loss = zf.cross_entropy(tensors[0], tensors[1], targets, bias=tensors[2], chunk=4, vocabulary_chunk=16)
    ours = torch.autograd.grad(loss, tensors)
    assert loss.dtype is torch.float32
    for mine, other, reference in zip(ours, theirs, truth, strict=True):
        assert mine.dtype is torch.bfloat16
        assert (mine - reference).norm() <= 1.5 * (other - reference).norm() + 1e-4


def test_autocast_casts_as_for_a_linear_layer() -> None:
    (hidden, weight), targets = inputs(torch.float32, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), targets.flatten())
        found = zf.cross_entropy(hidden, weight, targets, chunk=5)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    ours = torch.autograd.grad(found, [hidden, weight])
    assert [gradient.dtype for gradient in ours] == [torch.float32] * 2
    (hidden, weight), targets = inputs(torch.float64, bias=False)
    with torch.autocast("cpu", torch.bfloat16):  # which leaves fp64 as it is
        found = zf.cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(found, plain(hidden, weight, targets), rtol=1e-12, atol=1e-12)


def test_a_gradient_of_the_gradient_is_refused_not_taken_for_zero() -> None:
    tensors, targets = inputs(torch.float32, bias=True)
    hidden, weight, bias = tensors
    loss = zf.cross_entropy(hidden, weight, targets, bias=bias)
    with pytest.raises(RuntimeError, match="cannot be differentiated again.*use F.cross_entropy"):
        torch.autograd.grad(loss, tensors, create_graph=True)


def test_nothing_to_learn_from_is_nan_as_in_torch_and_wrong_words_are_refused() -> None:
    (hidden, weight), targets = inputs(torch.float32, bias=False)
    assert zf.cross_entropy(hidden, weight, torch.full_like(targets, -100)).isnan()
    assert zf.cross_entropy(hidden[:0], weight, targets[:0], reduction="sum") == 0
    targets[1, 1] = VOCABULARY
    with pytest.raises(ValueError, match="none of the 50 words: give 0 to 49"):
        zf.cross_entropy(hidden, weight, targets)
    for wrong, says in (
        ({"weight": weight.T}, "do not fit"),
        ({"targets": targets[0]}, "a word for each"),
        ({"targets": targets.float()}, "targets are torch.float32: give the numbers of words"),
        ({"bias": torch.ones(3)}, "bias"),
        ({"chunk": 0}, "chunk=0"),
        ({"reduction": "median"}, "use one of mean, sum, none"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0"),
    ):
        with pytest.raises(ValueError, match=says):
            zf.cross_entropy(**{"hidden": hidden, "weight": weight, "targets": targets, **wrong})


class Headed(nn.Module):
    """A tiny language model; its loss in chunks, or by way of the logits."""

    def __init__(self, *, chunked: bool, tied: bool = False, size: tuple[int, int] = (VOCABULARY, WIDTH)) -> None:
        super().__init__()
        torch.manual_seed(5)
        vocabulary, width = size
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.chunked, self.tile = chunked, (8, 17)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if self.chunked:
            return zf.cross_entropy(x, self.head.weight, targets, chunk=self.tile[0], vocabulary_chunk=self.tile[1])
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def trained(stage: int, chunked: bool, tied: bool, precision: str) -> list[Tensor]:
    model = Headed(chunked=chunked, tied=tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = zf.prepare(model, optimizer, stage=stage, precision=precision, units=nn.Sequential)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(3):
        data = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
        model(data[:, :-1], data[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zf.full_params(model):
        weights = [p.detach().clone() for p in model.parameters()]
    zf.close(model)
    return weights


def apart(tied: bool, precision: str) -> list[float]:
    found = []
    for stage in (0, 1, 2, 3):
        pairs = zip(trained(stage, True, tied, precision), trained(stage, False, tied, precision), strict=True)
        found.append(max((mine - theirs).abs().max().item() for mine, theirs in pairs))
    return found


@pytest.mark.parametrize(
    ("tied", "precision", "most"), [(False, "fp32", 1e-6), (True, "fp32", 1e-6), (True, "bf16", 5e-3)]
)
def test_under_every_stage(ranks: Any, tied: bool, precision: str, most: float) -> None:
    for found in ranks(2, apart, tied, precision):
        assert max(found) <= most, found


def sharded_weight() -> str:
    model = zf.shard(Headed(chunked=True), stage=3)
    try:
        zf.cross_entropy(torch.ones(2, WIDTH), model.head.weight, torch.zeros(2, dtype=torch.long))
    except RuntimeError as error:
        return str(error)
    finally:
        zf.close(model)
    return ""


def test_outside_of_forward_a_cut_weight_says_so(ranks: Any) -> None:
    assert all("zf.full" in message for message in ranks(2, sharded_weight))


def test_the_peak_falls_by_the_logits() -> None:
    """By the profiler's count of a step on the CPU, against what the sizes say."""
    vocabulary, width, tokens = 2048, 32, 512

    def peak(chunked: bool) -> int:
        model = Headed(chunked=chunked, size=(vocabulary, width))
        model.tile = 64, 512
        data = torch.randint(0, vocabulary, (1, tokens + 1))
        return peak_of_step(model, lambda: (data[:, :-1].clone(), data[:, 1:].clone()))

    logits = tokens * vocabulary * 4
    whole, chunked = peak(chunked=False), peak(chunked=True)
    tile, gradient = 64 * 512 * 4, vocabulary * width * 4
    # Before: log-softmax, and the gradients of two of its steps. After: the gradient of the weight, which before comes
    # when the logits are gone, a tile, and its products.
    assert whole - chunked == pytest.approx(3 * logits - gradient - 2 * tile, rel=0.02), (whole, chunked)
