"""`zerofold train --stage`: every row, in groups where it has them, as predicted and to the same losses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import RankPool
from zerofold.placement import row
from zerofold.samples import Shares
from zerofold.train.gpt import GPTConfig
from zerofold.train.loop import Result, train
from zerofold.train.options import TrainOptions
from zerofold.train.spread import Degrees

# Blocks are larger than what is around them: buffers are predicted for two of the largest units on the wire at once.
TINY = GPTConfig(layers=2, hidden=64, heads=2, seq=16)


def run(options: TrainOptions) -> Result:
    return train(options, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def train_each(folder: str, rows: dict[str, dict[str, Any]]) -> dict[str, tuple[float, float | None]]:
    found = {}
    for name, given in rows.items():
        options: dict[str, Any] = {"global_batch": 8, "steps": 4, "save_every": 2, "plain": True, "sample_bytes": 4}
        result = run(TrainOptions(out=Path(folder, name), gpt=TINY, **options | given))
        found[name] = result.loss, result.validation_loss
    return found


def go_on(folder: str, given: dict[str, Any]) -> float:
    return run(TrainOptions.of_run(Path(folder), given)).loss


def book(run: Path) -> dict[str, Any]:
    return json.loads((run / "ledger.json").read_text())


def test_every_row_takes_what_was_predicted_and_learns_the_same(ranks: RankPool, tmp_path: Path) -> None:
    rows: dict[str, dict[str, Any]] = {name: {"stage": name} for name in ("0", "3", "dp", "hsdp", "hpz")}
    rows |= {
        "hpz, alone": {"stage": "hpz", "group": 1},
        "hsdp, sums": {"stage": "hsdp", "batch": 1},
        "hpz, away": {"stage": "hpz", "offload": "host"},
    }
    found = ranks(4, train_each, str(tmp_path), rows)
    for losses in found:
        for name, (loss, unseen) in losses.items():
            assert loss == pytest.approx(losses["0"][0], abs=1e-5), name
            assert unseen == pytest.approx(losses["0"][1], abs=1e-5), name
    for name in rows:
        lines = [line for line in book(tmp_path / name)["predicted"] if line["unit"] == "bytes"]
        assert {line["line"] for line in lines} >= {"parameters", "gradients"}, name
        differing = [line for line in lines if line["predicted"] != line["measured"]]
        assert not differing, (name, differing)
        for sent in book(tmp_path / name)["comm"]:
            if sent["theory_bytes_per_step"] is not None:
                assert sent["bytes_per_step"] == pytest.approx(sent["theory_bytes_per_step"]), (name, sent)


def test_a_run_goes_on_in_another_row(ranks: RankPool, tmp_path: Path) -> None:
    run = tmp_path / "hsdp"
    started = {"hsdp": {"stage": "hsdp", "group": 2, "steps": 6, "save_every": 4}}
    expected = ranks(4, train_each, str(tmp_path), started)[0]["hsdp"][0]
    shutil.rmtree(run / "checkpoints" / "step-00000006")  # as if it had been killed after step 4
    for given in ({"stage": "dp"}, {"stage": "hpz"}):
        other = tmp_path / given["stage"]
        shutil.copytree(run, other)
        assert ranks(2, go_on, str(other), given)[0] == pytest.approx(expected, abs=1e-5)
        config = json.loads((other / "config.json").read_text())
        assert (config["stage"], config["group"]) == (given["stage"], None)


@pytest.mark.parametrize(
    "axes",
    [
        {"tensor": 2},
        {"pipeline": 2},
        pytest.param({"tensor": 2, "pipeline": 2}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_groups_beside_other_axes(ranks: RankPool, tmp_path: Path, axes: dict[str, int]) -> None:
    world = 8 if len(axes) == 2 else 4
    rows: dict[str, dict[str, Any]] = {name: {"stage": name, **axes} for name in ("3", "dp", "hsdp", "hpz")}
    for losses in ranks(world, train_each, str(tmp_path), rows):
        for name, found in losses.items():
            assert found == pytest.approx(losses["3"], abs=1e-5), name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stage": "fsdp"}, "--stage fsdp does not exist: choose one of dp, 0, 1, 2, 3, hsdp, hpz"),
        ({"stage": True}, "--stage True does not exist"),
        ({"stage": 3, "group": 2}, "and --stage 3 has none: leave it out, or choose --stage hsdp or hpz"),
        ({"stage": "hsdp", "group": 0}, "--group 0 is no number of ranks: use 1 or more"),
        ({"stage": "hsdp", "group": 4}, "--group 4 does not divide the 6 data-parallel ranks: use 1, 2, 3, or"),
        ({"stage": "hpz", "group": 6}, "--group 6 is all of the 6 data-parallel ranks: use 1, 2, 3, or --stage 3"),
        ({"stage": "hpz", "group": 6, "tensor": 2}, "does not divide the 3 data-parallel ranks: use 1, or"),
    ],
)
def test_rows_and_groups_that_cannot_be_are_refused_in_one_line(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as caught:
        TrainOptions(out=tmp_path / "run", gpt=TINY, batch=1, **given).shares(6)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_groups_are_machines_or_else_a_part_of_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def size(world: int, **given: Any) -> int:
        return Degrees(row=row("hsdp"), **given).in_group(world)

    assert (size(2), size(4), size(5), size(9), size(8, group=2)) == (1, 2, 1, 3, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert (size(32), size(32, tensor=2), size(8), size(12)) == (8, 4, 4, 4)
    with pytest.raises(ValueError, match="and there is 1 data-parallel rank: choose --stage 3, or a larger --nproc"):
        Degrees(row=row("hpz"), tensor=2).data_ranks(2)
    # All of them read other samples, whatever they share.
    assert TrainOptions(out=tmp_path / "run", gpt=TINY, stage="hpz", batch=2).shares(4) == Shares(2, 4, 1)
