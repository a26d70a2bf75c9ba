"""What can go wrong with a checkpoint: always noticed, said in one line, and what was there before stays as it was."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ranks import RankPool, raised
from tests.test_checkpoint import make, train, weights
from torch import nn

import zerofold as zf
from zerofold.checkpoint.commit import TEMPORARY
from zerofold.checkpoint.manifest import DIGEST, MANIFEST
from zerofold.checkpoint.native import verify_native
from zerofold.checkpoint.plan import Fill


def spoilings(file: Path, generator: random.Random) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every class of byte range of a file, flipped or cut."""
    data = file.read_bytes()
    size = len(data)
    header = 8 + int.from_bytes(data[:8], "little") if file.suffix == ".safetensors" else size // 2
    places = {"length": (0, 8), "header": (8, header), "data": (header, size), "end": (size - 8, size)}
    for place, (low, high) in places.items():
        for _ in range(6):
            at, bit = generator.randrange(low, max(low + 1, high)), 1 << generator.randrange(8)
            changed = bytearray(data)
            changed[min(at, size - 1)] ^= bit
            yield f"{place}: bit at {at} of {size}", lambda changed=changed: file.write_bytes(changed)  # type: ignore[misc]
        at = generator.randrange(low, max(low + 1, high))
        yield f"{place}: cut at {at}", lambda at=at: file.write_bytes(data[:at])  # type: ignore[misc]
        blank = data[:low] + bytes(high - low) + data[high:]
        if blank != data:
            yield f"{place}: zeros", lambda blank=blank: file.write_bytes(blank)  # type: ignore[misc]
    yield "longer", lambda: file.write_bytes(data + b"\0")
    yield "empty", lambda: file.write_bytes(b"")
    yield "gone", file.unlink


def spoil_everything(folder: Path) -> tuple[int, list[str]]:
    """How many ways were tried, and those that were not refused as they should be."""
    model, optimizer = make(0, stage=3)
    train(model, optimizer, 0, 1)
    zf.save(model, optimizer, folder, tag="only", extra={"numbers": torch.arange(5)})
    train(model, optimizer, 1, 2)
    before, tried, wrong = weights(model), 0, []
    generator = random.Random(0)
    for file in sorted((folder / "only").iterdir()):
        whole = file.read_bytes()
        for what, spoil in spoilings(file, generator):
            spoil()
            tried += 1
            try:
                zf.load(model, optimizer, folder / "only")
                wrong.append(f"{file.name}, {what}: loaded")
            except zf.CheckpointError as error:
                if file.name not in str(error) and "only" not in str(error):
                    wrong.append(f"{file.name}, {what}: {error}")
            except BaseException as error:
                wrong.append(f"{file.name}, {what}: {type(error).__name__} {error}")
            if not verify_native(folder / "only"):
                wrong.append(f"{file.name}, {what}: verified")
            file.write_bytes(whole)
    after = weights(model)
    if any(not torch.equal(before[name], after[name]) for name in before):
        wrong.append("the model was changed by a load that failed")
    zf.load(model, optimizer, folder / "only")
    zf.close(model)
    return tried, wrong


def test_every_kind_of_damage_is_noticed_and_changes_nothing(ranks: RankPool, tmp_path: Path) -> None:
    ((tried, wrong),) = ranks(1, spoil_everything, tmp_path)
    assert tried > 90
    assert wrong == []


def fall_back(folder: Path, damage: str) -> tuple[Any, list[str]]:
    model, optimizer = make(0, stage=3)
    for step in range(2):
        train(model, optimizer, step, step + 1)
        zf.save(model, optimizer, folder, tag=f"step-{step}", extra={"step": step})
    dist.barrier()
    newest = folder / "step-1"
    if dist.get_rank() == 0:
        if damage == "data":
            data = bytearray((newest / "rank-00001.safetensors").read_bytes())
            data[-1] ^= 1
            (newest / "rank-00001.safetensors").write_bytes(data)
        elif damage == "missing shard":
            (newest / "rank-00001.safetensors").unlink()
        elif damage == "no folder":
            shutil.rmtree(newest)
        elif damage == "latest":
            (folder / "latest").write_bytes(b"\xff\xfe../..")
        elif damage == "half written":
            os.rename(newest, folder / f"{TEMPORARY}step-1-elsewhere-1")
        elif damage == "moved aside":
            os.rename(newest, folder / ".replaced-step-1-5")
    dist.barrier()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        extra = zf.load(model, optimizer, folder)
    zf.close(model)
    return extra["step"], [str(each.message) for each in said]


