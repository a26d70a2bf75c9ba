"""`zerofold checkpoint`: what it says of intact, broken and different checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from zerofold.checkpoint.commands import tensors_of
from zerofold.checkpoint.contents import Contents, OptimizerContents
from zerofold.checkpoint.open import open_checkpoint
from zerofold.cli import build_app

WEIGHTS = {"up.weight": torch.arange(12.0).view(3, 4), "up.bias": torch.ones(3), "steps": torch.tensor(5)}


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["checkpoint", *map(str, arguments)])
    assert "Traceback" not in result.output
    return result.exit_code, result.output


def run_json(*arguments: str | Path) -> tuple[int, Any]:
    code, output = run(*arguments, "--json")
    return code, json.loads(output)


def folder_of(path: Path, tensors: dict[str, Tensor] = WEIGHTS, **metadata: str) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata=metadata or None)
    return path


def test_inspect_shows_tensors_and_totals(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "one", head="up.weight")
    code, output = run("inspect", folder)
    assert code == 0
    assert "up.weight" in output
    assert "3, 4" in output
    assert "3 tensors, 16 elements, 68 bytes" in output
    assert "head is up.weight" in output
    code, found = run_json("inspect", folder)
    assert code == 0
    assert found["totals"]["parameters and buffers"] == {"tensors": 3, "elements": 16, "bytes": 68}
    assert {row["name"]: (row["shape"], row["dtype"]) for row in found["tensors"]} == {
        "up.weight": ([3, 4], "float32"),
        "up.bias": ([3], "float32"),
        "steps": ([], "int64"),
    }
    assert found["aliases"] == {"head": "up.weight"}


def test_states_and_averages_are_listed_beside_the_weights(tmp_path: Path) -> None:
    stored = open_checkpoint(folder_of(tmp_path / "one")).tensors["up.bias"]
    states: dict[str, dict[str, Any]] = {"up.bias": {"exp_avg": stored, "step": 3}}
    contents = Contents("somewhere", {"up.bias": stored}, {}, [OptimizerContents([], states)])
    contents.averages = [{"decay": 0.9, "tensors": {"up.bias": stored}}]
    assert [(each.kind, each.name) for each in tensors_of(contents)] == [
        ("parameters and buffers", "up.bias"),
        ("optimizer states", "optimizer 0: up.bias: exp_avg"),
        ("averages", "average 0: up.bias"),
    ]


def test_verify_accepts_what_is_whole_and_nothing_else(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "one")
    assert run("verify", folder) == (0, f"{folder}: 3 tensors, 68 bytes, all readable\n")
    assert run_json("verify", folder)[1]["ok"]
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    code, output = run("verify", file)
    assert code == 1
    assert "no intact safetensors file" in output
    code, found = run_json("verify", folder)
    assert code == 1
    assert len(found["problems"]) == 1


def test_verify_finds_what_is_not_finite_when_asked(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "one", {"a": torch.tensor([1.0, float("nan")]), "b": torch.ones(2)})
    assert run("verify", folder)[0] == 0
    code, output = run("verify", folder, "--finite")
    assert code == 1
    assert "'a' has elements that are infinite or NaN" in output


def test_export_casts_and_takes_configs_along(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "one")
    (folder / "config.json").write_text('{"model_type": "x", "dtype": "float32"}')
    (folder / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    assert run("export", folder, out, "--dtype", "bf16", "--max-file-bytes", "30")[0] == 0
    files = sorted(os.listdir(out))
    assert files == [
        "config.json",
        *(f"model-0000{number}-of-00002.safetensors" for number in (1, 2)),
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    found = {key: tensor for file in out.glob("*.safetensors") for key, tensor in load_file(file).items()}
    assert {key: tensor.dtype for key, tensor in found.items()} == {
        "up.weight": torch.bfloat16,
        "up.bias": torch.bfloat16,
        "steps": torch.int64,
    }
    assert torch.equal(found["up.weight"].float(), WEIGHTS["up.weight"])
    assert run("diff", folder, out)[0] == 1  # two dtypes
    assert run("export", folder, tmp_path / "again")[0] == 0
    assert run("diff", folder, tmp_path / "again") == (0, "the same: 3 tensors, every bit\n")


def test_diff_names_every_difference(tmp_path: Path) -> None:
    one = folder_of(tmp_path / "one", {**WEIGHTS, "odd": torch.tensor([float("nan"), float("inf")])})
    other = {
        "up.weight": WEIGHTS["up.weight"] + 0.25,
        "up.bias": torch.ones(4),
        "down": torch.ones(1),
        "odd": torch.tensor([float("nan"), float("inf")]),
    }
    second = folder_of(tmp_path / "other", other)
    code, found = run_json("diff", one, second)
    assert code == 1
    assert (found["only_first"], found["only_second"]) == (["steps"], ["down"])
    assert {row["name"]: row["largest"] for row in found["differing"]} == {"up.weight": 0.25, "up.bias": None}
    assert found["compared"] == 3
    code, output = run("diff", one, second)
    assert code == 1
    assert "up.bias: shape (3,) and (4,)" in output
    assert "up.weight: largest difference 0.25" in output
    assert run_json("diff", one, one) == (
        0,
        {"only_first": [], "only_second": [], "differing": [], "compared": 4, "same": True},
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "nowhere"], "nowhere does not exist"),
        (["verify", "nowhere"], "nowhere does not exist"),
        (["inspect", "empty"], "no checkpoint that is known here"),
        (["inspect", "pickled"], "save_pretrained(new_folder)"),
        (["export", "one", "out", "--dtype", "int4"], "'int4' is not known"),
        (["export", "one", "one"], "holds model.safetensors, which no export has written"),
        (["diff", "one", "nowhere"], "nowhere does not exist"),
    ],
)
def test_mistakes_get_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "one")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    code, output = run(*arguments)
    assert code == 2
    assert words in output
    assert len(output.strip().splitlines()) == 1
