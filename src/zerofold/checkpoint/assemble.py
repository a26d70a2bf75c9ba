"""One table of contents from what every rank says it has written."""

from __future__ import annotations

from typing import Any, NamedTuple

from zerofold.checkpoint.contents import CheckpointError
from zerofold.checkpoint.manifest import Entry, Manifest, PartEntry
from zerofold.part import PartBox


class PartWritten(NamedTuple):
    """What a rank has of a tensor that several ranks hold between them."""

    whole: tuple[int, ...]
    boxes: tuple[PartBox, ...]


class PieceWritten(NamedTuple):
    """A flat range of what a rank has of a tensor, and where it lies in that rank's file."""

    key: str
    dtype: str
    shape: tuple[int, ...]  # which the range is one of: the whole, or the rank's part
    start: int
    stop: int
    offset: int
    part: PartWritten | None


def assemble(tables: list[dict[str, Any]], about: dict[str, Any], plain: dict[str, Any]) -> Manifest:
    """Raises where the ranks do not hold every element of every tensor once between them."""
    manifest = Manifest(about=about, plain=plain)
    for number, table in enumerate(tables):
        manifest.files.append(table["file"])
        for piece in table["pieces"]:
            _take_piece(manifest, number, piece)
    for key, entry in manifest.tensors.items():
        try:
            entry.check(key, manifest.files)
        except ValueError as error:
            raise CheckpointError(f"the ranks do not hold every element once between them: {error}") from error
    for number, table in enumerate(tables):
        for name in table["copies"]:
            if f"model/{name}" not in manifest.tensors:
                raise CheckpointError(
                    f"rank {number} holds '{name}' as a copy of what another rank counts, and no rank does: give it a "
                    "Part that counts on one of them, with the same name"
                )
        plain["aliases"] = {**plain["aliases"], **table["aliases"]}
        if len(table["groups"]) != len(plain["optimizers"]):
            raise CheckpointError(
                f"rank {number} saves {len(table['groups'])} optimizer(s), rank 0 {len(plain['optimizers'])}: give "
                "zf.save the same ones on every rank"
            )
        for optimizer, values, groups in zip(plain["optimizers"], table["values"], table["groups"], strict=True):
            optimizer["values"] = {**optimizer["values"], **values}
            optimizer["groups"] = join_groups(optimizer["groups"], groups)
    plain["ranks"] = [table["own"] for table in tables]
    return manifest


def _take_piece(manifest: Manifest, number: int, piece: PieceWritten) -> None:
    shape = list(piece.shape if piece.part is None else piece.part.whole)
    entry = manifest.tensors.setdefault(piece.key, Entry(piece.dtype, shape))
    if entry.dtype != piece.dtype or entry.shape != shape:
        raise CheckpointError(
            f"rank {number} holds '{piece.key}' as {piece.dtype} of shape {shape}, another rank as {entry.dtype} of "
            f"shape {entry.shape}: the ranks do not train the same model"
        )
    pieces = entry.pieces if piece.part is None else _part(entry, piece.part.boxes, piece.shape).pieces
    if piece.stop > piece.start:
        pieces.append((number, piece.start, piece.stop, piece.offset))


def _part(entry: Entry, boxes: tuple[PartBox, ...], shape: tuple[int, ...]) -> PartEntry:
    """The ranks of a data axis hold the same part, in pieces."""
    for part in entry.parts:
        if part.boxes == list(boxes):
            return part
    entry.parts.append(PartEntry(list(shape), list(boxes)))
    return entry.parts[-1]


def join_groups(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of one optimizer on two ranks: a stage of a pipeline has its own parameters in them, and no others.

    Groups at the same place with the same settings are one. A rank with other groups than the first (it may have no
    parameter for one of them) adds to the first that has the same settings, or a group of its own.

    >>> join_groups([{"lr": 1, "params": ["a"]}], [{"lr": 2, "params": ["b"]}, {"lr": 1, "params": ["a", "c"]}])
    [{'lr': 1, 'params': ['a', 'c']}, {'lr': 2, 'params': ['b']}]
    """
    joined = [{**group, "params": list(group["params"])} for group in ours]
    known = {name for group in ours for name in group["params"]}
    for place, group in enumerate(theirs):
        new = [name for name in group["params"] if name not in known]
        if not new:
            continue
        settings = _settings(group)
        at_place = [joined[place]] if place < len(joined) else []
        found = next((each for each in (*at_place, *joined) if _settings(each) == settings), None)
        if found is None:
            joined.append({**group, "params": new})
        else:
            found["params"] += new
    return joined


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
