"""`zf.pipeline` trains as one process does: every schedule, stage and kind of model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.pipeline_models import (
    BATCH,
    batch,
    largest_difference,
    loss_fn,
    make,
    mean_over_data,
    optimizer,
    own,
    train_alone,
)
from tests.ranks import raised
from torch import nn

import zerofold as zf
from zerofold.engine import Engine


def train(kind: str, steps: int = 10, *, stages: int = 2, clip: float | None = None, **options: Any) -> dict[str, Any]:
    """Differences between a pipeline and one process, and what the pipeline kept and sent."""
    placing = {key: options.pop(key) for key in ("stage", "precision") if key in options}
    checkpoints = options.pop("checkpoints", 0)
    mesh = zf.mesh(pipeline=stages, device="cpu")
    model, reference = make(kind), make(kind)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    pipe = zf.pipeline(model, mesh, **{"microbatches": 4, "loss_fn": loss_fn, **options})
    if checkpoints:
        zf.checkpoint_blocks(model, every=checkpoints)
    pipe, stepper = zf.prepare(pipe, optimizer(pipe.parameters()), mesh=mesh, clip=clip, **placing)
    losses, norms = [], []
    for step in range(steps):
        tokens, target = own(mesh, *batch(step))
        losses.append(mean_over_data(pipe.step(tokens, target=target)))
        stepper.step()
        norms.append(zf.last_step(model).norm)
        stepper.zero_grad()
    expected, expected_norms = train_alone(reference, steps, clip)
    kept = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    result = {
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "norms": max(abs(a - b) / b for a, b in zip(norms, expected_norms, strict=True)),
        "weights": largest_difference(model, reference),
        "names_are_known": set(kept) <= set(names),
        "share": len(kept) / len(names),
        "units": [unit.name for unit in Engine.of(model).units],
        "bytes": zf.ledger(model).snapshot()["pipeline_bytes"],
        "psi": Engine.of(model).psi,
    }
    zf.close(model)
    return result


def assert_equal(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["losses"] < 1e-5
        assert result["weights"] < 1e-5
        assert result["norms"] < 1e-5
        assert result["names_are_known"]


SCHEDULES = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "interleaved", "chunks_per_rank": 2},
    {"schedule": "zero_bubble"},
    {"schedule": "zero_bubble", "chunks_per_rank": 2},
    {"schedule": "zbv"},
]


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: f"{o['schedule']}-{o.get('chunks_per_rank', 1)}")
def test_every_schedule_trains_as_one_process_does(ranks: Any, options: dict[str, Any]) -> None:
    results = ranks(2, train, "gpt2", stage=2, clip=0.5, **options)
    assert_equal(results)
    if options["schedule"] != "zbv":  # there one rank has both ends
        assert all(result["share"] < 0.75 for result in results)
    assert results[0]["units"] != results[1]["units"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_of_zero_works_over_the_data_axis(ranks: Any, stage: int) -> None:
    results = ranks(4, train, "gpt2", stage=stage, clip=0.5, microbatches=2)
    assert_equal(results)
    for result in results:
        assert result["bytes"]["gathered"] >= 4 * result["psi"]  # all of the stage, whatever the stage of ZeRO
        assert result["bytes"]["gradients"] >= 4 * result["psi"]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_gradients_that_are_assigned_are_not_lost_over_the_data_axis(ranks: Any, stage: int, schedule: str) -> None:
    assert_equal(ranks(4, train, "gpt", 4, stage=stage, schedule=schedule, microbatches=2))


@pytest.mark.parametrize("kind", ["gpt", "llama", "mixtral", "odd"])
def test_every_kind_of_model_trains_as_one_process_does(ranks: Any, kind: str) -> None:
    results = ranks(2, train, kind, stage=3)
    assert_equal(results)
    blocks = [sum(name.split(".")[-1].isdigit() for name in result["units"]) for result in results]
    assert sum(blocks) == 4  # each is a unit, on one of the ranks


def test_four_stages_of_one_block(ranks: Any) -> None:
    results = ranks(4, train, "llama", 4, stages=4, stage=3)
    assert_equal(results)
    assert all(len(result["units"]) == 2 for result in results)  # the block is one beside the root


def test_one_stage_is_a_pipeline_too(ranks: Any) -> None:
    assert_equal(ranks(2, train, "gpt2", 3, stages=1, stage=3))


@pytest.mark.parametrize(("schedule", "every"), [("1f1b", 2), ("zero_bubble", 1), ("zbv", 2)])
def test_checkpointed_blocks(ranks: Any, schedule: str, every: int) -> None:
    """With zbv the two blocks of a rank, also where they are neighbours, are of two stages."""
    assert_equal(ranks(2, train, "llama", 3, stage=3, schedule=schedule, checkpoints=every))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_mixed_precision_follows_fp32(ranks: Any, precision: str, schedule: str) -> None:
    for result in ranks(2, train, "gpt2", 5, stage=3, precision=precision, schedule=schedule):
        assert result["losses"] < 0.03
        assert result["norms"] < 0.05  # a scale that was left in, or met twice, would make it thousands


def count_calls(microbatches: int, stage: int, schedule: str) -> tuple[dict[str, int], int]:
    """Collective calls of one step over the data axis, and the number of slabs."""
    mesh = zf.mesh(pipeline=2, device="cpu")
    model = make("gpt")
    pipe = zf.pipeline(model, mesh, microbatches=microbatches, loss_fn=loss_fn, schedule=schedule)
    pipe, stepper = zf.prepare(pipe, optimizer(pipe.parameters()), stage=stage, mesh=mesh)
    counts = []
    for step in range(3):
        tokens, target = own(mesh, *batch(step))
        pipe.step(tokens, target=target)
        stepper.step()
        stepper.zero_grad()
        counts.append(dict(zf.ledger(model).snapshot()["comm_calls"]))
    slabs = len(Engine.of(model).slabs())
    zf.close(model)
    return {name: count - counts[-2].get(name, 0) for name, count in counts[-1].items()}, slabs


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_are_reduced_and_parameters_gathered_once_a_step(ranks: Any, stage: int, schedule: str) -> None:
    for calls, slabs in ranks(4, count_calls, 4, stage, schedule):
        # Shapes of batches; errors of stages; at the end of backward; the norm over the model, and over the data axis.
        agreements = 4 if stage == 0 else 5
        assert calls["all_reduce"] == agreements + (slabs if stage == 0 else 0)
        assert calls.get("reduce_scatter", 0) == (0 if stage == 0 else slabs)
        assert calls["all_gather"] == (0 if stage == 0 else slabs)


def accumulate(stage: int) -> tuple[float, float]:
    """Two steps of a pipeline before one of the optimizer, one of them inside no_sync, against the mean of both."""
    mesh = zf.mesh(pipeline=2, device="cpu")
    model, reference = make("gpt2"), make("gpt2")
    pipe = zf.pipeline(model, mesh, microbatches=2, loss_fn=loss_fn)
    pipe, _ = zf.prepare(pipe, optimizer(pipe.parameters()), stage=stage, mesh=mesh)
    for steps in ((0, 1), (2, 3)):
        for step in steps:
            loss_fn(reference(batch(step)[0]), batch(step)[1]).backward()
    for steps in ((0, 1), (2, 3)):  # the second pair is reduced in each of its two steps
        for step in steps:
            tokens, target = own(mesh, *batch(step))
            if step == 0:
                with zf.no_sync(model):
                    pipe.step(tokens, target=target)
            else:
                pipe.step(tokens, target=target)
    norm = zf.clip_grad_norm_(model, float("inf"))
    expected = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    zf.close(model)
    return norm.item(), expected.item()


@pytest.mark.parametrize("stage", [0, 3])
def test_several_steps_of_a_pipeline_add_up(ranks: Any, stage: int) -> None:
    for norm, expected in ranks(4, accumulate, stage):
        assert norm == pytest.approx(expected, rel=1e-5)


def evaluate(schedule: str) -> tuple[float, float, float, bool]:
    mesh = zf.mesh(pipeline=2, device="cpu")
    model, reference = make("gpt2"), make("gpt2")
    pipe = zf.pipeline(model, mesh, microbatches=4, schedule=schedule)  # the model makes its loss itself
    pipe, _ = zf.prepare(pipe, optimizer(pipe.parameters()), stage=3, mesh=mesh)
    tokens = batch(0)[0]
    evaluated = pipe.evaluate(tokens, labels=tokens).item()
    long = tokens.repeat(2, 1)[:, :5]  # another shape in between
    pipe.evaluate(long, labels=long)
    trained = pipe.step(input_ids=tokens, labels=tokens).item()
    has_gradients = all(p.grad is not None for p in model.parameters())
    zf.close(model)
    return evaluated, trained, reference(tokens, labels=tokens).loss.item(), has_gradients


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_evaluation_and_a_model_that_makes_its_own_loss(ranks: Any, schedule: str) -> None:
    for evaluated, trained, expected, has_gradients in ranks(2, evaluate, schedule):
        assert evaluated == pytest.approx(expected, abs=1e-5)
        assert trained == pytest.approx(expected, abs=1e-5)
        assert has_gradients


def from_meta(folder: str | None) -> tuple[float, float, int, int, float]:
    """A model that has no memory anywhere until each rank takes its own part."""
    import transformers

    mesh = zf.mesh(pipeline=2, device="cpu")
    reference = make("gpt2")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(reference.config)
    whole = sum(p.numel() for p in model.parameters())
    pipe = zf.pipeline(model, mesh, microbatches=4, loss_fn=loss_fn)
    torch.manual_seed(10 + dist.get_rank())  # ranks that draw their own numbers
    pipe, stepper = zf.prepare(pipe, optimizer(pipe.parameters()), stage=3, mesh=mesh, load=folder)
    losses = []
    for step in range(3):
        tokens, target = batch(step)
        losses.append(pipe.step(tokens, target=target).item())
        stepper.step()
        stepper.zero_grad()
    with zf.full_params(model):
        embedding = float(model.get_output_embeddings().weight.double().sum())
    found = Engine.of(model).psi
    zf.close(model)
    expected = train_alone(reference, 3)[0]
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True)), losses[-1], found, whole, embedding


def test_a_model_on_the_meta_device_gets_memory_for_its_own_stage_alone(ranks: Any, tmp_path: Path) -> None:
    make("gpt2").save_pretrained(tmp_path)  # type: ignore[operator]
    results = ranks(2, from_meta, str(tmp_path))
    for difference, _, found, whole, _ in results:
        assert difference < 1e-5
        assert found < 0.6 * whole
    drawn = ranks(2, from_meta, None)
    assert drawn[0][1] == drawn[1][1] > 0
    assert drawn[0][4] == drawn[1][4]  # tied values are alike, though each rank drew its own


class TwoLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.decoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


class Bare(nn.Module):
    """A parameter that no module of its own holds."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


