"""From a temporary folder to a checkpoint: by rank 0, in an order that leaves something whole at every moment."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from zerofold.checkpoint.contents import CheckpointError
from zerofold.checkpoint.files import reported
from zerofold.checkpoint.manifest import (
    LATEST,
    REPLACED,
    TEMPORARY,
    Manifest,
    age,
    candidates,
    is_checkpoint,
    plain_name,
    sync_folder,
    write_durably,
)
from zerofold.checkpoint.native import files_of

LOCK = ".lock"
_JUST_MADE_S = 60.0  # a folder without a lock may be about to get one
_LONG_S = 24 * 3600.0


class Place:
    """A temporary folder, and the name that it gets when all is in it. Only rank 0 has the lock and the last word."""

    def __init__(self, path: Path, tag: str, folder: Path) -> None:
        self.path, self.tag, self.folder = path, tag, folder
        self.becomes_latest = True
        self._lock: IO[bytes] | None = None

    def lock(self) -> None:
        """As long as this process lives, others see that the folder is in use."""
        self._lock = (self.folder / LOCK).open("wb")
        with suppress(OSError):  # a file system without locks: its age tells
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def abandon(self) -> None:
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()

    def commit(self, manifest: Manifest) -> Path:
        """All ranks have written: the temporary folder becomes the checkpoint, and then the latest one if it is to."""
        for file in files_of(manifest, self.folder):
            if not file.path.exists():
                raise CheckpointError(
                    f"{file.path.name} was written by its rank and is not seen by rank 0: {self.path} must be on a "
                    "file system that all ranks share"
                )
            file.check_size()
        manifest.write(self.folder)
        path, final = self.path, self.path / self.tag
        with reported(final):
            (self.folder / LOCK).unlink(missing_ok=True)
            sync_folder(self.folder)
            check_free(final)
            if final.exists():
                os.rename(final, path / f"{REPLACED}{self.tag}-{time.time_ns()}")
            os.rename(self.folder, final)
            sync_folder(path)
            if self.becomes_latest:
                write_durably(path / f".{LATEST}", f"{self.tag}\n".encode())
                os.replace(path / f".{LATEST}", path / LATEST)
                sync_folder(path)
        if self._lock is not None:
            self._lock.close()
        for left in path.glob(f"{REPLACED}*"):
            if plain_name(left.name) == self.tag:
                shutil.rmtree(left, ignore_errors=True)
        return final


def begin(path: Path, tag: str | None, nbytes: int) -> Place:
    """A place for a checkpoint of this name, or the next free one; remains of earlier saves are cleared away."""
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file: name a folder for checkpoints")
    with reported(path):
        path.mkdir(parents=True, exist_ok=True)
        if is_checkpoint(path):
            raise CheckpointError(f"{path} is a checkpoint itself: name the folder around it, {path.parent}")
        for left in path.iterdir():
            if left.name.startswith(TEMPORARY) and _is_abandoned(left):
                shutil.rmtree(left, ignore_errors=True)
        free = shutil.disk_usage(path).free
        if free < nbytes:
            raise CheckpointError(
                f"{path}: the checkpoint needs {nbytes:,} bytes and the disk has {free:,} left. Earlier checkpoints "
                "are as they were; free some space, or keep fewer"
            )
        tag = tag or _next_tag(path)
        check_free(path / tag)
        place = Place(path, tag, path / f"{TEMPORARY}{tag}-{secrets.token_hex(4)}")
        place.folder.mkdir()
        place.lock()
    return place


def check_free(final: Path) -> None:
    """Only a checkpoint may be replaced by one."""
    if final.exists() and not is_checkpoint(final):
        raise CheckpointError(f"{final} exists and is no checkpoint: move it away, or use another tag")


def check_tag(tag: str | None) -> None:
    if tag is not None and not (isinstance(tag, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", tag)):
        raise ValueError(f"tag={tag!r} must be a plain name, such as 'step-100' or 'best': it becomes a folder")
    if tag == LATEST:
        raise ValueError("tag='latest' is taken by the file that names the newest checkpoint: use another")


def _next_tag(path: Path) -> str:
    """After all that are there, also those that are being written and those that are something else."""
    numbers = [int(found[1]) for entry in path.iterdir() if (found := re.search(r"save-(\d+)", entry.name))]
    return f"save-{max(numbers, default=0) + 1:08d}"


def _is_abandoned(folder: Path) -> bool:
    """Whether nobody writes to it any more: the lock goes with the process that had it."""
    try:
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _JUST_MADE_S
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - folder.stat().st_mtime > _LONG_S


def prune(path: Path, newest: Path, keep: int) -> None:
    """Removes checkpoints beyond `keep`; the newest one, which has just been verified, always stays."""
    others = sorted((f for f in candidates(path) if f != newest and is_checkpoint(f)), key=age, reverse=True)
    for folder in others[keep - 1 :]:
        # Its name goes first: half of a checkpoint must not be taken for one.
        gone = path / f"{TEMPORARY}{folder.name}-{secrets.token_hex(4)}"
        with reported(folder):
            os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)
