"""Over a tensor axis, what would be wrong on some ranks without a word is right, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import raised
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import zerofold as zf
from zerofold.part import Part, part_of, set_part
from zerofold.train.gpt import GPT, GPTConfig

WORDS = 8


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.GELU(), nn.Linear(8, 4, bias=False))


def tensor_mesh() -> zf.Mesh:
    return zf.mesh(tensor=2, device="cpu")


def overflow_on_one_rank(stage: int) -> tuple[float, list[float]]:
    mesh, model = tensor_mesh(), mlp()
    model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, mesh=mesh)
    before = zf.full(model[0].weight).flatten().tolist()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if mesh.coordinate["tensor"] == 0:
        gradient: Any = optimizer.param_groups[0]["params"][0].grad
        gradient.local.view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    after = zf.full(model[0].weight).flatten().tolist()
    zf.close(model)
    return scaler.get_scale(), [a - b for a, b in zip(after, before, strict=True)]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_grad_scaler_skips_everywhere_and_keeps_one_scale(ranks: Any, stage: int) -> None:
    for scale, changes in ranks(2, overflow_on_one_rank, stage):
        assert scale == 512.0
        assert not any(changes)


def train_with(name: str, **placing: Any) -> None:
    model = mlp()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    zf.prepare(model, optimizer, mesh=tensor_mesh(), **placing)


@pytest.mark.parametrize("placing", [{"stage": 0}, {"stage": 1, "cut": "whole"}], ids=["0", "whole"])
def test_an_optimizer_of_whole_matrices_is_refused_where_they_are_cut(ranks: Any, placing: dict[str, Any]) -> None:
    for message in ranks(2, raised, train_with, "Adafactor", **placing):
        assert "Adafactor does not work element by element" in message
        assert "the tensor axis leaves a part of '0.weight' here" in message


def values_of_what_torch_left_whole() -> list[float]:
    mesh = tensor_mesh()
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.LayerNorm(4), *mlp())
    nn.init.normal_(model[0].weight)
    parallelize_module(model, mesh.along("tensor"), {"1": ColwiseParallel(), "3": RowwiseParallel()})
    torch.manual_seed(dist.get_rank() + 1)
    nn.init.normal_(model[0].weight)
    zf.shard(model, stage=1, mesh=mesh)
    found = zf.full(model[0].weight).tolist()
    zf.close(model)
    return found


def test_what_torch_left_whole_starts_from_the_same_values(ranks: Any) -> None:
    first, second = ranks(2, values_of_what_torch_left_whole)
    assert first == second


def parts_after_closing(world_of_data: int) -> tuple[list[Part | None], list[Part | None]]:
    mesh, model = zf.mesh(tensor=2, data=world_of_data, device="cpu"), mlp()
    zf.shard(model, stage=3, mesh=mesh)
    before = [entry.part for slab in zf.engine.Engine.of(model).slabs() for entry in slab.entries]
    zf.close(model, gather=False)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return before, [part_of(p) for p in model.parameters()]


@pytest.mark.parametrize("data", [1, 2])
def test_parts_outlive_the_sharding(ranks: Any, data: int) -> None:
    for before, after in ranks(2 * data, parts_after_closing, data):
        assert None not in before
        assert after == before


def counts_after_a_plan() -> bool:
    """Of a parameter that another stage of a pipeline counts."""
    model = mlp()
    weight = model[0].weight
    set_part(weight, Part(weight.shape, None, 0, 8, counts=False))
    zf.tensor_parallel(model, tensor_mesh(), plan={"0": ColwiseParallel(), "2": RowwiseParallel()})
    part = part_of(weight)
    assert part is not None
    assert part.is_cut
    return part.counts


def test_what_another_stage_counts_is_not_counted_again(ranks: Any) -> None:
    assert ranks(2, counts_after_a_plan) == [False, False]


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 4, **options)
        self.mlp = mlp()
        self.head = nn.Linear(4, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mlp(self.embed(tokens)))


def gradient_of_embedding(options: dict[str, Any]) -> float:
    """Its difference from that of one process."""
    model, reference = zf.tensor_parallel(Words(**options), tensor_mesh()), Words(**options)
    tokens = torch.tensor([[1, 2, 5, 5, 0, 7]])
    for each in (model, reference):
        each(tokens).square().sum().backward()
    expected, part = reference.embed.weight.grad, part_of(model.embed.weight)
    assert expected is not None
    assert model.embed.weight.grad is not None
    assert part is not None
    return (model.embed.weight.grad - part.of(expected)).abs().max().item()


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings_have_the_gradient_of_one_process(ranks: Any, options: dict[str, Any]) -> None:
    assert max(ranks(2, gradient_of_embedding, options)) < 1e-6


INDICES = {
    "fewer words": (..., slice(None, 2)),
    "more words than a rank has": (..., slice(None, 6)),
    "one word": (..., 0),
    "words by all dimensions": (0, slice(None), slice(1, None)),
}


def look_up_no_word(word: int) -> tuple[str, list[int]]:
    """And the shape of what comes after it, of words."""
    model = zf.tensor_parallel(GPT(GPTConfig(layers=1, hidden=8, heads=2, seq=4, vocab=WORDS)), tensor_mesh())
    said = raised(model, torch.tensor([[0, word]]))
    return said, list(model(torch.tensor([[0, WORDS - 1]])).shape)


@pytest.mark.parametrize("word", [-1, WORDS])
def test_a_token_that_is_no_word_raises_as_in_one_process(ranks: Any, word: int) -> None:
    """Each rank could take it for another's, and all would look up zeros."""
    for said, shape in ranks(2, look_up_no_word, word):
        assert said.startswith("IndexError: index out of range")
        assert shape == [1, 2, WORDS]


