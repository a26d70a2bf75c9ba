"""Local sums of micro-batches, whose gradients live on the host or wait for a pipeline: books against the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import batches, make_model
from tests.pipeline_models import loss_fn, make
from torch import nn

import zerofold as zf
from zerofold.engine import Engine
from zerofold.observe.predicted import Line, predictions
from zerofold.observe.recording import Recording

UPPER_BOUNDS = ("fused buffers", "gathered units")
HOST, HALF = {"optimizer": "host"}, {"optimizer": 0.5}


def book(model: nn.Module, recording: Recording, precision: str | None) -> tuple[list[Line], int]:
    """Lines of states, and the most that gradients took anywhere."""
    found = predictions(Engine.of(model), recording, zf.ledger(model).snapshot(), precision or "fp32")
    return [line for line in found.lines if line.line not in UPPER_BOUNDS], recording.peaks["gradients"]


def train(cases: list[tuple[str, str | None, int, Any]]) -> list[tuple[list[Line], int, int]]:
    """With what the ledger says is on the device before the last backward of a step."""
    found = []
    for stage, precision, accumulate, offload in cases:
        model = make_model(width=40, layers=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        settings = {"accumulate": accumulate, "offload": offload, "precision": precision}
        model, optimizer = zf.prepare(model, optimizer, stage=stage, **settings)
        between = 0
        with zf.ledger(model).record() as recording:
            for number, batch in enumerate(batches(2 * accumulate)):
                model(*batch).backward()
                if number % accumulate == accumulate - 2:
                    between = zf.ledger(model).snapshot()["tier_bytes"]["device"]["gradients"]
                if number % accumulate == accumulate - 1:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append((*book(model, recording, precision), between))
        zf.close(model)
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sums_beside_gradients_on_the_host(ranks: Any, world: int) -> None:
    """The first of two stays as autograd made it, 16-bit; more are added up in fp32. Rows 2 and 3 send each down."""
    cases = [(stage, "bf16", many, HOST) for stage in ("0", "1") for many in (2, 3)]
    cases += [("0", None, 2, HOST), ("1", "bf16", 3, HALF), ("2", "bf16", 2, HOST)]
    numel = sum(parameter.numel() for parameter in make_model(width=40, layers=2).parameters())
    sums = [2 * numel, 4 * numel, 2 * numel, 4 * numel, 4 * numel, None, 0]
    for case, expected, (lines, most, between) in zip(cases, sums, ranks(world, train, cases)[0], strict=True):
        compared = {(line.line, line.where): (line.predicted, line.measured) for line in lines}
        for said, measured in compared.values():
            assert said == measured, (case, compared)
        waiting = compared.get(("local sums", "device"), (0, 0))[1]
        assert most >= waiting
        if expected is None:
            assert 0 < waiting < between < 8 * numel  # those of the other half are among the gradients
        else:
            assert waiting == between == expected, case


def train_stages(cases: list[tuple[int, Any, bool]]) -> list[list[Line]]:
    found = []
    for stage, offload, contiguous in cases:
        mesh, model = zf.mesh(data=torch.distributed.get_world_size() // 2, pipeline=2, device="cpu"), make("gpt")
        pipe = zf.pipeline(model, mesh, microbatches=3, loss_fn=loss_fn)
        optimizer = torch.optim.AdamW(pipe.parameters())
        settings = {"accumulate": 3, "offload": offload, "contiguous_gradients": contiguous, "precision": "bf16"}
        pipe, optimizer = zf.prepare(pipe, optimizer, stage=stage, mesh=mesh, **settings)
        with zf.ledger(model).record() as recording:
            for _ in range(2):
                tokens = torch.arange(8).repeat(3, 1)
                pipe.step(tokens, target=tokens)
                optimizer.step()
                optimizer.zero_grad()
        found.append(book(model, recording, "bf16")[0])
        zf.close(model)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_sums_of_a_stage(ranks: Any, world: int) -> None:
    """Rows 0 and 1 count them among the gradients where others share these; a rank alone hands them over."""
    cases = [(1, None, False), (1, HOST, False), (2, None, False), (2, None, True)]
    for case, lines in zip(cases, ranks(world, train_stages, cases)[0], strict=True):
        compared = {(line.line, line.where): (line.predicted, line.measured) for line in lines}
        for said, measured in compared.values():
            assert said == measured, (case, compared)
        stays_apart = case[1] == HOST or case[2] or (case[0] == 2 and world == 4)
        assert (("local sums", "device") in compared) == stays_apart, case
