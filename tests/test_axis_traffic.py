"""What is sent along the tensor and pipeline axes is in the ledger: as counted by hand, by torch, and by the plan."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import zerofold as zf
from zerofold.bench.gpt import GPT, Block, GPTSize
from zerofold.engine import Engine
from zerofold.observe.predicted import predictions
from zerofold.train import gpt as train_gpt
from zerofold.train.amounts import workload
from zerofold.train.gpt import GPTConfig
from zerofold.train.loop import train
from zerofold.train.options import TrainOptions

WORDS, WIDTH, LAYERS, TOKENS, SAMPLES = 32, 16, 3, 8, 4
STREAM = SAMPLES * TOKENS * WIDTH * 4
"""Bytes of what goes from block to block. Of two ranks each sends half of it in a gather, all in an all-reduce."""
LOGITS = SAMPLES * TOKENS * WORDS * 4
Sent = dict[str, int]


def gpt() -> nn.Module:
    return GPT(GPTSize(vocab=WORDS, width=WIDTH, layers=LAYERS, heads=2, seq=TOKENS))


def llama() -> nn.Module:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": LAYERS}
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=TOKENS, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config)


MODELS = {"gpt": gpt, "llama": llama}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The GPT makes its loss inside; of Llama's logits it is computed after the forward."""
    if isinstance(model, GPT):
        return model(tokens, tokens)
    logits = model(input_ids=tokens).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def prepared(kind: str, wishes: dict[str, bool], **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    mesh = zf.mesh(tensor=2, device="cpu")
    model = zf.tensor_parallel(MODELS[kind](), mesh, **wishes)
    return zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh, stage=1, **options)


def batch(samples: int = SAMPLES) -> Tensor:
    return torch.zeros(samples, TOKENS, dtype=torch.long)


def along(model: nn.Module, axis: str) -> Sent:
    return dict(zf.ledger(model).snapshot()["comm_bytes_by_axis"].get(axis, {}))


def more(after: Sent, before: Sent) -> Sent:
    return {name: total - before.get(name, 0) for name, total in after.items() if total != before.get(name, 0)}


