"""Our own checkpoints, as `Contents` and to be verified."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor

from zerofold.checkpoint.boxes import SavedPart, Spread, flat_ranges
from zerofold.checkpoint.contents import CheckpointError, Contents, OptimizerContents, Stored, numel
from zerofold.checkpoint.files import DTYPES, DamagedError, Progress, WrittenFile, threads_here
from zerofold.checkpoint.manifest import Entry, Manifest, candidates, is_checkpoint
from zerofold.checkpoint.plain import decode


@dataclass(frozen=True)
class NativeTensor:
    """A tensor in pieces that cover it, in one file or several."""

    key: str
    entry: Entry
    files: list[WrittenFile]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.entry.shape)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.entry.dtype]

    def read(self, start: int, stop: int) -> Tensor:
        found = torch.empty(stop - start, dtype=self.dtype)
        for file, low, high, at in self._overlapping(start, stop):
            data = self.files[file].read(at, (high - low) * self.dtype.itemsize)
            found[low - start : high - start] = torch.frombuffer(data, dtype=self.dtype)
        return found

    def chunks(self, start: int, stop: int) -> Iterable[tuple[int, int]]:
        """File and number of every chunk that holds some of this range."""
        for file, low, high, at in self._overlapping(start, stop):
            for number in self.files[file].chunks(at, at + (high - low) * self.dtype.itemsize):
                yield file, number

    def _overlapping(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        for file, low, high, at in self.entry.pieces:  # in order and without gaps: the manifest was checked
            first, last = max(low, start), min(high, stop)
            if first < last:
                yield file, first, last, at + (first - low) * self.dtype.itemsize


def is_native(path: Path) -> bool:
    """Whether `path` is a checkpoint of zerofold or a folder with some."""
    return any(is_checkpoint(folder) for folder in candidates(Path(path)))


def read_native(path: Path) -> Contents:
    """The contents of one checkpoint, or of the latest one in a folder."""
    return open_native(newest(path))


def newest(path: Path) -> Path:
    return next(iter(candidates(Path(path))), Path(path))


def open_native(folder: Path) -> Contents:
    """Reads the table of contents. That every file is there, and as long as it should be, is checked here too."""
    manifest = Manifest.read(folder)
    files = files_of(manifest, folder)
    for file in files:
        file.check_size()
    tensors = {key: _stored(key, entry, files) for key, entry in manifest.tensors.items()}

    def fetch(key: str) -> Tensor:
        stored = tensors[key]
        return stored.read(0, numel(stored)).view(stored.shape)

    try:
        plain, by_rank = dict(manifest.plain), [dict(own) for own in manifest.plain["ranks"]]
        contents = Contents(
            str(folder),
            tensors=_under("model/", tensors),
            aliases=plain["aliases"],
            base=plain["base"],
            ranks=len(by_rank),
            of_rank=lambda rank: decode(by_rank[rank], fetch),
        )
        for index, saved in enumerate(plain["optimizers"]):
            states: dict[str, dict[str, Stored | Any]] = {
                name: dict(decode(values, fetch)) for name, values in saved["values"].items()
            }
            for key, stored in _under(f"optimizer.{index}/", tensors).items():
                state, _, name = key.partition("/")
                states.setdefault(name, {})[unquote(state)] = stored
            groups = [dict(group) for group in decode(saved["groups"], fetch)]
            others = dict(decode(saved["others"], fetch))
            contents.optimizers.append(OptimizerContents(groups, states, str(saved["kind"]), others))
        for index, average in enumerate(plain["averages"]):
            contents.averages.append({**average, "tensors": _under(f"average.{index}/", tensors)})
        contents.plain = {key: decode(plain[key], fetch) for key in ("extra", "schedulers", "scaler")}
        contents.plain["about"] = manifest.about
        check_plain(contents)
    except DamagedError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    except Exception as error:  # what stands there may be anything
        raise DamagedError(f"{folder}: its manifest is not what it should be ({_brief(error)})") from error
    return contents


def check_plain(contents: Contents) -> None:
    """That loading will find what it expects."""
    extra, scaler, schedulers = (contents.plain[key] for key in ("extra", "scaler", "schedulers"))
    if not (extra is None or isinstance(extra, dict)) or not isinstance(schedulers, list):
        raise TypeError("extra or schedulers")
    if not all(isinstance(value, (int, float)) for value in dict(scaler).values()):
        raise TypeError("the loss scale")
    texts = [*contents.aliases.items(), *(contents.base or {}).items()]
    if not all(isinstance(text, str) for pair in texts for text in pair):
        raise TypeError("aliases or fingerprints")
    for optimizer in contents.optimizers:
        if not all(isinstance(name, str) and name for group in optimizer.groups for name in group["params"]):
            raise TypeError("names in groups")
    if not all(isinstance(average["updates"], int) for average in contents.averages):
        raise TypeError("averages")


def _brief(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _stored(key: str, entry: Entry, files: list[WrittenFile]) -> Stored:
    if not entry.parts:
        return NativeTensor(key, entry, files)
    parts = (
        SavedPart(tuple(part.boxes), NativeTensor(key, Entry(entry.dtype, part.shape, part.pieces), files))
        for part in entry.parts
    )
    return Spread(tuple(entry.shape), DTYPES[entry.dtype], tuple(parts))


def _under(prefix: str, tensors: dict[str, Stored]) -> dict[str, Any]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def files_of(manifest: Manifest, folder: Path) -> list[WrittenFile]:
    return [WrittenFile(folder / file["name"], file["bytes"], file["sha256"]) for file in manifest.files]


def check_ranges(ranges: Iterable[tuple[Stored, int, int]]) -> None:
    """Reads the chunks of these ranges once and compares them with their digests, where the format has some."""
    files: dict[Path, tuple[WrittenFile, set[int]]] = {}
    for stored, start, stop in (found for each in ranges for found in flat_ranges(*each)):
        if isinstance(stored, NativeTensor):
            for file, number in stored.chunks(start, stop):
                written = stored.files[file]
                files.setdefault(written.path, (written, set()))[1].add(number)
    for written, numbers in files.values():
        written.check(sorted(numbers), threads=threads_here())


def verify_native(path: Path, progress: Progress | None = None) -> list[str]:
    """What is wrong with a checkpoint, or the latest in a folder, every byte of it read; nothing if it is whole."""
    problems, path = [], newest(path)
    try:
        manifest = Manifest.read(path)
    except CheckpointError as error:
        return [str(error)]
    for file in files_of(manifest, path):
        try:
            file.check(range(len(file.digests)), threads=threads_here(), progress=progress)
        except CheckpointError as error:
            problems.append(str(error))
    return problems
