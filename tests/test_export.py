"""zf.export and zf.full_tensors: whole tensors, streamed, the same bits that the model has."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, load_model
from tests.ranks import raised
from tests.test_load_folder import GPT2, LLAMA, WithBuffer, weights_of
from torch import nn
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import zerofold as zf

BUILDS: dict[str, Any] = {"llama": (LlamaForCausalLM, LLAMA), "gpt2": (GPT2LMHeadModel, GPT2)}


def trained(name: str, stage: Any, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After a step, so that whole parameters are on their way when something reads them."""
    build, config = BUILDS[name]
    torch.manual_seed(5)
    model: nn.Module = build(config)
    model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage=stage, **options)
    tokens = torch.arange(12).view(1, 12)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def exported(folder: Path, name: str, stage: Any, dtype: Any, options: dict[str, Any]) -> list[str]:
    """Names whose bits are not the model's, by Hugging Face's own reader; and what is wrong with the folder."""
    model, _ = trained(name, stage, options)
    zf.export(model, folder, dtype=dtype, max_file_bytes=30_000)
    expected = {key: whole if dtype is None else whole.bfloat16() for key, whole in weights_of(model).items()}
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    found = dict(loaded.named_parameters())
    wrong = [key for key in expected if key not in found or not torch.equal(found[key].detach(), expected[key])]
    if name == "llama" and loaded.lm_head.weight is not loaded.model.embed_tokens.weight:
        wrong.append("not tied")
    tokens = torch.arange(12).view(1, 12)  # the model goes on
    model(input_ids=tokens, labels=tokens).loss.backward()
    zf.close(model)
    dist.barrier()  # others still read the folder
    return wrong


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("stage", ["dp", 0, 1, 2, 3], ids=str)
def test_hugging_face_loads_the_same_bits(ranks: Any, tmp_path: Path, stage: Any, dtype: Any) -> None:
    name = "gpt2" if stage in (0, 2) else "llama"
    assert ranks(2, exported, tmp_path / "out", name, stage, dtype, {}) == [[]] * 2
    assert sorted(os.listdir(tmp_path)) == ["out"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {file.name: load_file(file) for file in (tmp_path / "out").glob("*.safetensors")}
    assert len(files) > 1
    assert {key: file for file, held in files.items() for key in held} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for held in files.values() for t in held.values())
    assert "lm_head.weight" not in index["weight_map"]


@pytest.mark.parametrize(
    ("stage", "options"),
    [(3, {"precision": "bf16"}), (2, {"precision": "bf16"}), (0, {"precision": "bf16"}), (3, {"cut": "whole"})],
)
def test_masters_and_owners(ranks: Any, tmp_path: Path, stage: Any, options: dict[str, Any]) -> None:
    assert ranks(2, exported, tmp_path / "out", "llama", stage, None, options) == [[]] * 2


def mixed_model(folder: Path) -> bool:
    """Frozen, tied, compiled, without elements, and buffers; to safetensors' own reader, in one file."""
    torch.manual_seed(5)
    model = WithBuffer()
    model.layers[2].weight = model.layers[0].weight
    model.layers[1].requires_grad_(False)
    model.nothing = nn.Parameter(torch.empty(0, 3))
    whole = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    model.layers[1] = torch.compile(model.layers[1])  # type: ignore[assignment]
    zf.shard(model, stage=3, precision=zf.Precision(parameters=torch.bfloat16, keep=["norm"]))
    zf.export(model, folder)
    names = set(whole) - {"layers.2.weight"}
    streamed = {key for key, _ in zf.full_tensors(model)}
    trainable = {key for key, _ in zf.full_tensors(model, trainable_only=True)}
    zf.close(model)
    fresh = WithBuffer()
    fresh.layers[2].weight = fresh.layers[0].weight
    fresh.nothing = nn.Parameter(torch.empty(0, 3))
    load_model(fresh, folder / "model.safetensors")
    held = fresh.state_dict()
    exact = all(torch.equal(held[key], tensor) for key, tensor in whole.items() if "layers.1" not in key)
    frozen = torch.equal(held["layers.1.weight"], whole["layers.1.weight"].bfloat16().float())
    left_out = {"layers.1.weight", "layers.1.bias"} | {key for key in names if "running" in key or "batches" in key}
    return exact and frozen and streamed == names and trainable == names - left_out


def test_frozen_tied_and_compiled_parts_and_buffers(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, mixed_model, tmp_path / "out") == [True, True]
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


def t5(folder: Path) -> bool:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, **sizes))
    zf.shard(model, stage=3)
    zf.export(model, folder)
    expected = weights_of(model)
    zf.close(model)
    loaded = dict(T5ForConditionalGeneration.from_pretrained(folder).named_parameters())
    return all(torch.equal(loaded[name].detach(), whole) for name, whole in expected.items())


def test_several_tied_names(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, t5, tmp_path / "out") == [True, True]


