"""The zoo trains as under DistributedDataParallel: unmodified classes, every row, every feature.

`tests/matrix.py` measures, `tests/zoo.py` has the models; here are the bounds, and what else a model is used for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.matrix import (
    FEATURES,
    ROWS,
    STEPS,
    Question,
    bounds,
    distance,
    largest,
    make_optimizer,
    run_model,
    train_ddp,
    train_zerofold,
    trained,
    worst,
)
from tests.test_unusual import Averaging
from tests.zoo import ZOO, Batch, batches, build
from torch import Tensor, nn

import zerofold as zf
from zerofold.units import find_units

PLAIN = FEATURES["plain"]

Rows = list[tuple[str, str]]


def rows_for(name: str, feature: str, world: int) -> Rows:
    """With two ranks plain steps go through every row. A feature, and three ranks, take a few rows of each model and
    others for the next model, so that all rows are met; `make matrix` runs every cell.
    """
    if feature == "plain" and world == 2:
        return ROWS
    start = 3 * list(ZOO).index(name) + list(FEATURES).index(feature)
    some = [ROWS[(start + number) % len(ROWS)] for number in (0, 3, 7)]
    return some if world == 2 or feature == "plain" else []


def distances(rows: dict[str, Rows], name: str) -> dict[str, Any]:
    return {feature: run_model(name, feature, some) for feature, some in rows.items() if some}


def check(ranks: Any, world: int, name: str, rows: dict[str, Rows]) -> None:
    """Every cell within its bounds; the message names those that are not."""
    per_rank = ranks(world, distances, rows, name)
    outside = []
    for feature in per_rank[0]:
        for (row, cut), found in worst(cells[feature] for cells in per_rank).items():
            allowed = bounds(name, row, feature, world)
            if found.weights > allowed.weights or found.losses > allowed.losses:
                outside.append(f"stage {row} cut {cut} {feature}: {found}, allowed {allowed}")
    assert not outside, f"{name} on {world} ranks differs from DDP:\n" + "\n".join(outside)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", list(ZOO))
def test_equals_ddp(ranks: Any, name: str, world: int) -> None:
    suitable = [feature.name for feature in FEATURES.values() if feature.suits(ZOO[name])]
    check(ranks, world, name, {feature: rows_for(name, feature, world) for feature in suitable})


@pytest.mark.parametrize(("world", "features"), [(2, list(FEATURES)), (3, ["plain"])])
def test_every_row_meets_every_feature(world: int, features: list[str]) -> None:
    for feature in features:
        models = [name for name in ZOO if FEATURES[feature].suits(ZOO[name])]
        assert {row for name in models for row in rows_for(name, feature, world)} == set(ROWS)


@pytest.mark.parametrize("world", [1, 5])
@pytest.mark.parametrize("name", ["qwen3", "odd_net"])
def test_one_rank_and_five(ranks: Any, name: str, world: int) -> None:
    check(ranks, world, name, {"plain": [("2", "even"), ("3", "even"), ("3", "whole")]})


def alone_and_together() -> float:
    """How far from DDP a rank gets that trains by itself."""
    reference, net = train_ddp(ZOO["gpt2"], PLAIN), build(ZOO["gpt2"])
    optimizer = make_optimizer(net)
    for batch in batches(ZOO["gpt2"], STEPS):
        net(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return largest(reference.weights, trained(net, []).weights)


def test_the_bounds_would_not_pass_ranks_that_do_not_communicate(ranks: Any) -> None:
    assert min(ranks(2, alone_and_together)) > 1e-4


def moved(row: str) -> dict[str, bool]:
    before = trained(build(ZOO["odd_net"]), []).weights
    after = train_zerofold(ZOO["odd_net"], PLAIN, row, "even").weights
    return {name: not torch.equal(before[name], after[name]) for name in before}


@pytest.mark.parametrize("row", ["0", "1", "2", "3"])
def test_weight_decay_leaves_alone_what_no_rank_uses(ranks: Any, row: str) -> None:
    for found in ranks(2, moved, row):
        still = {name.rpartition(".")[2] for name, has_moved in found.items() if not has_moved}
        assert still == {"unused", "nothing"}


def evaluate(net: nn.Module, batch: Batch) -> tuple[float, float]:
    """A loss in eval mode and one in train mode, neither with a backward."""
    with torch.no_grad():
        net.eval()
        first = net(**batch).loss.item()
        net.train()
        return first, net(**batch).loss.item()


def generate(net: Any, batch: Batch) -> list[list[int]]:
    """Greedy; all ranks make as many tokens, for at stage 3 each token is a forward that all take part in."""
    inputs = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}
    net.eval()
    tokens: Tensor = net.generate(**inputs, do_sample=False, min_new_tokens=5, max_new_tokens=5)
    net.train()
    return tokens.tolist()


def asked_between(name: str, rows: list[tuple[str, str]], question: Question) -> dict[str, tuple[bool, float]]:
    """For each row: whether the answers are the reference's, and how far the weights are from it in the end."""
    reference = train_ddp(ZOO[name], PLAIN, between=question)
    found = {}
    for row, cut in rows:
        ours = train_zerofold(ZOO[name], PLAIN, row, cut, between=question)
        found[row] = (ours.between == reference.between, distance(reference, ours).weights)
    return found


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral", "whisper", "llama_lora", "odd_net"])
def test_evaluation_between_steps(ranks: Any, name: str) -> None:
    for found in ranks(2, asked_between, name, ROWS, evaluate):
        assert found == {row: (True, 0.0) for row, _ in ROWS}


