"""The plan of tensor-parallel ranks and pipeline stages: what each holds, keeps, sends and waits for."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.pipelining as torch_pipelining
from tests.pipeline_models import loss_fn, make, optimizer
from tests.plan_models import H200, gpt
from tests.test_plan_command import invoke

import zerofold as zf
from zerofold.engine import Engine
from zerofold.parallel.marks import loss_ranks, sequence_ranks
from zerofold.plan.memory import memory
from zerofold.plan.pipelining import SCHEDULES, can_run, in_flight
from zerofold.plan.point import Point
from zerofold.plan.shape import ROOT, ModelShape, UnitShape
from zerofold.plan.space import Space
from zerofold.plan.text import config_lines
from zerofold.plan.times import times
from zerofold.plan.traffic import traffic

MODEL = gpt(layers=16, hidden=1024, heads=16, tokens=512)
MACHINE = replace(H200, devices=16)
WORDS, WIDTH, LAYERS = 32768, 1024, 16


def held(point: Point, model: ModelShape = MODEL) -> dict[str, int]:
    return memory(model, MACHINE, point).device


@pytest.mark.parametrize(
    ("schedule", "name", "chunks"),
    [
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("zero_bubble", "ScheduleInterleavedZeroBubble", 2),
        ("zbv", "ScheduleZBVZeroBubble", 2),
    ],
)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 4), (4, 16)])
def test_micro_batches_at_once_are_those_of_torchs_schedules(
    schedule: str, name: str, chunks: int, stages: int, micro_batches: int
) -> None:
    """Counted in torch's own order of a rank's work: a chunk's activations are there from its forward to the end of
    its backward."""
    last = stages * chunks - 1
    of_rank = [0, last] if schedule == "zbv" else [chunk * stages for chunk in range(chunks)]
    made: Any = [
        SimpleNamespace(
            stage_index=index,
            num_stages=stages * chunks,
            group_size=stages,
            group_rank=0,
            group=None,
            has_backward=False,
            is_first=index == 0,
            is_last=index == last,
            submod=None,
            stage_index_to_group_rank={},
        )
        for index in of_rank
    ]
    order = getattr(torch_pipelining, name)(made, micro_batches, loss_fn=lambda out, target: out).pipeline_order
    most = 0
    for actions in order.values():
        alive = 0
        for action in actions:
            kind = None if action is None else action.computation_type.name
            alive += kind == "FORWARD"
            most = max(most, alive)
            alive -= kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT")
    point = Point(pipeline=stages, accumulate=micro_batches, schedule=schedule, chunks=chunks)
    assert in_flight(point) == pytest.approx(most / chunks)


def test_tensor_ranks_share_matrices_and_not_norms() -> None:
    whole, fourth = (held(Point(stage="0", precision="fp32", tensor=degree)) for degree in (1, 4))
    block_whole = 6 * WIDTH  # of a block: two norms, weights and biases, and the biases of two rows of matrices
    root_whole = (512 + 2) * WIDTH  # positions and the last norm
    cut = MODEL.parameters - LAYERS * block_whole - root_whole
    expected = 4 * (cut / 4 + LAYERS * block_whole + root_whole)
    assert fourth["parameters"] == pytest.approx(expected, rel=1e-4)  # and padding
    assert whole["parameters"] == pytest.approx(4 * MODEL.parameters, rel=1e-4)


def test_activations_are_cut_where_tensor_parallelism_cuts_them() -> None:
    everything = Point(stage="1", micro_batch=4, checkpoint_every=0)
    plain = held(everything)
    four = held(replace(everything, tensor=4))
    norms = held(replace(everything, tensor=4, sequence_parallel=True))
    logits = held(replace(everything, tensor=4, loss_parallel=True))
    assert four["working activations"] / plain["working activations"] == pytest.approx(1 / 4 + 3 / 16, rel=1e-3)
    assert norms["working activations"] / plain["working activations"] == pytest.approx(1 / 8 + 7 / 32, rel=1e-3)
    assert four["logits"] == plain["logits"] == 4 * logits["logits"]


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_checkpoints_in_parts_are_smaller_by_the_tensor_degree(degree: int) -> None:
    point = Point(stage="1", micro_batch=4, checkpoint_every=1, tensor=degree)
    whole, parts = held(point), held(replace(point, partition=True))
    assert parts["activation checkpoints"] * degree == whole["activation checkpoints"]
    sent, more = (traffic(MODEL, MACHINE, each).bytes for each in (point, replace(point, partition=True)))
    extra = more["all_gather", "tensor"] - sent["all_gather", "tensor"]  # beside the logits
    assert 0 < extra <= 0.1 * sent["all_reduce", "tensor"]
    # Two blocks' are put together at a time: all that is left of the saving is on the device's peak.
    saved = (
        memory(MODEL, MACHINE, point).device_peak - memory(MODEL, MACHINE, replace(point, partition=True)).device_peak
    )
    one = whole["activation checkpoints"] / LAYERS
    assert 0 <= saved <= (LAYERS - 2) * one * (1 - 1 / degree) + 1
    on_host = memory(MODEL, MACHINE, replace(point, partition=True, checkpoints_on="host"))
    assert on_host.host["activation checkpoints"] * degree == whole["activation checkpoints"]


def test_a_stage_of_a_pipeline_keeps_units_gathered_and_gradients_whole() -> None:
    point = Point(stage="3", pipeline=4, accumulate=8, checkpoint_every=1)
    found = held(point)
    of_stage = sum(unit.trained * (unit.count // 4 if unit.name else 1) for unit in MODEL.units)
    assert found["gathered units"] == pytest.approx(2 * of_stage, rel=1e-3)
    assert found["local gradients"] == pytest.approx(4 * of_stage, rel=0.2)  # and one unit's, as autograd makes it
    assert found["local gradients"] > 4 * of_stage
    without = held(replace(point, pipeline=1))
    assert without["gathered units"] < 0.5 * 2 * MODEL.parameters
    assert without["local gradients"] < found["local gradients"]
    second = held(replace(point, stage="2"))
    assert second["local gradients"] == found["local gradients"]
    # Stage 1 has the same sums among its states.
    first = held(replace(point, stage="1"))
    assert first["gradients"] - second["gradients"] == pytest.approx(4 * of_stage, rel=1e-3)


def test_both_ends_of_a_pipeline_have_a_table_of_words() -> None:
    table = WORDS * WIDTH
    tied = (table, 512 * WIDTH, WIDTH, WIDTH)
    units = tuple(unit if unit.name else replace(unit, tensors=tied, trained=sum(tied)) for unit in MODEL.units)
    root = units[0]
    untied = replace(root, tensors=(*tied, table), trained=sum(tied) + table)
    point = Point(stage="0", precision="fp32", pipeline=4, accumulate=4)
    shared = held(point, replace(MODEL, units=units))["parameters"]
    apart = held(point, replace(MODEL, units=(untied, *units[1:])))["parameters"]
    assert shared == apart  # the first stage has the embedding, the last the head
    assert root.name == ROOT
    assert isinstance(root, UnitShape)


def test_schedules_trade_memory_for_waiting() -> None:
    found = {
        schedule: (
            held(Point(stage="1", pipeline=4, accumulate=16, checkpoint_every=1, schedule=schedule)),
            times(MODEL, MACHINE, Point(stage="1", pipeline=4, accumulate=16, schedule=schedule)).exposed["pipeline"],
        )
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
    }
    kept = {schedule: lines["activation checkpoints"] for schedule, (lines, _) in found.items()}
    waits = {schedule: waited for schedule, (_, waited) in found.items()}
    assert kept["gpipe"] == 4 * kept["1f1b"]
    assert kept["interleaved"] == pytest.approx(kept["1f1b"] * 5.5 / 4)
    assert kept["zero_bubble"] == kept["zbv"] == kept["1f1b"]
    assert waits["gpipe"] == waits["1f1b"] > 1.9 * waits["interleaved"]
    assert waits["interleaved"] > waits["zero_bubble"] > waits["zbv"]


@pytest.mark.parametrize("pipeline", [1, 2])
def test_checkpoints_on_the_host_take_time_on_a_slow_bus_alone(pipeline: int) -> None:
    point = Point(stage="1", micro_batch=4, checkpoint_every=1, pipeline=pipeline, accumulate=4)
    here, there = (times(MODEL, MACHINE, replace(point, checkpoints_on=each)) for each in ("device", "host"))
    assert there.step == pytest.approx(here.step)  # hidden behind compute
    slow = replace(MACHINE, to_host=replace(MACHINE.to_host, rate=1e8))
    late = times(MODEL, slow, replace(point, checkpoints_on="host"))
    bytes_moved = 4 * 2 * (4 * 512 * WIDTH * 2) * LAYERS / pipeline  # micro-batches, down and up, of a stage's blocks
    waited = late.exposed["host"]
    assert 0.9 * bytes_moved / 1e8 - here.compute < waited < 1.1 * bytes_moved / 1e8
    assert late.efficiency < here.efficiency
    parts = times(MODEL, slow, replace(point, tensor=4, partition=True, checkpoints_on="host"))
    whole = times(MODEL, slow, replace(point, tensor=4, checkpoints_on="host"))
    assert parts.exposed["host"] < 0.3 * whole.exposed["host"]


def test_the_command_shows_the_mesh_and_its_costs() -> None:
    sizes = ["--layers", "16", "--hidden", "1024", "--heads", "16", "--world-size", "8"]
    degrees = ["--tensor", "2", "--pipeline", "2", "--accumulate", "4"]
    done = invoke(*sizes, *degrees)
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "8 devices: data 2, tensor 2, pipeline 2 (1f1b)" in text
    assert "a stage waits 20% of its time for others" in text
    assert "mesh = zf.mesh(data=2, tensor=2, pipeline=2)" in text
    assert "zf.pipeline(model, mesh, microbatches=4, schedule='1f1b')" in text
    found = json.loads(invoke(*sizes, *degrees, "--json").output)
    assert found["mesh"]["bubble"] == pytest.approx(1 / 5)
    assert found["mesh"]["in_flight"] == 2
    assert found["recommended"]["pipeline_config"] == {"microbatches": 4, "schedule": "1f1b"}
    sent = {(each["collective"], each["group"]) for each in found["stages"][3]["sent"]}
    assert {("all_reduce", "tensor"), ("send", "pipeline")} <= sent


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensor": 3}, "tensor=3 does not divide the 16 attention heads"),
        ({"tensor": 2, "pipeline": 3}, "do not divide 8 devices"),
        ({"pipeline": 8, "schedule": "interleaved", "chunks": 4}, "needs at least 32 blocks"),
        ({"schedule": "2f2b", "pipeline": 2}, "did you mean '1f1b'?"),
        ({"pipeline": 4}, "accumulate=1 cannot fill 4 stages with schedule='1f1b': give at least 4"),
        ({"pipeline": 2, "accumulate": 5, "schedule": "interleaved"}, "accumulate=5 do not make 2 equal rounds"),
        ({"pipeline": 2, "accumulate": 4, "chunks": 3}, "chunks=3, but with schedule='1f1b' a rank has one stage"),
        ({"pipeline": 4, "global_batch": 4}, "give at least 8, or use schedule='gpipe'"),
        ({"partition": True}, "tensor=1"),
        ({"partition": True, "tensor": 2, "sequence_parallel": True}, "nothing to cut"),
        ({"keep": "attic"}, "keep='attic' is not known"),
        ({"keep": "host", "checkpoint_every": 0}, "add checkpoint_every=1"),
    ],
)
def test_degrees_that_cannot_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        zf.plan(layers=16, hidden=1024, heads=16, world_size=8, **given)
    assert said in str(caught.value)


def taken_by_a_pipeline(counts: tuple[int, ...]) -> list[tuple[str, int]]:
    """Those with which a model is cut and takes a step."""
    mesh, found = zf.mesh(pipeline=2, device="cpu"), []
    for schedule in SCHEDULES:
        for count in counts:
            model = make("gpt")
            try:
                pipe = zf.pipeline(model, mesh, microbatches=count, schedule=schedule, loss_fn=loss_fn)
            except ValueError:
                continue
            pipe, _ = zf.prepare(pipe, optimizer(pipe.parameters()), stage=1, mesh=mesh)
            tokens = torch.arange(8).repeat(count, 1)
            pipe.step(tokens, target=tokens)
            zf.close(model)
            found.append((schedule, count))
    return found


def test_a_plan_takes_what_a_pipeline_takes(ranks: Any) -> None:
    counts = (1, 3, 5)
    planned = [Point(pipeline=2, schedule=each, accumulate=count) for each in SCHEDULES for count in counts]
    taken = [(point.schedule, point.accumulate) for point in planned if can_run(point)]
    assert {("gpipe", 1), ("interleaved", 3), ("1f1b", 3)} <= set(taken)
    assert not {("1f1b", 1), ("interleaved", 5), ("zero_bubble", 5)} & set(taken)
    assert ranks(2, taken_by_a_pipeline, counts) == [taken] * 2


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_samples_are_divided_as_the_pipeline_takes_them(schedule: str) -> None:
    """By the plan of each row and by the search, whose points no pipeline refuses."""
    given = {"layers": 16, "hidden": 1024, "heads": 16, "world_size": 8, "pipeline": 4, "schedule": schedule}
    found = zf.plan(**given, global_batch=20)
    assert all(can_run(each.point) for each in (*found.stages, *found.offloaded))
    assert {each.point.samples for each in found.stages} == {10}
    space = Space(model=MODEL, machine=MACHINE, global_samples=48)
    groups = list(space.groups())
    assert all(map(can_run, groups))
    assert any(group.pipeline > 1 for group in groups)


@pytest.mark.parametrize("tensor", [2, 3])
def test_a_number_of_parameters_alone_divides_by_any_tensor_degree(tensor: int) -> None:
    """Its heads are made up, so they are made to fit; 7e9 has 33 otherwise. The calls to make are shown."""
    found = zf.plan(params=7e9, world_size=tensor, tensor=tensor, keep="host", partition=True)
    assert found.model.heads is not None
    assert found.model.heads % tensor == 0
    assert "zf.checkpoint_blocks(model, every=1, keep='host', partition=mesh)" in found.text()
    section = {"partition_activations": True, "cpu_checkpointing": True}
    assert found.ds_config["activation_checkpointing"] == section


def follow(lines: list[str]) -> tuple[int, int, str, bool]:
    """What a plan tells a person to write, on these ranks: who shares norms and logits, the row, and checkpoints in
    parts."""
    model = make("gpt")
    names: dict[str, Any] = {"zf": zf, "model": model, "optimizer": None}
    for line in lines:
        if line.startswith("zf.prepare"):
            names["optimizer"] = optimizer(names.get("pipe", model).parameters())
        exec(line.replace("zf.mesh(", "zf.mesh(device='cpu', "), names)
    engine = Engine.of(model)
    is_cut = engine.checkpoints is not None and engine.checkpoints.is_cut
    found = sequence_ranks(model), loss_ranks(model), engine.row.name, is_cut
    zf.close(model)
    return found


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({"tensor": 2, "sequence_parallel": True, "loss_parallel": True}, (2, 2, False)),
        ({"tensor": 2, "partition": True}, (1, 1, True)),
        ({"tensor": 2, "pipeline": 2, "accumulate": 4, "sequence_parallel": True}, (2, 1, False)),
    ],
    ids=["sequence and loss", "partition", "with a pipeline"],
)
def test_the_lines_of_a_plan_do_what_it_says(ranks: Any, degrees: dict[str, Any], expected: tuple[Any, ...]) -> None:
    plan = zf.plan(layers=4, hidden=32, heads=2, vocab=64, seq=16, world_size=4, **degrees)
    assert plan.recommended is not None
    lines = [line for line in config_lines(plan, plan.recommended) if not line.startswith("ds_config.json")]
    for *shared, row, is_cut in ranks(4, follow, lines):
        assert (*shared, is_cut) == expected
        assert row == plan.recommended.point.stage
