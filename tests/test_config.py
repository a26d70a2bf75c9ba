"""A DeepSpeed config: read, resolved, or refused in one line that names the key, the value and the fix."""

from __future__ import annotations

import base64
import copy
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.config_table import page
from torch import nn

from zerofold.config import ConfigError, Settings, read, resolve
from zerofold.config.keys import Section
from zerofold.config.keys_training import TABLE
from zerofold.configured import shard_arguments
from zerofold.offload.wishes import read_offload

CPU = torch.device("cpu")
FIXTURES = sorted((Path(__file__).parent / "data" / "ds_configs").glob("*.json"))

BASE: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_num_steps": 500}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": 2e8,
        "overlap_comm": True,
    },
}


def changed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """BASE with values at dotted paths put in; ... takes one out."""
    config = copy.deepcopy(BASE)
    for path, value in changes.items():
        *sections, name = path.split(".")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
        if value is ...:
            section.pop(name)
        else:
            section[name] = value
    return config


def resolved(config: Mapping[str, Any], *, world: int = 2, device: torch.device = CPU, **more: Any) -> Settings:
    return resolve(config, world=world, device=device, **more)


# What is changed, and words of the message beyond the key of the first change.
MUTATIONS: list[tuple[dict[str, Any], list[str]]] = [
    # Misspellings, at every depth.
    ({"zero_optimisation": {"stage": 2}}, ['{"stage": 2}', 'did you mean "zero_optimization"?']),
    ({"train_batchsize": 32}, ["32", 'did you mean "train_batch_size"?']),
    ({"train_micro_batch_size_per_device": 4}, ["4", 'did you mean "train_micro_batch_size_per_gpu"?']),
    ({"gradient_clip": 1.0}, ["1.0", 'did you mean "gradient_clipping"?']),
    ({"fp16.enable": True}, ["true", 'did you mean "enabled"?']),
    ({"fp16.initial_scale": 16}, ["16", 'did you mean "initial_scale_power"?']),
    ({"zero_optimization.reduce_bucketsize": 1}, ["1", 'did you mean "reduce_bucket_size"?']),
    ({"zero_optimization.offload_optimizer.devise": "cpu"}, ['"cpu"', 'did you mean "device"?']),
    ({"optimizer.parameters": {}}, ["{}", 'did you mean "params"?']),
    ({"optimizer.params.learning_rate": 1e-3}, ["0.001", 'did you mean "lr"?']),
    ({"optimizer.params.weight_decai": 0.1}, ["0.1", 'did you mean "weight_decay"?']),
    ({"optimizer.type": "AdanW"}, ['"AdanW"', 'did you mean "AdamW"?']),
    ({"scheduler.type": "WarmupLr"}, ['"WarmupLr"', 'did you mean "WarmupLR"?']),
    ({"scheduler.params.warmup_steps": 10}, ["10", 'did you mean "warmup_num_steps"?']),
    ({"_comment": "for two ranks"}, ['"for two ranks"', "no key of this name", "write comments as //"]),
    ({"comment": "for two ranks"}, ['"for two ranks"', "no key of this name", "write comments as //"]),
    ({"stage": 2}, ["2", 'did you mean "zero_optimization.stage"?']),
    ({"zero_optimization.gradient_clipping": 1.0}, ["1.0", 'did you mean "gradient_clipping"?']),
    ({"cuda_visible_devices": 0}, ["0 is given", "take it out; no name here is like it"]),
    ({"checkpoint.tag_validate": "Warn"}, ['"Warn"', 'did you mean "tag_validation"?']),
    # Wrong types.
    ({"train_batch_size": "32"}, ['"32"', "a whole number", "without quotes"]),
    ({"train_batch_size": 32.5}, ["32.5", "a whole number, at least 1"]),
    ({"train_batch_size": True}, ["true", "a whole number"]),
    ({"gradient_accumulation_steps": [4]}, ["[4]", "a whole number"]),
    ({"zero_optimization.stage": "2"}, ['"2"', "a whole number from 0 to 3"]),
    ({"zero_optimization.stage": True}, ["true", "a whole number from 0 to 3"]),
    ({"zero_optimization.reduce_bucket_size": "2e8"}, ['"2e8"', "without quotes"]),
    ({"zero_optimization.overlap_comm": "true"}, ['"true"', "give true or false"]),
    ({"zero_optimization.overlap_comm": 1}, ["1", "give true or false"]),
    ({"zero_optimization": 2}, ["2", 'write {"stage": 2}']),
    ({"fp16": True}, ["true", 'write {"enabled": true}']),
    ({"fp16.enabled": 1}, ["1", "give true or false"]),
    ({"optimizer": "AdamW"}, ['"AdamW"', 'write {"type": "AdamW"']),
    ({"optimizer.params": [0.1]}, ["[0.1]", "a section"]),
    ({"optimizer.params.betas": 0.9}, ["0.9", "a list of 2, each a number"]),
    ({"optimizer.params.lr": "3e-5"}, ['"3e-5"', "without quotes"]),
    ({"scheduler.params.warmup_num_steps": 2.5}, ["2.5", "a whole number, at least 0"]),
    ({"steps_per_print": "often"}, ['"often"', "a whole number, at least 1; leave it out for never"]),
    # Wrong ranges.
    ({"zero_optimization.stage": 4}, ["4", "a whole number from 0 to 3"]),
    ({"zero_optimization.stage": -1}, ["-1", "a whole number from 0 to 3"]),
    ({"gradient_clipping": -1.0}, ["-1.0", "a number, at least 0"]),
    ({"gradient_clipping": math.nan}, ["NaN", "a number, at least 0"]),
    ({"train_micro_batch_size_per_gpu": 0}, ["0", "at least 1"]),
    ({"fp16.loss_scale": -1}, ["-1", "a number, at least 0"]),
    ({"fp16.loss_scale_window": 0}, ["0", "at least 1"]),
    ({"fp16.initial_scale_power": 128}, ["128", "from 0 to 127"]),
    ({"fp16.min_loss_scale": 2e5}, ["above the first scale, 2**16", "raise fp16.initial_scale_power"]),
    ({"optimizer.params.lr": -0.1}, ["-0.1", "a number, at least 0"]),
    ({"optimizer.params.betas": [0.9, 1.5]}, ["[0.9, 1.5]", "at most 1"]),
    ({"communication_data_type": "fp8"}, ['"fp8"', "one of fp32, fp16, bf16"]),
    ({"checkpoint.tag_validation": "Error"}, ['"Error"', "one of Ignore, Warn, Fail"]),
    ({"zero_optimization.offload_optimizer.device": "gpu"}, ['"gpu"', "one of cpu, nvme, none"]),
    ({"scheduler.params.warmup_type": "cosine"}, ['"cosine"', "one of log, linear"]),
    # Batch arithmetic.
    ({"train_batch_size": 30}, ["30 is not micro 4 x accumulation 4 x 2 ranks = 32", "leave one of"]),
    (
        {"train_batch_size": 30, "gradient_accumulation_steps": ...},
        ["30 is not divisible by micro 4 x 2 ranks = 8", "24 or 32"],
    ),
    ({"train_batch_size": 6, "train_micro_batch_size_per_gpu": ...}, ["6", "accumulation 4 x 2 ranks = 8", "use 8"]),
    # Contradictions.
    ({"fp16.enabled": True, "bf16.enabled": True}, ["contradicts bf16.enabled", "switch one of"]),
    ({"zero_optimization.offload_param.device": "cpu"}, ['"cpu"', "stage 2", "set zero_optimization.stage to 3"]),
    (
        {"zero_optimization.offload_optimizer.device": "cpu", "zero_optimization.stage": 0},
        ['"cpu"', "stage 0", "1, 2 or 3"],
    ),
    ({"zero_optimization.cpu_offload": False}, ["false", "contradicts", "keep one of the two"]),
    ({"zero_optimization.zero_hpz_partition_size": 2}, ["2 needs stage 3"]),
    ({"zero_optimization.mics_shard_size": 3, "zero_optimization.stage": 3}, ["3 does not divide 2 ranks", "1, 2"]),
    ({"communication_data_type": "fp16", "fp16.enabled": False}, ['"fp16"', "use bf16 or fp32"]),
    ({"data_types.param_dtype": "bf16"}, ['"bf16"', "contradicts fp16.enabled"]),
    ({"bf16.bf16_master_weights_and_grads": True}, ["true", "switch bf16.enabled on"]),
    ({"torch_autocast.dtype": "float16", "torch_autocast.enabled": True}, ['"float16"', "fp16.enabled"]),
    ({"bf16.bf16_optimizer_states": True}, ["true", "bf16_master_weights_and_grads"]),
    ({"bfloat16": {"enabled": False}}, ["false", "an old name of bf16", "keep one"]),
    ({"zero_optimization.offload_optimizer": {"device": "nvme"}}, ["nvme_path: null", "give a folder"]),
    (
        {"zero_optimization.offload_optimizer": {"device": "nvme", "nvme_path": "/disk", "ratio": 0.5}},
        ["0.5 is a part for the host", "set the device to cpu"],
    ),
    ({"zero_optimization.offload_optimizer.ratio": 1.5}, ["1.5", "at most 1"]),
    # Still to come.
    ({"tensor_parallel": {"autotp_size": 4}}, ['{"autotp_size": 4}', "mpu=zf.mesh(tensor=...)"]),
    ({"pipeline": {"stages": 2}}, ['{"stages": 2}', "zf.pipeline with zf.prepare"]),
    ({"sequence_parallel_size": 2}, ["2", "sequence_parallel=True"]),
    ({"seq_parallel_communication_data_type": "bf16"}, ['"bf16"', "leave the key out"]),
    # Never.
    ({"amp": {"enabled": True}}, ['{"enabled": true}', "use bf16.enabled or fp16.enabled"]),
    ({"autotuning": {"enabled": True}}, ["use zerofold plan"]),
    ({"elasticity": {"enabled": True}}, ["give train_batch_size"]),
    ({"data_efficiency": {"enabled": True}}, ["in the data loader"]),
    ({"curriculum_learning": {"enabled": True}}, ["in the data loader"]),
    (
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
        ["quantise it after"],
    ),
    ({"progressive_layer_drop": {"enabled": True}}, ["in its forward"]),
    ({"sparse_attention": {"mode": "fixed"}}, ["flex_attention"]),
    ({"zero_optimization.zero_quantized_weights": True}, ["true", "communication_data_type"]),
    ({"optimizer.type": "OneBitAdam"}, ['"OneBitAdam" is refused', "use AdamW"]),
    ({"optimizer.type": "Lamb"}, ['"Lamb" is refused', "use AdamW"]),
    ({"optimizer.params.max_grad_norm": 1.0}, ["1.0", "use gradient_clipping"]),
    ({"optimizer.params.bias_correction": False}, ["false", "always corrects the bias"]),
    ({"gradient_allreduce_op": "sum"}, ['"sum" is refused', "use mean"]),
    ({"compile": {"deepcompile": True}}, ["torch.compile each block"]),
    # "auto" where there is nothing to find it from.
    ({"zero_optimization.stage": "auto"}, ['"auto" cannot be found by itself', "from 0 to 3"]),
    ({"fp16.loss_scale": "auto"}, ['"auto" cannot be found by itself', "a number"]),
    ({"steps_per_print": "auto"}, ['"auto" cannot be found by itself', "a whole number"]),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
        ["total_num_steps", "at least 0"],
    ),
    # Something missing.
    ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, ["total_num_steps: nothing is given", "add"]),
    ({"optimizer.type": ...}, ["null", 'such as "AdamW"']),
]