@pytest.mark.parametrize(
    ("damage", "step", "message"),
    [
        ("data", 0, "rank-00001.safetensors is damaged: bytes 0 to"),
        ("missing shard", 0, "rank-00001.safetensors is missing"),
        ("no folder", 0, None),
        ("latest", 1, None),
        ("half written", 0, None),
        ("moved aside", 1, None),
    ],
)
def test_the_newest_whole_one_is_found(
    ranks: RankPool, tmp_path: Path, damage: str, step: int, message: str | None
) -> None:
    for rank, (found, said) in enumerate(ranks(2, fall_back, tmp_path, damage)):
        assert found == step
        if rank == 0 and message is not None:
            assert any(message in line and "Going on with" in line and "step-0" in line for line in said)


def misuse(case: str, folder: Path) -> None:
    model, optimizer = make(0, stage=3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    try:
        if case == "nothing there":
            zf.load(model, optimizer, folder / "none")
        if case == "a file":
            (folder / "file").write_text("text")
            zf.load(model, optimizer, folder / "file")
        if case == "foreign":
            (folder / "notes.txt").write_text("text")
            dist.barrier()
            zf.load(model, optimizer, folder)
        if case == "into a file":
            (folder / "file").write_text("text")
            zf.save(model, optimizer, folder / "file")
        if case == "tag":
            zf.save(model, optimizer, folder, tag="../up")
        if case == "keep":
            zf.save(model, optimizer, folder, keep=0)
        if case == "extra":
            zf.save(model, optimizer, folder, extra={"model": {"class": nn.Linear}})
        if case == "extra on one rank":
            zf.save(model, optimizer, folder, extra={"x": object()} if dist.get_rank() == 1 else {})
        if case == "optimizer":
            zf.save(model, "adam", folder)
        if case == "other optimizer":
            zf.save(model, torch.optim.SGD([nn.Parameter(torch.ones(3))]), folder)
        if case == "data":
            zf.save(model, optimizer, folder, data=[1, 2])
        train(model, optimizer, 0, 1)
        zf.save(model, optimizer, folder, tag="good")
        dist.barrier()
        if case == "newer":
            if dist.get_rank() == 0:
                body = json.loads((folder / "good" / MANIFEST).read_text())
                rewrite(folder / "good", {**body, "version": 99})
            dist.barrier()
            zf.load(model, optimizer, folder / "good")
        if case == "inside":
            zf.save(model, optimizer, folder / "good")
        if case == "scheduler":
            zf.load(model, optimizer, folder, scheduler=scheduler)
        if case == "position":
            zf.load(model, optimizer, folder, data=model)
        if case == "no states":
            zf.save(model, None, folder, tag="weights")
            zf.load(model, optimizer, folder / "weights")
        if case == "class":
            zf.close(model)
            model, optimizer = make(0, stage=3, kind=torch.optim.Adagrad)
            zf.load(model, optimizer, folder)
        if case in ("shape", "missing", "unexpected"):
            zf.close(model)
            width = 19 if case == "shape" else 18
            layers: list[nn.Module] = [nn.Embedding(31, width)] + ([nn.Linear(18, 18)] if case == "missing" else [])
            names = ["tokens", "extra"][: len(layers)]
            model = nn.ModuleDict(dict(zip(names, layers, strict=True)))
            model = zf.shard(model, stage=3)
            zf.load(model, None, folder)
        if case == "swapped":
            average = zf.EMA(model, decay=0.5)
            with average.swapped():
                zf.save(model, optimizer, folder)
        if case == "held":
            with zf.full_params(model):
                zf.load(model, optimizer, folder)
        if case == "saved while held":
            with zf.full_params(model):
                zf.save(model, optimizer, folder)
        raise AssertionError("nothing was raised")
    finally:
        zf.close(model)


def rewrite(folder: Path, body: dict[str, Any]) -> None:
    """Another manifest, with the digest that belongs to it."""
    text = json.dumps(body).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / DIGEST).write_text(f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n")


MISUSE = {
    "nothing there": "none does not exist: name the folder that zf.save was given",
    "a file": "file is no checkpoint that is known here (it is a single file)",
    "foreign": "is no checkpoint that is known here (it holds notes.txt): name what zf.save was given",
    "into a file": "file",
    "tag": "tag='../up' must be a plain name",
    "keep": "keep=0 must be a number of checkpoints of at least 1",
    "extra": "extra['model']['class'] is a type: checkpoints hold plain data",
    "extra on one rank": "extra['x'] is a object",
    "optimizer": "optimizer must be a torch.optim.Optimizer, several, or None",
    "other optimizer": "this SGD holds parameters that the model does not have",
    "data": "data: list has no state_dict()",
    "newer": "has format version 99, this zerofold reads up to 2: install a newer zerofold",
    "inside": "good is a checkpoint itself: name the folder around it",
    "scheduler": "holds the state of 0 scheduler(s), and there are 1 here",
    "position": "holds no position in the data: it was saved without data=",
    "no states": "weights holds no optimizer states: pass None",
    "class": "holds states of AdamW (exp_avg, exp_avg_sq, step), and Adagrad needs step, sum",
    "shape": "'tokens.weight' has shape (31, 19), in ",
    "missing": "has no 'extra.weight' (2 such tensor(s))",
    "unexpected": "holds, and the model does not have,",
    "swapped": "zf.save inside `with average.swapped()`",
    "saved while held": "zf.save inside `with zf.full_params(model)`",
    "held": "zf.load inside `with zf.full_params(model)`",
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_told_on_every_rank(ranks: RankPool, tmp_path: Path, case: str) -> None:
    for message in ranks(2, raised, misuse, case, tmp_path):
        assert MISUSE[case] in message
        assert "\n" not in message


def full_disk(folder: Path, background: bool) -> tuple[str, Any, list[str]]:
    model = zf.shard(nn.Sequential(*(nn.Linear(160, 160) for _ in range(4))), stage=3)  # 400 KB
    zf.save(model, None, folder, extra={"step": 1})
    filler = folder / "filler"
    if dist.get_rank() == 0:
        free = shutil.disk_usage(folder).free
        filler.write_bytes(bytes(free - 300_000))
    dist.barrier()
    try:
        if background:  # as if there had been room when it began
            with mock.patch("shutil.disk_usage", return_value=shutil._ntuple_diskusage(0, 0, 2**40)):
                zf.save(model, None, folder, background=True).wait()
        zf.save(model, None, folder)
        message = "nothing was raised"
    except zf.CheckpointError as error:
        message = str(error)
    dist.barrier()
    extra = zf.load(model, None, folder)
    zf.close(model)
    return message, extra, sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_leaves_the_older_checkpoint(ranks: RankPool, tmp_path: Path, background: bool) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        for message, extra, names in ranks(2, full_disk, tmp_path, background):
            assert ("cannot be written: the disk is full" if background else "bytes and the disk has") in message
            assert extra == {"step": 1}
            assert names == ["filler", "latest", "save-00000001"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in_a_save(folder: Path) -> str:
    model = zf.shard(torch.nn.Linear(16, 16), stage=3)
    zf.save(model, None, folder)
    if dist.get_rank() == 1:
        mock.patch("zerofold.checkpoint.files.os.fsync", die).start()
    try:
        zf.save(model, None, folder)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_dies_in_a_save_is_named_and_the_older_checkpoint_is_there(ranks: RankPool, tmp_path: Path) -> None:
    said, dead = ranks(2, dies_in_a_save, tmp_path, expect_error=True)
    assert "ProcessDied" in dead
    assert said.startswith(
        "CommError: rank 0: all_reduce of unit 'save' failed, because rank 1 does not answer any more"
    )
    assert verify_native(tmp_path) == []
    assert (tmp_path / "latest").read_text() == "save-00000001\n"


def unreadable_at_the_end(folder: Path) -> str:
    model = zf.shard(torch.nn.Linear(16, 16), stage=3)
    zf.save(model, None, folder)
    failing = mock.patch.object(Fill, "run", side_effect=OSError(errno.EIO, "Input/output error"))
    with failing if dist.get_rank() == 1 else nullcontext():
        message = raised(zf.load, model, None, folder)
    zf.load(model, None, folder)
    zf.close(model)
    return message


def test_a_disk_that_fails_half_way_is_told_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks(2, unreadable_at_the_end, tmp_path):
        assert message.startswith(f"CheckpointError: rank 1 could read only a part of {tmp_path / 'save-00000001'}")
        assert "load it again" in message
