"""Pickles and files of torch.save: what is in them is read, nothing in them is run, damage is one kind of error."""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import foreign_runs
from zerofold.checkpoint.contents import CheckpointError, numel
from zerofold.checkpoint.foreign import read_foreign
from zerofold.checkpoint.torch_file import load_pickle, load_torch
from zerofold.checkpoint.unpickle import plain


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
            stored.read(0, numel(stored))
        for optimizer in contents.optimizers:
            for state in optimizer.states.values():
                for value in state.values():
                    if hasattr(value, "read"):
                        value.read(0, numel(value))


def test_damage_is_one_kind_of_error(tmp_path: Path) -> None:
    """Bits flipped and ends cut off at random places of every file: it reads, or it is a CheckpointError."""
    generator = random.Random(1)
    model = foreign_runs.Tiny()
    optimizer = torch.optim.AdamW(foreign_runs.groups_of(model))
    model(torch.arange(4)).backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.distributed.checkpoint.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    folders = [tmp_path / "dcp"]
    folders += [foreign_runs.recorded(run, tmp_path)[0] for run in ("stage0-bf16", "stage1", "stage3-subgroups")]
    found = 0
    for folder in folders:
        for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"):
            good = file.read_bytes()
            for trial in range(30):
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
