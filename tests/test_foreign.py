"""Checkpoints of FSDP2 and DeepSpeed: every bit is read, and nothing in them is run."""

from __future__ import annotations

import importlib.util
import itertools
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import foreign_runs
import zerofold as zf
from ranks import RankPool
from zerofold.checkpoint.contents import CheckpointError, Contents, OptimizerContents, Stored, numel
from zerofold.checkpoint.foreign import read_foreign
from zerofold.checkpoint.ondisk import Box, Boxed
from zerofold.checkpoint.positions import by_name, named
from zerofold.engine import Engine
from zerofold.loss_scale import LossScale, LossScaler


def whole(stored: Stored) -> Tensor:
    return stored.read(0, numel(stored)).view(stored.shape)


def check(contents: Contents, truth: dict[str, Tensor]) -> None:
    """Every tensor and every moment, whole and in odd ranges."""
    states = {} if not contents.optimizers else contents.optimizers[0].states
    for key, expected in truth.items():
        name, _, state = key.partition("/")
        stored = states[name][state] if state else contents.tensor(name)
        assert stored is not None, key
        assert (tuple(stored.shape), stored.dtype) == (tuple(expected.shape), expected.dtype), key
        flat = expected.reshape(-1)
        for start, stop in odd_ranges(flat.numel()):
            assert torch.equal(stored.read(start, stop), flat[start:stop]), (key, start, stop)


def odd_ranges(count: int) -> Iterator[tuple[int, int]]:
    generator = random.Random(count)
    yield from [(0, count), (0, 0), (count, count)]
    for _ in range(12):
        start, stop = sorted((generator.randint(0, count), generator.randint(0, count)))
        yield start, stop


# torch.distributed.checkpoint


