"""The plan's bytes: those of the source documents, and those that the engine's own ledger shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import TinyGPT, batches, make_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import zerofold as zf
from zerofold.engine import Engine
from zerofold.plan.comparison import Parameter, predicted_for
from zerofold.plan.states import Widths, elements_sent, paper_bytes, state_bytes

STATES = ("parameters", "gradients", "optimizer")


def test_the_papers_figures() -> None:
    billions = [paper_bytes(7.5e9, stage, 64).total / 1e9 for stage in range(4)]
    assert billions == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)
    assert paper_bytes(1.5e9, 0, 1).total == 24e9  # GPT-2, as the seeds count it: 2 + 2 + 12 bytes a parameter
    assert [elements_sent(stage, 64) for stage in range(4)] == pytest.approx([2, 2, 2, 3], rel=0.02)


def test_groups_stand_between_stages() -> None:
    within, fewer = paper_bytes(1e9, 3, 64).total, paper_bytes(1e9, 3, 8).total
    assert paper_bytes(1e9, "hsdp", 64, group=8).total == fewer
    assert within < paper_bytes(1e9, "hpz", 64, group=8).total < fewer
    assert paper_bytes(1e9, "dp", 64).optimizer == 12e9


def test_what_the_engine_holds_is_not_what_the_paper_counts() -> None:
    """fp32 gradients; parameters that are cut are made from their masters."""
    assert state_bytes(1000, 0, 4) == (2000, 4000, 12000)
    assert state_bytes(1000, 3, 4) == (0, 1000, 3000)
    assert state_bytes(1000, "hpz", 4, group=2) == (1000, 1000, 3000)
    assert state_bytes(1000, 3, 4, widths=Widths.of("fp32")) == (1000, 1000, 2000)


def llama() -> nn.Module:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(model, TinyGPT):
        return model(*batch)
    return model(input_ids=batch[0], labels=batch[1]).loss


def measured_and_predicted(
    kind: str, stage: str, shape: tuple[int, int] | None, precision: str | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Between the last backward and its step, where all three states are there."""
    model: nn.Module = make_model(width=72, layers=4) if kind == "gpt" else llama()
    mesh = None if shape is None else init_device_mesh("cpu", shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zf.prepare(model, optimizer, stage=stage, mesh=mesh, precision=precision, **settings)
    engine = Engine.of(model)
    accumulate = settings.get("accumulate", 1)
    for number, batch in enumerate(batches(2 * accumulate)):
        _loss(model, batch).backward()
        held = zf.ledger(model).snapshot()
        if number % accumulate == accumulate - 1 and number + 1 < 2 * accumulate:
            optimizer.step()
            optimizer.zero_grad()
    units = {
        unit.name: [Parameter(e.parameter.numel(), e.wants_gradient) for slab in unit.slabs for e in slab.entries]
        for unit in engine.units
    }
    predicted = predicted_for(
        units,
        row=engine.row,
        ranks=torch.distributed.get_world_size(),
        group=0 if shape is None else shape[1],
        precision=precision,
        accumulate=accumulate,
        tiers=engine.offloading.tiers,
        buffer_bytes=settings.get("buffer_bytes", 16 * 2**20),
    )
    zf.close(model)
    return {"held": held, "predicted": predicted}


def _check(found: dict[str, Any]) -> None:
    held, predicted = found["held"], found["predicted"]
    for state in STATES:
        assert predicted.device[state] == held["state_bytes"][state], state
    assert held["peak_live_bytes"] <= predicted.device["gathered units"]
    assert 0.45 * predicted.device["gathered units"] <= held["peak_live_bytes"]
    assert held["temporary_bytes"]["buffers"] <= predicted.device["fused buffers"]
    assert 0.4 * predicted.device["fused buffers"] <= held["temporary_bytes"]["buffers"]


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", ["dp", "0", "1", "2", "3"])
@pytest.mark.parametrize("world", [1, 2])
def test_states_to_the_byte(ranks: Any, world: int, stage: str, precision: str | None, kind: str) -> None:
    _check(ranks(world, measured_and_predicted, kind, stage, None, precision, {})[0])


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(("stage", "shape"), [("3", None), ("hsdp", (2, 2)), ("hpz", (2, 2))])
def test_states_of_four_ranks_to_the_byte(
    ranks: Any, stage: str, shape: tuple[int, int] | None, precision: str | None
) -> None:
    _check(ranks(4, measured_and_predicted, "gpt", stage, shape, precision, {})[0])
