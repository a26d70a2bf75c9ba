"""`zerofold plan` and `zf.plan`: what goes in, what comes out, and what is said of wrong input."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import zerofold as zf
from zerofold.bench.gpt import GPTSize
from zerofold.config import resolve
from zerofold.placement import Tier, Tiers
from zerofold.plan.command import plan_command
from zerofold.plan.configs import ds_config, native
from zerofold.plan.formulas import Formulas
from zerofold.plan.held import ranks_of
from zerofold.plan.machine import GIB
from zerofold.plan.memory import LINES, memory
from zerofold.plan.named import named_costs, nearest_named
from zerofold.plan.page import PEAK
from zerofold.plan.predict import predict
from zerofold.plan.presets import preset, preset_names
from zerofold.plan.result import Plan
from zerofold.plan.shape import ModelShape
from zerofold.plan.sliders import rows_of_plan, sliders_of_plan
from zerofold.plan.transformer import from_parameters

GPT = ["--layers", "4", "--hidden", "256", "--heads", "4", "--vocab", "1000", "--seq", "128"]


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(plan_command)
    return CliRunner().invoke(app, list(arguments))


def planned(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_contract() -> None:
    found = planned("--params", "7.5e9", "--world-size", "64")
    stages = {row["stage"]: row for row in found["stages"]}
    assert list(stages)[:4] == [0, 1, 2, 3]
    assert [stages[stage]["model_state_bytes"] / 1e9 for stage in range(4)] == pytest.approx(
        [120, 31.4, 16.6, 1.9], abs=0.05
    )
    for row in found["stages"] + found["offloaded"]:
        parts = [row[f"{state}_bytes"] for state in ("parameters", "gradients", "optimizer")]
        assert sum(parts) == pytest.approx(row["model_state_bytes"], abs=3)
        assert tuple(row["held_bytes"]) == LINES
        assert row["step_seconds"] > 0
        assert row["device_need_bytes"] >= row["device_peak_bytes"] > 0
    assert [stages[stage]["comm_elements_per_psi"] for stage in range(4)] == pytest.approx([2, 2, 2, 3], rel=0.02)
    assert {"dp", "hsdp", "hpz"} < set(stages)
    assert not stages[0]["fits"]
    assert "needed" in stages[0]["lacks"]
    assert found["recommended"]["fits"]
    assert found["search"]["fits"]
    assert found["next_larger"]


def test_gpt2_takes_24_gb_before_activations() -> None:
    found = planned("--params", "1.5e9", "--preset", "V100-32")
    assert found["stages"][0]["model_state_bytes"] == 24e9


def test_numbers_of_a_gpt() -> None:
    found = planned("--layers", "48", "--hidden", "1600", "--heads", "25", "--vocab", "50257", "--seq", "1024")
    assert found["model"]["psi"] == 1_557_611_200
    assert found["paper"]["activation_checkpoints_bytes"] == 2 * 1024 * 1600 * 48


def test_the_recommendation_is_the_fastest_that_fits() -> None:
    found = zf.plan(params=13e9, world_size=16, machine="A100-40", micro_batch=2)
    everything = [each for each in (*found.stages, *found.offloaded) if each.fits and each.point.stage != "dp"]
    assert found.recommended in everything
    assert found.recommended.times.step <= 1.02 * min(each.times.step for each in everything)
    assert any(not each.fits for each in found.stages)


def test_where_nothing_fits_it_says_what_would() -> None:
    found = zf.plan(params=1e11, world_size=1, machine="3090")
    assert found.recommended is None
    assert found.to_dict()["recommended"] is None
    assert found.advice.sentences[0].startswith("Nothing fits")
    assert "devices" in found.advice.sentences[1]
    assert found.config == found.ds_config == {}


def test_one_quadrillion_parameters_on_100_000_devices() -> None:
    """A block alone is too large for a device, so that only tensor degrees help, of which there must be some."""
    found = zf.plan(params=1e15, world_size=100_000, machine="H100")
    assert found.model.parameters == 10**15
    assert found.stages[3].memory.states == pytest.approx(16e15 / 1e5, rel=0.01)
    assert found.recommended is None
    assert found.searched.best is not None
    assert found.searched.best.fits
    assert found.searched.best.point.tensor > 8
    text = found.text()
    assert "…" not in text
    assert f"tensor {found.searched.best.point.tensor}" in " ".join(text.split())


@pytest.mark.parametrize("count", [2e10, 70e9, 175e9, 1e12, 1e14])
def test_large_models_can_be_cut_by_heads_and_layers(count: float) -> None:
    shape = from_parameters(count)
    assert (shape.parameters, shape.heads % 8, shape.layers % 8) == (int(count), 0, 0)
    assert shape.hidden % shape.heads == 0


@pytest.mark.parametrize("stage", ["0", "1", "2", "3", "hsdp", "hpz"])
def test_the_ds_config_says_what_the_native_one_says(stage: str) -> None:
    found = zf.plan(params=1e9, world_size=16, machine="A100-40", accumulate=3, micro_batch=2)
    (point,) = [each.point for each in found.stages if each.point.stage == stage]
    ranks = ranks_of(found.machine, point)
    read = resolve(ds_config(point, ranks), world=16, device=torch.device("cpu"))
    own = native(point, ranks)
    assert (read.stage, read.accumulate) == (own["stage"], own["accumulate"])
    assert (read.micro_batch, read.group) == (2, 8 if stage in ("hsdp", "hpz") else None)
    assert read.precision.parameters is torch.bfloat16
    assert own.get("mesh") == ([2, 8] if stage in ("hsdp", "hpz") else None)


def test_rows_with_groups_name_a_mesh_in_one_node_too() -> None:
    """`zf.prepare` asks for one."""
    found = zf.plan(params=1e9, world_size=4)
    points = {each.point.stage: each.point for each in found.stages}
    for stage in ("hsdp", "hpz"):
        assert native(points[stage], ranks_of(found.machine, points[stage]))["mesh"] == [1, 4]


def test_the_config_file_is_written(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    found = planned(*GPT, "--world-size", "4", "--config", str(file))
    assert json.loads(file.read_text()) == found["recommended"]["ds_config"]


@pytest.mark.parametrize("width", [80, 100])
def test_the_text_fits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    result = invoke("--params", "70e9", "--world-size", "1024", "--disk", "4TB", "--preset", "h100")
    assert result.exit_code == 0
    tables, _, sentences = result.stdout.partition("Choose ")
    assert max(map(len, tables.splitlines())) <= width
    assert "…" not in tables
    assert "zf.prepare(model, optimizer, stage=" in sentences
    said = " ".join(sentences.split())
    assert "within 2% of the fastest" in said
    assert "% of a step is arithmetic; the most of the rest" in said
    assert "With batch, checkpoints and degrees free" in said
    assert "it fits here as well, with stage" in said


def test_fp16_states_stay_off_the_disk() -> None:
    """`zf.prepare` refuses them there."""
    for precision, has_disk in (("bf16", True), ("fp16", False)):
        found = zf.plan(params=1e9, machine="4090", disk=10**12, precision=precision)
        assert any(row.point.tiers.optimizer.value == "nvme" for row in found.offloaded) == has_disk
        assert any("the disk is not used" in note for note in found.model.notes) != has_disk


def test_a_hugging_face_folder_is_traced(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4
    )
    config.save_pretrained(tmp_path)
    found = planned("--model", str(tmp_path), "--seq", "32", "--world-size", "2")
    assert found["model"]["psi"] == sum(p.numel() for p in LlamaForCausalLM(config).parameters())
    assert found["model"]["layers"] == 3
    assert found["model"]["tokens"] == 32
    held = found["stages"][0]["held_bytes"]
    assert held["activation checkpoints"] >= 3 * 32 * 64 * 2
    assert held["working activations"] > 0
    assert planned("--model", str(tmp_path / "config.json"), "--seq", "32")["model"]["psi"] == found["model"]["psi"]


def test_a_function_is_built_on_the_meta_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned_model.py").write_text(
        "import torch\n"
        "from zerofold.bench.gpt import GPT, GPTSize\n"
        "size = GPTSize(vocab=64, width=64, layers=2, heads=2, seq=16)\n"
        "def bare():\n    return GPT(size)\n"
        "def example(batch):\n"
        "    names = ('tokens', 'targets')\n"
        "    return {name: torch.zeros(batch, 16, dtype=torch.long, device='meta') for name in names}\n"
        "def both():\n    return GPT(size), example\n"
        "def number():\n    return 7\n"
        "def nameless():\n    return GPT(size), lambda batch: torch.zeros(batch, 16)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    both, bare = (planned("--function", f"planned_model:{name}") for name in ("both", "bare"))
    assert (
        both["model"]["psi"]
        == bare["model"]["psi"]
        == GPTSize(vocab=64, width=64, layers=2, heads=2, seq=16).parameters
    )
    assert both["model"]["tokens"] == 16
    assert both["stages"][0]["held_bytes"]["working activations"] > 0
    assert bare["stages"][0]["held_bytes"]["working activations"] == 0
    assert "activations are not counted" in bare["model"]["notes"][0]
    assert "returned a int" in invoke("--function", "planned_model:number").stderr
    assert "the example returned a Tensor" in invoke("--function", "planned_model:nameless").stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ([], "nothing is given"),
        (["--params", "1e9", "--layers", "3"], "--params and --layers, --hidden, --heads are given"),
        (["--params", "1e16"], "from 1e3 to 1e+15"),
        (["--layers", "3", "--hidden", "64"], "add --heads"),
        (["--layers", "3", "--hidden", "64", "--heads", "5"], "does not divide into --heads 5"),
        (["--params", "1e9", "--preset", "A100"], "did you mean 'A100-40' or 'A100-80'?"),
        (["--params", "1e9", "--precision", "bf8"], "--precision bf8"),
        (["--params", "1e9", "--device-memory", "many"], "--device-memory='many' is no size"),
        (["--params", "1e9", "--world-size", "6", "--group", "4"], "does not divide the 6"),
        (["--params", "1e9", "--checkpoint-every", "1000"], "--checkpoint-every 1000"),
        (["--params", "1e9", "--path", "/tmp"], "needs --this-machine"),
        (["--params", "1e9", "--config", "/dev/null/folder/ds_config.json"], "/dev/null/folder cannot be made"),
        (["--params", "1e9", "--world-size", "8", "--global-batch", "100"], "give a multiple of 8"),
        (["--params", "1e9", "--global-batch", "100", "--accumulate", "2"], "--micro-batch and --accumulate"),
        (["--params", "1e9", "--keep", "nvme"], "--keep nvme needs a disk, and this machine has none; give --disk"),
        (["--params", "1e9", "--tensor", "3", "--world-size", "8"], "--tensor 3 and --pipeline 1 do not divide"),
        (["--params", "1e9", "--preset", "H100", "--this-machine"], "leave one of them out"),
        (["--layers", "2", "--hidden", "64", "--heads", "2", "--device-memory", "80"], "write 80GB"),
        (["--model", "x", "--vocab", "5"], "--vocab 5 is of a GPT given by its numbers, and --model has its own"),
        (["--model", "/no/such/folder"], "no config.json"),
        (["--function", "no_colon"], "must be module:function"),
        (["--function", "no_such_module:build"], "No module named"),
        (["--function", "json:build"], "json has no function 'build'"),
        (["--params", "1e9", "--vocab", "1000000000"], "give a smaller --vocab"),
        (["--params", "1e9", "--preset", ""], "--preset '' is not known"),
        (["--params", "1e9", "--chunks", "2"], "--chunks 2 is of a pipeline, and --pipeline 1"),
        (["--params", "1e9", "--html", "."], "--html . is a folder: name a file in it"),
    ],
)
def test_misuse(arguments: list[str], hint: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert hint in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("option", ["--html", "--config"])
def test_a_file_that_cannot_be_written(tmp_path: Path, option: str) -> None:
    """What is no file is written to, and not replaced by one; a link stays one."""
    link, page = tmp_path / "link", tmp_path / "page"
    link.symlink_to("/dev/full")
    result = invoke(*GPT, option, str(link))
    assert result.exit_code == 2, result.output
    assert result.stderr == f"error: {option} {link} cannot be written (No space left on device): name another\n"
    link.unlink()
    link.symlink_to(page)
    assert invoke(*GPT, option, str(link)).exit_code == 0
    assert link.is_symlink()
    assert page.stat().st_size > 100
    assert sorted(tmp_path.iterdir()) == [link, page]


def test_a_model_of_no_blocks_is_planned(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "gpt2", "n_layer": 0, "n_embd": 64, "n_head": 2, "vocab_size": 64}')
    assert planned("--model", str(file))["recommended"]["fits"]


def test_a_config_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text, hint in (
        ("{", "is no config.json"),
        ("{}", "has no model_type"),
        ("[]", "config.json is no config.json: it has a list"),
        ('{"model_type": "gpt2", "n_head": 7, "n_embd": 768}', "config.json: `embed_dim` must be divisible"),
        ('{"model_type": "nobody"}', "cannot be built"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "model_type 'llama' cannot be built"),
        ('{"model_type": "cohere2", "num_hidden_layers": 2, "layer_types": ["full_attention"]}', "must be equal to"),
        ('{"model_type": "llava"}', "--function module:function"),
        ('{"model_type": "dpr", "projection_dim": 8}', "--function module:function"),
    ):
        file.write_text(text)
        result = invoke("--model", str(file))
        assert result.exit_code == 2
        assert hint in result.stderr


def test_presets() -> None:
    for name in preset_names():
        machine = preset(name.lower(), devices=16)
        assert machine.name == name
        assert machine.flops > 0
        assert machine.device_memory > 2**30


def plan_of_a_gpt() -> Plan:
    return zf.plan(layers=4, hidden=256, heads=4, vocab=1000, seq=128, world_size=8)


def test_a_page_answers_as_python_does(tmp_path: Path) -> None:
    found = plan_of_a_gpt()
    rows = rows_of_plan(found)
    formulas = Formulas({row.key: row.bytes_at for row in rows})
    here = {slider.name: slider.value for slider in sliders_of_plan(found)}
    formulas.cover([here])
    formulas.check([here])
    for row, each in zip(rows, found.stages, strict=False):
        assert row.bytes_at(here)[PEAK] == each.memory.device_need
    elsewhere = rows[3].bytes_at({"devices": 24, "batch": 3, "sequence": 96})
    again = zf.plan(layers=4, hidden=256, heads=4, vocab=1000, seq=96, world_size=24, micro_batch=3)
    assert elsewhere[PEAK] == again.stages[3].memory.device_need
    file = tmp_path / "plan.html"
    assert invoke(*GPT, "--world-size", "8", "--html", str(file)).exit_code == 0
    assert "<script>" in file.read_text()


def test_a_machine_given_by_hand() -> None:
    found = planned(*GPT, "--device-memory", "1GiB", "--host-memory", "2TB", "--disk", "4TB", "--gpus-per-node", "2")
    assert found["machine"]["device_memory_bytes"] == 2**30
    assert found["machine"]["host_memory_bytes"] == 2 * 10**12
    assert found["machine"]["disk_bytes"] == 4 * 10**12
    fast, slow = (
        zf.plan(params=7e9, world_size=16, machine=_with_links(rate)).stages[3].times.step for rate in (50, 0.5)
    )
    assert slow > 1.5 * fast


def _with_links(rate: float) -> Any:
    from dataclasses import replace

    from zerofold.plan.machine import Link

    machine = preset("A100-80", devices=16)
    return replace(machine, across=Link(rate=rate * 1e9), inside=Link(rate=rate * 1e9))


def test_a_shape_of_ones_own() -> None:
    shape: ModelShape = plan_of_a_gpt().model
    found = zf.plan(shape, world_size=8)
    assert found.stages[3].memory == memory(shape, found.machine, found.stages[3].point)


def test_the_ds_config_of_tiers_without_names_is_the_nearest_and_says_what_it_costs(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    result = invoke("--layers", "4", "--hidden", "8192", "--heads", "4", "--seq", "256", "--preset", "4090",
                    "--host-memory", "60GiB", "--json", "--config", str(file))  # fmt: skip
    chosen = json.loads(result.stdout)["recommended"]
    assert chosen["tiers"] == "auto"
    zero = json.loads(file.read_text())["zero_optimization"]
    tiers = Tiers(Tier.HOST, Tier.HOST, Tier.HOST if "offload_param" in zero else Tier.DEVICE)
    part = zero["offload_optimizer"].get("ratio", 1.0)
    found = zf.plan(
        layers=4, hidden=8192, heads=4, seq=256, machine="4090", host_memory=60 * GIB, world_size=1
    )  # the same again, for its model and machine
    said = predict(found.model, found.machine, replace(found.recommended.point, auto=False, tiers=tiers, part=part))
    assert said.fits
    assert f"{said.times.step:.3g} s a step instead of {chosen['step_seconds']:.3g}" in chosen["ds_config_note"]
    assert chosen["ds_config_note"] in result.stderr
    whole = replace(said.point, part=1.0, tiers=Tiers(Tier.HOST, Tier.HOST, Tier.HOST))
    assert said.times.step <= predict(found.model, found.machine, whole).times.step
    read = resolve(json.loads(file.read_text()), world=1, device=torch.device("cpu"))
    assert read.offload is not None
    assert read.offload["optimizer"] == (part if part < 1 else "host")


def test_a_global_batch_is_divided_as_is_fastest() -> None:
    """Against all divisions of the 64 samples of a rank; few fit whole."""
    given = {"params": 3e9, "world_size": 4, "machine": "A100-40"}
    found = zf.plan(**given, global_batch=256)
    for chosen in (*found.stages, *found.offloaded):
        assert chosen.point.samples == 64
        fitting = [
            each.times.step
            for each in (
                predict(found.model, found.machine, replace(chosen.point, micro_batch=size, accumulate=64 // size))
                for size in (1, 2, 4, 8, 16, 32, 64)
            )
            if each.fits
        ]
        assert chosen.fits == bool(fitting)
        if fitting:
            assert chosen.times.step == min(fitting)
    best = found.recommended
    assert best is not None
    assert best.point.micro_batch > 1
    assert best.point.accumulate > 1
    written = found.ds_config
    assert written["train_micro_batch_size_per_gpu"] == best.point.micro_batch
    assert written["gradient_accumulation_steps"] == best.point.accumulate == found.config["accumulate"]
    searched = found.searched.best
    assert searched is not None
    assert searched.point.samples * 4 == 256 * searched.point.tensor * searched.point.pipeline
    assert f"micro-batches of {best.point.micro_batch} samples, {best.point.accumulate} to a step" in found.text()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def build(): raise KeyError('oops')", "it raised KeyError: 'oops' (broken_model.py, line 2)"),
        ("def build(): return nn.Linear(2, 2), lambda batch: batch[0]", "the example raised TypeError"),
        ("def build(): return nn.Linear(2, 2), torch.zeros(2)", "the example is a Tensor; return the model, or the"),
        ("def build(): return 3", "returned a int; return the model, or the model and its example"),
        (
            "def build(): return nn.Linear(2, 2), lambda batch: {'input': torch.zeros(batch, 2)}",
            "no repeated blocks were found in this model, so none is computed again in backward; give "
            "--checkpoint-every 0",
        ),
        ("raise RuntimeError('no')", "importing it raised RuntimeError: no (broken_model.py, line 2)"),
    ],
)
def test_what_a_users_function_does_wrong_is_one_line(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_model.py").write_text(f"import torch; from torch import nn\n{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_model", raising=False)
    result = invoke("--function", "broken_model:build")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --function broken_model:build")
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_ds_config_of_gradients_on_disk_or_in_a_block_says_that_they_are_not() -> None:
    """DeepSpeed's format has no place for either: read back, such gradients are on the host, or lie where they come."""
    found = zf.plan(params=1e9, world_size=4, disk=10**13, contiguous_gradients=True)
    (on_disk,) = [each for each in found.offloaded if each.point.tiers.gradients is Tier.NVME]
    named = nearest_named(found.model, found.machine, on_disk)
    assert named.point.tiers == Tiers(Tier.NVME, Tier.HOST, Tier.NVME)
    assert not named.point.contiguous_gradients
    assert "no gradients on disk and no block of gradients; the nearest is" in named_costs(on_disk, named)
    plain = predict(found.model, found.machine, named.point)
    assert nearest_named(found.model, found.machine, plain) is plain
    assert named_costs(plain, plain) == ""
