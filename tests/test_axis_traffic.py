"""What is sent along the tensor and pipeline axes is in the ledger: against a count by hand."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

import zerofold as zf
from zerofold.bench.gpt import GPT, GPTSize

WORDS, WIDTH, LAYERS, TOKENS, SAMPLES = 32, 16, 3, 8, 4


def gpt() -> nn.Module:
    return GPT(GPTSize(vocab=WORDS, width=WIDTH, layers=LAYERS, heads=2, seq=TOKENS))


def llama() -> nn.Module:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": LAYERS}
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=TOKENS, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config)


MODELS = {"gpt": gpt, "llama": llama}


def loss_of(model: nn.Module, kind: str, tokens: Tensor) -> Tensor:
    return model(tokens, tokens) if kind == "gpt" else model(input_ids=tokens, labels=tokens).loss


def sent(kind: str, steps: int, wishes: dict[str, bool]) -> list[dict[str, int]]:
    """Bytes by operation along the tensor axis, in each step."""
    torch.manual_seed(0)
    mesh = zf.mesh(tensor=2, device="cpu")
    model = zf.tensor_parallel(MODELS[kind](), mesh, **wishes)
    model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh, stage=1)
    tokens = torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
    found, before = [], {}
    for _ in range(steps):
        loss_of(model, kind, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        now = zf.ledger(model).snapshot()["comm_bytes_by_axis"]["tensor"]
        found.append({name: total - before.get(name, 0) for name, total in now.items()})
        before = now
    zf.close(model)
    return found