def in_steps(kind: str, steps: int, wishes: dict[str, bool], precision: str | None = None) -> list[Sent]:
    """Bytes by operation along the tensor axis, in each step."""
    model, optimizer = prepared(kind, wishes, precision=precision)
    found = []
    for _ in range(steps):
        before = along(model, "tensor")
        loss_of(model, batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(more(along(model, "tensor"), before))
    zf.close(model)
    return found


def by_hand(kind: str, wishes: dict[str, bool]) -> Sent:
    """Of one of two ranks, in fp32."""
    if wishes.get("sequence_parallel"):
        norms = (2 * LAYERS + 1) * WIDTH * (2 if kind == "gpt" else 1) * 4  # a LayerNorm has biases
        return {
            "all_reduce": 2 * STREAM + norms,  # words looked up, the gradient of what the head reads, of norms
            # Before each of two layers of a block and, backward, after it; cut before the first, whole after the last.
            "all_gather": (4 * LAYERS + 2) * STREAM // 2 + LOGITS // 2,
            "reduce_scatter": 4 * LAYERS * STREAM // 2,
        }
    sums = (4 * LAYERS + 2) * STREAM
    if wishes.get("loss_parallel"):
        return {"all_reduce": sums + 4 * SAMPLES * TOKENS * 4}  # four numbers of each token
    return {"all_reduce": sums, "all_gather": LOGITS // 2}


@pytest.mark.parametrize("wish", ["", "sequence_parallel", "loss_parallel"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_tensor_axis_counted_by_hand(ranks: Any, kind: str, wish: str) -> None:
    """In the first step, in which it is looked at, and in those that follow."""
    wishes = {wish: True} if wish else {}
    for found in ranks(2, in_steps, kind, 3, wishes):
        assert found == [by_hand(kind, wishes)] * 3


def test_in_16_bit_half_as_much(ranks: Any) -> None:
    for found in ranks(2, in_steps, "gpt", 2, {}, "bf16"):
        assert found == [{name: sent // 2 for name, sent in by_hand("gpt", {}).items()}] * 2


def in_other_ways() -> dict[str, Sent]:
    model, optimizer = prepared("gpt", {"loss_parallel": True})
    found: dict[str, Sent] = {}

    def note(name: str, before: Sent) -> None:
        found[name] = more(along(model, "tensor"), before)

    for round_ in ("first", "again"):
        before = along(model, "tensor")
        with torch.no_grad():
            loss_of(model, batch())
        note(f"forward alone, {round_}", before)
        before = along(model, "tensor")
        losses = [loss_of(model, batch()) for _ in range(2)]  # the second begins before backward of the first
        sum(losses).backward()
        note(f"two forwards and a backward, {round_}", before)
        before = along(model, "tensor")
        loss_of(model, batch(2 * SAMPLES)).backward()
        note(f"twice the batch, {round_}", before)
        before = along(model, "tensor")
        with pytest.raises(ValueError, match="numbers of words"):
            model(batch(), batch() + 0.5)  # its loss raises, after all else was sent
        note(f"an error, {round_}", before)
        before = along(model, "tensor")
        loss_of(model, batch()).backward()
        note(f"after an error, {round_}", before)
        optimizer.step()
        optimizer.zero_grad()
    zf.close(model)
    return found


def test_whatever_runs_counts_once(ranks: Any) -> None:
    whole = by_hand("gpt", {"loss_parallel": True})["all_reduce"]
    forward = (2 * LAYERS + 1) * STREAM + 4 * SAMPLES * TOKENS * 4
    for found in ranks(2, in_other_ways):
        for round_ in ("first", "again"):
            assert found[f"forward alone, {round_}"] == {"all_reduce": forward}
            assert found[f"two forwards and a backward, {round_}"] == {"all_reduce": 2 * whole}
            assert found[f"twice the batch, {round_}"] == {"all_reduce": 2 * whole}
            assert found[f"an error, {round_}"] == {"all_reduce": (2 * LAYERS + 1) * STREAM}
            assert found[f"after an error, {round_}"] == {"all_reduce": whole}


def calls_along_tensor(model: nn.Module) -> int:
    counts = zf.engine.Engine.of(model).traffic.counts
    return sum(count for (_, group), count in counts.items() if group == "tensor")


def calls_of_torch_and_ledger(way: str) -> list[tuple[int, int]]:
    model, _ = prepared("gpt", {})
    if way in ("device", "host"):
        zf.checkpoint_blocks(model, keep=way)
    elif way != "plain":
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=way == "reentrant")
    found = []
    for _ in range(3):
        before = calls_along_tensor(model)
        with CommDebugMode() as torchs:
            loss_of(model, batch()).backward()
        found.append((torchs.get_total_counts(), calls_along_tensor(model) - before))
    zf.close(model)
    return found


@pytest.mark.parametrize("way", ["plain", "device", "host", "reentrant", "non_reentrant"])
def test_blocks_that_are_computed_again_as_torch_counts_them(ranks: Any, way: str) -> None:
    """The data axis has one rank, so all that torch sees is the tensor axis, and before each forward a message in which
    ranks compare their inputs."""
    for found in ranks(2, calls_of_torch_and_ledger, way):
        again = found[0][1] - (4 * LAYERS + 3)
        assert again == 0 if way == "plain" else LAYERS <= again <= 2 * LAYERS  # torch may leave out what nobody needs
        assert found[1:] == [(found[0][1] + 1, found[0][1])] * 2


def rebuilt(when: str) -> list[dict[str, Any]]:
    """What a step adds to the books, where inputs of blocks are kept in parts."""
    mesh = zf.mesh(tensor=2, device="cpu")
    model = zf.tensor_parallel(gpt(), mesh, loss_parallel=True)  # its layers gather nothing
    if when == "before":
        zf.checkpoint_blocks(model, partition=mesh, units=Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zf.prepare(model, optimizer, mesh=mesh, stage=1, units=Block)
    if when == "after":
        zf.checkpoint_blocks(model, partition=mesh)
    loss_of(model, batch()).backward()  # in the first step inputs are compared as well
    ledger, found = zf.ledger(model), []
    for _ in range(2):
        shown, units = ledger.snapshot(), ledger.by_unit()
        with ledger.record() as recording:
            loss_of(model, batch()).backward()
            optimizer.step()
        now = ledger.snapshot()
        found.append(
            {
                "sum": now["comm_bytes"]["all_gather"] - shown["comm_bytes"]["all_gather"],
                "calls": now["comm_calls"]["all_gather"] - shown["comm_calls"]["all_gather"],
                "axis": more(along(model, "tensor"), shown["comm_bytes_by_axis"]["tensor"])["all_gather"],
                "units": [
                    sent["all_gather"] - units[name]["all_gather"]
                    for name, sent in ledger.by_unit().items()
                    if name.startswith("blocks.")
                ],
                "rows": [row.nbytes for row in recording.comm() if row[:2] == ("all_gather", "tensor")],
            }
        )
    zf.close(model)
    return found


@pytest.mark.parametrize("when", ["before", "after"])
def test_inputs_put_together_from_parts_count_by_collective_and_by_unit(ranks: Any, when: str) -> None:
    """One gather a block, whether blocks were checkpointed before the model was sharded or after."""
    one = STREAM // 2
    expected = {
        "sum": LAYERS * one,
        "calls": LAYERS,
        "axis": LAYERS * one,
        "units": [one] * LAYERS,
        "rows": [LAYERS * one],
    }
    for found in ranks(2, rebuilt, when):
        assert found == [expected] * 2


def gathered_and_planned() -> tuple[float, float]:
    """Bytes of a step along the tensor axis, of inputs in parts and of logits."""
    mesh = zf.mesh(tensor=2, device="cpu")
    size = GPTConfig(layers=4, hidden=32, heads=2, seq=32)
    model = zf.tensor_parallel(train_gpt.GPT(size), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zf.prepare(model, optimizer, mesh=mesh, stage=1, units=train_gpt.Block)
    zf.checkpoint_blocks(model, partition=mesh)
    tokens, ledger = torch.zeros(2, 32, dtype=torch.long), zf.ledger(model)
    model(tokens, tokens).backward()
    with ledger.record() as recording:
        model(tokens, tokens).backward()
        optimizer.step()
    options = TrainOptions(out=Path("none"), gpt=size, tensor=2, checkpoint_every=1, batch=2, keep="device")
    planned = predictions(Engine.of(model), recording, ledger.snapshot(), "fp32", workload(options, 2)).sent
    (sent,) = (row.nbytes for row in recording.comm() if row[:2] == ("all_gather", "tensor"))
    zf.close(model)
    return sent, planned["all_gather", "tensor"]


def test_the_plan_beside_a_run_knows_of_parts(ranks: Any) -> None:
    for sent, planned in ranks(2, gathered_and_planned):
        assert sent == planned > 4 * 2 * 32 * 32 * 4 / 2


def accumulated() -> list[int]:
    model, optimizer = prepared("gpt", {}, units=Block)
    calls = [calls_along_tensor(model)]
    for _ in range(3):
        zf.accumulate(model, loss_of, [batch(), batch()])
        optimizer.step()
        optimizer.zero_grad()
        calls.append(calls_along_tensor(model))
    zf.close(model)
    return [after - before for before, after in pairwise(calls)]


def test_micro_batches_unit_by_unit(ranks: Any) -> None:
    """Forwards run in threads of their own; every block is computed again. Two micro-batches."""
    for found in ranks(2, accumulated):
        assert found == [2 * (6 * LAYERS + 3)] * 3


def of_pipeline(schedule: str, kind: str) -> list[dict[str, Sent]]:
    torch.manual_seed(0)
    mesh = zf.mesh(pipeline=2, device="cpu")
    sizes = {"vocab_size": WORDS, "n_positions": TOKENS, "n_embd": WIDTH, "n_layer": 4, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, tie_word_embeddings=kind == "tied"))
    pipe = zf.pipeline(model, mesh, microbatches=4, schedule=schedule)
    pipe, optimizer = zf.prepare(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), mesh=mesh, stage=1)
    found = []
    for _ in range(2):
        before = along(model, "pipeline")
        pipe.step(batch(), labels=batch())
        optimizer.step()
        optimizer.zero_grad()
        after = along(model, "pipeline")
        pipe.evaluate(batch(), labels=batch())
        found.append({"step": more(after, before), "evaluate": more(along(model, "pipeline"), after)})
    zf.close(model)
    return found


@pytest.mark.parametrize(
    ("schedule", "kind", "crossings"),
    [("1f1b", "tied", [1, 0]), ("interleaved", "untied", [2, 1]), ("zbv", "untied", [1, 1])],
)
def test_the_pipeline_axis_counted_by_hand(ranks: Any, schedule: str, kind: str, crossings: list[int]) -> None:
    """`crossings`: how often each rank hands a micro-batch on. Every one of them comes back as a gradient."""
    table = WORDS * WIDTH * 4 if kind == "tied" else 0
    for rank, found in enumerate(ranks(2, of_pipeline, schedule, kind)):
        for each in found:
            assert each["step"]["send"] == sum(crossings) * STREAM + table
            assert each["evaluate"].get("send", 0) == crossings[rank] * STREAM


def trained(options: TrainOptions) -> None:
    train(options, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def test_the_plan_stands_beside(tmp_path: Path, ranks: Any) -> None:
    """Without what torch finds out once: a run of the first block, before the first step."""
    tiny = GPTConfig(layers=4, hidden=32, heads=2, seq=32)
    options = TrainOptions(out=tmp_path / "run", gpt=tiny, tensor=2, pipeline=2, steps=4, batch=2, accumulate=2)
    ranks(4, trained, options)
    book = json.loads((tmp_path / "run" / "ledger.json").read_text())
    rows = {(row["operation"], row["group"]): row for row in book["comm"]}
    sends, sums = rows["send", "pipeline"], rows["all_reduce", "tensor"]
    assert sends["bytes_per_step"] == sends["theory_bytes_per_step"] == 4 * 32 * 32 * 4
    once = 3 * 2 * 32 * 32 * 4 / 4  # words, attention and MLP of a micro-batch, over four steps
    assert sums["bytes_per_step"] == sums["theory_bytes_per_step"] + once > once