@pytest.fixture(scope="module")
def fsdp(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("fsdp")
    return folder, ranks(2, foreign_runs.write_dcp, str(folder))[0]


def test_fsdp2_by_names(fsdp: tuple[Path, dict[str, Tensor]]) -> None:
    folder, truth = fsdp
    contents = read_foreign(folder / "named")
    assert contents is not None
    check(contents, truth)
    assert [group["weight_decay"] for group in contents.optimizers[0].groups] == [0.1, 0.0]
    assert contents.optimizers[0].groups[1]["params"] == ["up.bias", "norm.weight", "norm.bias", "down.bias"]
    assert contents.plain == {"extra": {"step": 3, "seen": {"tokens": [1, 2]}}, "scheduler": {"last_epoch": 3}}


def test_fsdp2_by_numbers(fsdp: tuple[Path, dict[str, Tensor]]) -> None:
    """Of `optimizer.state_dict()`, with the model and the optimizer one dict further down."""
    folder, truth = fsdp
    contents = read_foreign(folder / "numbered")
    assert contents is not None
    # The model's head is tied to its tokens, and the file has it twice; its buffer looks like a bias.
    optimizer = contents.optimizers[0]
    assert "down.weight" in optimizer.states
    order = ["tokens.weight", "up.weight", "down.weight", "up.bias", "norm.weight", "norm.bias", "down.bias"]
    contents.optimizers[0] = named(optimizer, order)
    check(contents, truth)


def test_fsdp2_weights_alone(fsdp: tuple[Path, dict[str, Tensor]]) -> None:
    folder, truth = fsdp
    contents = read_foreign(folder / "weights")
    assert contents is not None
    check(contents, {name: tensor for name, tensor in truth.items() if "/" not in name})
    assert contents.optimizers == []
    assert contents.plain == {}


@pytest.mark.parametrize("form", ["flattened", "accelerate"])
def test_fsdp2_as_others_save_it(fsdp: tuple[Path, dict[str, Tensor]], form: str) -> None:
    folder, truth = fsdp
    contents = read_foreign(folder / form)
    assert contents is not None
    check(contents, truth)
    groups = contents.optimizers[0].groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert groups[1]["params"] == ["up.bias", "norm.weight", "norm.bias", "down.bias"]
    assert contents.plain == ({"extra": {"train_state": {"step": 3}}} if form == "flattened" else {})


def test_tensors_cut_along_another_dimension(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks(2, foreign_runs.write_boxes, str(tmp_path))[0]
    contents = read_foreign(tmp_path)
    assert contents is not None
    check(contents, {"cut": expected})


@dataclass(frozen=True)
class InMemory:
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, start: int, stop: int) -> Tensor:
        return self.tensor.reshape(-1)[start:stop].clone()


def test_boxes_cut_along_all_dimensions() -> None:
    whole = torch.randn(5, 7, 4)
    cuts = [(0, 2, 5), (0, 3, 4, 7), (0, 1, 4)]
    boxes = []
    for ends in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
        piece = InMemory(whole[tuple(slice(low, high) for low, high in ends)].contiguous())
        boxes.append(Box(tuple(low for low, _ in ends), piece.shape, partial(_itself, piece)))
    stored = Boxed((5, 7, 4), torch.float32, tuple(boxes), where="memory")
    check(Contents("memory", {"whole": stored}), {"whole": whole})
    with pytest.raises(CheckpointError, match="do not cover the tensor"):
        Boxed((5, 7, 4), torch.float32, tuple(boxes[1:]), where="memory").read(0, 20)


def _itself(piece: InMemory) -> InMemory:
    return piece


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    torch.distributed.checkpoint.save({"model": {"a": torch.arange(1 << 20)}}, checkpoint_id=tmp_path, no_dist=True)
    contents = read_foreign(tmp_path)
    assert contents is not None
    before = bytes_read()
    assert contents.tensors["a"].read(500_000, 500_010).tolist() == list(range(500_000, 500_010))
    assert bytes_read() - before < 20_000


def bytes_read() -> int:
    path = Path("/proc/self/io")
    if not path.exists():
        pytest.skip("the system does not count what a process reads")
    return int(path.read_text().split("rchar:")[1].split()[0])


# Optimizers by number


def test_numbers_get_names_where_only_one_fits() -> None:
    model = {"a": (7, 5), "b": (3,), "c": (3,), "d": (5, 7)}
    states = {0: {"m": torch.ones(7, 5)}, 1: {"m": torch.ones(5, 7)}, 2: {"m": torch.ones(3)}}
    groups = [{"params": [0, 1]}, {"params": [2]}]
    optimizer = by_name(groups, states, model)
    assert [group["params"] for group in optimizer.groups] == [["a", "d"], ["#2"]]
    assert list(named(optimizer, ["a", "d", "c"]).states) == ["a", "d", "c"]
    with pytest.raises(CheckpointError, match="same parameter groups"):
        named(optimizer, ["a", "d"])


def test_numbers_of_a_whole_model_are_certain() -> None:
    model = dict.fromkeys("abcd", (4, 4))
    states = {number: {"m": torch.ones(4, 4)} for number in range(4)}
    assert list(by_name([{"params": [0, 1, 2, 3]}], states, model).states) == list("abcd")


# DeepSpeed


def check_deepspeed(folder: Path, truth: dict[str, Tensor]) -> OptimizerContents:
    contents = read_foreign(folder)
    assert contents is not None
    check(contents, truth)
    assert contents.aliases == {"head.weight": "tokens.weight"}
    assert contents.plain["extra"] == {**foreign_runs.CLIENT_STATE, "global_steps": 3, "global_samples": 24}
    assert contents.plain["scheduler"] == {"last_batch_iteration": 2}
    [optimizer] = contents.optimizers
    assert optimizer.kind == "AdamW"
    assert [group["weight_decay"] for group in optimizer.groups] == [0.1, 0.0]
    assert sorted(optimizer.groups[0]["params"]) == ["down.weight", "tokens.weight", "up.weight"]
    # DeepSpeed's wrapper of stage 0 takes a step of its own before the first, to make the states.
    assert {whole(state["step"]).item() for state in optimizer.states.values()} == {4 if "stage0" in str(folder) else 3}
    return optimizer


@pytest.mark.parametrize("run", [*foreign_runs.DEEPSPEED_RUNS, "universal"])
def test_deepspeed_as_recorded(run: str, tmp_path: Path) -> None:
    folder, truth = foreign_runs.recorded(run, tmp_path)
    check_deepspeed(folder, truth)
    [tag] = folder.glob("global_step*")
    check_deepspeed(tag, truth)


@pytest.fixture(scope="module")
def deepspeed_ranks() -> Iterator[RankPool]:
    """Ranks of their own: DeepSpeed leaves changes behind in a process."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed; the recorded checkpoints are tested")
    pool = RankPool(keep=1)
    yield pool
    pool.close()


@pytest.mark.parametrize("run", ["stage1", "stage2-round-robin", "stage3-subgroups"])
def test_deepspeed_as_installed(deepspeed_ranks: RankPool, tmp_path: Path, run: str) -> None:
    truth = deepspeed_ranks(2, foreign_runs.write_deepspeed, str(tmp_path), run)[0]
    check_deepspeed(tmp_path, truth)


def test_deepspeed_flat_without_stages(tmp_path: Path) -> None:
    """fp16 at stage 0: one flat master, and the loss scale beside it. Written here, as it needs a GPU."""
    flat, moment = torch.randn(17), torch.randn(17)
    module = {"a": flat[:15].view(3, 5).half(), "ticks": torch.arange(4.0), "b": flat[15:].half()}
    optimizer = {
        "dynamic_loss_scale": True,
        "cur_scale": 4096.0,
        "cur_iter": 12,
        "last_overflow_iter": 4,
        "optimizer_state_dict": {
            "state": {0: {"step": torch.tensor(5.0), "exp_avg": moment}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "fp32_groups_flat": [flat],
    }
    saved = {"module": module, "buffer_names": ["ticks"], "optimizer": optimizer, "global_steps": 8, "skipped_steps": 2}
    torch.save(saved, tmp_path / "mp_rank_00_model_states.pt")
    contents = read_foreign(tmp_path)
    assert contents is not None
    truth = {"a": flat[:15].view(3, 5), "b": flat[15:], "ticks": module["ticks"]}
    check(
        contents, truth | {"a/exp_avg": moment[:15].view(3, 5), "b/exp_avg": moment[15:], "b/step": torch.tensor(5.0)}
    )
    assert contents.optimizers[0].groups == [{"lr": 0.1, "params": ["a", "b"]}]
    scaler = LossScaler(LossScale())
    scaler.load_state_dict(contents.plain["scaler"])
    assert scaler.state_dict() == contents.plain["scaler"]
    assert (scaler.value, scaler.skipped, contents.plain["scaler"]["clean"]) == (4096.0, 2, 7)
    optimizer["fp32_groups_flat"] = [flat[:8], flat[8:]]
    torch.save(saved, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="save it again with ZeRO stage 1"):
        read_foreign(tmp_path)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    folder, _ = foreign_runs.recorded("stage1", tmp_path)
    [tag] = folder.glob("global_step*")
    last = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    last.rename(tag / "kept")
    with pytest.raises(CheckpointError, match="2 ranks wrote it: copy the whole checkpoint"):
        read_foreign(folder)
    (tag / "kept").rename(tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match="no file of rank 1"):
        read_foreign(folder)


def test_weights_that_are_nowhere_are_missed(tmp_path: Path) -> None:
    """Without its optimizer files, stage 1 still has the weights that the module computed with; stage 3 has none."""
    for run in ("stage1-bf16", "stage3"):
        folder, _ = foreign_runs.recorded(run, tmp_path)
        for file in folder.glob("*/*_optim_states.pt"):
            file.unlink()
    contents = read_foreign(tmp_path / "stage1-bf16")
    assert contents is not None
    assert contents.tensors["up.weight"].dtype == torch.bfloat16
    assert contents.optimizers == []
    with pytest.raises(CheckpointError, match="no weights for.*copy the whole checkpoint"):
        read_foreign(tmp_path / "stage3")


def test_model_parallel_files_are_refused(tmp_path: Path) -> None:
    folder, _ = foreign_runs.recorded("stage1", tmp_path)
    [tag] = folder.glob("global_step*")
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="tensor parallelism.*ds_to_universal"):
        read_foreign(folder)


def test_a_folder_of_neither_is_nothing(tmp_path: Path) -> None:
    assert read_foreign(tmp_path) is None
    (tmp_path / "latest").write_text("../elsewhere")
    assert read_foreign(tmp_path) is None


def load_into_zerofold(folder: Path, stage: int) -> dict[str, Tensor]:
    """All that a sharded model has after loading, under the names that the truth has."""
    torch.manual_seed(7)
    model = foreign_runs.Tiny()
    optimizer = torch.optim.AdamW(foreign_runs.groups_of(model), lr=0.5)
    model, optimizer = zf.prepare(model, optimizer, stage=stage)
    zf.load(model, optimizer, folder)
    found = {name: zf.full(p) for name, p in model.named_parameters()} | {"ticks": model.ticks.clone()}
    names = {id(face): name for name, face in Engine.of(model).faces().values()}
    for group in optimizer.param_groups:
        assert group["lr"] != 0.5
        for parameter in group["params"]:
            for key, value in optimizer.state[parameter].items():
                found[f"{names[id(parameter)]}/{key}"] = zf.full(value)
    model(foreign_runs.indices()).backward()
    optimizer.step()
    zf.close(model)
    return found


@pytest.mark.parametrize("form", ["named", "numbered"])
def test_a_run_of_fsdp2_goes_on_here(ranks: RankPool, fsdp: tuple[Path, dict[str, Tensor]], form: str) -> None:
    folder, truth = fsdp
    for stage, found in ((stage, ranks(3, load_into_zerofold, folder / form, stage)[0]) for stage in (1, 3)):
        assert found["tokens.weight/exp_avg"].any(), stage
        for name in found:
            assert torch.equal(found[name], truth[name]), (stage, name)


@pytest.mark.parametrize("run", ["stage1", "stage3"])
def test_a_run_of_deepspeed_goes_on_here(ranks: RankPool, tmp_path: Path, run: str) -> None:
    folder, truth = foreign_runs.recorded(run, tmp_path)
    found = ranks(3, load_into_zerofold, folder, 3)[0]
    for name in found:
        if not name.endswith("/step"):
            assert torch.equal(found[name], truth[name]), name
