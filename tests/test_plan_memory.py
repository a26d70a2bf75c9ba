"""The plan's bytes: those of the source documents, and those that the engine's own ledger shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.models import TinyGPT, batches, make_model
from tests.plan_models import Adapter, Outer, Residual, Step, adapters, nested
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofold as zf
from zerofold.activation.store import AT_ONCE
from zerofold.bench.activation_plan import traced
from zerofold.bench.gpt import GPT, Block, GPTSize
from zerofold.engine import Engine
from zerofold.memory.disk import PAGE
from zerofold.placement import Tier, Tiers
from zerofold.plan.activities import GROUPS_ON_DEVICE, activity_of
from zerofold.plan.comparison import Parameter, lines, predicted_for
from zerofold.plan.memory import memory
from zerofold.plan.point import Memory, Point
from zerofold.plan.presets import preset
from zerofold.plan.shape import Phase
from zerofold.plan.states import Widths, elements_sent, paper_bytes, state_bytes
from zerofold.plan.tracing import trace
from zerofold.plan.transformer import GPTNumbers, activity, from_numbers, from_parameters

STEP_NUMBERS = 4 * 53  # bytes: one for each parameter, which stays where the optimizer is
STATES = ("parameters", "gradients", "optimizer")
STAGES = ("dp", "0", "1", "2", "3")
PRECISIONS = (None, "bf16")


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
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, on every rank: only where it is used

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


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "gpt": partial(make_model, width=72, layers=4),
    "llama": llama,
    "adapters": adapters,
    "tied": partial(adapters, vocab=5000, frozen=False, tied=True),
    "nested": nested,
}


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(model, (TinyGPT, Residual)):
        return model(*batch)
    return model(input_ids=batch[0], labels=batch[1]).loss


class Case(NamedTuple):
    kind: str
    stage: str
    precision: str | zf.Precision | None = None
    mesh: tuple[int, int] | None = None
    settings: Mapping[str, Any] = {}


class Compared(NamedTuple):
    held: dict[str, Any]
    """By the ledger, between the last backward and its step, where all three states are there."""
    predicted: Memory
    tiers: dict[str, dict[str, int]]
    """By the ledger, after the last step."""


def compare(case: Case) -> Compared:
    model = MODELS[case.kind]()
    mesh = None if case.mesh is None else init_device_mesh("cpu", case.mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    settings = dict(case.settings)
    model, optimizer = zf.prepare(model, optimizer, stage=case.stage, mesh=mesh, precision=case.precision, **settings)
    engine, accumulate = Engine.of(model), settings.get("accumulate", 1)
    most: dict[str, int] = {}
    for number, batch in enumerate(batches(2 * accumulate)):
        _loss(model, batch).backward()
        held = zf.ledger(model).snapshot()
        for state, nbytes in held["state_bytes"].items():
            most[state] = max(nbytes, most.get(state, 0))
        if number % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    last = zf.ledger(model).snapshot()
    most["optimizer"] = last["state_bytes"]["optimizer"]
    units = {
        unit.name: [Parameter(e.parameter.numel(), e.wants_gradient) for slab in unit.slabs for e in slab.entries]
        for unit in engine.units
    }
    predicted = predicted_for(
        units,
        row=engine.row,
        ranks=dist.get_world_size(),
        group=0 if case.mesh is None else case.mesh[1],
        precision=case.precision,
        accumulate=accumulate,
        tiers=engine.offloading.tiers,
        buffer_bytes=settings.get("buffer_bytes", 16 * 2**20),
    )
    zf.close(model)
    return Compared({**held, "state_bytes": most}, predicted, last["tier_bytes"])


def compare_all(cases: list[Case]) -> list[Compared]:
    return [compare(case) for case in cases]


def check(case: Case, found: Compared) -> None:
    held, device = found.held, found.predicted.device
    assert {state: device[state] for state in STATES} == held["state_bytes"], case
    check_gathered(case, found)
    buffers = held["temporary_bytes"]["buffers"]
    assert 0.4 * device["fused buffers"] <= buffers <= device["fused buffers"], case


@pytest.mark.parametrize("world", [2, 3])
def test_buffers_of_chunks_to_the_byte(ranks: Any, world: int) -> None:
    """Where gradients go in many chunks. With "dp" the first rank owns everything: it receives, and sends nothing."""
    cases = [
        Case("gpt", stage, precision, settings={"buffer_bytes": 2**14})
        for stage in ("dp", "2")
        for precision in PRECISIONS
    ]
    for case, found in zip(cases, ranks(world, compare_all, cases)[0], strict=True):
        assert found.held["temporary_bytes"]["buffers"] == found.predicted.device["fused buffers"], case


def check_gathered(case: Case, found: Compared) -> None:
    predicted, peak = found.predicted.device["gathered units"], found.held["peak_live_bytes"]
    assert 0.8 * predicted <= peak <= predicted, (case, predicted, peak)


@pytest.mark.parametrize("world", [1, 2])
def test_states_to_the_byte(ranks: Any, world: int) -> None:
    cases = [Case("gpt", stage, precision) for stage in STAGES for precision in PRECISIONS]
    fp16 = zf.Precision(parameters=torch.float16, loss_scale=zf.LossScale(static=1.0))  # no step is skipped
    cases += [Case("gpt", "3", fp16), Case("gpt", "2", "bf16", settings={"buffer_bytes": 2**14})]
    cases += [Case("gpt", "3", "bf16", settings={"accumulate": 2}), Case("gpt", "2", settings={"accumulate": 3})]
    for case, found in zip(cases, ranks(world, compare_all, cases)[0], strict=True):
        check(case, found)


@pytest.mark.thorough
@pytest.mark.parametrize("world", [1, 2])
def test_states_of_a_llama_to_the_byte(ranks: Any, world: int) -> None:
    cases = [Case("llama", stage, "bf16") for stage in STAGES]
    cases += [Case("llama", "3"), Case("llama", "3", "bf16", settings={"accumulate": 2})]
    for case, found in zip(cases, ranks(world, compare_all, cases)[0], strict=True):
        check(case, found)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_sums_that_stay_whole_until_the_last_backward(ranks: Any, accumulate: int, world: int) -> None:
    """The most that gradients take is before the last backward, whose own are reduced one after the other."""
    cases = [
        Case("gpt", stage, precision, settings={"accumulate": accumulate})
        for stage in ("0", "1")
        for precision in PRECISIONS
    ]
    for case, found in zip(cases, ranks(world, compare_all, cases)[0], strict=True):
        assert found.predicted.device["gradients"] == found.held["state_bytes"]["gradients"], case


def test_groups_of_four_ranks_to_the_byte(ranks: Any) -> None:
    cases = [
        Case("gpt", stage, precision, mesh)
        for stage, mesh in (("3", None), ("hsdp", (2, 2)), ("hpz", (2, 2)))
        for precision in PRECISIONS
    ]
    for case, found in zip(cases, ranks(4, compare_all, cases)[0], strict=True):
        check(case, found)


@pytest.mark.parametrize("world", [1, 2])
def test_offloaded_states_are_where_the_ledger_finds_them(ranks: Any, world: int, tmp_path: Any) -> None:
    on_disk = {"optimizer": "nvme", "gradients": "nvme", "parameters": "nvme", "path": str(tmp_path)}
    wishes = [{"optimizer": "host"}, {"optimizer": "host", "parameters": "host"}, {"optimizer": 0.5}, on_disk]
    cases = [Case("gpt", "3", "bf16", settings={"offload": wish}) for wish in wishes]
    cases += [Case("gpt", "2", "bf16", settings={"offload": wishes[0]})]
    for case, found in zip(cases, ranks(world, compare_all, cases)[0], strict=True):
        predicted = found.predicted
        measured = {f"host {state}": found.tiers["host"].get(state, 0) for state in STATES}
        measured |= {f"disk {state}": found.tiers["nvme"].get(state, 0) for state in STATES}
        compared = lines(predicted, measured)
        assert len(compared) == 6
        for line in compared:
            rounding = 30 * PAGE if line.name.startswith("disk") and line.measured else 0  # up to whole pages
            assert line.predicted <= line.measured <= line.predicted + rounding, (case, line)
        assert predicted.device["parameters"] == found.tiers["device"]["parameters"], case
        check_gathered(case, found)
        optimizer = found.tiers["device"]["optimizer"]
        assert predicted.device["optimizer"] == pytest.approx(optimizer, rel=0.02, abs=STEP_NUMBERS), case


def waiting_on_the_device(stages: list[str], accumulate: int) -> list[tuple[int, int]]:
    """The most that local sums took beside gradients on the host, and what the plan has for them."""
    found = []
    for stage in stages:
        model = MODELS["gpt"]()
        model, _ = zf.prepare(
            model,
            torch.optim.AdamW(model.parameters()),
            stage=stage,
            precision="bf16",
            accumulate=accumulate,
            offload={"optimizer": "host"},
        )
        engine, most = Engine.of(model), 0
        for batch in batches(accumulate):
            _loss(model, batch).backward()
            waiting = [slab.gradients._local for slab in engine.slabs()]
            most = max(most, sum(each.nbytes for some in waiting for each in some if each is not None))
        units = {
            unit.name: [Parameter(e.parameter.numel(), e.wants_gradient) for slab in unit.slabs for e in slab.entries]
            for unit in engine.units
        }
        said = [
            predicted_for(
                units,
                row=engine.row,
                ranks=dist.get_world_size(),
                precision="bf16",
                accumulate=times,
                tiers=engine.offloading.tiers,
            )
            for times in (accumulate, 1)
        ]
        lines_of = [each.device["local gradients"] for each in said]
        found.append((most, lines_of[0] - lines_of[1]))
        zf.close(model)
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_sums_wait_on_the_device_for_a_host_that_has_the_gradients(ranks: Any, accumulate: int, world: int) -> None:
    """Rows 0 and 1 send them down once a step, rows 2 and 3 with every micro-batch."""
    found = ranks(world, waiting_on_the_device, ["0", "1", "2", "3"], accumulate)[0]
    for measured, said in found:
        assert measured == said
    assert [measured > 0 for measured, _ in found] == [True, True, False, False]


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.thorough)])
def test_frozen_tied_and_nested_parameters_to_the_byte(ranks: Any, world: int) -> None:
    """What is frozen counts where a unit is fetched; the units around one are gathered with it."""
    adapted = {"units": (Adapter, Step)}
    cases = [
        Case(kind, stage, precision, settings=settings)
        for kind, settings in (("adapters", adapted), ("tied", adapted), ("nested", {"units": (Outer, Step)}))
        for stage, precision in (("1", "bf16"), ("3", "bf16"), ("3", None))
    ]
    for case, found in zip(cases, ranks(world, compare_all, cases)[0], strict=True):
        assert {state: found.predicted.device[state] for state in STATES} == found.held["state_bytes"], case
        check_gathered(case, found)


def test_a_rank_alone_gathers_what_its_tiers_ask_for(ranks: Any) -> None:
    """With masters on the host, what forward computes with stays on the device, or comes from there, frozen too."""
    wishes = [{"optimizer": "host"}, {"optimizer": "host", "parameters": "host"}]
    cases = [
        Case("adapters", "3", precision, settings={"offload": wish, "units": Adapter})
        for wish in wishes
        for precision in PRECISIONS
    ]
    for case, found in zip(cases, ranks(1, compare_all, cases)[0], strict=True):
        check_gathered(case, found)
        assert (found.predicted.device["gathered units"] == 0) == ("parameters" not in case.settings["offload"])


def test_a_world_of_any_size_takes_no_longer() -> None:
    """And shares the states evenly: what 100,000 ranks hold together is what one would, but for padding."""
    model, machine = from_parameters(1e15), preset("H200", devices=100_000)
    started = time.process_time()
    found = memory(model, machine, Point(stage="3", checkpoint_every=1))
    assert time.process_time() - started < 1.0
    assert found.states * 100_000 == pytest.approx(16e15, rel=0.001)


def test_the_peak_is_the_fullest_moment() -> None:
    """A rank alone gets gradients while activations go, so with everything kept the peak is not the sum."""
    model = from_numbers(GPTNumbers(layers=12, hidden=768, heads=12, vocab=50257, seq=1024))
    point, machine = Point(stage="0", micro_batch=8), preset("A100-80")
    found = memory(model, machine, point)
    parts = sum(found.device[line] for line in ("optimizer", "gradients", "gathered units", "library workspaces"))
    alive = max(moment.alive.at(8) for moment in model.activity(0).moments)
    assert found.peak_at == "backward of the root"
    assert found.device_peak < parts + alive
    assert found.device_peak > found.device["optimizer"] + alive
    # With almost no activations the step, where all gradients are there, takes the most.
    small = memory(model, machine, replace(point, micro_batch=1, checkpoint_every=1))
    assert small.device_peak >= small.device["optimizer"] + small.device["gradients"]


def test_init_peak() -> None:
    model, machine = from_parameters(7e9), preset("A100-80", devices=8)
    on_meta = memory(model, machine, Point(stage="3", checkpoint_every=1))
    whole = memory(model, machine, Point(stage="3", checkpoint_every=1, on_meta=False))
    assert on_meta.device["init peak"] < 0.3 * whole.device["init peak"]
    assert whole.device["init peak"] > 4 * 7e9
    assert whole.peak_at == "init"


def test_tensor_and_pipeline_degrees_share_what_there_is() -> None:
    model, machine = from_parameters(70e9), preset("H100", devices=64)
    plain = memory(model, machine, Point(stage="1", checkpoint_every=1, accumulate=8))
    tensor = memory(
        model, machine, Point(stage="1", checkpoint_every=1, accumulate=8, tensor=8, sequence_parallel=True)
    )
    pipeline = memory(model, machine, Point(stage="1", checkpoint_every=1, accumulate=8, pipeline=8))
    assert tensor.device["parameters"] == pytest.approx(plain.device["parameters"] / 8, rel=0.01)
    assert tensor.device["activation checkpoints"] == pytest.approx(
        plain.device["activation checkpoints"] / 8, rel=0.01
    )
    assert pipeline.device["parameters"] < 0.15 * plain.device["parameters"]
    # Eight micro-batches are on their way, each with an eighth of the blocks.
    assert pipeline.device["activation checkpoints"] == pytest.approx(plain.device["activation checkpoints"], rel=0.05)
    with pytest.raises(ValueError, match="tensor=3"):
        memory(model, machine, Point(tensor=3))


def test_automatic_tiers_use_the_host_only_for_what_does_not_fit() -> None:
    model = from_parameters(3e9)
    point = Point(stage="3", auto=True, checkpoint_every=1)
    large, small = (memory(model, preset(name), point) for name in ("H200", "4090"))
    assert not any(large.host.values())
    assert 0 < sum(small.host.values()) < 14 * 3e9
    assert small.device_need <= preset("4090").device_memory


def test_the_memory_model_of_the_papers() -> None:
    size = GPTNumbers(layers=10, hidden=1000, heads=10, seq=100)
    found = size.paper(samples=3, checkpoint_every=2)
    assert found.parameters == 12 * 10 * 1000**2
    assert found.activation_checkpoints == 2 * 3 * 100 * 1000 * 10 / 2
    assert found.activation_working == 3 * 100 * 2 * (16 * 1000 + 2 * 10 * 100)
    assert found.model_state_working == 4 * 1000 * 4 * 1000


def test_what_a_block_keeps_is_what_autograd_saves() -> None:
    """Counted by torch's own hooks in the benchmark's GPT, in bf16; parameters are no activations."""
    size = GPTSize(vocab=64, width=128, layers=1, heads=4, seq=64)
    model = GPT(size).bfloat16()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(3, 64, 128, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.blocks[0](x)
    (block,) = [
        m
        for m in activity(GPTNumbers(layers=1, hidden=128, heads=4, vocab=64, seq=64), 0).moments
        if m.repeats == 1 and m.unit == 1 and m.phase is Phase.FORWARD
    ]
    assert sum(saved.values()) == pytest.approx(block.growth.at(3), rel=0.03)
    assert out.shape == x.shape


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_checkpoints_off_the_device_leave_two_inputs_there(tier: str, every: int) -> None:
    numbers = GPTNumbers(layers=24, hidden=1024, heads=16, vocab=50, seq=4096)
    model, machine = from_numbers(numbers, checkpoint_every=(0, every)), preset("H100", devices=8)
    here = memory(model, machine, Point(stage="3", micro_batch=4, checkpoint_every=every))
    away = memory(model, machine, Point(stage="3", micro_batch=4, checkpoint_every=every, checkpoints_on=tier))
    one = 2 * 4 * 4096 * 1024
    assert here.device["activation checkpoints"] == 24 // every * one
    assert away.device["activation checkpoints"] == 2 * one
    assert (away.host if tier == "host" else away.disk)["activation checkpoints"] == 24 // every * one
    assert "activation checkpoints" not in (away.disk if tier == "host" else away.host)
    assert here.device_peak - away.device_peak == pytest.approx((24 // every - 2) * one, rel=0.02)
    assert here.device["working activations"] == pytest.approx(away.device["working activations"], rel=0.02)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_checkpoints_off_the_device_of_a_traced_model(every: int) -> None:
    size = GPTSize(vocab=64, width=64, layers=12, heads=2, seq=64)
    with torch.device("meta"):
        model, tokens = GPT(size), torch.zeros(1, size.seq, dtype=torch.long)
    shape = trace(model, (tokens, tokens), units=Block, checkpoint_every=[every], precision="bf16")
    point, machine = Point(stage="3", micro_batch=64, checkpoint_every=every), preset("H100", devices=8)
    here, away = (memory(shape, machine, replace(point, checkpoints_on=tier)) for tier in ("device", "host"))
    one, groups = 2 * 64 * size.seq * size.width, size.layers // every
    assert here.device["activation checkpoints"] == away.host["activation checkpoints"] == groups * one
    assert away.device["activation checkpoints"] == GROUPS_ON_DEVICE * one
    assert GROUPS_ON_DEVICE == AT_ONCE  # what the store does
    assert here.device_peak - away.device_peak == pytest.approx((groups - 2) * one, rel=0.02)


@pytest.mark.parametrize("every", [1, 2])
def test_a_contiguous_block_of_checkpoints_stays_when_they_have_gone(every: int) -> None:
    """Where the peak is at the end of backward, with all gradients there, it is higher by the block; else no higher."""
    numbers = GPTNumbers(layers=8, hidden=256, heads=4, vocab=512, seq=512)
    model, machine = from_numbers(numbers), preset("H200", devices=1)
    for samples, is_late in ((1, True), (64, False)):
        point = Point(stage="3", checkpoint_every=every, micro_batch=samples)
        plain, block = (memory(model, machine, replace(point, contiguous_checkpoints=is_on)) for is_on in (False, True))
        kept = block.device["activation checkpoints"]
        assert kept == plain.device["activation checkpoints"] == numbers.paper(samples, every).activation_checkpoints
        grown = block.device_peak - plain.device_peak
        assert (0.5 * kept < grown <= kept) if is_late else (0 <= grown < 0.5 * kept), grown / kept
        assert block.reserve < plain.reserve
    # Where the update of states from the host is the peak, the block is there too.
    away = replace(point, micro_batch=16, tiers=Tiers(Tier.HOST, Tier.HOST))
    plain, block = (memory(model, machine, replace(away, contiguous_checkpoints=is_on)) for is_on in (False, True))
    assert plain.peak_at == block.peak_at == "step"
    assert block.device_peak - plain.device_peak == block.device["activation checkpoints"]
    with pytest.raises(ValueError, match="contiguous_checkpoints= is about inputs of checkpointed blocks"):
        zf.plan(params=1e9, keep="host", contiguous_checkpoints=True)


def test_of_a_traced_model_the_block_is_whole_in_every_moment() -> None:
    """Before the first input is kept, and when the last has gone; so no block leaves less than it found."""
    shape = traced(GPTSize(vocab=64, width=32, layers=4, heads=2, seq=16), 16, "cpu", loss_tokens=None)
    plain, block = (
        activity_of(shape, Point(checkpoint_every=1, contiguous_checkpoints=is_on)) for is_on in (False, True)
    )
    kept = plain.checkpoints.at(1)
    assert kept == block.checkpoints.at(1) == 4 * 16 * 32 * 2
    more = [after.alive.at(1) - before.alive.at(1) for before, after in zip(plain.moments, block.moments, strict=True)]
    assert more[0] == more[-1] == kept
    for before, after, grown in zip(plain.moments, block.moments, more, strict=True):
        if shape.units[before.unit].name:
            assert (before.growth.at(1), after.growth.at(1)) == (kept / 4, 0)
            assert 0 <= grown < kept