def misuse(kind: str, **options: Any) -> None:
    mesh = zf.mesh(pipeline=2, device="cpu")
    model = {"two": TwoLists, "bare": Bare}[kind]() if kind in ("two", "bare") else make(kind)
    size = options.pop("size", BATCH)
    target = options.pop("target", True)
    pipe = zf.pipeline(model, mesh, **{"microbatches": 4, "loss_fn": loss_fn, **options})
    zf.shard(pipe, mesh=mesh)
    tokens = batch(0)[0][:size]
    try:
        pipe.step(tokens, target=tokens if target else None)
    finally:
        zf.close(model)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("gpt", {"schedule": "1fib"}, "schedule='1fib' is unknown: did you mean '1f1b'?"),
        ("gpt", {"microbatches": 1}, "microbatches=1 cannot fill 2 stages"),
        ("gpt", {"microbatches": 0}, "microbatches=0 must be a whole number"),
        ("gpt", {"chunks_per_rank": 2}, "use schedule='interleaved'"),
        ("gpt", {"schedule": "interleaved", "microbatches": 5}, "do not make 2 equal rounds"),
        ("gpt", {"schedule": "interleaved", "chunks_per_rank": 3}, "4 blocks cannot make 6 stages"),
        ("odd", {"loss_fn": None}, "loss_fn is missing, and OddModel takes no labels"),
        ("gpt", {"split": ["blocks.9"]}, "'blocks.9' is no block of the model"),
        ("gpt", {"split": ["blocks.1", "blocks.2"]}, "must name the first block of each of the 2 stages"),
        ("gpt", {"size": 7}, "a batch of 7 does not make 4 equal micro-batches"),
        ("gpt", {"target": False}, "target is missing"),
        ("two", {}, "TwoLists has its blocks in 2 lists (encoder, decoder)"),
        ("bare", {}, "'positions' is a parameter of a Bare"),
    ],
)
def test_misuse_is_said_on_every_rank(ranks: Any, kind: str, options: dict[str, Any], said: str) -> None:
    for message in ranks(2, raised, misuse, kind, **options):
        assert said in message