def index_logits(index: Any) -> None:
    zf.tensor_parallel(Words(), tensor_mesh(), loss_parallel=True)(torch.tensor([[1, 2, 3]]))[index]


@pytest.mark.parametrize("what", INDICES)
def test_words_of_cut_logits_cannot_be_chosen(ranks: Any, what: str) -> None:
    for message in ranks(2, raised, index_logits, INDICES[what]):
        assert "has to stay the 8 words" in message


def loss_of_some_tokens() -> float:
    model, reference = zf.tensor_parallel(Words(), tensor_mesh(), loss_parallel=True), Words()
    tokens = torch.tensor([[1, 2, 3, 2], [7, 5, 0, 4]])
    mask = torch.tensor([[True, False, True], [True, True, False]])
    losses = [F.cross_entropy(each(tokens).float()[:, :-1][mask], tokens[:, 1:][mask]) for each in (model, reference)]
    return abs(losses[0].item() - losses[1].item())


def test_tokens_of_cut_logits_can_be_chosen(ranks: Any) -> None:
    assert max(ranks(2, loss_of_some_tokens)) < 1e-6


def placed_without_the_tensor_axis(stage: int, data: int | None, way: str) -> str:
    mesh, model = tensor_mesh(), mlp()
    if way == "zerofold":
        zf.tensor_parallel(model, mesh)
    else:
        parallelize_module(model, mesh.along("tensor"), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    other = None if data is None else zf.mesh(data=data, device="cpu")
    return raised(zf.prepare, model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, mesh=other)


@pytest.mark.parametrize("way", ["zerofold", "torch"])
@pytest.mark.parametrize(("stage", "data"), [(1, None), (3, None), (3, 2)])
def test_ranks_with_different_parts_are_not_taken_for_copies(
    ranks: Any, stage: int, data: int | None, way: str
) -> None:
    for said in ranks(2, placed_without_the_tensor_axis, stage, data, way):
        assert "has cut this Sequential over tensor=2" in said or "is a DTensor, and there is no mesh=" in said, said


PLANS = ({"0": ColwiseParallel(), "2": RowwiseParallel()}, {"0": ColwiseParallel(use_local_output=False)})
OTHERS: dict[str, dict[str, Any]] = {
    "plan": {"plan": PLANS[1]},
    "sequence": {"sequence_parallel": True},
    "words": {"loss_parallel": True},
}


def cut_by_rank(way: str) -> str:
    model = Words() if way == "words" else mlp()
    if way == "model" and dist.get_rank():
        model[2] = nn.Linear(8, 6, bias=False)
    if way == "sequence":
        model = GPT(GPTConfig(layers=1, hidden=8, heads=2, seq=4, vocab=8))
    options = {"plan": PLANS[0]} if way == "plan" else {}
    return raised(
        zf.tensor_parallel, model, tensor_mesh(), **{**options, **(OTHERS.get(way, {}) if dist.get_rank() else {})}
    )


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("plan", "has plan '0': ColwiseParallel("),
        ("sequence", "rank 0 has sequence_parallel=False where rank 1 has sequence_parallel=True"),
        ("words", "rank 0 has loss_parallel=False where rank 1 has loss_parallel=True"),
        ("model", "rank 0 has '2.weight' of (4, 8) in torch.float32 where rank 1 has '2.weight' of (6, 8)"),
    ],
)
def test_ranks_that_cut_differently_are_told(ranks: Any, way: str, said: str) -> None:
    for message in ranks(2, cut_by_rank, way):
        assert message.startswith("ValueError: zf.tensor_parallel: ranks 0 and 1 share the inside of every layer")
        assert said in message