def name_of(changes: dict[str, Any]) -> str:
    return ",".join(f"{path}={value}"[:40] for path, value in changes.items() if value is not ...)


@pytest.mark.parametrize(("changes", "words"), MUTATIONS, ids=[name_of(changes) for changes, _ in MUTATIONS])
def test_a_wrong_config_is_refused_in_one_line(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        resolved(changed(changes))
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(next(iter(changes))), message
    assert ";" in message or ":" in message.removeprefix(next(iter(changes)) + ":"), message
    for word in words:
        assert word in message, message


def test_there_are_enough_of_them() -> None:
    assert len(MUTATIONS) >= 50
    assert resolved(BASE).stage == 2  # and nothing is wrong before


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_configs_of_public_documentation_resolve(path: Path) -> None:
    config = read(path)
    as_given = copy.deepcopy(config)
    batch = None if isinstance(config.get("train_batch_size"), int) else 4
    settings = resolved(config, batch=batch)
    assert config == as_given
    assert settings.train_batch == settings.micro_batch * settings.accumulate * 2
    assert "auto" not in list(_values(settings.resolved))
    given_autos = {key for key, value in _paths(config) if value == "auto"}
    assert given_autos <= {note.key for note in settings.notes}
    # What was resolved means the same when it is read again.
    again = resolved(json.loads(json.dumps(settings.resolved)))
    assert (again.stage, again.precision, again.optimizer, again.scheduler, again.clip, again.buffer_bytes) == (
        settings.stage,
        settings.precision,
        settings.optimizer,
        settings.scheduler,
        settings.clip,
        settings.buffer_bytes,
    )


def test_there_are_ten_fixtures_and_each_has_its_origin() -> None:
    assert len(FIXTURES) > 10
    origins = (FIXTURES[0].parent / "README.md").read_text()
    assert all(f"`{path.name}`" in origins for path in FIXTURES)


def _paths(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _values(section: Mapping[str, Any]) -> Iterator[Any]:
    return (value for _, value in _paths(section))


# Reading.


def test_comments_and_trailing_commas_but_not_inside_strings() -> None:
    text = """{
        // a line
        "csv_monitor": {"output_path": "http://x/*y*/ # z, }",}, /* two
        lines */ "train_batch_size": 4, # the last
    }"""
    assert read(text) == {"csv_monitor": {"output_path": "http://x/*y*/ # z, }"}, "train_batch_size": 4}
    assert read(r'{"a": "\" // b"}') == {"a": '" // b'}


def test_from_a_file_a_path_a_dict_text_and_base64(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(BASE))
    encoded = base64.urlsafe_b64encode(json.dumps(BASE).encode()).decode()
    for source in (str(path), path, BASE, json.dumps(BASE), encoded):
        assert read(source) == BASE
    taken = read(BASE)
    taken["zero_optimization"]["stage"] = 3
    assert BASE["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n  "a": 1\n  "b": 2\n}', ["line 3, column 3", '"b\\": 2']),
        ('{"a": True}', ["line 1, column 7", "true, false and null"]),
        ('{"a": 1 /* b}', ["line 1, column 9", "no end"]),
        ('{"a": {"b": 1, "b": 2}}', ['"b" is given twice', "as 1 and as 2", "keep one"]),
        ('[{"a": 1}]', ["not a section"]),
        ("no_such_file.json", ['"no_such_file.json" is no file', "give the path"]),
    ],
)
def test_what_cannot_be_read_says_where(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        read(text)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


def test_a_folder_and_a_number_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder; give the path of the JSON file in it"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="the config is 3; give a path"):
        read(3)  # type: ignore[arg-type]


# Resolving.


@pytest.mark.parametrize(
    ("given", "batch", "expected"),
    [
        ((32, 4, 4), None, (32, 4, 4)),
        ((32, 4, None), None, (32, 4, 4)),
        ((32, None, 4), None, (32, 4, 4)),
        ((None, 4, 4), None, (32, 4, 4)),
        ((32, None, None), None, (32, 16, 1)),
        ((32, None, None), 2, (32, 2, 8)),
        ((None, 4, None), 8, (8, 4, 1)),
        (("auto", "auto", 4), 8, (64, 8, 4)),
        (("auto", "auto", "auto"), None, (2, 1, 1)),
        ((None, None, None), None, (2, 1, 1)),
        ((None, None, 3), None, (6, 1, 3)),
    ],
)
def test_two_batch_numbers_give_the_third(given: Any, batch: int | None, expected: tuple[int, int, int]) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {key: value for key, value in zip(keys, given, strict=True) if value is not None}
    settings = resolved(config, batch=batch)
    assert (settings.train_batch, settings.micro_batch, settings.accumulate) == expected
    assert [settings.resolved[key] for key in keys] == list(expected)
    train, micro, steps = expected
    assert settings.table()[0] == f"train_batch_size {train} = {micro} per rank x {steps} accumulated x 2 ranks"


def test_precision_of_every_kind() -> None:
    fp16 = resolved(
        changed({"fp16.hysteresis": 3, "fp16.min_loss_scale": 2, "communication_data_type": "fp16"})
    ).precision
    assert fp16 is not None
    assert (fp16.parameters, fp16.reduction) == (torch.float16, torch.float16)
    assert (fp16.scaling.static, fp16.scaling.first, fp16.scaling.hysteresis, fp16.scaling.minimum) == (
        None,
        65536,
        3,
        2,
    )
    static = resolved(changed({"fp16.loss_scale": 128})).precision
    assert static is not None
    assert static.scaling.static == 128
    only = {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "bf16"}}
    bf16 = resolved({**only, "bf16": {"enabled": True}}).precision
    assert bf16 is not None
    assert (bf16.parameters, bf16.accumulation, bf16.master) == (torch.bfloat16, torch.bfloat16, torch.float32)
    states = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    small = resolved({"zero_optimization": {"stage": 2}, "bf16": states}).precision
    assert small is not None
    assert (small.master, small.moments, small.accumulation) == (torch.bfloat16,) * 3
    assert resolved({"fp16": {"enabled": False}}).precision is None


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [
        (torch.float32, "cpu", (False, False)),
        (torch.bfloat16, "cpu", (False, True)),
        (torch.float16, "cpu", (True, False)),
        (torch.float32, "xpu", (False, True)),
        (torch.float16, "xpu", (True, False)),
    ],
)
def test_auto_precision_follows_the_model_then_the_machine(dtype: torch.dtype, device: str, expected: Any) -> None:
    config = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    settings = resolved(config, device=torch.device(device), model=nn.Linear(2, 2, dtype=dtype))
    assert (settings.resolved["fp16"]["enabled"], settings.resolved["bf16"]["enabled"]) == expected
    assert {note.key for note in settings.notes} >= {"fp16.enabled", "bf16.enabled"}
    alone = resolved({"fp16": {"enabled": "auto"}}, device=torch.device("xpu"))
    assert alone.resolved["fp16"]["enabled"] is True


