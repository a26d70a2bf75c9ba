"""What a config asks to see: CSV files, lines, flops and collectives, from real ranks."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zerofold.compat.flops import FlopsCounter, flops_report
from zerofold.compat.initialize import initialize
from zerofold.config import ConfigError, FileMonitor, FlopsProfiler
from zerofold.observe.monitors import make_writers

STEPS, WIDTH = 4, 16


def config_of(folder: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3},
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"},
        "steps_per_print": 2,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": f"{folder}/flops.txt"},
        "comms_logger": {"enabled": True},
    }


def train(folder: str) -> tuple[str, list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine, *_ = initialize(model=model, config=config_of(folder))
        for _ in range(2 * STEPS):
            engine.backward(engine(torch.ones(2, WIDTH)).float().square().mean())
            engine.step()
        summary = engine._reporter.log_summary()
        engine.destroy()
    return printed.getvalue(), summary


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_everything_at_once_on_two_ranks(ranks: Any, tmp_path: Path) -> None:
    (printed, summary), (quiet, _) = ranks(2, train, str(tmp_path))

    # One file for each number, over samples: 2 per rank x 2 accumulated x 2 ranks.
    names = {path.name for path in (tmp_path / "run").glob("*.csv")}
    phases = {f"Train_Samples_elapsed_time_ms_{phase}.csv" for phase in ("forward", "backward", "step")}
    assert names == {f"Train_Samples_{name}.csv" for name in ("lr", "train_loss", "loss_scale")} | phases
    assert rows(tmp_path / "run" / "Train_Samples_lr.csv") == [
        ["step", "lr"],
        *([str(8 * n), "0.01"] for n in (1, 2, 3, 4)),
    ]
    losses = [float(loss) for _, loss in rows(tmp_path / "run" / "Train_Samples_train_loss.csv")[1:]]
    assert losses == sorted(losses, reverse=True)
    assert all(float(ms) > 0 for _, ms in rows(tmp_path / "run" / "Train_Samples_elapsed_time_ms_backward.csv")[1:])

    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 4"]
    for words in ("skipped 0", "lr 0.01", "loss scale 16", "samples/s", "forward ", "parameters 0.0 MiB", "peak "):
        assert words in lines[0]
    assert "step 2" not in quiet  # the first rank alone prints

    # 2 x in x out for each sample, two layers, two samples; parameters are whole in the report, though cut.
    report = (tmp_path / "flops.txt").read_text()
    flops = 2 * 2 * 2 * WIDTH * WIDTH
    assert f"forward {flops / 1e3:.2f} k flops ({flops / 2e3:.2f} k MACs)" in report
    assert f"parameters {2 * (WIDTH * WIDTH + WIDTH)}" in report
    assert "  2 (Linear): 272 parameters, 1.02 k flops, 50.0%" in report

    assert summary[0].split() == ["collective", "calls", "bytes", "sent", "bytes", "a", "call"]
    counts = {line.split()[0]: (int(line.split()[1]), int(line.split()[2].replace(",", ""))) for line in summary[1:]}
    assert counts["all_gather"][0] >= STEPS
    assert all(sent > 0 for _, sent in counts.values())


def test_the_flops_table_keeps_to_its_depth_and_its_best(capsys: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    counter = FlopsCounter(model)
    counter.start()
    model(torch.ones(2, 4))
    counter.stop()
    settings = FlopsProfiler(profile_step=1, module_depth=1, top_modules=1, detailed=False, output_file=None)
    lines = flops_report(counter, settings, step=1, world=1, batch=2)
    assert lines[-2:] == ["depth 0: Sequential 192 flops", "depth 1: Sequential 128 flops"]


def test_a_resumed_run_goes_on_in_its_files(tmp_path: Path) -> None:
    from zerofold.observe.monitors import CsvWriter, Event

    for samples in (8, 16):
        CsvWriter(FileMonitor("csv_monitor", str(tmp_path), "run")).write([Event("Train/Samples/lr", 0.1, samples)])
    assert rows(tmp_path / "run" / "Train_Samples_lr.csv") == [["step", "lr"], ["8", "0.1"], ["16", "0.1"]]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="tensorboard is installed")
def test_a_missing_package_is_named_on_every_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        with pytest.raises(ConfigError, match="tensorboard.enabled: true needs the package tensorboard.*pip install"):
            make_writers([FileMonitor("tensorboard", str(tmp_path), "run")], rank=rank)
