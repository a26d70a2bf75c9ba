"""load=: weights from a Hugging Face folder, each rank reading only what it keeps."""

from __future__ import annotations

import json
import os
import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.ranks import raised
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import zerofold as zf
from zerofold.checkpoint.contents import CheckpointError, Stored, numel
from zerofold.checkpoint.open import open_checkpoint
from zerofold.checkpoint.safetensors_file import read_safetensors
from zerofold.launch import init_ranks, run_ranks

SIZES: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}
LLAMA = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    tie_word_embeddings=True,
    **SIZES,
)
GPT2 = GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=16, **SIZES)
STAGES: list[Any] = ["dp", 0, 1, 2, 3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved by Hugging Face's own code: one file, several with an index, bf16, and a base model without its head."""
    root = tmp_path_factory.mktemp("folders")
    torch.manual_seed(3)
    llama, gpt2 = LlamaForCausalLM(LLAMA), GPT2LMHeadModel(GPT2)
    llama.save_pretrained(root / "llama")
    llama.save_pretrained(root / "llama_many", max_shard_size="20KB")
    gpt2.save_pretrained(root / "gpt2")
    gpt2.transformer.save_pretrained(root / "gpt2_base")
    llama.to(torch.bfloat16).save_pretrained(root / "llama_bf16")  # type: ignore[arg-type]
    return {path.name: path for path in root.iterdir()}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: zf.full(p) for name, p in model.named_parameters()}


