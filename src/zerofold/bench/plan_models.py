"""The models of `zerofold bench plan`: our GPT, and four of Hugging Face's from configs, large for a GPU and tiny for
the CPU. Nothing is downloaded."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerofold.bench.gpt import GPT, GPTSize

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class PlanModel:
    """How a model is built on the current default device, what it is fed, and how its checkpointing is switched."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    """So many samples, on the current default device."""

    def set_checkpointing(self, model: nn.Module, on: bool) -> None:
        switched: Any = model
        if isinstance(model, GPT):
            switched.checkpointing = on
        elif on:
            # Without states of random numbers: nothing here is random, and on the CPU they would count as the device's.
            options = {"use_reentrant": False, "preserve_rng_state": False}
            switched.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        else:
            switched.gradient_checkpointing_disable()


NAMES = ("gpt", "llama", "t5", "vit", "mixtral")


def plan_model(name: str, device: str) -> PlanModel:
    """Raises ValueError for a name that is not among NAMES, and where transformers is not installed."""
    if name not in NAMES:
        raise ValueError(f"there is no model {name!r}; the models are {', '.join(NAMES)}")
    if name == "gpt":
        return _gpt(device == "cuda")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"the model {name!r} is one of Hugging Face's: install transformers, or choose --only gpt")
    return {"llama": _llama, "t5": _t5, "vit": _vit, "mixtral": _mixtral}[name](device == "cuda")


def _hugging_face(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when it is imported
        transformers = importlib.import_module("transformers")
        built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return built

    return build


def _causal(vocabulary: int, length: int) -> Callable[[int], Batch]:
    def batch(samples: int) -> Batch:
        tokens = torch.randint(3, vocabulary, (samples, length))
        return {"input_ids": tokens, "labels": tokens}

    return batch


def _gpt(large: bool) -> PlanModel:
    tiny = GPTSize(vocab=1024, width=128, layers=4, heads=4, seq=64)
    size = GPTSize(vocab=50304, width=2048, layers=24, heads=16, seq=1024) if large else tiny  # 1.4e9

    def batch(samples: int) -> Batch:
        tokens, targets = (torch.randint(0, size.vocab, (samples, size.seq)) for _ in range(2))
        return {"tokens": tokens, "targets": targets}

    return PlanModel("gpt", lambda: GPT(size), batch)


_TINY_DECODER: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}


def _llama(large: bool) -> PlanModel:
    sizes = _DecoderSizes(2048, 5632, 22, 32)  # 1.1e9
    return _decoder("llama", "LlamaForCausalLM", "LlamaConfig", sizes if large else None)


def _mixtral(large: bool) -> PlanModel:
    sizes = _DecoderSizes(1024, 3584, 16, 16)  # 1.5e9
    experts = {"num_local_experts": 8 if large else 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return _decoder("mixtral", "MixtralForCausalLM", "MixtralConfig", sizes if large else None, **experts)


class _DecoderSizes(NamedTuple):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int


def _decoder(name: str, kind: str, config: str, sizes: _DecoderSizes | None, **more: Any) -> PlanModel:
    """Of the given sizes, or a tiny one."""
    chosen = _TINY_DECODER
    if sizes is not None:
        chosen = {"vocab_size": 32000, **sizes._asdict(), "num_key_value_heads": 4, "pad_token_id": None}
    build = _hugging_face(kind, config, **chosen, **more)
    return PlanModel(name, build, _causal(chosen["vocab_size"], 64 if sizes is None else 1024))


def _t5(large: bool) -> PlanModel:
    settings = {"vocab_size": 32128, "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16}
    tiny = {"vocab_size": 512, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 3, "num_heads": 4}
    chosen, length = (settings, 512) if large else (tiny, 64)  # 0.74e9
    build = _hugging_face(
        "T5ForConditionalGeneration", "T5Config", **chosen, dropout_rate=0.0, decoder_start_token_id=0
    )

    def batch(samples: int) -> Batch:
        tokens, labels = (torch.randint(3, chosen["vocab_size"], (samples, part)) for part in (length, length // 2))
        return {"input_ids": tokens, "labels": labels}

    return PlanModel("t5", build, batch)


def _vit(large: bool) -> PlanModel:
    settings = {
        "hidden_size": 1280,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "intermediate_size": 5120,
        "image_size": 224,
        "patch_size": 14,
    }  # 0.63e9
    tiny = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "image_size": 32,
        "patch_size": 4,
    }
    chosen = settings if large else tiny
    build = _hugging_face("ViTForImageClassification", "ViTConfig", **chosen, num_labels=1000)

    def batch(samples: int) -> Batch:
        pixels = torch.randn(samples, 3, chosen["image_size"], chosen["image_size"])
        return {"pixel_values": pixels, "labels": torch.randint(0, 1000, (samples,))}

    return PlanModel("vit", build, batch)