def cut_two_models_side_by_side() -> None:
    """As stages that somebody has made by hand: only ranks of one tensor axis must hold the same."""
    mesh, model = zf.mesh(pipeline=2, tensor=2, device="cpu"), mlp()
    zf.tensor_parallel(nn.Sequential(model, mlp()) if mesh.coordinate["pipeline"] else model, mesh)


def test_other_axes_may_hold_other_models(ranks: Any) -> None:
    ranks(4, cut_two_models_side_by_side)


def state_dict_of_parts(way: str) -> str:
    mesh, model = tensor_mesh(), mlp()
    if way == "torch":
        parallelize_module(model, mesh.along("tensor"), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        zf.tensor_parallel(model, mesh)
    if way != "before":
        zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, mesh=mesh)
        zf.close(model)
    return raised(model.state_dict)


@pytest.mark.parametrize("way", ["before", "after", "torch"])
def test_a_part_is_not_shown_as_the_whole(ranks: Any, way: str) -> None:
    for said in ranks(2, state_dict_of_parts, way):
        assert "this rank has a part of '0.weight', (4, 4) of (8, 4)" in said
        assert "after zf.prepare, zf.save and zf.export write whole parameters" in said


def cut_what_is_sharded(stage: int) -> str:
    model = mlp()
    zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    said = raised(zf.tensor_parallel, model, tensor_mesh())
    zf.close(model)
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_tensor_parallel_comes_before_prepare(ranks: Any, stage: int) -> None:
    for said in ranks(2, cut_what_is_sharded, stage):
        assert (
            said == "ValueError: this model is already sharded: call zf.tensor_parallel before zf.prepare or zf.shard"
        )


def train_otherwise(axis: str, what: str) -> str:
    """Rank 1 by numbers of its own."""
    mesh, other = zf.mesh(device="cpu", **{axis: 2}), dist.get_rank() == 1
    model: Any = GPT(GPTConfig(layers=2, hidden=8, heads=2, seq=4, vocab=WORDS))
    placed = model
    if axis == "pipeline":
        placed = zf.pipeline(model, mesh, microbatches=2, loss_fn=lambda output, target: output.mean())
    zf.shard(placed, stage=1, mesh=mesh)
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.2 if what == "lr" and other else 0.1)
    clip = 1.0 if what == "clip" and other else 0.5
    if what != "frozen":
        return raised(zf.attach, placed, optimizer, clip=clip)
    zf.attach(placed, optimizer, clip=clip)
    model(torch.zeros(1, 4, dtype=torch.long))
    model.blocks[0].requires_grad_(not other)
    return raised(model, torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("axis", "what", "said"),
    [
        ("tensor", "lr", "rank 1 holds a part of one model with others"),
        ("pipeline", "clip", "it has 'clip=1.0' where others have 'clip=0.5'; give the same numbers on every rank"),
        ("tensor", "frozen", "train different parameters: rank 0 trains 20 of them, rank 1 12; freeze and thaw"),
    ],
)
def test_ranks_that_train_one_model_in_different_ways_are_told(ranks: Any, axis: str, what: str, said: str) -> None:
    """What they hold alike, such as norms, would differ from then on."""
    for message in ranks(2, train_otherwise, axis, what):
        assert message.startswith("ValueError: rank")
        assert said in message
