"""A run folder: what zerofold train and zf.Run write, whole at any moment, and true to what the ledger knows."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import zerofold as zf
from models import Block as TinyBlock
from models import TinyGPT
from ranks import RankPool, raised
from zerofold.config import FileMonitor
from zerofold.observe.book import ending, mfu
from zerofold.observe.monitors import CsvWriter, Event, PrometheusWriter
from zerofold.observe.report import report_of
from zerofold.observe.report_files import read_run
from zerofold.observe.run_files import RunFiles
from zerofold.plan.memory import memory
from zerofold.plan.point import Point
from zerofold.plan.presets import preset
from zerofold.timing import CATEGORIES
from zerofold.train.amounts import flops_per_token, workload
from zerofold.train.gpt import GPT, GPTConfig
from zerofold.train.loop import train
from zerofold.train.options import TrainOptions

STEPS = 6


def own_loop(folder: Path, stage: int, offload: Any, steps: int = STEPS, **options: Any) -> int:
    torch.manual_seed(0)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zf.prepare(model, optimizer, stage=stage, units=TinyBlock, precision="bf16", offload=offload)
    tokens = torch.randint(0, 90, (2, 16))
    with zf.Run(folder, model, every=2, **options) as run:
        for _ in range(steps):
            loss = model(tokens, tokens)
            loss.backward()
            optimizer.step()
            run.step(loss=loss, lr=0.5, tokens=64)
            optimizer.zero_grad()
            with run.pause(), torch.no_grad():
                model(tokens, tokens)  # an evaluation, which is no part of a step
    zf.close(model)
    return len(list(folder.iterdir()))


def read(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ledger = json.loads((folder / "ledger.json").read_text())
    return lines, ledger, json.loads((folder / "timeline.json").read_text())["traceEvents"]


def keeping_on_the_host(folder: Path) -> dict[str, dict[str, int]]:
    model = zf.shard(TinyGPT(), stage=3, units=TinyBlock)
    checkpointing = zf.checkpoint_blocks(model, keep="host")
    tokens = torch.randint(0, 90, (2, 16))
    with zf.Run(folder, model) as run, zf.offload_activations(model, above="1KiB") as store:
        loss = model(tokens, tokens)
        kept = {"checkpoints": checkpointing.nbytes["host"], "activations": store.nbytes["host"]}
        loss.backward()
        run.step(loss=loss, tokens=32)
    zf.close(model)
    return {"host": kept}


def test_what_waited_for_backward_off_the_device_is_in_the_books(ranks: RankPool, tmp_path: Path) -> None:
    (kept,) = ranks(1, keeping_on_the_host, tmp_path / "run")
    found = read(tmp_path / "run")[1]["peak_kept_bytes"]
    assert found["host"] == kept["host"]
    assert min(kept["host"].values()) > 0


def test_a_run_without_a_step_is_compared_with_nothing(ranks: RankPool, tmp_path: Path) -> None:
    """Else its moments, which are not there yet, were less than planned, and a hint made something of it."""
    ranks(1, own_loop, tmp_path / "none", 3, None, 0)
    _, ledger, _ = read(tmp_path / "none")
    assert ledger["predicted"]
    assert {line["measured"] for line in ledger["predicted"]} == {None}
    assert ledger["hints"] == []
    report = report_of(read_run(tmp_path / "none"))
    assert report["time"] is None


@pytest.mark.parametrize(("stage", "offload"), [(0, None), (2, None), (3, None), (3, {"optimizer": "host"})])
def test_own_loops_leave_what_a_report_reads(ranks: RankPool, tmp_path: Path, stage: int, offload: Any) -> None:
    ranks(2, own_loop, tmp_path / "run", stage, offload, peak_flops=1e12)
    lines, ledger, events = read(tmp_path / "run")

    assert [line["step"] for line in lines] == [2, 4, 6]
    assert (lines[-1]["lr"], lines[-1]["tokens"]) == (0.5, 64 * STEPS)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert set(lines[-1]["time"]) == set(CATEGORIES)
    assert lines[-1]["step_seconds"] == pytest.approx(sum(lines[-1]["time"].values()))
    assert lines[-1]["mfu"] == pytest.approx(6 * ledger["psi"] * 32 / lines[-1]["step_seconds"] / 1e12)
    assert lines[-1]["peak_bytes"]["device"] >= lines[-1]["state_bytes"]["parameters"]

    assert (ledger["stage"], ledger["precision"], ledger["world"], ledger["steps"]) == (str(stage), "bf16", 2, STEPS)
    assert [unit["name"] for unit in ledger["units"]] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert sum(unit["parameters"] for unit in ledger["units"]) == ledger["psi"]
    compared = {(row["line"], row["where"]): row for row in ledger["predicted"]}
    assert ("optimizer", "host" if offload else "device") in compared
    for row in compared.values():  # the few bytes are the optimizer's step counters, which stay on the device
        assert row["measured"] == pytest.approx(row["predicted"], rel=0.01, abs=1024), row
    theory = {row["operation"]: row for row in ledger["comm"] if row["theory_bytes_per_step"] is not None}
    assert set(theory) == ({"all_reduce"} if stage == 0 else {"all_gather", "reduce_scatter"})
    for row in theory.values():  # padding
        assert row["bytes_per_step"] == pytest.approx(row["theory_bytes_per_step"], rel=0.05)

    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} >= {"forward", "backward", "reduce", "update", "wait"}
    for unit in ("", "blocks.0", "blocks.2"):
        assert sum(span["cat"] == "backward" and span["args"]["unit"] == unit for span in spans) == 2  # steps
    assert all(span["dur"] >= 0 and span["ts"] >= 0 for span in spans)
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert max(sample["gradients"] for sample in counters) > 0
    assert {"parameters", "gradients", "optimizer", "gathered", "cached", "buffers", "other"} == set(counters[0])


def test_a_timeline_shows_units_gathered_ahead_and_nested_as_they_ran(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, own_loop, tmp_path / "run", 3, None)
    *_, events = read(tmp_path / "run")
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "main", 2: "wire", 3: "host", 4: "disk"}
    spans = [event for event in events if event["ph"] == "X"]
    gathers = [span for span in spans if span["cat"] == "gather" and span["args"]["unit"] == "blocks.1"]
    assert {span["tid"] for span in gathers} == {2}
    assert gathers[0]["args"]["bytes"] > 0
    root, *_ = [span for span in spans if span["name"] == "forward root"]
    inside = [span for span in spans if span["cat"] == "forward" and span["args"]["unit"]]
    first = [span for span in inside if span["ts"] < root["ts"] + root["dur"]]
    assert [span["args"]["unit"] for span in first] == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(root["ts"] <= span["ts"] and span["ts"] + span["dur"] <= root["ts"] + root["dur"] for span in first)
    ahead = next(span for span in gathers if span["ts"] > root["ts"] - 1e6)
    assert ahead["ts"] < first[1]["ts"], "gathered before it is used"


def test_other_places_get_the_same_numbers(ranks: RankPool, tmp_path: Path) -> None:
    prom = tmp_path / "metrics" / "run.prom"
    ranks(1, own_loop, tmp_path / "run", 3, None, csv=True, prometheus=prom)
    lines, *_ = read(tmp_path / "run")
    with (tmp_path / "run" / "csv" / "train_loss.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows == [["step", "loss"], *([str(line["step"]), str(line["loss"])] for line in lines)]
    values = parsed(prom.read_text())
    assert values["zerofold_train_loss"] == ({"run": "run"}, lines[-1]["loss"])
    assert values["zerofold_step"][1] == STEPS
    assert values["zerofold_train_time_compute"][1] == lines[-1]["time"]["compute"]
    assert [path.name for path in prom.parent.iterdir()] == ["run.prom"]  # nothing half written is left


def parsed(text: str) -> dict[str, tuple[dict[str, str], float]]:
    """By the rules of Prometheus' text format: HELP and TYPE stand before the only sample of each metric."""
    found: dict[str, tuple[dict[str, str], float]] = {}
    assert text.endswith("\n")
    for comment, kind, sample in zip(*[iter(text.splitlines())] * 3, strict=True):
        match = re.fullmatch(r"([a-zA-Z_][a-zA-Z0-9_]*)(?:\{(.*)\})? (\S+)", sample)
        assert match is not None, sample
        name, labels, value = match.groups()
        assert comment.startswith(f"# HELP {name} ")
        assert kind == f"# TYPE {name} gauge"
        assert name not in found
        pairs = re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', labels or "")
        found[name] = {key: re.sub(r"\\(.)", r"\1", text) for key, text in pairs}, float(value)
    return found