def adapters(folder: Path) -> tuple[bool, list[str]]:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(LlamaForCausalLM(LLAMA), LoraConfig(r=4, target_modules=["q_proj"]))
    names = set(model.state_dict()) - {"base_model.model.lm_head.weight"}
    zf.shard(model, stage=3)
    zf.export(model, folder)
    zf.close(model)
    return set(load_file(folder / "model.safetensors")) == names, sorted(os.listdir(folder))


def test_adapters_are_exported_as_they_are(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, adapters, tmp_path / "out") == [(True, ["model.safetensors"])] * 2


def streamed(stage: int, precision: str | None) -> dict[str, Any]:
    """All tensors, their bytes on the wire, and the model after a loop that was left early."""
    model, optimizer = trained("llama", stage, {"precision": precision})
    expected = weights_of(model)
    sent = zf.ledger(model).snapshot()["comm_bytes"].get("broadcast", 0)
    half = dict(zf.full_tensors(model, dtype=torch.bfloat16))
    sent = zf.ledger(model).snapshot()["comm_bytes"].get("broadcast", 0) - sent
    whole = dict(zf.full_tensors(model))
    for number, _ in enumerate(zf.full_tensors(model)):
        if number == 2:
            break
    tokens = torch.arange(12).view(1, 12)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    kept = all(torch.equal(whole[name], expected[name]) for name in expected)  # not an alias of what a step changes
    zf.close(model)
    return {
        "names": set(whole) == set(half) == set(expected),
        "bits": kept and all(torch.equal(half[name], expected[name].bfloat16()) for name in expected),
        "sent": sent,
        "psi": sum(tensor.numel() for tensor in expected.values()),
    }


@pytest.mark.parametrize(("stage", "precision"), [(3, None), (3, "bf16"), (2, None), (2, "bf16")])
def test_tensors_are_streamed_whole(ranks: Any, stage: int, precision: str | None) -> None:
    for found in ranks(2, streamed, stage, precision):
        assert found["names"]
        assert found["bits"]
        gathers = stage == 3 or precision is not None
        assert found["sent"] == (found["psi"] * 2 / 2 if gathers else 0)  # bf16, from the other of two ranks


def small() -> nn.Module:
    torch.manual_seed(5)
    return zf.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), stage=3)


def refused(folder: Path, limit: int | None) -> tuple[str, bool]:
    """The error, and whether another export works after it."""
    model = small()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        error = raised(zf.export, model, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    zf.export(model, folder.parent / "other")
    zf.close(model)
    return error, (folder.parent / "other" / "model.safetensors").exists()


def test_a_disk_that_takes_no_more_leaves_nothing_behind(ranks: Any, tmp_path: Path) -> None:
    for error, works in ranks(2, refused, tmp_path / "out", 20_000):
        assert error.startswith("CheckpointError")
        assert "out could not be written: File too large (after 16,640 of 33,280 bytes" in error
        assert works
    assert sorted(os.listdir(tmp_path)) == ["other"]


@pytest.mark.parametrize("held", ["notes.txt", "foreign.safetensors", "folder", "file"])
def test_what_is_there_is_never_overwritten(ranks: Any, tmp_path: Path, held: str) -> None:
    target = tmp_path / "out"
    if held == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        if held == "folder":
            (target / held).mkdir()
        elif held == "foreign.safetensors":
            from safetensors.torch import save_file

            save_file({"a": torch.ones(2)}, target / held)
        else:
            (target / held).write_text("mine")
    for error, works in ranks(2, refused, target, None):
        assert error.startswith("CheckpointError")
        assert "is a file" in error if held == "file" else f"holds {held}" in error
        assert works


def twice(folder: Path) -> None:
    model = small()
    zf.export(model, folder)
    if dist.get_rank() == 0:
        (folder / "tokenizer.json").write_text("{}")
    with zf.full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        error = raised(zf.export, model, folder)
        assert "inside full_params" in error
    zf.export(model, folder, max_file_bytes=1)
    zf.close(model)


def test_an_earlier_export_is_replaced_and_what_lies_beside_it_stays(ranks: Any, tmp_path: Path) -> None:
    ranks(2, twice, tmp_path / "out")
    names = sorted(os.listdir(tmp_path / "out"))
    assert names[:4] == [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert names[4:] == ["model.safetensors.index.json", "tokenizer.json"]
    held = {key: t for name in names[:4] for key, t in load_file(tmp_path / "out" / name).items()}
    assert all(tensor.unique().tolist() == [1.0] for tensor in held.values())
    assert os.listdir(tmp_path) == ["out"]


def wrong_arguments(folder: Path) -> list[str]:
    model = small()
    errors = [
        raised(zf.export, model, folder, dtype="int4"),
        raised(zf.export, model, folder, dtype=torch.int8),
        raised(zf.export, model, folder, max_file_bytes=0),
        raised(zf.export, nn.Linear(2, 2), folder),
    ]
    zf.close(model)
    return errors


def test_wrong_arguments_are_told(ranks: Any, tmp_path: Path) -> None:
    errors, _ = ranks(2, wrong_arguments, tmp_path / "out")
    for error, words in zip(errors, ["'int4' is not known", "not a floating", "positive", "not sharded"], strict=True):
        assert words in error
    assert os.listdir(tmp_path) == []
