"""Writing a Hugging Face folder as a stream: under another name, read back and compared, then renamed.

.out.3f9a.part/model-00001-of-00002.safetensors      written, hashed on the way, synced, read back
               model-00002-of-00002.safetensors
               model.safetensors.index.json, config.json, …
out/                                                 the same folder, renamed when all of it is right
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerofold.checkpoint.contents import CheckpointError, Stored, numel
from zerofold.checkpoint.hugging_face import INDEX, SINGLE, write_json
from zerofold.checkpoint.safetensors_file import Planned, SafetensorsWriter, bytes_of, read_safetensors
from zerofold.comm import Comm

MAX_FILE_BYTES = 5 * 2**30
_CHUNK_BYTES = 2**26  # of a tensor in memory at once
_MARK = {"format": "pt", "written_by": "zerofold"}


def write_folder(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Stored],
    *,
    aliases: Mapping[str, str] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    control: Comm | None = None,
    complete: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Reads the tensors piece by piece, on all ranks alike, and writes them on the first; raises on all or none.

    `complete` puts further files into the folder before it gets its name.
    """
    if not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise ValueError(f"max_file_bytes={max_file_bytes!r} must be a positive number of bytes")
    files = _plan(tensors, max_file_bytes)
    folder, team = _Folder(Path(path), files, aliases or {}), _Team(control)
    try:
        team.attempt(folder.begin)
        team.settle()
        for file in files:
            team.attempt(folder.open, file)
            for planned in file.tensors:
                stored, step = tensors[planned.name], max(1, _CHUNK_BYTES // planned.dtype.itemsize)
                for start in range(0, numel(stored), step):
                    data = stored.read(start, min(start + step, numel(stored)))
                    team.attempt(folder.write, planned.name, data)
            team.attempt(folder.close, file)
            team.settle()  # once a file: a full disk is noticed by the others before the next one
        team.attempt(complete, folder.part)
        team.attempt(folder.publish)
        team.settle()
    finally:
        if team.writes:
            folder.abandon()


class _File(NamedTuple):
    name: str
    tensors: list[Planned]


def _plan(tensors: Mapping[str, Stored], max_file_bytes: int) -> list[_File]:
    """In the order given, a new file when the next tensor would not fit; inside a file larger elements first."""
    parts: list[list[Planned]] = [[]]
    size = 0
    for name, stored in tensors.items():
        planned = Planned(name, tuple(stored.shape), stored.dtype)
        if parts[-1] and size + planned.nbytes > max_file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(planned)
        size += planned.nbytes
    count = len(parts)
    names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)] if count > 1 else [SINGLE]
    ordered = [sorted(part, key=lambda planned: -planned.dtype.itemsize) for part in parts]
    return [_File(name, part) for name, part in zip(names, ordered, strict=True)]


class _Team:
    """The first rank writes; its first error waits until all ranks can raise it together."""

    def __init__(self, control: Comm | None) -> None:
        self._control = control
        self.writes = control is None or control.rank == 0
        self._error: Exception | None = None

    def attempt(self, do: Callable[..., None], *args: Any) -> None:
        if self.writes and self._error is None:
            try:
                do(*args)
            except Exception as error:
                self._error = error

    def settle(self) -> None:
        told = None if self._error is None else str(self._error)
        if self._control is not None:
            told = self._control.all_gather_objects(told)[0]
        if told is not None:
            raise CheckpointError(told) from self._error


class _Folder:
    """The folder under way, on the rank that writes."""

    def __init__(self, path: Path, files: list[_File], aliases: Mapping[str, str]) -> None:
        self._path = Path(os.path.realpath(path))  # a link keeps pointing at what is replaced
        self.part = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.part")
        self._files, self._aliases = files, aliases
        self._total = sum(planned.nbytes for file in files for planned in file.tensors)
        self._written = 0
        self._out: SafetensorsWriter | None = None
        self._hashes: dict[str, Any] = {}

    def begin(self) -> None:
        _check_may_replace(self._path)
        with self._telling():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._path.parent).free
            if free < self._total:
                raise CheckpointError(f"{self._path} needs {self._total:,} bytes, and {free:,} are free on its disk")
            self.part.mkdir()

    def open(self, file: _File) -> None:
        names = {planned.name for planned in file.tensors}
        aliases = {name: kept for name, kept in self._aliases.items() if kept in names}
        with self._telling():
            self._out = SafetensorsWriter(self.part / file.name, file.tensors, {**aliases, **_MARK})
        self._hashes = {name: hashlib.sha256() for name in names}

    def write(self, name: str, data: Tensor) -> None:
        assert self._out is not None
        raw = data.detach().cpu().contiguous().view(torch.uint8)
        self._hashes[name].update(bytes_of(raw))
        with self._telling():
            self._out.write(raw)
        self._written += raw.numel()

    def close(self, file: _File) -> None:
        """Ends the file and reads it back."""
        assert self._out is not None
        with self._telling():
            self._out.close()
        self._out = None
        _forget_cached(self.part / file.name)
        found = read_safetensors(self.part / file.name).tensors
        for planned in file.tensors:
            hashed, step = hashlib.sha256(), max(1, _CHUNK_BYTES // planned.dtype.itemsize)
            size = math.prod(planned.shape)
            for start in range(0, size, step):
                read = found[planned.name].read(start, min(start + step, size))
                hashed.update(bytes_of(read.view(torch.uint8)))
            if hashed.digest() != self._hashes[planned.name].digest():
                raise CheckpointError(
                    f"{self._path}: '{planned.name}' is not what was written when it is read back; the disk loses data"
                )

    def publish(self) -> None:
        with self._telling():
            if len(self._files) > 1:
                places = {planned.name: file.name for file in self._files for planned in file.tensors}
                index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(places.items()))}
                write_json(self.part / INDEX, index)
            old = self.part.with_suffix(".old")
            if self._path.exists():
                _check_may_replace(self._path)
                _keep_others(self._path, self.part)
            _sync(self.part)
            if self._path.exists():
                self._path.rename(old)
            try:
                self.part.rename(self._path)
            except OSError:
                if old.exists():
                    old.rename(self._path)
                raise
            _sync(self._path.parent)
            shutil.rmtree(old, ignore_errors=True)

    def abandon(self) -> None:
        """Leaves nothing behind of a folder that was not published."""
        if self._out is not None:
            self._out.abandon()
        shutil.rmtree(self.part, ignore_errors=True)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            free = "unknown"
            with suppress(OSError):
                free = f"{shutil.disk_usage(self._path.parent).free:,}"
            raise CheckpointError(
                f"{self._path} could not be written: {error.strerror or error} (after {self._written:,} of "
                f"{self._total:,} bytes; {free} are free)"
            ) from error


def _check_may_replace(path: Path) -> None:
    """Only what an earlier call has written may be replaced."""
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; name a folder")
    held = sorted(path.iterdir())
    weights = [file for file in held if file.suffix == ".safetensors"]
    others = [file for file in held if file.is_dir() or not weights]
    others += [file for file in weights if read_safetensors(file).metadata.get("written_by") != _MARK["written_by"]]
    if others:
        raise CheckpointError(f"{path} holds {others[0].name}, which no export has written: name another folder")


def _keep_others(old: Path, new: Path) -> None:
    """What somebody put beside the weights, such as a tokenizer, goes along."""
    for file in old.iterdir():
        if file.suffix != ".safetensors" and file.name != INDEX and not (new / file.name).exists():
            shutil.copy2(file, new / file.name)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _forget_cached(path: Path) -> None:
    """So that reading back asks the disk, where the system can be told."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