def on_meta(build: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = build(config)
    return model


def trained_from(folder: Path, stage: Any, meta: bool, options: dict[str, Any]) -> tuple[bool, bool, float]:
    """Whether the weights and buffers are those that Hugging Face reads, and the loss after a step."""
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    build = type(expected)
    model = on_meta(build, expected.config) if meta else build(expected.config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zf.prepare(model, optimizer, stage=stage, load=folder, **options)
    named = dict(expected.named_parameters())
    same = all(torch.equal(named[name].detach(), whole) for name, whole in weights_of(model).items())
    buffers = all(torch.equal(a, b) for a, b in zip(expected.buffers(), model.buffers(), strict=True))
    tokens = torch.arange(12).view(1, 12)
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    zf.close(model)
    return same, buffers, float(loss)


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_a_model_on_the_meta_device_gets_the_weights_of_the_folder(
    ranks: Any, folders: dict[str, Path], stage: Any
) -> None:
    (loss,) = {found[2] for found in ranks(2, trained_from, folders["llama"], 0, False, {})}
    for name in ("llama_many", "llama"):
        for same, buffers, trained in ranks(2, trained_from, folders[name], stage, True, {}):
            assert same
            assert buffers
            assert trained == loss


@pytest.mark.parametrize(
    ("name", "stage", "meta", "options"),
    [
        ("gpt2", 3, True, {}),
        ("gpt2", 2, False, {}),
        ("gpt2_base", 3, True, {}),  # tensors without the prefix "transformer."
        ("llama", 3, True, {"precision": "bf16"}),
        ("llama", 0, False, {"precision": "bf16"}),
        ("llama_bf16", 1, True, {"precision": "bf16"}),
        ("llama_bf16", 3, True, {"cut": "whole"}),
        ("llama", 2, True, {"cut": "whole", "precision": "bf16"}),
    ],
)
def test_other_models_files_and_precisions(
    ranks: Any, folders: dict[str, Path], name: str, stage: Any, meta: bool, options: dict[str, Any]
) -> None:
    if name == "gpt2_base":  # Hugging Face needs the class that has a head, and its config names the other
        config = json.loads((folders[name] / "config.json").read_text())
        (folders[name] / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    for same, buffers, _ in ranks(4, trained_from, folders[name], stage, meta, options):
        assert same
        assert buffers


@dataclass
class Counted:
    """A stored tensor that counts what is read of it."""

    stored: Stored
    counts: list[int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def read(self, start: int, stop: int) -> Tensor:
        self.counts.append((stop - start) * self.dtype.itemsize)
        return self.stored.read(start, stop)


def bytes_read(folder: Path, stage: Any, groups: int | None = None) -> tuple[int, int]:
    contents = open_checkpoint(folder)
    counts: list[int] = []
    contents.tensors = {name: Counted(stored, counts) for name, stored in contents.tensors.items()}
    model = on_meta(LlamaForCausalLM, LLAMA)
    mesh = None if groups is None else init_device_mesh("cpu", (groups, 4 // groups))
    zf.shard(model, stage=stage, load=contents, mesh=mesh)
    expected = load_file(folder / "model.safetensors")
    assert all(torch.equal(expected[name], whole) for name, whole in weights_of(model).items())
    zf.close(model)
    return sum(counts), sum(numel(stored) * stored.dtype.itemsize for stored in contents.tensors.values())


@pytest.mark.parametrize(("stage", "groups"), [(0, None), (1, None), (3, None), ("hsdp", 2), ("hpz", 2)])
def test_each_rank_reads_its_share_and_the_disk_is_read_once(
    ranks: Any, folders: dict[str, Path], stage: Any, groups: int | None
) -> None:
    found = ranks(4, bytes_read, folders["llama"], stage, groups)
    ((total,),) = ({total for _, total in found},)
    assert sum(read for read, _ in found) == total
    assert all(read <= total / 4 * 1.1 for read, _ in found)


WIDTH, LAYERS = 2048, 6
UNIT = 4 * (WIDTH * WIDTH + WIDTH)


def peaks(folder: Path) -> tuple[int, int, int]:
    """Bytes by which this process grew at most while it loaded and while it exported, and those of the shards."""

    def load(width: int, path: Path | None) -> nn.Module:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        return zf.shard(model, stage=3, units=nn.Linear, load=path)

    def memory(field: str) -> int:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
        return int(line.split()[1]) * 1024

    with init_ranks("cpu"):
        model = load(16, None)
        zf.export(model, folder / "first")  # imports, sockets, threads and code are there
        zf.close(model)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = memory("VmRSS")
        model = load(WIDTH, folder)
        loading = memory("VmHWM") - before
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        zf.export(model, folder / "second")
        exporting = memory("VmHWM") - before
        shards = zf.ledger(model).snapshot()["state_bytes"]["parameters"]
        zf.close(model)
        return loading, exporting, shards


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's count of resident memory")
def test_loading_takes_no_whole_unit_and_exporting_no_whole_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for loading, exporting, shards in run_ranks(peaks, 2, tmp_path):
        assert shards == pytest.approx(LAYERS * UNIT / 2, rel=0.01)
        assert shards < loading <= shards + 0.8 * UNIT  # half of a unit on its way from the file, and sockets
        assert exporting <= 2.5 * UNIT  # one tensor, sent and received; the whole model takes 6


def lora(folder: Path) -> tuple[bool, list[float]]:
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        base = LlamaForCausalLM(LLAMA)
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zf.shard(model, load=folder)
    expected = load_file(folder / "model.safetensors")
    found = weights_of(model)
    start = "base_model.model.model.layers.0.self_attn."
    same = torch.equal(
        found[f"{start}q_proj.base_layer.weight"], expected["model.layers.0.self_attn.q_proj.weight"]
    ) and torch.equal(found[f"{start}k_proj.weight"], expected["model.layers.0.self_attn.k_proj.weight"])
    zf.close(model)
    return same, [t.abs().max().item() for name, t in found.items() if "lora_B" in name]


def test_adapters_around_a_base_model(ranks: Any, folders: dict[str, Path]) -> None:
    assert ranks(2, lora, folders["llama"]) == [(True, [0.0, 0.0])] * 2


def fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5)


def new_head(folder: Path, stage: int) -> tuple[list[float], bool, list[str]]:
    model = on_meta(LlamaForSequenceClassification, LLAMA)

    def init(module: nn.Module) -> None:
        fill(module)
        if hasattr(module, "inv_freq"):
            model._init_weights(module)  # type: ignore[operator]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zf.shard(model, stage=stage, load=folder, init=init)
    found, expected = weights_of(model), load_file(folder / "model.safetensors")
    same = all(torch.equal(found[name], values) for name, values in expected.items())
    zf.close(model)
    return found["score.weight"].unique().tolist(), same, [str(w.message) for w in caught]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_new_head_gets_its_values_from_init(ranks: Any, folders: dict[str, Path], stage: int) -> None:
    (values, same, said), (_, _, silent) = ranks(2, new_head, folders["llama"], stage)
    assert values == [0.5]
    assert same
    assert "1 parameter(s) are not in" in said[0]
    assert said[0].endswith("get their values from init=: score.weight")
    assert silent == []


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.norm(x)
        return y


def buffers_from(folder: Path, meta: bool) -> list[list[float]]:
    model = on_meta(lambda _: WithBuffer(), None) if meta else WithBuffer()

    def init(module: nn.Module) -> None:
        if isinstance(module, WithBuffer):
            module.passing.fill_(1.0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zf.shard(model, load=folder, init=init)
    found = [buffer.flatten().tolist() for buffer in model.buffers()]
    zf.close(model)
    return found


@pytest.mark.parametrize("meta", [True, False])
def test_buffers_are_loaded(ranks: Any, tmp_path: Path, meta: bool) -> None:
    saved = WithBuffer()
    assert isinstance(saved.norm.running_mean, Tensor)
    saved.norm.running_mean.fill_(3.0)
    save_file(saved.state_dict(), tmp_path / "weights.safetensors")  # any one file of this kind
    expected = [[1.0, 1.0], [3.0] * 8, [1.0] * 8, [0.0]]
    for found in ranks(2, buffers_from, tmp_path, meta):
        assert found == expected


def attempt(folder: Path, build: Any = LlamaForCausalLM, config: Any = LLAMA, stage: int = 3) -> str:
    return raised(zf.shard, on_meta(build, config), stage=stage, load=folder)


def test_what_does_not_fit_is_named(ranks: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    wide = LlamaConfig(**{**LLAMA.to_dict(), "intermediate_size": 96})
    weights = load_file(folders["llama"] / "model.safetensors")
    for name, change in (("short", {"model.norm.weight": None}), ("int8", {"model.norm.weight": torch.int8})):
        (tmp_path / name).mkdir()
        kept = {key: t.to(change.get(key, t.dtype)) for key, t in weights.items() if change.get(key, t.dtype)}
        save_file(kept, tmp_path / name / "model.safetensors")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    for case, words in (
        ((folders["llama"], LlamaForCausalLM, wide), ["mlp.gate_proj.weight' has shape (96, 32)", "(64, 32)"]),
        ((folders["llama"], GPT2LMHeadModel, GPT2), ["none of the model's parameters", "another model's?"]),
        ((tmp_path / "short",), ["'model.norm.weight' is not in", "1 of 20 parameters", "pass init="]),
        ((tmp_path / "int8",), ["'model.norm.weight' is torch.float32", "torch.int8"]),
        ((tmp_path / "pickled",), ["save_pretrained(new_folder)"]),
        ((tmp_path / "empty",), ["no checkpoint that is known here", "it holds nothing"]),
        ((tmp_path / "nowhere",), ["does not exist"]),
    ):
        for error in ranks(2, attempt, *case):
            assert all(word in error for word in words), error


def base_from_head_file(folder: Path) -> tuple[bool, list[str]]:
    model = on_meta(GPT2Model, GPT2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zf.shard(model, load=folder / "model.safetensors")
    expected = load_file(folder / "model.safetensors")
    same = all(torch.equal(expected[f"transformer.{name}"], whole) for name, whole in weights_of(model).items())
    zf.close(model)
    return same, [str(w.message) for w in caught]


def test_a_base_model_takes_its_part_of_a_file_with_a_head(
    ranks: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    weights = load_file(folders["gpt2"] / "model.safetensors")
    save_file({**weights, "value_head.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (same, said), (_, silent) = ranks(2, base_from_head_file, tmp_path)
    assert same
    assert "holds 1 tensor(s) that the model has no use for: value_head.weight" in said[0]
    assert silent == []


def one_rank_cannot_read(folder: Path) -> str:
    contents = open_checkpoint(folder)
    if torch.distributed.get_rank() == 1:
        contents.tensors["model.norm.weight"] = Unreadable(contents.tensors["model.norm.weight"], [])
    return raised(zf.shard, on_meta(LlamaForCausalLM, LLAMA), load=contents)


class Unreadable(Counted):
    def read(self, start: int, stop: int) -> Tensor:
        raise CheckpointError("the disk is gone")


def test_what_one_rank_cannot_read_is_an_error_on_all(ranks: Any, folders: dict[str, Path]) -> None:
    first, second = ranks(2, one_rank_cannot_read, folders["llama"])
    assert first == "ValueError: rank 1 refused: CheckpointError: the disk is gone"
    assert second == "CheckpointError: the disk is gone"


def test_malformed_files_are_named_and_never_crash(tmp_path: Path) -> None:
    path, broken = tmp_path / "intact.safetensors", tmp_path / "broken.safetensors"
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.tensor([True]), "d": torch.ones(0, 2)}
    save_file(tensors, path)
    intact, generator, errors = path.read_bytes(), random.Random(0), list[str]()
    for number in range(600):
        data = bytearray(intact)
        if number % 3 == 0:
            del data[generator.randrange(len(data)) :]
        elif number % 3 == 1:
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        else:
            data[generator.randrange(200)] = generator.choice(b'0123456789[]{},:"\xff')
        broken.write_bytes(data)
        try:
            for stored in read_safetensors(broken).tensors.values():
                assert len(stored.read(0, numel(stored))) == numel(stored)
        except CheckpointError as error:
            errors.append(str(error))
    assert len(errors) > 400
    assert all(str(broken) in error for error in errors)


def header(entries: Any) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"abc", "too few"),
        ((2**60).to_bytes(8, "little") + b"{}", "its header is said to have"),
        (header(b"[" * 100_000), "not JSON"),
        (header([1]), "not a JSON object"),
        (header(b'{"a":1,"a":1}'), "twice"),
        (header({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}), "which is none"),
        (header({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}), "which is none"),
        (header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}), "of 0 that are there"),
        (header({"a": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 4]}}), "'Q4'"),
        (header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}) + b"xy", "hole"),
        (
            header({n: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} for n in "ab"}) + b"xy",
            "overlaps",
        ),
        (header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}) + b"xy", "the file at"),
    ],
)
def test_each_problem_of_a_header_is_told(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="no intact safetensors file") as caught:
        read_safetensors(tmp_path / "x.safetensors")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("[]", "not a JSON object"),
        ("{", "not JSON"),
        ('{"weight_map": {"a": 1}}', "weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "not in its folder"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "cannot be opened"),
        ('{"weight_map": {"b": "x.safetensors"}}', "has no tensor 'b'"),
    ],
)
def test_a_broken_index_is_told(tmp_path: Path, index: str, problem: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert problem in str(caught.value)


def test_a_numbered_file_that_is_missing_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="lacks model-00002-of-00002.safetensors"):
        open_checkpoint(tmp_path)
