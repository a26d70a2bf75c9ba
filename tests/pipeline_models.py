"""Small models for pipelines, and the run on one process that a pipeline is compared with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerofold as zf
from zerofold.train.gpt import GPT, GPTConfig

VOCABULARY, SEQUENCE, BATCH = 64, 16, 8


class OddBlock(nn.Module):
    """Returns a tuple, as many blocks of older models do, and changes what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))

    def forward(self, hidden_states: Tensor, scale: float) -> tuple[Tensor, None]:
        hidden_states *= 0.9
        return hidden_states + scale * self.mlp(hidden_states), None


class OddModel(nn.Module):
    """The last norm is defined before the blocks, a norm of the embedding after them, and blocks return tuples."""

    def __init__(self, width: int = 24, layers: int = 4) -> None:
        super().__init__()
        self.last_norm = nn.LayerNorm(width)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(OddBlock(width) for _ in range(layers))
        self.first_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first_norm(self.embedding(tokens))
        for layer in self.layers:
            x, _ = layer(hidden_states=x, scale=0.5)
        return self.head(self.last_norm(x))


def make(kind: str) -> nn.Module:
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": SEQUENCE}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt":
        return GPT(GPTConfig(layers=4, hidden=32, heads=2, seq=SEQUENCE, vocab=VOCABULARY))
    if kind == "odd":
        return OddModel()
    import transformers

    if kind == "gpt2":  # its head is its embedding
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
        small = {"vocab_size": VOCABULARY, "n_positions": SEQUENCE, "n_embd": 32, "n_layer": 4, "n_head": 2}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, **drop))
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    assert kind == "mixtral"
    config = transformers.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def loss_fn(output: Any, target: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    data = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    return data[:, :-1], data[:, 1:]


def own(mesh: zf.Mesh, *tensors: Tensor) -> list[Tensor]:
    """What this rank's pipeline has of a batch."""
    return [tensor.chunk(mesh.data)[mesh.coordinate["data"]] for tensor in tensors]


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_alone(model: nn.Module, steps: int, clip: float | None = None) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of plain torch on the whole batch."""
    steps_taken = optimizer(model.parameters())
    losses, norms = [], []
    for step in range(steps):
        tokens, target = batch(step)
        loss = loss_fn(model(tokens), target)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        steps_taken.step()
        steps_taken.zero_grad()
        losses.append(loss.item())
    return losses, norms


def largest_difference(model: nn.Module, reference: nn.Module) -> float:
    """Over the parameters that this rank has, whole."""
    known = dict(reference.named_parameters(remove_duplicate=False))
    with zf.full_params(model):
        found = [(p.detach() - known[n]).abs().max().item() for n, p in model.named_parameters(remove_duplicate=False)]
    return max(found)


def mean_over_data(loss: Tensor) -> float:
    """All ranks of a pipeline have the same number, so the mean over all ranks is that over data."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