def test_auto_sizes_rates_and_lengths() -> None:
    model = nn.Linear(2, 2)
    model.config = type("Config", (), {"hidden_size": 600})()  # type: ignore[assignment]
    config = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "prefetch_bucket_size": "auto"},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_max_lr", "warmup_min_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
    }
    settings = resolved(config, model=model, steps=2000)
    assert settings.resolved["zero_optimization"]["reduce_bucket_size"] == 360_000
    assert settings.buffer_bytes == 4 * 360_000
    assert settings.optimizer is not None
    assert settings.scheduler is not None
    assert settings.optimizer.params == {"lr": 0.5, "momentum": 0}
    assert settings.scheduler.params == {
        "warmup_max_lr": 0.5,
        "warmup_min_lr": 0.0,
        "warmup_num_steps": 20,
        "total_num_steps": 2000,
    }


@pytest.mark.parametrize(("elements", "expected"), [(5e8, 16 * 2**20), (1e6, 4_000_000), (0, 2**20), (1000, 2**20)])
def test_bucket_sizes_are_bounds_of_one_buffer(elements: float, expected: int) -> None:
    assert resolved({"zero_optimization": {"stage": 2, "reduce_bucket_size": elements}}).buffer_bytes == expected


def test_groups_of_ranks() -> None:
    hpz = resolved({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, world=4)
    mics = resolved({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, world=4)
    assert (hpz.stage, hpz.group, mics.stage, mics.group) == ("hpz", 2, "hsdp", 2)
    assert resolved({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}}).group is None


def test_old_names_and_forms() -> None:
    old = {
        "zero_optimization": {"stage": 3, "cpu_offload": True, "stage3_gather_fp16_weights_on_model_save": True},
        "bfloat16": {"enabled": True},
        "fp32_allreduce": True,
    }
    settings = resolved(old)
    assert settings.precision is not None
    assert (settings.precision.parameters, settings.precision.reduction) == (torch.bfloat16, torch.float32)
    assert settings.offload == {"optimizer": "host"}
    assert settings.gather_16bit_on_save
    assert resolved({"zero_optimization": True}).stage == 1
    assert resolved({"zero_optimization": True}).resolved["zero_optimization"] == {"stage": 1}


NVME = {"device": "nvme", "nvme_path": "/disk", "pipeline_read": True, "buffer_count": 24}


@pytest.mark.parametrize(
    ("optimizer", "parameters", "expected"),
    [
        ({"device": "cpu"}, {}, {"optimizer": "host"}),
        ({"device": "cpu", "ratio": 0.4}, {}, {"optimizer": 0.4}),
        ({"device": "none", "ratio": 0.4}, {"device": "none"}, {}),
        ({"device": "cpu", "ratio": 1}, {"device": "cpu"}, {"optimizer": "host", "parameters": "host"}),
        (NVME, {"device": "cpu"}, {"optimizer": "nvme", "parameters": "host", "path": "/disk"}),
        (NVME, {"device": "nvme", "nvme_path": "/b"}, {"optimizer": "nvme", "parameters": "nvme", "path": "/disk"}),
        ({}, {"device": "cpu"}, {"optimizer": "host", "parameters": "host"}),
        ({}, {"device": "nvme", "nvme_path": "/b"}, {"optimizer": "nvme", "parameters": "nvme", "path": "/b"}),
    ],
)
def test_offload_is_what_shard_takes(optimizer: Any, parameters: Any, expected: dict[str, Any]) -> None:
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": optimizer, "offload_param": parameters}}
    settings = resolved(config)
    assert settings.offload == resolved(config, device=torch.device("cuda")).offload == expected
    assert shard_arguments(settings, None).get("offload", {}) == expected
    read_offload(expected or None)
    told = "\n".join(settings.table())
    assert not expected or all(f"{key!r}: {value!r}" in told for key, value in expected.items())
    assert ("go along" in told) == (optimizer == {})
    assert ("one folder holds all states: /disk" in told) == (optimizer is NVME and "nvme_path" in parameters)


def test_features_that_are_switched_off_are_no_matter() -> None:
    off = {name: {"enabled": False} for name in ("amp", "autotuning", "elasticity", "curriculum_learning", "comet")}
    off |= {"data_efficiency": {"enabled": False, "data_sampling": {"enabled": True}}, "pipeline": {"stages": "auto"}}
    off |= {"amp": {"enabled": "auto", "opt_level": "auto"}, "sparse_gradients": False, "tensor_parallel": {}}
    assert "auto" not in list(_values(resolved({**BASE, **off}).resolved))


def test_what_public_configs_write_and_older_versions_took() -> None:
    """Seen in files of Accelerate and Axolotl, and in what older Trainers fill in."""
    settings = resolved(
        changed(
            {
                "scheduler.params.warmup_num_steps": 0,
                "zero_optimization.stage3_gather_16bit_weights_on_model_save": "auto",
                "compile": {"disable": False, "backend": "inductor"},
                "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"},
            }
        )
    )
    assert settings.gather_16bit_on_save
    assert settings.autocast is torch.bfloat16
    assert any(line.startswith("compile (disable false") and "engine.compile()" in line for line in settings.table())
    assert resolved(changed({"torch_autocast": {"enabled": False, "dtype": "fp16"}})).autocast is None


