"""States besides plain ones of a model spread over a mesh: masters, owners, averages, adapters, state dicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import zerofold as zf
from ranks import raised
from spread_models import Block, Settings, Spreadable, mesh_of, prepared, spread, steps, whole
from zerofold.cli import build_app
from zerofold.part import Part, part_of, set_part

CUBE = {"data": 2, "tensor": 2, "pipeline": 2}
OTHER = {"tensor": 4, "pipeline": 2}


def diff(one: Path, other: Path) -> dict[str, Any]:
    result = CliRunner().invoke(build_app(), ["checkpoint", "diff", str(one), str(other), "--json"])
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def there_and_back(folder: str, options: dict[str, Any]) -> tuple[int, int]:
    """Saved from one mesh, loaded into another, and saved from that: how often averages were updated."""
    model, optimizer = prepared(CUBE, 3, **options)
    average = zf.EMA(model, decay=0.5)
    steps(model, optimizer, 2)
    zf.save(model, optimizer, folder, tag="there")
    zf.close(model)
    model, optimizer = prepared(OTHER, 2, **options)
    other = zf.EMA(model, decay=0.5)
    zf.load(model, optimizer, f"{folder}/there")
    zf.save(model, optimizer, folder, tag="back")
    zf.close(model)
    return average.updates, other.updates


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"cut": "whole"}])
def test_masters_owners_and_averages_go_there_and_back(ranks: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    assert ranks(8, there_and_back, str(tmp_path), options) == [(2, 2)] * 8
    found = diff(tmp_path / "there", tmp_path / "back")
    assert found["same"], found
    assert found["compared"] == 37 * 5 + 5


def frozen(sizes: Settings) -> tuple[Spreadable, torch.optim.AdamW]:
    """Only what stands after `down` is trained."""
    mesh = mesh_of(sizes)
    model = spread(whole(), mesh)
    for name, p in model.named_parameters():
        p.requires_grad_("down" in name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return zf.prepare(model, optimizer, stage=3, mesh=mesh, units=Block)


def adapters(folder: str) -> tuple[str, bool]:
    model, optimizer = frozen(CUBE)
    steps(model, optimizer, 1)
    zf.save(model, optimizer, folder, trainable_only=True)
    zf.close(model)
    model, optimizer = frozen(OTHER)
    zf.load(model, optimizer, folder)
    plain = whole()
    for name, p in plain.named_parameters():
        p.requires_grad_("down" in name)
    steps(plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.1), 1)
    expected = dict(plain.named_parameters())
    same = all(torch.equal(t, expected[name]) for name, t in zf.full_tensors(model) if name in expected)
    with zf.full_params(model), torch.no_grad():  # one element of one part on one tensor rank
        if hasattr(model.blocks[2], "up") and dist.get_rank() % 4 == 1:
            model.blocks[2].up.weight[0, 0] += 1
    try:
        return raised(zf.load, model, optimizer, folder), same
    finally:
        zf.close(model)


def test_adapters_know_the_base_they_were_trained_on(ranks: Any, tmp_path: Path) -> None:
    for said, same in ranks(8, adapters, str(tmp_path)):
        assert same
        assert "holds what was trained on another base: 'blocks.2.up.weight' has other values" in said


def load_whole_state(stage: int) -> bool:
    model, _ = prepared(CUBE, stage)
    other = whole()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3)
    own = set(dict(model.named_parameters())) | set(dict(model.named_buffers()))
    model.load_state_dict({name: tensor for name, tensor in other.state_dict().items() if name in own})
    expected = dict(other.named_parameters())
    same = all(torch.equal(t, expected[name]) for name, t in zf.full_tensors(model) if name in expected)
    zf.close(model)
    return same


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_takes_its_parts_of_a_whole_state_dict(ranks: Any, stage: int) -> None:
    assert all(ranks(8, load_whole_state, stage))


def to_torch(folder: str) -> None:
    model, _ = prepared(CUBE, 3)
    try:
        dcp.save(dict(model.named_parameters()), checkpoint_id=folder)
    except dcp.CheckpointException as error:  # no Exception in torch
        raise RuntimeError(str(error)) from None
    finally:
        zf.close(model)


def test_torch_checkpoints_do_not_take_a_part_for_the_whole(ranks: Any, tmp_path: Path) -> None:
    for said in ranks(8, raised, to_torch, str(tmp_path)):
        assert "is this rank's part of a larger parameter" in said
        assert "use zf.save" in said


def wrong_parts(case: str, folder: str) -> None:
    """Parts that do not make the whole are told when they are saved, not when they are missed."""
    mesh = mesh_of(CUBE)
    model = spread(whole(), mesh)
    for name, p in model.named_parameters():
        part = part_of(p)
        assert part is not None
        if case == "nobody counts" and name.endswith("norm.weight"):
            set_part(p, Part(part.shape, None, 0, 0, counts=False))
        if case == "the same half" and name.endswith("up.bias"):
            set_part(p, Part(part.shape, 0, 0, 5, counts=True))
    zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, mesh=mesh, units=Block)
    try:
        zf.save(model, None, folder)
    finally:
        zf.close(model)


WRONG = {
    "nobody counts": "holds 'blocks.0.norm.weight' as a copy of what another rank counts, and no rank does",
    "the same half": "every element once between them: the boxes of 'model/blocks.0.up.bias' reach to 5 of 10",
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_parts_are_told_when_they_are_saved(ranks: Any, tmp_path: Path, case: str) -> None:
    for said in ranks(8, raised, wrong_parts, case, str(tmp_path)):
        assert WRONG[case] in said
    assert not list(tmp_path.glob("save-*"))
