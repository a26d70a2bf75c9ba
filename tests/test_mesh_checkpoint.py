"""Checkpoints of a model spread over data, tensor and pipeline axes load into any other mesh, to the bit."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import zerofold as zf
from ranks import raised
from spread_models import Block, Settings, adamw, differences, mesh_of, prepared, spread, steps, whole
from zerofold.checkpoint.manifest import DIGEST, MANIFEST
from zerofold.cli import build_app

CUBE = {"data": 2, "tensor": 2, "pipeline": 2}
BEFORE = 2  # steps that are saved


def save(sizes: Settings, stage: Any, folder: str, background: bool = False) -> None:
    model, optimizer = prepared(sizes, stage)
    steps(model, optimizer, BEFORE)
    zf.save(model, optimizer, folder, extra={"step": BEFORE}, background=background).wait()
    zf.close(model)


def load(sizes: Settings, stage: Any, folder: str) -> list[str]:
    """What differs from one process after loading and after one more step."""
    model, optimizer = prepared(sizes, stage)
    for group in optimizer.param_groups:
        group["lr"] = 99.0
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
    extra = zf.load(model, optimizer, folder)
    found = differences(model, optimizer, BEFORE)
    steps(model, optimizer, 1)
    found += [f"{name}, a step later" for name in differences(model, optimizer, BEFORE + 1)]
    zf.close(model)
    return found if extra == {"step": BEFORE} else [*found, f"extra {extra}"]


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: Any) -> dict[int, str]:
    """Checkpoints of 2 x 2 x 2 ranks, by stage."""
    found = {}
    for stage in (1, 3):
        found[stage] = str(tmp_path_factory.mktemp(f"stage{stage}"))
        ranks(8, save, CUBE, stage, found[stage], stage == 1)
    return found


@pytest.mark.parametrize("saved_at", [1, 3])
@pytest.mark.parametrize(
    ("world", "sizes", "stage"),
    [
        (8, {"data": 8}, 3),
        (8, {"tensor": 2, "pipeline": 4}, 2),
        (8, {"tensor": 4, "pipeline": 2}, 3),
        (8, CUBE, 0),
        (8, {"replicate": 2, "data": 2, "tensor": 2}, "hsdp"),
        (1, {}, 3),
    ],
)
def test_any_mesh_goes_on_where_the_cube_was(
    ranks: Any, saved: dict[int, str], saved_at: int, world: int, sizes: Settings, stage: Any
) -> None:
    assert ranks(world, load, sizes, stage, saved[saved_at]) == [[]] * world


@pytest.mark.parametrize("stage", [0, 2])
def test_one_rank_and_its_checkpoint_go_into_the_cube(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(1, save, {}, 0, str(tmp_path))
    assert ranks(8, load, CUBE, stage, str(tmp_path)) == [[]] * 8


def run(*arguments: str | Path) -> tuple[int, Any]:
    result = CliRunner().invoke(build_app(), ["checkpoint", *map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


def after_two_steps() -> dict[str, Tensor]:
    model = whole()
    steps(model, adamw(model), BEFORE)
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name != "head.weight"}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_commands_see_whole_tensors_under_their_names(ranks: Any, saved: dict[int, str], tmp_path: Path) -> None:
    ranks(1, save, {}, 0, str(tmp_path / "one"))
    for stage in (1, 3):
        assert run("diff", saved[stage], tmp_path / "one") == (
            0,
            {"only_first": [], "only_second": [], "differing": [], "compared": 37 * 4 + 5, "same": True},
        )
    code, found = run("inspect", saved[3])
    assert code == 0
    shapes = {row["name"]: tuple(row["shape"]) for row in found["tensors"] if row["kind"] == "parameters and buffers"}
    expected = after_two_steps()
    assert shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    assert found["aliases"] == {"head.weight": "embed.weight"}
    (optimizer,) = found["optimizers"]
    names = [name for group in optimizer["groups"] for name in group["params"]]
    assert sorted(names) == sorted(name for name, _ in whole().named_parameters())
    assert [group["lr"] for group in optimizer["groups"]] == [0.05, 0.02]
    assert found["plain"]["about"]["parameters"] == sum(p.numel() for p in whole().parameters())
    result = CliRunner().invoke(build_app(), ["checkpoint", "export", saved[3], str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert same(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_verify_knows_damage_and_boxes(saved: dict[int, str], tmp_path: Path) -> None:
    assert run("verify", saved[3])[0] == 0
    folder = Path(shutil.copytree(saved[3], tmp_path / "copy")) / "save-00000001"
    file = folder / "rank-00005.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    code, found = run("verify", folder)
    assert code == 1
    assert "rank-00005.safetensors" in found["problems"][0]


def damaged(sizes: Settings, folder: str) -> str:
    """Damage in one rank's file is an error on all, and leaves the model as it was."""
    model, optimizer = prepared(sizes, 3)
    steps(model, optimizer, 1)
    with pytest.raises(zf.CheckpointError) as caught:
        zf.load(model, optimizer, folder)
    assert differences(model, optimizer, 1) == []
    zf.close(model)
    return str(caught.value)