def test_sizes_that_trl_writes_beside_their_section() -> None:
    given = {"train_batch_size": 4, "zero_optimization": {"stage": 3}, "zero_optimization.reduce_bucket_size": 64}
    settings = resolved(given)
    assert any("as with DeepSpeed" in note.text for note in settings.notes)
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage"):
        resolved({"train_batch_size": 4, "zero_optimization.stage": 3})


def test_what_is_off_what_is_absent_and_what_accelerate_writes() -> None:
    settings = resolved({"gradient_clipping": 0.0, "steps_per_print": math.inf, "scheduler": None})
    assert (settings.clip, settings.steps_per_print, settings.scheduler) == (None, None, None)
    absent = resolved({})
    assert absent.clip == 1.0
    assert any(line.startswith("gradient_clipping: not given") for line in absent.table())


def test_monitoring() -> None:
    config = {
        "csv_monitor": {"enabled": True, "output_path": "out", "job_name": "run"},
        "wandb": {"enabled": False, "project": "p"},
        "comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_gather"]},
        "flops_profiler": {"enabled": True, "profile_step": 5, "module_depth": -1},
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": None},
        "checkpoint": {"tag_validation": "FAIL"},
    }
    settings = resolved(config)
    assert [(monitor.kind) for monitor in settings.monitors] == ["csv_monitor"]
    assert settings.comms_logger is not None
    assert settings.comms_logger.operations == ("all_gather",)
    assert settings.flops_profiler is not None
    assert settings.flops_profiler.profile_step == 5
    assert settings.tag_validation == "Fail"
    assert settings.activation_checkpointing["partition_activations"] is True
    assert settings.activation_checkpointing["cpu_checkpointing"] is False
    mapped = {note.key for note in settings.notes if note.fate == "mapped"}
    assert mapped == {"activation_checkpointing.partition_activations"}


