"""Tensor parallelism with given plans, models that torch has cut, other features; its traffic; and what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import GPT2Config, GPT2LMHeadModel

import models
import zerofold as zf
import zoo
from ranks import raised
from test_tensor_parallel import MODELS, STEPS, alone, build, half_of, loss_of, mean_of, spread, steps

MLP_PLAN = {"layers.0": ColwiseParallel, "layers.2": RowwiseParallel}
LLAMA_PLAN = {
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel,
    "model.layers.*.self_attn.o_proj": RowwiseParallel,
    "model.layers.*.mlp.gate_proj": ColwiseParallel,
    "model.layers.*.mlp.up_proj": ColwiseParallel,
    "model.layers.*.mlp.down_proj": RowwiseParallel,
}


def made(plan: dict[str, type[ParallelStyle]]) -> dict[str, ParallelStyle]:
    return {name: style() for name, style in plan.items()}


def given(name: str, plan: dict[str, type[ParallelStyle]]) -> list[float]:
    torch.set_num_threads(1)
    mesh = zf.mesh(tensor=2, device="cpu")
    model, optimizer = build(name)
    zf.tensor_parallel(model, mesh, made(plan))
    return steps(*zf.prepare(model, optimizer, stage=3, mesh=mesh), name, mesh)


def cut_by_torch(name: str, plan: dict[str, type[ParallelStyle]], stage: int) -> list[float]:
    """The user's own call of torch, and an optimizer over DTensors that has stepped once."""
    torch.set_num_threads(1)
    mesh = zf.mesh(tensor=2, device="cpu")
    model, _ = build(name)
    parallelize_module(model, mesh.along("tensor"), made(plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=False)  # which takes DTensors mixed
    first = torch.zeros(())
    for half in (0, 1):
        loss = loss_of(model, half_of(MODELS[name][1](0), half)) / 2
        loss.backward()
        first += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    zf.prepare(model, optimizer, stage=stage, mesh=mesh)
    losses = [mean_of(first)]
    for step in range(1, STEPS):
        loss = loss_of(model, half_of(MODELS[name][1](step), mesh.coordinate["data"]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_of(loss))
    zf.close(model)
    return losses


@pytest.mark.parametrize(("name", "plan"), [("mlp", MLP_PLAN), ("llama", LLAMA_PLAN)])
def test_a_plan_may_be_given(ranks: Any, name: str, plan: dict[str, type[ParallelStyle]]) -> None:
    for losses in ranks(4, given, name, plan):
        assert losses == pytest.approx(alone(name), abs=1e-5)


@pytest.mark.parametrize(("name", "plan", "stage"), [("mlp", MLP_PLAN, 2), ("llama", LLAMA_PLAN, 3)])
def test_a_model_that_torch_has_cut_is_taken_with_its_optimizer(
    ranks: Any, name: str, plan: dict[str, type[ParallelStyle]], stage: int
) -> None:
    for losses in ranks(4, cut_by_torch, name, plan, stage):
        assert losses == pytest.approx(alone(name), abs=1e-5)


class Chunked(models.TinyGPT):
    """Its loss needs no logits, and its head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__(width=24, layers=2, key_bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, indices: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(indices) + self.positions(torch.arange(indices.shape[1]))
        for block in self.blocks:
            x = block(x)
        return zf.cross_entropy(
            self.norm(x), self.head.weight, targets, chunk=7, vocabulary_chunk=11, label_smoothing=0.1
        )


def losses_of_chunked(stage: int | None) -> list[float]:
    """Over tensor 2; in one process without a stage."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Chunked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage is not None:
        zf.prepare(model, optimizer, stage=stage, mesh=zf.mesh(tensor=2, device="cpu"))
        assert len(zf.full(model.head.weight)) == models.VOCABULARY // 2
    found = []
    for step in range(5):
        loss = model(**MODELS["tests"][1](step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    if stage is not None:
        zf.close(model)
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_chunked_cross_entropy_of_a_cut_head(ranks: Any, stage: int) -> None:
    for losses in ranks(2, losses_of_chunked, stage):
        assert losses == pytest.approx(losses_of_chunked(None), abs=1e-5)


def with_features(stage: int) -> list[float]:
    """Checkpointed blocks and micro-batches; the optimizer has stepped before."""
    torch.set_num_threads(1)
    mesh = zf.mesh(tensor=4, device="cpu")
    model, optimizer = build("gpt2_4")
    found = []
    for step in range(STEPS):
        if step == 1:
            zf.prepare(model, optimizer, stage=stage, mesh=mesh, accumulate=2)
            zf.checkpoint_blocks(model)
        total = 0.0
        for half in (0, 1):
            loss = loss_of(model, half_of(MODELS["gpt2_4"][1](step), half)) / 2
            loss.backward()
            total += loss.item()
            del loss  # its graph remembers whole parameters
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    zf.close(model)
    return found


def gpt2_of_four_heads() -> nn.Module:
    config = GPT2Config(vocab_size=zoo.VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    return GPT2LMHeadModel(config)


MODELS["gpt2_4"] = (gpt2_of_four_heads, MODELS["gpt2"][1])


@pytest.mark.parametrize("stage", [1, 3])
def test_accumulation_checkpoints_and_an_optimizer_in_the_midst(ranks: Any, stage: int) -> None:
    for losses in ranks(4, with_features, stage):
        assert losses == pytest.approx(alone("gpt2_4"), abs=1e-5)


def untrained(name: str) -> list[float]:
    model, _ = build(name)
    return [loss_of(model, MODELS[name][1](step)).item() for step in range(STEPS)]


def test_bf16(ranks: Any) -> None:
    for losses in ranks(4, spread, "llama", 3, {"sequence_parallel": True, "loss_parallel": True}, precision="bf16"):
        assert losses == pytest.approx(alone("llama"), abs=1e-2)
        assert losses != pytest.approx(untrained("llama"), abs=2e-2)


def traffic(name: str, wishes: dict[str, bool]) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of one block, forward and backward."""
    torch.set_num_threads(1)
    model, _ = build(name)
    zf.tensor_parallel(model, zf.mesh(tensor=2, device="cpu"), **wishes)
    block = model.model.layers[1] if name == "llama" else model.blocks[1]  # type: ignore[union-attr,index]
    length = 8 // 2 if wishes else 8
    x = torch.randn(2, length, 32 if name == "llama" else 24, requires_grad=True)
    tables = torch.ones(2, 8, 8), torch.zeros(2, 8, 8)
    rotation = {"rotation": torch.ones(2, 8, 6)} if name == "train" else {}
    forward, backward = CommDebugMode(), CommDebugMode()
    with forward:
        out = block(x, position_embeddings=tables) if name == "llama" else block(x, **rotation)
    with backward:
        out.sum().backward()
    return _counts(forward), _counts(backward)


def _counts(mode: CommDebugMode) -> dict[str, int]:
    return {str(op).split(".")[-1]: count for op, count in mode.get_comm_counts().items() if count}


@pytest.mark.parametrize("name", ["train", "bench", "llama"])
def test_a_block_sums_twice_forward_and_twice_backward(ranks: Any, name: str) -> None:
    forward, backward = ranks(2, traffic, name, {})[0]
    assert forward == {"all_reduce": 2}
    assert backward == {"all_reduce": 2}


def test_with_parts_of_the_sequence_each_sum_is_its_two_halves(ranks: Any) -> None:
    forward, backward = ranks(2, traffic, "llama", {"sequence_parallel": True})[0]
    assert forward == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    norms = backward.pop("all_reduce")  # of two weights
    assert norms == 2
    assert backward == forward


def dropped(seed_after: bool) -> list[Tensor]:
    """What the ranks of a tensor axis hold alike stays alike, though they began with other random numbers."""
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    config = GPT2Config(vocab_size=zoo.VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.5)
    model = GPT2LMHeadModel(config).train()
    mesh = zf.mesh(tensor=2, device="cpu")
    _, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1, mesh=mesh)
    if seed_after:
        torch.manual_seed(dist.get_rank())
    for step in range(3):
        loss_of(model, MODELS["gpt2"][1](step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zf.full_params(model):
        found = [p.detach().clone() for name, p in model.named_parameters() if "ln" in name or "wpe" in name]
    zf.close(model)
    return found


def test_dropout_masks_are_alike_where_activations_are(ranks: Any) -> None:
    first, second = ranks(2, dropped, False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert "different dropout masks: seed them alike" in ranks(2, raised, dropped, True)[1]


def copies() -> list[list[int]]:
    model, _ = build("mlp")
    zf.tensor_parallel(model, zf.mesh(tensor=2, device="cpu"))
    copied = copy.deepcopy(model)
    assert copied(**MODELS["mlp"][1](0)) == model(**MODELS["mlp"][1](0))
    return [list(pickle.loads(pickle.dumps(p)).shape) for p in (copied.layers[0].weight, model.layers[0].weight)]


def test_models_can_be_copied_and_parameters_pickled(ranks: Any) -> None:
    assert ranks(2, copies) == [[[8, 8]] * 2] * 2


def own_batches() -> None:
    mesh = zf.mesh(tensor=2, device="cpu")
    model, optimizer = build("train")
    zf.prepare(model, optimizer, stage=3, mesh=mesh)
    try:
        model(**MODELS["train"][1](dist.get_rank()))
    finally:
        zf.close(model, gather=False)


def spread_once(build_model: Any, plan: Any = None, **wishes: bool) -> None:
    zf.tensor_parallel(build_model(), zf.mesh(device="cpu", tensor=2), plan, **wishes)


def three_heads() -> nn.Module:
    return nn.Sequential(models.Block(24, 3, False))


def odd_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 4))


def unknown() -> nn.Module:
    return nn.Conv2d(2, 2, 3)


def on_the_first_rank_alone() -> nn.Module:
    return unknown() if dist.get_rank() == 0 else zoo.llama()


def odd_words() -> nn.Module:
    model = models.TinyGPT(width=24)
    model.tokens, model.head = nn.Embedding(97, 24), nn.Linear(24, 97, bias=False)
    return model


def twice() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    for _ in range(2):
        spread_once(lambda: model)


def logits_for_something_else() -> None:
    model, _ = build("train")
    zf.tensor_parallel(model, zf.mesh(tensor=2, device="cpu"), loss_parallel=True)
    model(MODELS["train"][1](0)["tokens"]).argmax(-1)


def odd_sequence() -> None:
    model, _ = build("train")
    zf.tensor_parallel(model, zf.mesh(tensor=2, device="cpu"), sequence_parallel=True)
    model(MODELS["train"][1](0)["tokens"][:, :7])


def with_an_old_loss() -> None:
    model, _ = build("mlp")
    loss = model(**MODELS["mlp"][1](0))
    spread_once(lambda: model)
    loss.backward()


COLUMNS = {"0": ColwiseParallel, "9": ColwiseParallel}
REFUSED: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (own_batches, (), {}, "got different inputs: rank 1 has other values in its "),
    (spread_once, (three_heads,), {}, "tensor=2: '0' has 3 attention heads, which do not divide by 2"),
    (spread_once, (odd_mlp,), {}, "'0' has 7 columns between two layers, which do not divide by 2: choose tensor=1"),
    (spread_once, (unknown,), {}, "no layer of this Conv2d is known, so none can be cut: give plan="),
    (spread_once, (on_the_first_rank_alone,), {}, "no layer of this Conv2d is known"),
    (spread_once, (MODELS["mlp"][0],), {"sequence_parallel": True}, "sequence_parallel: no block of this MLP is known"),
    (
        spread_once,
        (odd_words,),
        {"loss_parallel": True},
        "'head' has 97 words, which do not divide by tensor=2: leave ",
    ),
    (spread_once, (odd_mlp, {"0": "columns"}), {}, "plan must be a dict {module name: torch ParallelStyle}"),
    (twice, (), {}, "spread over a tensor axis already"),
    (logits_for_something_else, (), {}, "argmax: these logits are cut over the vocabulary"),
    (with_an_old_loss, (), {}, "'layers.0.weight' is in the graph of an earlier forward"),
    (odd_sequence, (), {}, "a sequence of 7 does not divide by tensor=2: pad it to 8"),
]


@pytest.mark.parametrize(("call", "arguments", "wishes", "said"), REFUSED, ids=[case[-1][:30] for case in REFUSED])
def test_what_cannot_be_done_is_said_on_every_rank(
    ranks: Any, call: Any, arguments: tuple[Any, ...], wishes: dict[str, Any], said: str
) -> None:
    for message in ranks(2, raised, call, *arguments, **wishes):
        assert said in message


def misnamed() -> None:
    spread_once(odd_mlp, made(COLUMNS))


def test_a_name_in_a_plan_that_fits_nothing_is_named(ranks: Any) -> None:
    for message in ranks(2, raised, misnamed):
        assert "plan: '9' is the name of no module of this Sequential" in message
