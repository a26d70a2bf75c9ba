"""What Hugging Face models are fed when they are planned: by their classes' words and their configs' numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import zerofold as zf
from zerofold.plan.sources import build_function, from_function, from_hugging_face

WIDE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 24,
    "decoder_layerdrop": 0.9,
}
SOUND: dict[str, Any] = {
    **WIDE,
    "conv_dim": [8, 8],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.9,
}
WHISPER: dict[str, Any] = {
    **{key: value for key, value in ENCODER_DECODER.items() if key != "max_position_embeddings"},
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "decoder_layerdrop": 0.0,
}
ROBERTA = {**WIDE, "max_position_embeddings": 34, "pad_token_id": 1}
CLIP = {
    "text_config": {**WIDE, "max_position_embeddings": 16, "eos_token_id": 2},
    "vision_config": {**{k: v for k, v in WIDE.items() if k != "vocab_size"}, "image_size": 16, "patch_size": 4},
    "projection_dim": 8,
}
CASES = {
    "bart": ("BartForConditionalGeneration", ENCODER_DECODER, 24),  # it asks whether its own mask has gaps
    "roberta": ("RobertaForSequenceClassification", ROBERTA, 32),  # positions begin behind padding's; one label
    "bert": ("BertModel", {**WIDE, "max_position_embeddings": 20}, 20),  # no labels
    "mpt": ("MptForCausalLM", {"vocab_size": 96, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 24}, 24),
    "whisper": ("WhisperForConditionalGeneration", WHISPER, 16),
    "wav2vec2": ("Wav2Vec2ForCTC", SOUND, 50),
    "beit": ("BeitForImageClassification", {**WIDE, "image_size": 16, "patch_size": 4}, 17),
    "resnet": ("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]}, 197),
    "clip": ("CLIPModel", CLIP, 16),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_config_is_enough(kind: str, tmp_path: Path) -> None:
    name, numbers, tokens = CASES[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [name], **numbers}))
    shape = from_hugging_face(tmp_path, seq=50 if kind == "wav2vec2" else None, checkpoint_every=(0,))
    with torch.device("meta"):
        model = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(tmp_path))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.tokens == tokens
    assert shape.activity(0).moments


def test_heads_need_not_divide_the_width(tmp_path: Path) -> None:
    """As in mT5, whose heads have a width of their own."""
    numbers = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 6}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mt5", **numbers}))
    found = zf.plan(str(tmp_path), seq=16)
    assert found.paper["activation_working_bytes"] == 16 * (16 * 32 + 2 * 6 * 16)


class Unknown(nn.Module):
    """Of a kind whose inputs nobody here knows, or that asks for values."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.layer = config, nn.Linear(4, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.layer(input_ids.float()).sum() * input_ids.max().item()


def unknown() -> nn.Module:
    return Unknown(transformers.LlavaConfig())


def asking() -> nn.Module:
    return Unknown(transformers.GPT2Config(n_positions=4))


def with_example() -> Any:
    config = transformers.BertConfig(**WIDE)
    names = "input_ids", "labels"
    return transformers.BertForMaskedLM(config), lambda batch: dict.fromkeys(names, torch.ones(batch, 12).long())


def test_a_model_alone_has_its_states_planned() -> None:
    for name, why in (("unknown", "no example of its inputs"), ("asking", "reads the value of a tensor")):
        shape = from_function(f"tests.test_plan_examples:{name}")
        assert shape.parameters == 20
        assert not shape.activities
        assert why in shape.notes[0]
        assert "activations are not counted" in shape.notes[0]


def test_tokens_are_those_of_the_example() -> None:
    assert build_function("tests.test_plan_examples:with_example").tokens == 12
    with pytest.raises(ValueError, match="--seq 24: --function .* their own length; leave it out"):
        build_function("tests.test_plan_examples:with_example", seq=24)
