"""Reading a Hugging Face folder: one safetensors file, or several with an index."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from zerofold.checkpoint.contents import CheckpointError, Contents
from zerofold.checkpoint.safetensors_file import SafetensorsFile, read_safetensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")
_MAX_JSON_BYTES = 2**28


def read_hugging_face(path: str | os.PathLike[str]) -> Contents | None:
    """What a folder with safetensors files, or one such file, holds; None where there are none.

    An index says which file has which tensor. Without one, a single file or a complete numbered set is taken.
    """
    where = Path(path)
    if where.is_file():
        if where.name.endswith(".index.json"):
            return _by_index(where)
        return _together(where, [where]) if where.suffix == ".safetensors" else None
    if not where.is_dir():
        return None
    indices = sorted(where.glob("*.safetensors.index.json"))
    if (where / INDEX).exists() or len(indices) == 1:
        return _by_index(where / INDEX if (where / INDEX).exists() else indices[0])
    if (where / SINGLE).exists():
        return _together(where, [where / SINGLE])
    files = sorted(where.glob("*.safetensors"))
    return _together(where, _complete(where, files)) if files else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a reasonable size."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, too many for what it should be")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return found


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _by_index(index: Path) -> Contents:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files")
    folder, files = index.parent, dict[str, SafetensorsFile]()
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index} names the file {name!r}, which is not in its folder")
        files[name] = read_safetensors(folder / name)
    contents = Contents(str(folder))
    for tensor, name in places.items():
        if tensor not in files[name].tensors:
            raise CheckpointError(f"{folder / name} has no tensor '{tensor}', which {index.name} says is there")
        contents.tensors[tensor] = files[name].tensors[tensor]
    _take_aliases(contents, list(files.values()))
    return contents


def _together(where: Path, paths: list[Path]) -> Contents:
    contents, files = Contents(str(where)), [read_safetensors(path) for path in paths]
    for path, file in zip(paths, files, strict=True):
        for name, tensor in file.tensors.items():
            if name in contents.tensors:
                raise CheckpointError(f"{where} has '{name}' in several files ({path.name}) and no {INDEX}")
            contents.tensors[name] = tensor
    _take_aliases(contents, files)
    return contents


def _take_aliases(contents: Contents, files: list[SafetensorsFile]) -> None:
    """The safetensors package notes names that it left out in the metadata: left out → kept."""
    for file in files:
        for name, kept in file.metadata.items():
            if kept in contents.tensors and name not in contents.tensors:
                contents.aliases[name] = kept


def _complete(where: Path, files: list[Path]) -> list[Path]:
    """Numbered files without an index: all of one set, or the others are missed."""
    if len(files) == 1 and _NUMBERED.fullmatch(files[0].name) is None:
        return files
    sets = {(m["stem"], m["count"]) for file in files if (m := _NUMBERED.fullmatch(file.name)) is not None}
    if len(sets) != 1:
        names = ", ".join(file.name for file in files[:3])
        raise CheckpointError(f"{where} holds {len(files)} safetensors files ({names}, …) and no {INDEX}: name one")
    ((stem, count),) = sets
    expected = [where / f"{stem}-{number + 1:05d}-of-{count}.safetensors" for number in range(int(count))]
    missing = [file.name for file in expected if file not in files]
    if missing:
        raise CheckpointError(f"{where} lacks {missing[0]} ({len(missing)} of {count} files are missing)")
    return expected
