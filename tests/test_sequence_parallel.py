"""Norms on a part of the sequence where blocks hold more than attention and an MLP: T5's cross-attention, Mixtral's
router and experts. Gradients, weights and traffic, since AdamW's losses would forgive a gradient that is k times its
size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

import models
import zerofold as zf
import zoo
from ranks import raised
from zerofold.part import part_of

STEPS, SAMPLES, LENGTH, SHORTER, WIDTH, HEADS = 3, 4, 12, 8, 32, 4
Batch = dict[str, Tensor]

_DECODER: dict[str, Any] = {
    "vocab_size": zoo.VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
_ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
_T5: dict[str, Any] = {
    "vocab_size": zoo.VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": HEADS,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


def mixtral(jitter: float = 0.0) -> nn.Module:
    """Its auxiliary loss weighs as much as the other, so that the router's gradient has both."""
    return MixtralForCausalLM(MixtralConfig(**_DECODER, **_ROUTED, num_local_experts=4, router_jitter_noise=jitter))


def mixtral_with_jitter() -> nn.Module:
    return mixtral(0.1)


def qwen3_moe() -> nn.Module:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_DECODER, **_ROUTED, num_experts=4, moe_intermediate_size=16, head_dim=8)
    )


def qwen2_moe() -> nn.Module:
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**_DECODER, num_experts=4, num_experts_per_tok=2))


def t5() -> nn.Module:
    return T5ForConditionalGeneration(T5Config(**_T5))


def gated_t5() -> nn.Module:
    """As T5 1.1 is: a gated MLP, and a head of its own."""
    return T5ForConditionalGeneration(T5Config(**_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False))


class Encoder(nn.Module):
    """T5's alone."""

    def __init__(self) -> None:
        super().__init__()
        self.t5 = T5EncoderModel(T5Config(**_T5))

    def forward(self, **batch: Tensor) -> Tensor:
        return self.t5(**batch).last_hidden_state.sin().mean()  # of squares after a norm the gradient is none