def test_prometheus_keeps_the_latest_of_each_and_any_label(tmp_path: Path) -> None:
    writer = PrometheusWriter(tmp_path / "a.prom", {"run": 'C:\\"x"'})
    writer.write([Event("train/loss", 2.0, 1), Event("train/lr", 0.1, 1)])
    writer.write([Event("train/loss", float("nan"), 2)])
    values = parsed((tmp_path / "a.prom").read_text())
    assert values["zerofold_train_lr"] == ({"run": 'C:\\"x"'}, 0.1)
    assert str(values["zerofold_train_loss"][1]) == "nan"
    assert values["zerofold_step"][1] == 2


@pytest.mark.parametrize("options", [{"tensorboard": True}, {"wandb": "project"}])
def test_a_missing_package_is_named_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} needs the package {name}, .*: pip install {name}"):
        TrainOptions(out=tmp_path / "run", **options)


def test_a_killed_run_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for step in (10, 20, 30):
        files.line({"step": step})
    files.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4')
    RunFiles(tmp_path, after=20).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 10}\n{"step": 20}\n'


def job(out: Path) -> list[str]:
    gpt = GPTConfig(layers=2, hidden=32, heads=2, seq=32)
    options = TrainOptions(out=out, gpt=gpt, plain=True, sample_bytes=4, steps=12, batch=2, save_every=5, csv=True)
    train(options, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return sorted(path.name for path in out.iterdir())


def test_the_built_in_job_writes_them_too(ranks: RankPool, tmp_path: Path) -> None:
    names, _ = ranks(2, job, tmp_path / "run")
    expected = {"checkpoints", "config.json", "csv", "ledger.json", "metrics.jsonl", "timeline.json"}
    assert set(names) == expected
    lines, ledger, _ = read(tmp_path / "run")
    assert [line["step"] for line in lines] == [10, 12]
    assert (
        ledger["flops_per_step"] == flops_per_token(GPTConfig(layers=2, hidden=32, heads=2, seq=32), ledger["psi"]) * 64
    )
    said = ending(ledger)
    assert said[0].startswith("A step took ")
    assert said[1].startswith("Communication that nothing hid: ")
    assert said[2].startswith("Predicted / measured peak in MiB on rank 0: ")


def offloaded_job(out: Path) -> None:
    options = TrainOptions(
        out=out,
        gpt=GPTConfig(layers=2, hidden=32, heads=2, seq=32),
        plain=True,
        sample_bytes=4,
        steps=2,
        batch=2,
        offload="host",
    )
    train(options, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def test_a_state_in_host_memory_is_named_so(ranks: RankPool, tmp_path: Path) -> None:
    ranks(1, offloaded_job, tmp_path / "run")
    _, ledger, _ = read(tmp_path / "run")
    assert [line["where"] for line in ledger["predicted"] if line["line"] == "optimizer"] == ["host"]
    assert ", optimizer (host) " in ending(ledger)[2]


def test_a_gpu_run_is_told_what_it_will_need() -> None:
    """The prediction itself is the plan's; here it is made from the job's own model and batch."""
    options = TrainOptions(out=Path("nowhere"), precision="bf16", gpt=GPTConfig(layers=2, hidden=64, heads=2, seq=64))
    small, large = (workload(options, batch) for batch in (4, 8))
    peaks = [
        memory(each.shape, preset("H200"), Point(stage="3", micro_batch=each.micro_batch)).device_peak
        for each in (small, large)
    ]
    assert large.micro_batch == 8
    assert peaks[1] > peaks[0]
    assert mfu(None, 1.0, 1e12) is None


def test_flops_are_those_that_torch_counts() -> None:
    config = GPTConfig(layers=2, hidden=64, heads=2, seq=32)
    model, tokens = GPT(config), torch.zeros(3, 32, dtype=torch.long)
    # torch counts matrix products alone, and of attention only those of the plain form.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert flops_per_token(config, parameters) * tokens.numel() == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_one_folder_is_needed_on_every_rank_alike(ranks: RankPool, tmp_path: Path) -> None:
    (message,) = ranks(1, raised, own_loop, tmp_path / "run", 3, None, wandb="no such package here")
    assert "pip install wandb" in message


def test_rows_of_steps_that_are_taken_again_are_dropped(tmp_path: Path) -> None:
    """Others' files and rows up to the step stay as they are."""
    settings, own, foreign = FileMonitor("csv_monitor", str(tmp_path), "csv"), "train_loss.csv", "notes.csv"
    CsvWriter(settings).write([Event("train/loss", 1 / step, step) for step in (10, 20, 30)])
    (tmp_path / "csv" / foreign).write_text("day,mood\n40,good\n")
    CsvWriter(settings).write([])  # who knows of no step drops nothing
    assert len((tmp_path / "csv" / own).read_text().splitlines()) == 4
    CsvWriter(settings, after=20).write([Event("train/loss", 0.5, 30)])
    assert (tmp_path / "csv" / own).read_text() == "step,loss\n10,0.1\n20,0.05\n30,0.5\n"
    CsvWriter(settings, after=0)
    assert (tmp_path / "csv" / own).read_text() == "step,loss\n"
    assert (tmp_path / "csv" / foreign).read_text() == "day,mood\n40,good\n"
