"""Checkpoints of FSDP2 and DeepSpeed: every bit is read, and nothing in them is run."""

from __future__ import annotations

import importlib.util
import io
import itertools
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import foreign_runs
from ranks import RankPool
from zerofold.checkpoint.contents import CheckpointError, Contents, OptimizerContents, Stored, numel
from zerofold.checkpoint.foreign import read_foreign
from zerofold.checkpoint.ondisk import Box, Boxed, _blocks
from zerofold.checkpoint.positions import by_name, named
from zerofold.checkpoint.torch_file import load_pickle, load_torch
from zerofold.checkpoint.unpickle import plain
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


def test_a_range_is_divided_into_few_boxes() -> None:
    shape = (3, 4, 5)
    grid = torch.arange(60).view(shape)
    for start, stop in itertools.combinations(range(61), 2):
        blocks = list(_blocks(shape, start, stop))
        found = [
            grid[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1)
            for _, offsets, sizes in blocks
        ]
        assert torch.cat(found).tolist() == list(range(start, stop))
        assert len(blocks) <= 5


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


# Files that somebody made to harm


class Call:
    """Pickled, it asks the reader to call something."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced


def archive_of(pickled: bytes, **records: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in {"data.pkl": pickled, "byteorder": b"little", **records}.items():
            file.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def text(*strings: str) -> bytes:
    return b"".join(
        pickle.BINUNICODE + len(string.encode()).to_bytes(4, "little") + string.encode() for string in strings
    )


def name(module: str, attribute: str) -> bytes:
    return b"c" + f"{module}\n{attribute}\n".encode()


HARM = "touch {mark}"
HARMFUL: dict[str, tuple[Callable[[str], bytes], str]] = {
    "os.system": (lambda do: pickle.dumps(Call(os.system, do), 2), "posix.system"),
    "eval": (lambda do: pickle.dumps({"a": Call(eval, f"__import__('os').system('{do}')")}, 2), "builtins.eval"),
    "nested": (lambda do: pickle.dumps([Call(tuple, [Call(os.system, do)])], 2), "builtins.tuple"),
    "new style": (lambda do: pickle.dumps(Call(os.popen, do), 4), "os.popen"),
    "getattr": (lambda do: pickle.dumps(Call(getattr, "".__class__, "format"), 4), "builtins.getattr"),
    "dotted": (lambda do: b"\x80\x04" + text("torch", "os.system") + b"\x93" + text(do) + b"\x85R.", "torch.os.system"),
    "torch.load": (lambda do: pickle.dumps(Call(torch.load, do), 2), "torch.serialization.load"),
    "partial": (lambda do: b"\x80\x02" + name("functools", "partial") + b")R.", "functools.partial"),
    "rebuilt by a function": (
        lambda do: b"\x80\x02" + name("torch._tensor", "_rebuild_from_type_v2")
        + b"(" + name("os", "system") + name("torch", "Tensor") + text(do) + b"\x85NtR.",
        "os.system",
    ),
    "rebuilt without a storage": (
        lambda do: b"\x80\x02" + name("torch._utils", "_rebuild_tensor_v2") + b"(" + text(do) + b"K\x00))\x89NtR.",
        "damaged",
    ),
    "a call of data": (lambda do: b"\x80\x02" + text(do) + b")R.", "a call of"),
    "a call of a dtype": (lambda do: b"\x80\x02" + name("torch", "float32") + b")R.", "a call of"),
    "a call of a class's object": (lambda do: b"\x80\x02" + name("argparse", "Namespace") + b")R)R.", "a call of"),
    "fields for a function": (
        lambda do: b"\x80\x02" + name("torch", "Size") + b"}" + text("make", do) + b"sb.",
        "fields for",
    ),
    "fields for a dtype": (lambda do: b"\x80\x02" + name("torch", "float32") + b"}b.", "fields for"),
    "an ordered dict that calls": (
        lambda do: b"\x80\x02" + name("collections", "OrderedDict") + name("os", "system") + b"\x85R.",
        "os.system",
    ),
    "a default that calls": (
        lambda do: b"\x80\x02" + name("collections", "defaultdict") + name("os", "getcwd") + b"\x85R.",
        "os.getcwd",
    ),
    "a state that calls": (
        lambda do: b"\x80\x02" + name("argparse", "Namespace") + b")\x81" + name("os", "system") + text(do)
        + b"\x85Rb.",
        "os.system",
    ),
    "old instruction": (lambda do: b"(S'" + do.encode() + b"'\nios\nsystem\n.", "damaged"),
    "extension registry": (lambda do: b"\x80\x02\x82\x01.", "damaged"),
    "a key that never ends": (lambda do: b"\x80\x02})" + b"2\x86" * 60 + b"K\x01s.", "a key of type"),
    "a memo of gigabytes": (lambda do: b"\x80\x02Nr\xff\xff\xff\xff.", ""),
    "bytes of gigabytes": (lambda do: b"\x80\x04\x8e" + (2**40).to_bytes(8, "little") + b"x.", "damaged"),
    "a bytearray of gigabytes": (lambda do: b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b"x.", "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("trick", HARMFUL)
def test_nothing_is_run(trick: str, tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    make, refused = HARMFUL[trick]
    harmful = make(HARM.format(mark=mark))
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(harmful)
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "latest").write_text("global_step1")
    model = tmp_path / "global_step1" / "mp_rank_00_model_states.pt"
    model.write_bytes(archive_of(harmful))
    for folder, file in ((tmp_path / "dcp", tmp_path / "dcp" / ".metadata"), (tmp_path, model)):
        with pytest.raises(CheckpointError) as raised:
            read_foreign(folder)
        assert refused in str(raised.value)
        if refused:
            assert str(file) in str(raised.value)
    assert not mark.exists()


def test_a_table_entry_cannot_be_changed(tmp_path: Path) -> None:
    """State for an entry of the table would stay for the next file."""
    file = tmp_path / "size"
    file.write_bytes(b"\x80\x02" + name("torch", "Size") + b"(N}" + text("make", "x") + b"stb.")
    with pytest.raises(CheckpointError, match="fields for"):
        load_pickle(file)
    file.write_bytes(b"\x80\x02" + name("torch", "Size") + b"K\x03K\x04\x86\x85R.")
    assert load_pickle(file) == (3, 4)


def tensor_pickle(shape: tuple[int, ...], stride: tuple[int, ...], begin: int = 0) -> bytes:
    class Writer(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 4) if obj is Writer else None

    buffer = io.BytesIO()
    Writer(buffer, 2).dump(Call(torch._utils._rebuild_tensor_v2, Writer, begin, shape, stride, False, None))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("shape", "stride", "begin"),
    [((2**50,), (1,), 0), ((2**50,), (0,), 0), ((4,), (2,), 0), ((4,), (1,), 1), ((-1, -4), (1, 1), 0)]
    + [((4,), (-1,), 3), ((4,), (1, 1), 0), ((4,), (1,), -1), ((1,) * 2000, (1,) * 2000, 0), ((2**64,), (0,), 0)],
)
def test_absurd_tensors(shape: tuple[int, ...], stride: tuple[int, ...], begin: int, tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    file.write_bytes(archive_of(tensor_pickle(shape, stride, begin), **{"data/0": bytes(16)}))
    with pytest.raises(CheckpointError, match="does not fit into its storage"):
        load_torch(file)


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    saved = {
        "transposed": base.t(),
        "part": base[2:4, 1:3],
        "shared": base,
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "fp8": torch.arange(5.0).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "plain": {"bytes": b"\x00\xff", "set": {1, 2}, "none": None, "tuple": (1, [2.5, "x"]), "size": torch.Size([2])},
        "number": numpy.float64(2.5),
    }
    array = numpy.arange(6, dtype=">i4").reshape(2, 3).T
    torch.save({**saved, "array": array}, tmp_path / "a.pt")
    found = plain(load_torch(tmp_path / "a.pt"), "a.pt")
    assert found["array"].tolist() == array.tolist()
    for key, expected in saved.items():
        if isinstance(expected, Tensor):
            assert found[key].dtype == expected.dtype
            assert found[key].shape == expected.shape
            assert found[key].view(-1).tolist() == expected.detach().reshape(-1).tolist()
        else:
            assert found[key] == expected


def test_zip_tricks(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    pickled = tensor_pickle((4,), (1,))
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", bytes(16), zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed"):
        load_torch(file)
    file.write_bytes(archive_of(pickled, **{"data/0": bytes(12)}))
    with pytest.raises(CheckpointError, match="does not fit into its storage of 3 elements"):
        load_torch(file)
    file.write_bytes(archive_of(pickled))
    with pytest.raises(CheckpointError, match="no record data/0"):
        load_torch(file)


def test_dcp_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    torch.distributed.checkpoint.save({"model": {"a": torch.ones(3)}}, checkpoint_id=tmp_path / "a", no_dist=True)
    metadata = (tmp_path / "a" / ".metadata").read_bytes()
    (tmp_path / "a" / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(CheckpointError, match="outside of the checkpoint: refused"):
        read_foreign(tmp_path / "a")


# Files that were damaged


def read_all(folder: Path) -> None:
    contents = read_foreign(folder)
    if contents is not None:
        for stored in contents.tensors.values():
            whole(stored)
        for optimizer in contents.optimizers:
            for state in optimizer.states.values():
                for value in state.values():
                    if hasattr(value, "read"):
                        whole(value)


def test_damage_is_one_kind_of_error(fsdp: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """Bits flipped and ends cut off at random places of every file: it reads, or it is a CheckpointError."""
    generator = random.Random(1)
    folders = [shutil.copytree(fsdp[0] / "named", tmp_path / "named")]
    folders += [foreign_runs.recorded(run, tmp_path)[0] for run in ("stage0-bf16", "stage1", "stage3-subgroups")]
    found = 0
    for folder in folders:
        for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"):
            good = file.read_bytes()
            for trial in range(15):
                bad = bytearray(good)
                if trial % 4 == 0:
                    del bad[generator.randrange(len(bad)) :]
                for _ in range(trial % 3 + 1 if bad else 0):
                    bad[generator.randrange(len(bad))] ^= 1 << generator.randrange(8)
                file.write_bytes(bad)
                try:
                    read_all(folder)
                except CheckpointError:
                    found += 1
            file.write_bytes(good)
        read_all(folder)
    assert found > 100


def test_a_flipped_bit_of_a_weight_is_found(tmp_path: Path) -> None:
    """torch writes a checksum for each storage."""
    torch.save({"a": torch.ones(1000)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(torch.ones(1000).numpy().tobytes()) + 2000] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    stored = load_torch(tmp_path / "a.pt")["a"]
    with pytest.raises(CheckpointError, match="checksum"):
        stored.read(3, 7)
