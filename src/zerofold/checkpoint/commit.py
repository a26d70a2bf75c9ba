"""From a temporary folder to a checkpoint: by rank 0, in an order that leaves something whole at every moment."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from zerofold.checkpoint.contents import CheckpointError
from zerofold.checkpoint.files import reported
from zerofold.checkpoint.manifest import (
    LATEST,
    REPLACED,
    TEMPORARY,
    Entry,
    Manifest,
    age,
    candidates,
    is_checkpoint,
    sync_folder,
    write_durably,
)
from zerofold.checkpoint.native import files_of


def begin(path: Path, tag: str | None, nbytes: int) -> tuple[str, Path]:
    """The checkpoint's name and the temporary folder to write it to; remains of earlier saves are cleared away."""
    with reported(path):
        path.mkdir(parents=True, exist_ok=True)
        if is_checkpoint(path):
            raise CheckpointError(f"{path} is a checkpoint itself: name the folder around it, {path.parent}")
        for left in path.iterdir():
            if left.name.startswith(TEMPORARY) and _is_abandoned(left.name):
                shutil.rmtree(left, ignore_errors=True)
        free = shutil.disk_usage(path).free
        if free < nbytes:
            raise CheckpointError(
                f"{path}: the checkpoint needs {nbytes:,} bytes and the disk has {free:,} left. Earlier checkpoints "
                "are as they were; free some space, or keep fewer"
            )
        tag = tag or _next_tag(path)
        folder = path / f"{TEMPORARY}{tag}-{_here()}-{os.getpid()}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    return tag, folder


def check_tag(tag: str | None) -> None:
    if tag is not None and not (isinstance(tag, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", tag)):
        raise ValueError(f"tag={tag!r} must be a plain name, such as 'step-100' or 'best': it becomes a folder")
    if tag == LATEST:
        raise ValueError("tag='latest' is taken by the file that names the newest checkpoint: use another")


def _next_tag(path: Path) -> str:
    numbers = [age(folder)[0] for folder in candidates(path) if is_checkpoint(folder)]
    return f"save-{max(numbers, default=0) + 1:08d}"


def _here() -> str:
    return re.sub(r"[^A-Za-z0-9]", "", socket.gethostname()) or "host"


def _is_abandoned(name: str) -> bool:
    """Whether the process that wrote it is gone, as far as this machine can tell."""
    *_, host, process = name.split("-")
    if host != _here() or not process.isdigit():
        return False
    if int(process) == os.getpid():
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def commit(path: Path, tag: str, folder: Path, manifest: Manifest) -> Path:
    """All ranks have written: the temporary folder becomes the checkpoint, and then the latest one."""
    for file in files_of(manifest, folder):
        if not file.path.exists():
            raise CheckpointError(
                f"{file.path.name} was written by its rank and is not seen by rank 0: {path} must be on a file system "
                "that all ranks share"
            )
        file.check_size()
    manifest.write(folder)
    final, aside = path / tag, None
    with reported(final):
        if final.exists():
            aside = path / f"{REPLACED}{tag}-{time.time_ns()}"
            os.rename(final, aside)
        os.rename(folder, final)
        sync_folder(path)
        write_durably(path / f".{LATEST}", f"{tag}\n".encode())
        os.replace(path / f".{LATEST}", path / LATEST)
        sync_folder(path)
    for left in path.glob(f"{REPLACED}{tag}-*"):
        shutil.rmtree(left, ignore_errors=True)
    return final


def prune(path: Path, newest: Path, keep: int) -> None:
    """Removes checkpoints beyond `keep`; the newest one, which has just been verified, always stays."""
    others = sorted((f for f in candidates(path) if f != newest and is_checkpoint(f)), key=age, reverse=True)
    for folder in others[keep - 1 :]:
        # Its name goes first: half of a checkpoint must not be taken for one.
        gone = path / f"{TEMPORARY}{folder.name}-{_here()}-{os.getpid()}"
        with reported(folder):
            os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


def assemble(tables: list[dict[str, Any]], about: dict[str, Any], plain: dict[str, Any]) -> Manifest:
    """One manifest from what every rank says it has written."""
    manifest = Manifest(about=about, plain=plain)
    for number, table in enumerate(tables):
        manifest.files.append(table["file"])
        for key, dtype, shape, start, stop, offset in table["pieces"]:
            entry = manifest.tensors.setdefault(key, Entry(dtype, list(shape)))
            if entry.dtype != dtype or entry.shape != list(shape):
                raise CheckpointError(
                    f"rank {number} holds '{key}' as {dtype} of shape {shape}, another rank as {entry.dtype} of shape "
                    f"{entry.shape}: the ranks do not train the same model"
                )
            if stop > start:
                entry.pieces.append((number, start, stop, offset))
        for optimizer, values in zip(plain["optimizers"], table["values"], strict=True):
            optimizer["values"] = {**optimizer["values"], **values}
    plain["ranks"] = [table["own"] for table in tables]
    return manifest
