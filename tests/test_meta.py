"""A model on the meta device: values unit by unit, never whole, and the same model in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import largest_difference
from tests.ranks import raised
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, Qwen3Config, T5Config

import zerofold as zf
from meta_peak import LAYERS, UNIT, peak_of_materialising
from zerofold.launch import run_ranks

ROWS = [("dp", None), (0, None), (2, None), (3, None), (3, "whole")]


def fill_by_shape(module: nn.Module) -> None:
    """Values that depend on nothing but the module's own parameters, so that the order of modules does not matter."""
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        with torch.no_grad():
            tensor.copy_(torch.linspace(1.0, 0.5, tensor.numel()).view(tensor.shape))


class Tied(nn.Module):
    """A weight shared between two units, a buffer, and a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))
        self.layers[3].weight = self.layers[1].weight
        self.register_buffer("shift", torch.empty(8, dtype=torch.float64), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.shift.float()
        return x * self.scale.sum() * self.count


def from_meta(row: tuple[Any, Any]) -> tuple[float, float]:
    expected = Tied()
    expected.apply(fill_by_shape)
    with torch.device("meta"):
        model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zf.prepare(model, optimizer, stage=row[0], cut=row[1], units=nn.Linear, init=fill_by_shape)
    weights = largest_difference(list(expected.parameters()), [zf.full(p) for p in model.parameters()])
    buffers = largest_difference(list(expected.buffers()), list(model.buffers()))
    assert model.layers[3].weight is model.layers[1].weight
    before = zf.full(model.scale)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = (zf.full(model.scale) - before).abs().min().item()
    zf.close(model)
    assert not any(t.is_meta for t in model.state_dict().values())
    return max(weights, buffers), moved


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_values_come_from_the_init_function(ranks: Any, row: tuple[Any, Any]) -> None:
    for difference, moved in ranks(3, from_meta, row):
        assert difference == 0.0
        assert moved > 0  # the optimizer was built on the meta parameters and trains the real ones


CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    ),
    "qwen3": Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    ),
    "t5": T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0),
}


def hugging_face(name: str) -> dict[str, Any]:
    """Buffers, the spread of each weight and the tied names, against the same model built in memory."""
    config = CONFIGS[name]
    build = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    torch.manual_seed(0)
    expected = build.from_config(config)
    with torch.device("meta"):
        model = build.from_config(config)
    torch.manual_seed(0)
    zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=3)
    buffers = max(
        ((a - b).abs().max().item() for a, b in zip(expected.buffers(), model.buffers(), strict=True)), default=0.0
    )
    names = [n for n, _ in expected.named_parameters()] == [n for n, _ in model.named_parameters()]
    spread = {}
    for (key, plain), sharded in zip(expected.named_parameters(), model.parameters(), strict=True):
        whole = zf.full(sharded)
        spread[key] = (plain.std().item(), whole.std().item()) if plain.numel() > 64 else (0.0, 0.0)
        if plain.std() == 0:
            assert torch.equal(plain, whole), key
    zf.close(model)
    return {"buffers": buffers, "names": names, "spread": spread}


@pytest.mark.parametrize("name", CONFIGS)
def test_hugging_face_models_start_as_they_would_in_memory(ranks: Any, name: str) -> None:
    for found in ranks(2, hugging_face, name):
        assert found["buffers"] == 0.0
        assert found["names"]
        for key, (expected, got) in found["spread"].items():
            assert got == pytest.approx(expected, rel=0.15), key


def unset() -> None:
    with torch.device("meta"):
        model = Tied()
    zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)


def test_what_the_init_function_leaves_out_is_named(ranks: Any) -> None:
    for error in ranks(2, raised, unset):
        assert "'scale' was on the meta device and got no values" in error
        assert "pass init=" in error


class Mixed(nn.Module):
    """A pretrained part, a head that is new, a mask, and a buffer that the init function replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained, self.head = nn.BatchNorm1d(8), nn.Linear(8, 8, device="meta")
        self.register_buffer("mask", torch.empty(8, dtype=torch.bool, device="meta"))
        self.register_buffer("steps", torch.empty(8, device="meta"))
        nn.init.constant_(self.pretrained.weight, 7.0)
        self.head.weight.no_decay = True  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        for module in (self.pretrained, self.head):
            module.reset_parameters()
        self.mask.fill_(True)
        self.steps = torch.arange(8.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.pretrained(x))
        return y


def partly_on_meta(stage: int) -> dict[str, Any]:
    model = Mixed()
    weight = model.head.weight
    zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    found = {
        "pretrained": zf.full(model.pretrained.weight).unique().tolist(),
        "head": zf.full(model.head.weight).std().item() > 0.05,
        "mask": model.mask.tolist(),
        "steps": model.steps.tolist(),
        "attributes": weight.no_decay,  # type: ignore[attr-defined]
    }
    zf.close(model)
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_what_has_values_keeps_them(ranks: Any, stage: int) -> None:
    expected = {"pretrained": [7.0], "head": True, "mask": [True] * 8, "steps": list(range(8)), "attributes": True}
    assert ranks(2, partly_on_meta, stage) == [expected] * 2


def masked() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model.register_buffer("mask", torch.empty(8, dtype=torch.bool))
    zf.shard(model)


def test_a_mask_left_out_is_named(ranks: Any) -> None:
    for error in ranks(2, raised, masked):
        assert "'mask' was on the meta device and got no values" in error


def adapters() -> list[float]:
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(CONFIGS["llama"])
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    zf.shard(model)
    found = [zf.full(p).abs().max().item() for name, p in model.named_parameters() if "lora_B" in name]
    zf.close(model)
    return found


def test_adapters_start_as_nothing(ranks: Any) -> None:
    assert ranks(2, adapters) == [[0.0] * 3] * 2


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's count of resident memory")
@pytest.mark.parametrize("world", [3])
def test_no_more_than_the_shards_and_one_unit_is_ever_held(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    # Freed blocks go back to the system at once; otherwise old garbage of the process would be counted or reused.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    for grown, shards in run_ranks(peak_of_materialising, world, 3):
        assert shards == pytest.approx(LAYERS * UNIT / world, rel=0.01)
        assert shards < grown <= shards + UNIT + 4 * 2**20  # a little for sockets; the whole model takes 144 MiB