# The table.


def _keys(section: Section, path: str = "") -> Iterator[str]:
    for name, spec in section.keys.items():
        yield f"{path}{name}"
        if isinstance(spec, Section):
            yield from _keys(spec, f"{path}{name}.")


def test_every_key_of_deepspeed_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    known = set(_keys(TABLE))
    for path, model in {
        "zero_optimization.": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer.": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param.": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.leaf_module.": DeepSpeedZeroLeafModuleConfig,
        "fp16.": DeepSpeedFP16Config,
        "bf16.": DeepSpeedBF16Config,
        "comms_logger.": CommsLoggerConfig,
        "csv_monitor.": CSVConfig,
        "tensorboard.": TensorBoardConfig,
        "wandb.": WandbConfig,
        "compile.": CompileConfig,
    }.items():
        for name, field in model.model_fields.items():
            assert f"{path}{name}" in known
            assert field.alias is None or f"{path}{field.alias}" in known


def test_every_top_level_key_that_deepspeed_looks_for_is_in_the_table() -> None:
    spec = pytest.importorskip("importlib.util").find_spec("deepspeed")
    if spec is None:
        pytest.skip("DeepSpeed is not installed")
    folder = Path(spec.origin).parent / "runtime"
    names = dict.fromkeys(
        line.split("=")[1].split("#")[0].strip().strip("'\"")
        for line in (folder / "constants.py").read_text().splitlines()
        if line[:1].isupper() and " = " in line and not line.split("=")[0].strip().endswith(("_DEFAULT", "_FORMAT"))
    )
    known = {path.rpartition(".")[2] for path in _keys(TABLE)}
    # No keys of their own: routes, values, attributes, what is at home in parameters, and bf16's old name.
    others = {"train", "eval", "predict", "encode", "mean", "sum", "max_grad_norm", "ds_pipe_replicated", "ddp_bf16"}
    others |= {"data_parallel_group", "global_rank", "bfloat16", "dtype", "lower_precision_safe_modules"}
    missing = {name for name in names if name.isidentifier() and name not in known | others}
    assert {name for name in missing if name.islower()} == set()


def test_the_page_of_all_keys_is_that_of_the_code() -> None:
    found = (Path(__file__).parent.parent / "docs" / "config.md").read_text()
    assert found == page(), "make it anew: python -m tests.config_table > docs/config.md"