@pytest.mark.parametrize("name", [model.name for model in ZOO.values() if model.generates])
def test_generation_between_steps(ranks: Any, name: str) -> None:
    rows = [("1", "even"), ("3", "even")]
    for found in ranks(2, asked_between, name, rows, generate):
        assert found == {row: (True, 0.0) for row, _ in rows}


def generate_unevenly(net: Any, batch: Batch) -> list[list[int]]:
    """Ranks stop at different lengths: the option is Hugging Face's own, for models that are cut over ranks."""
    length = 3 + 2 * dist.get_rank()
    net.eval()
    tokens: Tensor = net.generate(
        batch["input_ids"],
        attention_mask=torch.ones_like(batch["input_ids"]),
        do_sample=False,
        min_new_tokens=length,
        max_new_tokens=length,
        synced_gpus=True,
    )
    net.train()
    return tokens.tolist()


def test_generation_of_different_lengths(ranks: Any) -> None:
    for found in ranks(2, asked_between, "llama", [("3", "even")], generate_unevenly):
        assert found == {"3": (True, 0.0)}


def buffers_against_ddp(name: str) -> dict[str, float]:
    """After training, on this rank, from what DDP has on rank 0: it starts every forward from that."""
    reference = train_ddp(ZOO[name], PLAIN)
    for buffer in reference.buffers.values():
        dist.broadcast(buffer, 0)
    rows = [ROWS[0], ROWS[2], ROWS[4], ROWS[-2]]
    return {row: largest(reference.buffers, train_zerofold(ZOO[name], PLAIN, row, cut).buffers) for row, cut in rows}


@pytest.mark.parametrize("name", ["llama", "mixtral", "odd_net", "conv_net"])
def test_buffers_follow_those_of_rank_zero(ranks: Any, name: str) -> None:
    for found in ranks(2, buffers_against_ddp, name):
        assert set(found.values()) == {0.0}


# What units=None chooses: the layers, never anything inside one. Ranks that route to different experts would wait for
# each other if an expert were a unit of its own.
LAYERS = {
    "gpt2": ["transformer.h.0", "transformer.h.1", "transformer.h.2"],
    "llama": ["model.layers.0", "model.layers.1", "model.layers.2"],
    "qwen3": ["model.layers.0", "model.layers.1", "model.layers.2"],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    "mixtral": ["model.layers.0", "model.layers.1", "model.layers.2"],
    "switch": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    "vit": ["vit.layers.0", "vit.layers.1", "vit.layers.2"],
    "whisper": [f"model.{side}.layers.{number}" for side in ("encoder", "decoder") for number in range(2)],
    "llama_lora": [f"base_model.model.model.layers.{number}" for number in range(3)],
    "conv_net": ["blocks.0", "blocks.1", "blocks.2"],
    "odd_net": ["blocks.0", "blocks.1", "blocks.2"],
}


@pytest.mark.parametrize("name", list(ZOO))
def test_units_are_the_layers(name: str) -> None:
    assert list(find_units(build(ZOO[name]), None)) == LAYERS[name]


class Pairs(nn.Module):
    """Lists inside a list, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.Bilinear(8, 8, 8)]) for _ in range(3))


class Experts(nn.Module):
    """A layer that chooses which of its modules to call."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


def test_units_are_modules_that_every_rank_calls() -> None:
    assert list(find_units(Pairs(), None)) == [f"layers.{layer}.{part}" for layer in range(3) for part in range(2)]
    layers = nn.ModuleDict({"layers": nn.ModuleList(Experts() for _ in range(2))})
    assert list(find_units(layers, None)) == ["layers.0", "layers.1"]


def parts_by_themselves(row: str) -> float:
    """Encoder, decoder and head are called one by one, and the model itself never."""
    found = []
    for is_reference in (True, False):
        net: Any = build(ZOO["t5"])
        optimizer: Any = make_optimizer(net)
        if is_reference:
            optimizer = Averaging(optimizer)  # DDP needs its own forward to be called
        else:
            zf.prepare(net, optimizer, stage=row)
        for batch in batches(ZOO["t5"], STEPS):
            memory = net.encoder(input_ids=batch["input_ids"]).last_hidden_state
            hidden = net.decoder(input_ids=batch["labels"], encoder_hidden_states=memory).last_hidden_state
            net.lm_head(hidden).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not is_reference:
            zf.close(net)
        found.append(trained(net, []).weights)
    return largest(*found)


@pytest.mark.parametrize("row", ["1", "3"])
def test_parts_called_by_themselves(ranks: Any, row: str) -> None:
    assert ranks(2, parts_by_themselves, row) == [0.0, 0.0]
