"""Small models of many kinds: unmodified Hugging Face classes built from tiny configs, and two of our own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Nothing is downloaded: models are built from configs. Set before the import, which reads it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

SEED, VOCABULARY, SEQUENCE, SAMPLES, WIDTH = 7, 96, 12, 2, 32

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """One entry of the zoo: how it is built, what it is fed, and what it can do."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    checkpoints: bool = True  # has Hugging Face's gradient_checkpointing_enable
    generates: bool = False
    skips: bool = False  # some parameters have no gradient, on one rank or on all


def build(model: Model) -> nn.Module:
    """The same weights on every call and every rank."""
    torch.manual_seed(SEED)
    return model.build().train()


def batches(model: Model, count: int, *, start: int = 0) -> list[Batch]:
    """This rank's data: the same for every engine, different between ranks and steps."""
    seeds = [1000 * (start + number) + dist.get_rank() for number in range(count)]
    return [model.batch(torch.Generator().manual_seed(seed)) for seed in seeds]


def _tokens(generator: torch.Generator, length: int = SEQUENCE) -> Tensor:
    return torch.randint(3, VOCABULARY, (SAMPLES, length), generator=generator)


def causal_batch(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens}


def translation_batch(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator, SEQUENCE - 3)}


def labelled_batch(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)}


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=WIDTH,
            n_layer=3,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


# Llama, Qwen3 and Mixtral take these alike.
_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_DECODER))


def qwen3() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**_DECODER, head_dim=8, tie_word_embeddings=True))


def mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    )


_ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


def t5() -> nn.Module:
    return T5ForConditionalGeneration(T5Config(**_ENCODER_DECODER))


def switch() -> nn.Module:
    """Experts are modules of their own here, and a token goes to one of them: some get no token on some rank."""
    return SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(
            **_ENCODER_DECODER,
            num_experts=8,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            router_jitter_noise=0.0,
            add_router_probs=True,
        )
    )


def vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            num_labels=10,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def image_batch(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(SAMPLES, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 10, (SAMPLES,), generator=generator),
    }


def whisper() -> nn.Module:
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            d_model=WIDTH,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_source_positions=20,
            max_target_positions=16,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


def speech_batch(generator: torch.Generator) -> Batch:
    return {"input_features": torch.randn(SAMPLES, 8, 40, generator=generator), "labels": _tokens(generator, 8)}


def llama_lora() -> nn.Module:
    """The base is frozen; only the adapters of the attention train."""
    adapters = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    return get_peft_model(llama(), adapters)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Result:
    """What a model returns. DDP looks for tensors in dataclasses, not in any object."""

    loss: Tensor


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.convolution(x)))


class ConvNet(nn.Module):
    """Running means and variances, and a count of batches, in every block."""

    def __init__(self, channels: int = 12, layers: int = 3) -> None:
        super().__init__()
        self.inlet = nn.Conv2d(3, channels, 4, stride=4)
        self.blocks = nn.ModuleList(ConvBlock(channels) for _ in range(layers))
        self.head = nn.Linear(channels, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Result:
        x = self.inlet(pixel_values)
        for block in self.blocks:
            x = block(x)
        return Result(F.cross_entropy(self.head(x.mean((2, 3))), labels))


def conv_net() -> nn.Module:
    return ConvNet()


class OddBlock(nn.Module):
    """Two dtypes, a scalar, a zero-sized, a non-contiguous and an unused parameter, and buffers that are no floats."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.shared = shared  # one module in all blocks
        self.own = nn.Linear(WIDTH, WIDTH)
        self.precise = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.coarse = nn.Parameter(torch.randn(WIDTH).to(torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.turned = nn.Parameter(torch.randn(WIDTH, 24).t() * 0.1)
        self.unused = nn.Parameter(torch.randn(5))
        self.on_rank_zero = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.tanh(self.own(x)) * self.mask
        hidden = self.shared(hidden) + F.linear(F.linear(hidden, self.turned), self.turned.t())
        hidden = hidden * self.precise.float() + self.coarse.float()
        if dist.get_rank() == 0:
            hidden = hidden + self.on_rank_zero
        return x + self.scale * hidden + self.nothing.sum()


class OddNet(nn.Module):
    """What is legal in torch and rare; inlet and outlet share their weight, and all blocks share a layer."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.outlet.weight = self.inlet.weight
        nn.init.normal_(self.inlet.weight, std=0.2)
        shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(OddBlock(shared) for _ in range(layers))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Result:
        x = self.inlet(input_ids)
        for block in self.blocks:
            x = block(x)
        return Result(F.cross_entropy(self.outlet(x).flatten(0, 1), labels.flatten()))


def odd_net() -> nn.Module:
    return OddNet()


ZOO = {
    model.name: model
    for model in (
        Model("gpt2", gpt2, causal_batch, generates=True),
        Model("llama", llama, causal_batch, generates=True),
        Model("qwen3", qwen3, causal_batch),
        Model("t5", t5, translation_batch, generates=True),
        Model("mixtral", mixtral, causal_batch),
        Model("switch", switch, translation_batch, skips=True),
        Model("vit", vit, image_batch),
        Model("whisper", whisper, speech_batch),
        Model("llama_lora", llama_lora, causal_batch),
        Model("conv_net", conv_net, image_batch, checkpoints=False),
        Model("odd_net", odd_net, labelled_batch, checkpoints=False, skips=True),
    )
}
