"""What the plan says is sent, against what real ranks count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.models import batches, make_model
from tests.plan_models import H200, Outer, Step, gpt, nested
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofold as zf
from zerofold.engine import Engine
from zerofold.plan.comparison import Parameter, shape_of
from zerofold.plan.point import Point
from zerofold.plan.shape import ROOT, ModelShape, UnitShape
from zerofold.plan.traffic import traffic

LAYERS, WIDTH, STEPS = 6, 64, 2


def sizes(module: nn.Module) -> tuple[int, ...]:
    return tuple(p.numel() for p in module.parameters())


def shape_of_model() -> ModelShape:
    """As a tracer would see it: the root's own parameters, then blocks that are alike."""
    model = make_model(width=WIDTH, layers=LAYERS)
    block = sizes(model.blocks[0])
    root = tuple(p.numel() for name, p in model.named_parameters() if not name.startswith("blocks."))
    units = (
        UnitShape(name=ROOT, trained=sum(root), tensors=root),
        UnitShape(name="blocks", trained=sum(block), tensors=block, count=LAYERS),
    )
    return ModelShape(name="tiny", units=units)


def counted(
    row: str, precision: str, accumulate: int, inside: int, live_bytes: int | None
) -> dict[str, dict[str, float]]:
    """Bytes a step after the first, by collective and by group."""
    model, world = make_model(width=WIDTH, layers=LAYERS), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world // inside, inside), mesh_dim_names=("across", "inside"))
    options: dict[str, Any] = {"mesh": mesh} if row in ("hsdp", "hpz") else {}
    optimizer = torch.optim.AdamW(model.parameters())
    zf.prepare(
        model, optimizer, stage=row, precision=precision, accumulate=accumulate, live_bytes=live_bytes, **options
    )
    data = batches((STEPS + 1) * accumulate)

    def step() -> None:
        for _ in range(accumulate):
            model(*next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = zf.ledger(model).snapshot()
    for _ in range(STEPS):
        step()
    after = zf.ledger(model).snapshot()
    zf.close(model)
    keys = ("comm_bytes", "comm_bytes_by_group")
    return {key: {k: (v - before[key].get(k, 0)) / STEPS for k, v in after[key].items()} for key in keys}


def mean(found: list[dict[str, dict[str, float]]], key: str, name: str) -> float:
    """Over ranks: where one rank owns everything it sends other bytes than the rest."""
    return sum(each[key].get(name, 0.0) for each in found) / len(found)


CASES = [
    (row, precision, accumulate)
    for row in ("dp", "0", "1", "2", "3", "hsdp", "hpz")
    for precision, accumulate in (("fp32", 1), ("bf16", 3))
]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("row", "precision", "accumulate"), CASES)
def test_the_ledger_counts_what_the_plan_says(
    ranks: Any, world: int, row: str, precision: str, accumulate: int
) -> None:
    inside = world // 2
    check(ranks, world, Point(stage=row, precision=precision, accumulate=accumulate, group=inside), inside)


def test_a_tighter_bound_on_live_bytes_gathers_more(ranks: Any) -> None:
    tight = 4 * (96 * 64 * 2 + 16 * 64 + 2 * 64 + 12 * 64 * 64 + 13 * 64 + 2 * 128) + 4 * 64 * 40
    check(ranks, 2, Point(stage="3", precision="fp32", live_bytes=tight), 2)
    loose = traffic(shape_of_model(), replace(H200, devices=2), Point(stage="3", precision="fp32"))
    bound = traffic(shape_of_model(), replace(H200, devices=2), Point(stage="3", precision="fp32", live_bytes=tight))
    assert bound.bytes["all_gather", "all"] > 1.05 * loose.bytes["all_gather", "all"]


def check(ranks: Any, world: int, point: Point, inside: int) -> None:
    found = ranks(world, counted, point.stage, point.precision, point.accumulate, inside, point.live_bytes)
    said = traffic(shape_of_model(), replace(H200, devices=world), point)
    for collective in {name for name, _ in said.bytes}:
        expected = sum(sent for (name, _), sent in said.bytes.items() if name == collective)
        agreements = mean(found, "comm_bytes_by_group", "control") if collective == "all_reduce" else 0.0
        assert mean(found, "comm_bytes", collective) - agreements == pytest.approx(expected, rel=0.01), collective
    for group in ("all", "inside", "across"):
        expected = sum(sent for (_, name), sent in said.bytes.items() if name == group)
        assert mean(found, "comm_bytes_by_group", group) == pytest.approx(expected, rel=0.01), group


