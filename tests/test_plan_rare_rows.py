"""The plan's bytes beside a recording, in rows, precisions and tiers that are rarely met together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.models import batches, make_model
from tests.plan_models import adapters
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofold as zf
from zerofold.engine import Engine
from zerofold.memory.buffers import BufferPool
from zerofold.observe.book import precision_of
from zerofold.observe.predicted import predictions
from zerofold.placement import Tier

MODELS: Mapping[str, Callable[[], nn.Module]] = {"gpt": partial(make_model, width=72, layers=4), "adapters": adapters}
BF16, HOST = torch.bfloat16, {"optimizer": "host"}
BF16_MASTER = zf.Precision(parameters=BF16, master=BF16)
STEPS = 3


class Case(NamedTuple):
    stage: str
    precision: str | zf.Precision = "bf16"
    mesh: tuple[int, int] | None = None
    kind: str = "gpt"
    settings: Mapping[str, Any] = {}
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW


class Compared(NamedTuple):
    lines: dict[tuple[str, str], tuple[float, float | None]]
    """By line and memory: predicted and measured."""
    sent: dict[str, tuple[float, float]]
    """By collective, over all ranks: predicted, and of the last step."""


def compare(case: Case) -> Compared:
    model = MODELS[case.kind]()
    mesh = None if case.mesh is None else init_device_mesh("cpu", case.mesh)
    optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    settings = dict(case.settings)
    zf.prepare(model, optimizer, stage=case.stage, precision=case.precision, mesh=mesh, **settings)
    engine, accumulate = Engine.of(model), settings.get("accumulate", 1)
    with zf.ledger(model).record() as recording:
        before: dict[tuple[str, str], float] = {}
        for number, batch in enumerate(batches(STEPS * accumulate)):
            if number == (STEPS - 1) * accumulate:
                before = dict(engine.traffic.sent)
            model(*batch).backward()
            if number % accumulate == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
    found = predictions(engine, recording, zf.ledger(model).snapshot(), precision_of(engine))
    sent = {
        name: (nbytes, engine.traffic.sent[name, group] - before.get((name, group), 0))
        for (name, group), nbytes in found.sent.items()
        if group == "all"
    }
    zf.close(model)
    return Compared({(line.line, line.where): (line.predicted, line.measured) for line in found.lines}, sent)


def compare_all(cases: list[Case]) -> list[Compared]:
    return [compare(case) for case in cases]


def check(ranks: Any, world: int, cases: list[Case]) -> None:
    for case, found in zip(cases, ranks(world, compare_all, cases)[0], strict=True):
        for line, (predicted, measured) in found.lines.items():
            assert predicted == measured, (case, line)
        for collective, (predicted, measured) in found.sent.items():
            assert predicted == pytest.approx(measured, rel=0.01, abs=64), (case, collective)


def test_two_ranks(ranks: Any) -> None:
    """A group's copy stays on the device, wherever the rest goes; a group of one makes parameters from its masters;
    where something is offloaded, or masters are bf16, all gradients are reduced through buffers; gradients may go over
    the wire in 16 bits."""
    half = {"optimizer": 0.5}
    cases = [
        Case("hpz", mesh=(2, 1), settings={"offload": HOST}),
        Case("hpz", mesh=(2, 1), settings={"offload": HOST | {"parameters": "host"}}),
        Case("hpz", mesh=(2, 1), kind="adapters", settings={"offload": half}),
        Case("hsdp", mesh=(2, 1)),
        Case("hsdp", mesh=(2, 1), kind="adapters", settings={"offload": HOST}),
        Case("0", "fp32", settings={"offload": half, "accumulate": 3}),
        Case("0", BF16_MASTER),
        Case("0", BF16_MASTER, settings={"accumulate": 3, "contiguous_gradients": True}),
        Case("3", zf.Precision(parameters=BF16, reduction=BF16)),
    ]
    check(ranks, 2, cases)


def test_every_optimizer_keeps_what_it_keeps(ranks: Any) -> None:
    """None to three numbers an element, and none to two for a parameter."""
    optim = torch.optim
    made = [
        optim.SGD,
        partial(optim.SGD, momentum=0.9),
        optim.RMSprop,
        partial(optim.RMSprop, momentum=0.9, centered=True),
        optim.Adagrad,
        optim.NAdam,
        partial(optim.AdamW, amsgrad=True),
        zf.Lion,
    ]
    cases = [Case(stage, optimizer=each) for stage, each in zip("01231233", made, strict=True)]
    check(ranks, 2, cases)


def test_a_rank_alone(ranks: Any) -> None:
    block = {"accumulate": 3, "contiguous_gradients": True}
    cases = [
        Case("0", "fp32", settings={"offload": {"optimizer": 0.5}, **block}),
        Case("0", BF16_MASTER, settings={"accumulate": 3}),
        Case("0", BF16_MASTER, settings=block),
    ]
    check(ranks, 1, cases)


def limits(path: str) -> list[str]:
    """What is said where the device may hold a byte less than a plan says, and where it may hold just that."""
    said = []
    for less in (1, 0):
        model = MODELS["gpt"]()
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1))
        wish = {"optimizer": "nvme", "gradients": "nvme", "path": path}
        options: dict[str, Any] = {"stage": "hpz", "precision": "bf16", "mesh": mesh}
        zf.shard(model, offload=wish, **options)
        plan = Engine.of(model).offloading.plan
        assert plan is not None
        copies = sum(slab.group_copy.nbytes for slab in Engine.of(model).slabs() if slab.group_copy is not None)
        shards = sum(slab.resident.nbytes for slab in Engine.of(model).slabs() if slab.resident is not None)
        need = plan.used(Tier.DEVICE) + plan.extra_device
        assert need == copies + shards + plan.extra_device
        zf.close(model)
        model = MODELS["gpt"]()
        try:
            zf.shard(model, offload=wish | {"device_limit": need - less}, **options)
        except MemoryError as error:
            said.append(str(error))
            continue
        said.append("")
        zf.close(model)
    return said


def test_the_budget_counts_a_groups_copy(ranks: Any, tmp_path: Any) -> None:
    for refused, accepted in ranks(2, limits, str(tmp_path)):
        assert "device memory" in refused
        assert accepted == ""


def test_who_sends_nothing_takes_no_buffer() -> None:
    """With "dp" the first rank only receives: its empty rows took the buffer that the next chunk needed."""
    pool, device = BufferPool(1024), torch.device("cpu")
    large = pool.take(256, torch.float32, device)
    pool.give(large)
    nothing = pool.take(0, torch.float32, device)
    assert pool.take(256, torch.float32, device) is large
    pool.give(nothing)
    pool.give(large)
    assert pool.take(200, torch.float32, device) is large
    assert pool.nbytes == 1024


def held_parameters(offload: Mapping[str, str]) -> list[tuple[int, int]]:
    """By state, and by tier; before and after a step."""
    model = make_model(width=72, layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    zf.prepare(model, optimizer, stage=3, precision="bf16", offload=offload)
    found = []
    for batch in batches(2):
        model(*batch).backward()
        snapshot = zf.ledger(model).snapshot()
        by_tier = sum(states.get("parameters", 0) for states in snapshot["tier_bytes"].values())
        found.append((snapshot["state_bytes"]["parameters"], by_tier))
        optimizer.step()
        optimizer.zero_grad()
    zf.close(model)
    return found


def test_parameters_beside_masters_elsewhere_are_counted(ranks: Any) -> None:
    """16-bit ones, which forward computes with, are there between steps where their masters are on the host."""
    for found in ranks(2, held_parameters, HOST):
        for by_state, by_tier in found:
            assert by_state == by_tier > 0