MODELS: dict[str, Any] = {
    "mixtral": mixtral,
    "jitter": mixtral_with_jitter,
    "qwen3_moe": qwen3_moe,
    "t5": t5,
    "gated_t5": gated_t5,
    "encoder": Encoder,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(zoo.SEED)
    model: nn.Module = MODELS[name]().train()
    return model


def batch_of(name: str, step: int) -> Batch:
    """The end of one sample is padding; T5's decoder has a shorter sequence than its encoder."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, zoo.VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask}
    if name == "encoder":
        return batch
    labels = tokens[:, :SHORTER].contiguous() if "t5" in name else tokens
    return {**batch, "labels": labels}


def loss_of(model: nn.Module, batch: Batch, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)  # of jitter
    out = model(**batch)
    return out if isinstance(out, Tensor) else out.loss


class Gradients(NamedTuple):
    loss: float
    wrong: list[str]  # names of parameters
    lengths: set[int]  # of the sequence that norms of blocks saw


@contextmanager
def seen_by_norms(model: nn.Module) -> Iterator[set[int]]:
    found: set[int] = set()

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert not isinstance(args[0], DTensor)
        found.add(args[0].shape[1])

    norms = [module for module in model.modules() if type(module).__name__.endswith(("RMSNorm", "LayerNorm"))]
    by_head = {
        id(norm) for module in model.modules() for norm in (getattr(module, n, None) for n in ("q_norm", "k_norm"))
    }
    handles = [norm.register_forward_pre_hook(note) for norm in norms if id(norm) not in by_head]
    yield found
    for handle in handles:
        handle.remove()


def gradients(name: str, loss_parallel: bool) -> Gradients:
    """Of one batch, over a tensor axis of all ranks, beside those of one process."""
    torch.set_num_threads(1)
    plain, model, batch = build(name), build(name), batch_of(name, 0)
    loss_of(plain, batch).backward()
    mesh = zf.mesh(tensor=dist.get_world_size(), device="cpu")
    zf.tensor_parallel(model, mesh, sequence_parallel=True, loss_parallel=loss_parallel)
    with seen_by_norms(model) as lengths:
        loss = loss_of(model, batch)
    loss.backward()
    expected = dict(plain.named_parameters())
    wrong = []
    for parameter_name, parameter in model.named_parameters():
        part, whole = part_of(parameter), expected[parameter_name].grad
        assert part is not None
        assert whole is not None
        assert parameter.grad is not None
        if not torch.allclose(parameter.grad, part.of(whole), rtol=1e-4, atol=1e-6 * whole.abs().max().item() + 1e-9):
            wrong.append(parameter_name)
    return Gradients(loss.item(), wrong, lengths)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_process(ranks: Any, name: str, world: int) -> None:
    expected = loss_of(build(name), batch_of(name, 0)).item()
    has_head = name != "encoder"
    for found in ranks(world, gradients, name, has_head and world == 4):
        assert found.loss == pytest.approx(expected, abs=1e-5)
        assert found.wrong == []
        assert found.lengths == {LENGTH // world, SHORTER // world} if "t5" in name else {LENGTH // world}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Its steps are as large as gradients are, and so weights tell of them."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def half_of(batch: Batch, number: int) -> Batch:
    return {key: value[SAMPLES // 2 * number : SAMPLES // 2 * (number + 1)] for key, value in batch.items()}


class Run(NamedTuple):
    losses: list[float]
    weights: dict[str, Tensor]


def alone(name: str) -> Run:
    """One process, in halves: an auxiliary loss of all samples is not the mean of those of the halves."""
    model = build(name)
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        loss = sum((loss_of(model, half_of(batch_of(name, step), half)) for half in (0, 1)), torch.zeros(())) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, {key: p.detach() for key, p in model.named_parameters()})


def shared(name: str, sizes: dict[str, int], stage: int, checkpointing: str) -> Run:
    """Over data x tensor."""
    torch.set_num_threads(1)
    model, mesh = build(name), zf.mesh(**sizes, device="cpu")
    zf.tensor_parallel(model, mesh, sequence_parallel=True)
    _, optimizer = zf.prepare(model, optimizer_of(model), stage=stage, mesh=mesh, accumulate=2 // mesh.data)
    if checkpointing == "zerofold":
        zf.checkpoint_blocks(model, every=1)
    elif checkpointing == "transformers":
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for half in [mesh.coordinate["data"]] if mesh.data == 2 else [0, 1]:
            loss = loss_of(model, half_of(batch_of(name, step), half)) * mesh.data / 2
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    weights = dict(zf.full_tensors(model))
    zf.close(model, gather=False)
    return Run(losses, weights)


SPREADS = [
    ({"data": 2, "tensor": 2}, 3, "zerofold"),
    ({"data": 2, "tensor": 2}, 3, "transformers"),
    ({"data": 1, "tensor": 4}, 1, ""),
]


@pytest.mark.parametrize("spread", SPREADS, ids=["stage 3, checkpoints", "stage 3, transformers' checkpoints", "four"])
@pytest.mark.parametrize("name", ["mixtral", "t5"])
def test_training_goes_as_on_one_process(ranks: Any, name: str, spread: tuple[dict[str, int], int, str]) -> None:
    expected, before = alone(name), dict(build(name).named_parameters())
    assert all((expected.weights[key] - p).abs().max() > 1e-3 for key, p in before.items())
    for found in ranks(4, shared, name, *spread):
        assert found.losses == pytest.approx(expected.losses, abs=1e-5)
        for key, weight in found.weights.items():
            assert torch.allclose(weight, expected.weights[key], atol=1e-5), key


class Collectives(NamedTuple):
    forward: dict[str, int]
    backward: dict[str, int]


def traffic_of_a_block() -> Collectives:
    torch.set_num_threads(1)
    model = build("mixtral")
    zf.tensor_parallel(model, zf.mesh(tensor=2, device="cpu"), sequence_parallel=True)
    x = torch.randn(SAMPLES, LENGTH // 2, WIDTH, requires_grad=True)
    tables = torch.ones(SAMPLES, LENGTH, WIDTH // HEADS), torch.zeros(SAMPLES, LENGTH, WIDTH // HEADS)
    forward, backward = CommDebugMode(), CommDebugMode()
    with forward:
        out = model.model.layers[1](x, position_embeddings=tables)  # type: ignore[union-attr,index]
    assert out.shape == x.shape
    with backward:
        out.sum().backward()
    return Collectives(*(_counts(mode) for mode in (forward, backward)))


def _counts(mode: CommDebugMode) -> dict[str, int]:
    return {str(op).split(".")[-1]: count for op, count in mode.get_comm_counts().items() if count}


def test_experts_send_what_an_mlp_does_and_the_gradients_of_their_weights(ranks: Any) -> None:
    for found in ranks(2, traffic_of_a_block):
        assert found.forward == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
        assert found.backward == {**found.forward, "all_reduce": 2 + 1}  # of two norms, and what the router gave


def gpt_with_a_block_after_its_norm() -> nn.Module:
    model = models.TinyGPT(width=24, layers=2)
    model.last = models.Block(24, 2, False)
    return model


class SequentialBlock(models.Block):
    def __init__(self) -> None:
        super().__init__(24, 2, False)
        self.mlp = nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24))
        del self.up, self.down


def gpt_of_sequentials() -> nn.Module:
    model = models.TinyGPT(width=24, layers=2)
    model.blocks = nn.ModuleList(SequentialBlock() for _ in range(2))
    return model


REFUSED = {
    "qwen2_moe": qwen2_moe,  # it has a shared expert
    "switch": zoo.switch,
    "outside": gpt_with_a_block_after_its_norm,
    "sequential": gpt_of_sequentials,
}


def refused(name: str) -> None:
    model = REFUSED[name]()
    zf.tensor_parallel(model, zf.mesh(tensor=2, device="cpu"), sequence_parallel=True)


def uneven() -> None:
    """The encoder's sequence divides, and the decoder's does not."""
    model, batch = build("t5"), batch_of("t5", 0)
    zf.tensor_parallel(model, zf.mesh(tensor=2, device="cpu"), sequence_parallel=True)
    loss_of(model, {**batch, "labels": batch["labels"][:, :7].contiguous()})


FIX = "it is for blocks like those of GPT, Llama, T5 and Mixtral; leave it out, or give plan="


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen2_moe", "sequence_parallel: 'model.layers.0.mlp.gate' is not known to work on a part"),
        ("switch", "sequence_parallel: 'encoder.block.1.layer.1.mlp.router.classifier' is not known"),
        ("sequential", "sequence_parallel: 'blocks.0.mlp.2' is not known to work on a part"),
        ("outside", "sequence_parallel: 'last.project' is outside of the known blocks"),
    ],
)
def test_blocks_that_are_not_known_are_refused(ranks: Any, name: str, said: str) -> None:
    for message in ranks(2, raised, refused, name):
        assert said in message
        assert FIX in message


def test_both_sequences_have_to_divide(ranks: Any) -> None:
    for message in ranks(2, raised, uneven):
        assert "a sequence of 7 does not divide by tensor=2: pad it to 8" in message