def nested_bytes(accumulate: int, live_bytes: int | None) -> tuple[float, float]:
    """Gathered in a step of a model whose units have units inside: as counted, and as the plan says."""
    model = nested()
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"units": (Outer, Step), "accumulate": accumulate, "live_bytes": live_bytes}
    model, optimizer = zf.prepare(model, optimizer, stage=3, precision="fp32", **options)
    engine, counts = Engine.of(model), []
    data = batches(3 * accumulate)
    for _ in range(3):
        for _ in range(accumulate):
            model(*next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(zf.ledger(model).snapshot()["comm_bytes"]["all_gather"])
    units = {
        unit.name: [Parameter(p.numel(), True) for slab in unit.slabs for p in slab.parameters] for unit in engine.units
    }
    point = Point(stage="3", precision="fp32", accumulate=accumulate, live_bytes=engine.schedule.live_bytes)
    said = traffic(shape_of(units), replace(H200, devices=engine.world), point).bytes["all_gather", "all"]
    zf.close(model)
    return counts[2] - counts[1], said


@pytest.mark.parametrize("live_bytes", [None, 60_000], ids=["usual bound", "wide bound"])
def test_units_inside_units_are_gathered_as_often_as_said(ranks: Any, live_bytes: int | None) -> None:
    """In backward a unit comes before those inside it, so none of them is fetched and dropped again."""
    for counted_bytes, said in ranks(2, nested_bytes, 2, live_bytes):
        assert counted_bytes == said


@pytest.mark.parametrize(
    ("row", "times"), [("dp", 2), ("0", 2), ("1", 2), ("2", 2), ("3", 3)], ids=["dp", "0", "1", "2", "3"]
)
def test_the_papers_volumes(row: str, times: int) -> None:
    """2Ψ and 3Ψ, where units are many and small enough that what stays gathered does not count."""
    blocks = UnitShape(name="block", trained=10**6, count=10_000)
    model = ModelShape(name="m", units=(UnitShape(name=ROOT, trained=0), blocks))
    sent = traffic(model, replace(H200, devices=64), Point(stage=row))
    assert sum(sent.elements.values()) / model.parameters == pytest.approx(times * 63 / 64, rel=3e-4)


def test_tensor_and_pipeline_degrees_send_activations() -> None:
    model = gpt(layers=8, hidden=512, tokens=128)
    wide = 3 * 128 * 512  # micro-batch × tokens × hidden
    machine = replace(H200, devices=8)
    plain = traffic(model, machine, Point(tensor=2, micro_batch=3, accumulate=5))
    ends = 2  # words that are looked up, and the gradient of what the head reads
    assert plain.elements["all_reduce", "tensor"] == (4 * 8 + ends) * 5 * wide * 2 * 1 / 2
    assert plain.elements["all_gather", "tensor"] == 5 * 3 * 128 * 32768 / 2  # logits
    in_parts = traffic(model, machine, Point(tensor=2, micro_batch=3, accumulate=5, loss_parallel=True))
    assert in_parts.elements["all_reduce", "tensor"] == (4 * 8 + ends) * 5 * wide + 4 * 5 * 3 * 128
    assert ("all_gather", "tensor") not in in_parts.elements
    again = traffic(model, machine, Point(tensor=2, micro_batch=3, accumulate=5, checkpoint_every=1))
    assert again.elements["all_reduce", "tensor"] == (6 * 8 + ends) * 5 * wide
    piped = traffic(model, machine, Point(pipeline=4, micro_batch=3, accumulate=5))
    assert piped.elements["send", "pipeline"] == 2 * 5 * wide * 3 / 4
    both = traffic(model, machine, Point(pipeline=4, tensor=2, stage="2"))
    assert ("all_gather", "all") not in both.elements  # no data parallelism is left
    with pytest.raises(ValueError, match="give layers and hidden"):
        traffic(replace(model, hidden=None), machine, Point(tensor=2))
    with pytest.raises(ValueError, match="do not divide 8 devices"):
        traffic(model, machine, Point(tensor=3))