def test_damage_in_a_part_is_told_on_every_rank(ranks: Any, saved: dict[int, str], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved[3], tmp_path / "copy")) / "save-00000001"
    file = folder / "rank-00005.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for said in ranks(8, damaged, {"tensor": 2, "pipeline": 4}, str(folder)):
        assert "rank-00005.safetensors" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda parts: parts.pop(), "the boxes of 'model/blocks.0.up.weight' reach to 5 of 10 of dimension 0"),
        (lambda parts: parts.append(parts[0]), "the boxes of 'model/blocks.0.up.weight' do not follow each other"),
        (lambda parts: parts[0]["pieces"].pop(), "the pieces of 'model/blocks.0.up.weight' do not"),
        (lambda parts: parts[0]["boxes"][0][1].pop(), "are not of its 2 dimensions"),
    ],
)
def test_parts_that_do_not_make_the_whole_are_damage(
    saved: dict[int, str], tmp_path: Path, change: Any, said: str
) -> None:
    folder = Path(shutil.copytree(saved[3], tmp_path / "copy")) / "save-00000001"
    body = json.loads((folder / MANIFEST).read_text())
    change(body["tensors"]["model/blocks.0.up.weight"]["parts"])
    text = json.dumps(body).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / DIGEST).write_text(f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n")
    code, found = run("verify", folder)
    assert code == 1
    assert said in found["problems"][0]


def export(sizes: Settings, folder: str) -> bool:
    model, optimizer = prepared(sizes, 3)
    steps(model, optimizer, BEFORE)
    zf.export(model, folder)
    streamed = dict(zf.full_tensors(model))
    zf.close(model)
    return same(streamed, after_two_steps())


def test_a_live_model_is_exported_whole(ranks: Any, tmp_path: Path) -> None:
    assert all(ranks(8, export, CUBE, str(tmp_path / "out")))
    assert same(load_file(tmp_path / "out" / "model.safetensors"), after_two_steps())


def from_files(sizes: Settings, folder: str, stage: int, on_meta: bool) -> list[str]:
    """Weights as prepare(load=...) reads them; a model on the meta device has nothing else."""
    mesh = mesh_of(sizes)
    with torch.device("meta" if on_meta else "cpu"):
        model = spread(whole(), mesh)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of tensors that are missing, or have no place
        zf.shard(model, stage=stage, mesh=mesh, units=Block, load=folder, device="cpu")
    expected, found = after_two_steps(), dict(zf.full_tensors(model))
    zf.close(model)
    return [name for name in expected if name not in found or not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize(("stage", "on_meta"), [(3, True), (0, False)])
def test_prepare_reads_parts_of_any_folder(
    ranks: Any, saved: dict[int, str], tmp_path: Path, stage: int, on_meta: bool
) -> None:
    save_file(after_two_steps(), tmp_path / "model.safetensors")
    for folder in (str(tmp_path), saved[3]):
        assert ranks(8, from_files, CUBE, folder, stage, on_meta) == [[]] * 8


def misuse(case: str, folder: str) -> None:
    model, optimizer = prepared(CUBE, 3)
    try:
        steps(model, optimizer, 1)
        if case == "state_dict":
            model.state_dict()
        elif case == "load_state_dict":
            weight = torch.zeros(5, 6)  # as large as the part
            model.load_state_dict({"blocks.0.up.weight": weight, "blocks.2.up.weight": weight}, strict=False)
        elif case == "another model":
            if hasattr(model.blocks[3], "up"):  # on the second stage alone
                model.blocks[3].extra = nn.Linear(3, 3)
            zf.load(model, optimizer, folder)
        elif case == "stage alone":
            zf.save(model, optimizer if zf.engine.Engine.of(model).groups.job.rank < 4 else None, folder)
    finally:
        zf.close(model)


MISUSE = {
    "state_dict": "RuntimeError: state_dict(): this rank has a part of 'blocks.",
    "load_state_dict": "takes it from the whole, an ordinary tensor of shape (10, 6)",
    "another model": "has no 'blocks.3.extra.",
    "stage alone": "rank 4 saves 0 optimizer(s), rank 0 1: give zf.save the same ones on every rank",
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_told_on_every_rank(ranks: Any, saved: dict[int, str], tmp_path: Path, case: str) -> None:
    folder = saved[3] if case == "another model" else str(tmp_path)
    for message in ranks(8, raised, misuse, case, folder):
        assert MISUSE[case] in message
