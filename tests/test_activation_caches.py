"""Checkpointed blocks of Hugging Face's models get no cache, however their models pass it: not one that is asked for by
default either. The same gradients as torch alone, and nothing of it is left in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CsmDepthDecoderConfig,
    CsmDepthDecoderForCausalLM,
    DynamicCache,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
)

import zerofold as zf
import zoo

Batch = dict[str, Tensor]
MM = torch.ops.aten.mm.default
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reentrant": {"use_reentrant": True},
    "policy": {"policy": [MM]},
    "host": {"keep": "host"},
    "host_reentrant": {"keep": "host", "use_reentrant": True},
    "contiguous": {"contiguous": True},
}


def gpt_bigcode() -> nn.Module:
    sizes = {"vocab_size": zoo.VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 2}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPTBigCodeForCausalLM(GPTBigCodeConfig(**sizes, **dropouts, bos_token_id=1, eos_token_id=2, pad_token_id=0))


def csm() -> nn.Module:
    return CsmDepthDecoderForCausalLM(
        CsmDepthDecoderConfig(
            num_codebooks=12,
            backbone_hidden_size=32,
            vocab_size=zoo.VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=16,
        )
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch]]] = {
    "gpt2": (zoo.gpt2, zoo.causal_batch),
    "gpt_bigcode": (gpt_bigcode, zoo.causal_batch),
    "whisper": (zoo.whisper, zoo.speech_batch),
    "csm": (csm, zoo.causal_batch),
    "llama": (zoo.llama, zoo.causal_batch),
}


def made(name: str) -> tuple[nn.Module, Batch]:
    build, batch = MODELS[name]
    torch.manual_seed(zoo.SEED)
    return build().train(), batch(torch.Generator().manual_seed(5))


def gradients(name: str, how: dict[str, Any] | None, **given: Any) -> list[Tensor]:
    """Given nothing, the model asks for a cache, since its config does by default."""
    model, batch = made(name)
    if how is not None:
        assert model.config.use_cache  # type: ignore[union-attr]
        zf.checkpoint_blocks(model, **how)
    model(**batch, **given).loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) > 10
    return found


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_torch_alone(name: str) -> None:
    # What passes through a cache is added up in another order.
    plain, cached = gradients(name, None, use_cache=False), gradients(name, None)
    assert all(map(partial(torch.allclose, atol=1e-6), plain, cached))
    for way, how in WAYS.items():
        found = gradients(name, how)
        # An encoder's result, which several blocks take: see docs/activation.md.
        is_summed_otherwise = name == "whisper" and "use_reentrant" in how
        same = partial(torch.allclose, atol=1e-6) if is_summed_otherwise else torch.equal
        assert all(map(same, plain, found)), way


@contextlib.contextmanager
def caches_made() -> Any:
    """All that a model makes inside."""
    found: list[DynamicCache] = []
    with pytest.MonkeyPatch.context() as patch:
        start = DynamicCache.__init__

        def noted(self: DynamicCache, *args: Any, **kwargs: Any) -> None:
            start(self, *args, **kwargs)
            found.append(self)

        patch.setattr(DynamicCache, "__init__", noted)
        yield found


def held_by(caches: list[DynamicCache]) -> int:
    layers = [layer for cache in caches for layer in cache.layers]
    return sum(each.nbytes for layer in layers for each in (layer.keys, layer.values) if each is not None)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_kept_in_a_cache_and_what_comes_back_is_empty(name: str) -> None:
    model, batch = made(name)
    with caches_made() as caches:
        model(**batch)
    assert held_by(caches) > 0
    checkpointing = zf.checkpoint_blocks(model)
    with caches_made() as caches:
        result = model(**batch)
    assert caches
    assert held_by(caches) == 0
    assert result.past_key_values.get_seq_length() == 0
    result.loss.backward()
    assert held_by(caches) == 0
    with torch.no_grad():  # as always
        assert model(**batch).past_key_values.get_seq_length() > 0
    checkpointing.remove()
    assert model(**batch).past_key_values.get_seq_length() > 0


def test_generation_uses_its_cache() -> None:
    texts = []
    for is_checkpointed in (False, True):
        model, batch = made("gpt2")
        if is_checkpointed:
            zf.checkpoint_blocks(model)
            model(**batch).loss.backward()
        generate: Any = model.generate
        texts.append(generate(input_ids=batch["input_ids"][:, :4], max_new_tokens=4, do_sample=False))
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode", "llama"])
def test_a_cache_that_is_filled_cannot_be_left_out(name: str) -> None:
    model, batch = made(name)
    checkpointing = zf.checkpoint_blocks(model)
    with torch.no_grad():
        past = model(input_ids=batch["input_ids"]).past_key_values
    with pytest.raises(ValueError, match=r"checkpoint_blocks: (past_key_values|layer_past)= is filled already.*remove"):
        model(input_ids=batch["input_ids"][:, :2], past_key_values=past)
    checkpointing.remove()
    model(input_ids=batch["input_ids"][:, :2], past_key_values=past)


def test_a_layer_that_is_not_checkpointed_fills_its_own() -> None:
    """And the block after it is not taken for one whose cache was filled before."""
    model, batch = made("gpt2")
    zf.checkpoint_blocks(model, units=lambda name, module: name in ("transformer.h.1", "transformer.h.2"))
    past = model(**batch).past_key_values
    assert past.get_seq_length(0) == batch["input_ids"].shape[1]
    assert past.get_seq_length(1) == 0


class Reader(nn.Module):
    """Says, as some of Hugging Face's layers do, that it only reads."""

    _can_checkpoint_with_cache = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
        return self.linear(x) + past_key_values[0]


def test_a_layer_that_only_reads_its_cache_keeps_it() -> None:
    layer = Reader()
    zf.checkpoint_blocks(nn.ModuleList([layer]), units=Reader)
    assert torch.equal(layer(torch.zeros(4), (torch.ones(4),)), layer.linear.bias + 1)