def blocks_of(**options: Any) -> list[tuple[int, int]]:
    mesh = zf.mesh(pipeline=2, device="cpu")
    pipe = zf.pipeline(make("gpt"), mesh, microbatches=4, loss_fn=loss_fn, **options)
    assert "schedule 1f1b" in str(pipe)
    return [(stage.first, stage.stop) for stage in pipe.stages]


def heavy_head(name: str, module: nn.Module) -> float:
    return {"head": 2.0, "embedding": 0.0, "norm": 0.0}.get(name, 1.0)


def test_stages_are_cut_where_they_are_told_to_be_or_balanced(ranks: Any) -> None:
    assert ranks(2, blocks_of)[0] == [(0, 2), (2, 4)]
    assert ranks(2, blocks_of, split=["blocks.0", "blocks.1"])[1] == [(0, 1), (1, 4)]
    assert ranks(2, blocks_of, cost=heavy_head)[0] == [(0, 3), (3, 4)]


def dies_in_the_middle() -> None:
    import os

    mesh = zf.mesh(pipeline=2, device="cpu")
    model = make("gpt")

    def deadly(output: Any, target: Any) -> Any:
        os.kill(os.getpid(), 9)

    pipe = zf.pipeline(model, mesh, microbatches=4, loss_fn=deadly)
    pipe, _ = zf.prepare(pipe, optimizer(pipe.parameters()), stage=3, mesh=mesh)
    pipe.step(*batch(0)[:1], target=batch(0)[1])


def test_a_rank_that_is_killed_ends_the_others(ranks: Any) -> None:
    survivor, killed = ranks(2, dies_in_the_middle, expect_error=True)
    assert "closed" in survivor.lower() or "reset" in survivor.lower()
    assert "9" in killed or "kill" in killed.lower()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: f"{o['schedule']}-{o.get('chunks_per_rank', 1)}")
def test_every_schedule_at_every_stage(ranks: Any, stage: int, options: dict[str, Any]) -> None:
    assert_equal(ranks(4, train, "gpt2", 4, stage=stage, clip=0.5, microbatches=2, **options))
