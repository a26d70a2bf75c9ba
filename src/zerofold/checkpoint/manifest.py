"""The folder of a checkpoint and its table of contents.

run/                          what zf.save and zf.load are given
  latest                      the name of the newest checkpoint, moved last
  step-00000100/
    rank-00000.safetensors    what rank 0 owns
    rank-00001.safetensors
    manifest.json             where each piece of each tensor lies, digests of all files, plain data
    manifest.sha256           the digest of manifest.json, as `sha256sum -c` reads it
  .tmp-step-00000200-…        a save under way, or one that was cut short: nothing reads it
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerofold.checkpoint.contents import CheckpointError
from zerofold.checkpoint.files import CHUNK_BYTES, DTYPES, DamagedError, reported
from zerofold.part import PartBox

FORMAT = "zerofold checkpoint"
VERSION = 2  # tensors in parts; without such, 1 is written, which older ones read
MANIFEST, DIGEST, LATEST = "manifest.json", "manifest.sha256", "latest"
TEMPORARY, REPLACED = ".tmp-", ".replaced-"

Piece = tuple[int, int, int, int]
"""File, first and last element of the flattened tensor, first byte in the file."""


@dataclass
class PartEntry:
    """What one rank of a tensor axis had of a tensor: boxes of the whole, and which pieces of it are where."""

    shape: list[int]  # of that rank's tensor, which the pieces are ranges of
    boxes: list[PartBox]
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class Entry:
    """One tensor, whole: which pieces of it are where; or in parts, each of which has pieces of its own."""

    dtype: str
    shape: list[int]
    pieces: list[Piece] = field(default_factory=list)
    parts: list[PartEntry] = field(default_factory=list)

    @classmethod
    def read(cls, dtype: str, shape: list[int], pieces: list[Any], parts: Sequence[dict[str, Any]] = ()) -> Entry:
        return cls(dtype, shape, pieces, [PartEntry(p["shape"], _boxes(p["boxes"]), p["pieces"]) for p in parts])

    def as_json(self) -> dict[str, Any]:
        plain = {"dtype": self.dtype, "shape": self.shape, "pieces": self.pieces}
        return {**plain, "parts": [asdict(part) for part in self.parts]} if self.parts else plain

    def check(self, key: str, files: list[dict[str, Any]]) -> None:
        """Every element is in one piece, and every piece in its file."""
        if self.dtype not in DTYPES or not all(map(_is_count, self.shape)):
            raise ValueError(f"'{key}' has dtype {self.dtype} and shape {self.shape}")
        itemsize = DTYPES[self.dtype].itemsize
        if not self.parts:
            self.pieces = _in_order(key, self.pieces, self.shape, itemsize, files)
            return
        if self.pieces:
            raise ValueError(f"'{key}' is both whole and in parts")
        _check_cover(key, self.shape, [(box.offsets, box.sizes) for part in self.parts for box in part.boxes])
        for part in self.parts:
            _check_cover(f"a part of {key}", part.shape, [(box.local, box.sizes) for box in part.boxes])
            part.pieces = _in_order(key, part.pieces, part.shape, itemsize, files)


@dataclass
class Manifest:
    files: list[dict[str, Any]] = field(default_factory=list)  # name, bytes, sha256 (of every chunk)
    tensors: dict[str, Entry] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)  # who wrote it, with which settings
    plain: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        body = {
            "format": FORMAT,
            "version": VERSION if any(entry.parts for entry in self.tensors.values()) else 1,
            "chunk_bytes": CHUNK_BYTES,
            "about": self.about,
            "files": self.files,
            "tensors": {key: entry.as_json() for key, entry in self.tensors.items()},
            "plain": self.plain,
        }
        text = json.dumps(body, allow_nan=False).encode()
        write_durably(folder / MANIFEST, text)
        write_durably(folder / DIGEST, _digest_line(text))
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Checks the table itself; the files it names are checked when they are read."""
        if not (folder / MANIFEST).is_file():
            raise CheckpointError(_not_one(folder))
        with reported(folder / MANIFEST):
            text = (folder / MANIFEST).read_bytes()
        body = _parse(text) or {}
        if body.get("format") != FORMAT and (folder / DIGEST).is_file() is False:
            raise CheckpointError(_not_one(folder))
        version = body.get("version")
        if isinstance(version, int) and version > VERSION and _is_intact(folder, text):
            raise CheckpointError(
                f"{folder} has format version {version}, this zerofold reads up to {VERSION}: install a newer zerofold"
            )
        if not _is_intact(folder, text):
            raise DamagedError(f"{folder / MANIFEST} is damaged: it does not match {DIGEST}")
        try:
            if version not in range(1, VERSION + 1) or body["chunk_bytes"] != CHUNK_BYTES:
                raise ValueError(f"version {version} in chunks of {body['chunk_bytes']}")
            tensors = {key: Entry.read(**entry) for key, entry in body["tensors"].items()}
            manifest = cls(body["files"], tensors, body["about"], body["plain"])
            manifest._check(folder)
        except Exception as error:  # what stands there may be anything
            raise DamagedError(f"{folder / MANIFEST} is damaged: {type(error).__name__} {error}") from error
        return manifest

    def _check(self, folder: Path) -> None:
        """Raises for whatever reading could stumble over. A digest that fits only says that somebody wrote it so."""
        for file in self.files:
            if Path(file["name"]).name != file["name"] or file["name"] in (".", "..") or "\0" in file["name"]:
                raise ValueError(f"file {file['name']!r} is outside {folder}")
            if not _is_count(file["bytes"]) or len(file["sha256"]) != -(-file["bytes"] // CHUNK_BYTES):
                raise ValueError(f"digests of {file['name']}")
            if not all(isinstance(digest, str) for digest in file["sha256"]):
                raise TypeError(f"digests of {file['name']}")
        for key, entry in self.tensors.items():
            entry.check(key, self.files)
        if not isinstance(self.plain, dict) or not isinstance(self.about, dict):
            raise TypeError("plain data")


def _in_order(key: str, pieces: list[Any], shape: list[int], itemsize: int, files: list[dict[str, Any]]) -> list[Piece]:
    """The pieces of a tensor of this shape, which must follow each other without gaps."""
    found: list[Piece] = sorted(((a, b, c, d) for a, b, c, d in pieces), key=lambda piece: piece[1])
    end = 0
    for number, start, stop, offset in found:
        if not all(map(_is_count, (number, start, stop, offset))) or start != end or stop <= start:
            raise ValueError(f"the pieces of '{key}' do not follow each other")
        if offset + (stop - start) * itemsize > files[number]["bytes"]:
            raise ValueError(f"a piece of '{key}' is outside its file")
        end = stop
    if end != math.prod(shape):
        raise ValueError(f"the pieces of '{key}' do not cover it")
    return found


def _check_cover(key: str, shape: list[int], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Every element is in one box. A tensor is cut along one dimension, so boxes follow each other along it."""
    numbers = [*shape, *(number for box in boxes for side in box for number in side)]
    if not all(map(_is_count, numbers)) or any(len(side) != len(shape) for box in boxes for side in box):
        raise ValueError(f"the boxes of '{key}' are not of its {len(shape)} dimensions")
    cut = [dim for dim, size in enumerate(shape) if any(sizes[dim] != size for _, sizes in boxes)]
    if len(cut) > 1:
        raise ValueError(f"'{key}' is cut along dimensions {cut}, and may be along one")
    end, dim = 0, cut[0] if cut else 0
    for offsets, sizes in sorted(boxes, key=lambda box: box[0][dim] if shape else 0):
        if (offsets[dim] if shape else end) != end or any(o for other, o in enumerate(offsets) if other != dim):
            raise ValueError(f"the boxes of '{key}' do not follow each other along dimension {dim}")
        end += sizes[dim] if shape else 1
    if end != (shape[dim] if shape else 1):
        raise ValueError(f"the boxes of '{key}' reach to {end} of {shape[dim] if shape else 1} of dimension {dim}")


def _boxes(found: Sequence[Any]) -> list[PartBox]:
    return [PartBox(tuple(offsets), tuple(sizes), tuple(local)) for offsets, sizes, local in found]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _is_intact(folder: Path, text: bytes) -> bool:
    try:
        return (folder / DIGEST).read_bytes() == _digest_line(text)
    except OSError:
        return False


def _digest_line(text: bytes) -> bytes:
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()


def _not_one(folder: Path) -> str:
    if not folder.exists():
        return f"{folder} does not exist: name the folder that zf.save was given"
    if not folder.is_dir():
        return f"{folder} is a file, not a checkpoint: name the folder that zf.save was given"
    inside = sorted(entry.name for entry in folder.iterdir())[:4]
    found = f"it holds {', '.join(inside)} …" if inside else "it is empty"
    return f"{folder} is not a checkpoint of zerofold, nor a folder with some ({found}): name what zf.save was given"


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and (folder / DIGEST).is_file()


def candidates(path: Path) -> list[Path]:
    """The checkpoints to try for `path`, the best first: itself; or what `latest` names, then the others by age."""
    if is_checkpoint(path) or not path.is_dir():
        return [path]
    with reported(path):
        others = sorted((f for f in path.iterdir() if _is_offered(f)), key=age, reverse=True)
    # One that was moved aside for another of its name counts as long as no such one has come.
    others = [f for f in others if not (f.name.startswith(REPLACED) and (path / plain_name(f.name)).exists())]
    latest = named_latest(path)
    found = [path / latest] if latest is not None and is_checkpoint(path / latest) else []
    return found + [folder for folder in others if folder not in found]


def _is_offered(folder: Path) -> bool:
    return not folder.name.startswith(TEMPORARY) and is_checkpoint(folder)


def plain_name(name: str) -> str:
    return name.removeprefix(REPLACED).rpartition("-")[0]


def age(folder: Path) -> tuple[int, int]:
    """Newer ones are larger: by the number in the name, then by the clock."""
    number = re.search(r"(\d+)$", folder.name)
    return int(number[1]) if number else -1, (folder / MANIFEST).stat().st_mtime_ns


def named_latest(path: Path) -> str | None:
    try:
        name = (path / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if name and Path(name).name == name and name not in (".", "..") else None


def write_durably(path: Path, data: bytes) -> None:
    with reported(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Names are on the disk too, not only what they name."""
    with reported(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
