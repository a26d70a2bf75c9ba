"""`zerofold checkpoint`: look into a checkpoint, check it, export it, compare two."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zerofold.checkpoint.contents import CheckpointError, Contents, Stored, numel
from zerofold.checkpoint.export import export_contents
from zerofold.checkpoint.folder import MAX_FILE_BYTES
from zerofold.checkpoint.native import is_native, verify_native
from zerofold.checkpoint.open import open_checkpoint

_BAD_INPUT = 2
_READ_AT_ONCE = 2**22  # elements
_ROWS_SHOWN = 40

Checkpoint = Annotated[Path, typer.Argument(help="Its folder, or one safetensors file.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, not a table.")]


def checkpoint_app() -> typer.Typer:
    app = typer.Typer(help="Look into checkpoints, check, export and compare them.", no_args_is_help=True)
    app.command("inspect", short_help="What a checkpoint holds.")(inspect_command)
    app.command("verify", short_help="Read all of it and compare digests.")(verify_command)
    app.command("export", short_help="Weights as a Hugging Face folder.")(export_command)
    app.command("diff", short_help="Compare two checkpoints.")(diff_command)
    return app


class _Found(NamedTuple):
    """One tensor of a checkpoint, whatever it is there for."""

    kind: str
    name: str
    stored: Stored

    @property
    def nbytes(self) -> int:
        return numel(self.stored) * self.stored.dtype.itemsize

    @property
    def dtype(self) -> str:
        return str(self.stored.dtype).removeprefix("torch.")


def tensors_of(contents: Contents) -> Iterator[_Found]:
    """All tensors with names of their own: weights, then optimizer states, then averages."""
    for name, stored in contents.tensors.items():
        yield _Found("parameters and buffers", name, stored)
    for number, optimizer in enumerate(contents.optimizers):
        for parameter, state in optimizer.states.items():
            for key, value in state.items():
                if hasattr(value, "read"):
                    yield _Found("optimizer states", f"optimizer {number}: {parameter}: {key}", value)
    for number, average in enumerate(contents.averages):
        for name, stored in average.get("tensors", {}).items():
            yield _Found("averages", f"average {number}: {name}", stored)


def inspect_command(checkpoint: Checkpoint, as_json: Json = False) -> None:
    """Show what a checkpoint holds: tensors with shapes, dtypes and sizes, and the rest of its data.

    \b
    Examples:
      zerofold checkpoint inspect runs/last
      zerofold checkpoint inspect model.safetensors --json
    """
    with _one_line_errors():
        contents = open_checkpoint(checkpoint)
        found = list(tensors_of(contents))
    totals: defaultdict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "elements": 0, "bytes": 0})
    for each in found:
        totals[each.kind]["tensors"] += 1
        totals[each.kind]["elements"] += numel(each.stored)
        totals[each.kind]["bytes"] += each.nbytes
    if as_json:
        rows = [
            {"kind": f.kind, "name": f.name, "shape": list(f.stored.shape), "dtype": f.dtype, "bytes": f.nbytes}
            for f in found
        ]
        groups = [{"kind": each.kind, "groups": _readable(each.groups)} for each in contents.optimizers]
        rest = {"aliases": contents.aliases, "optimizers": groups, "plain": _readable(contents.plain)}
        typer.echo(json.dumps({"checkpoint": contents.where, "totals": totals, "tensors": rows, **rest}))
        return
    console = Console()
    table = Table(title=escape(contents.where), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("tensor")
    for heading in ("shape", "dtype", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in found[:_ROWS_SHOWN]:
        shape = ", ".join(map(str, each.stored.shape)) or "scalar"
        table.add_row(escape(each.name), shape, each.dtype, f"{each.nbytes:,}")
    console.print(table)
    if len(found) > _ROWS_SHOWN:
        console.print(f"and {len(found) - _ROWS_SHOWN} more tensors; --json has all of them")
    for kind, total in totals.items():
        console.print(f"{kind}: {total['tensors']} tensors, {total['elements']:,} elements, {total['bytes']:,} bytes")
    for number, optimizer in enumerate(contents.optimizers):
        console.print(f"optimizer {number}: {optimizer.kind or 'of some kind'}, {len(optimizer.groups)} group(s)")
    for name, kept in contents.aliases.items():
        console.print(f"{name} is {kept}", markup=False)
    for key, value in contents.plain.items():
        console.print(f"{key}: {json.dumps(_readable(value))[:200]}", markup=False)


def verify_command(
    checkpoint: Checkpoint,
    finite: Annotated[bool, typer.Option("--finite", help="Also look for infinite and NaN elements.")] = False,
    as_json: Json = False,
) -> None:
    """Read all of a checkpoint; the exit code is 0 only if every byte is there and can be read.

    \b
    Examples:
      zerofold checkpoint verify runs/last
      zerofold checkpoint verify model.safetensors --finite
    """
    problems: list[str] = []
    count = nbytes = 0
    keeps_digests = is_native(checkpoint)
    try:
        if keeps_digests:  # of all its bytes, not of tensors alone
            problems += verify_native(checkpoint)
        contents = open_checkpoint(checkpoint)
    except CheckpointError as error:
        if not checkpoint.exists():
            _fail(str(error), _BAD_INPUT)
        problems += [str(error)] if str(error) not in problems else []
    else:
        for each in tensors_of(contents):
            count, nbytes = count + 1, nbytes + each.nbytes
            if keeps_digests and not finite:
                continue  # every byte has been read already
            try:
                if not _is_readable(each.stored, finite):
                    problems.append(f"'{each.name}' has elements that are infinite or NaN")
            except CheckpointError as error:
                problems += [str(error)] if str(error) not in problems else []
    if as_json:
        said = {"checkpoint": str(checkpoint), "tensors": count, "bytes": nbytes, "problems": problems}
        typer.echo(json.dumps({**said, "ok": not problems}))
    else:
        for problem in problems:
            typer.echo(f"error: {problem}", err=True)
        if not problems:
            typer.echo(f"{checkpoint}: {count} tensors, {nbytes:,} bytes, all readable")
    if problems:
        raise typer.Exit(1)


def export_command(
    checkpoint: Checkpoint,
    folder: Annotated[Path, typer.Argument(help="The folder to write: new, or an earlier export.", show_default=False)],
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; as it is unless given.")] = None,
    max_file_bytes: Annotated[int, typer.Option(min=1, help="Largest size of a file.")] = MAX_FILE_BYTES,
) -> None:
    """Write the weights of any checkpoint as a Hugging Face folder, piece by piece, read back and compared.

    \b
    Examples:
      zerofold checkpoint export runs/last hub/model
      zerofold checkpoint export runs/last hub/model --dtype bf16
    """
    with _one_line_errors():
        contents = open_checkpoint(checkpoint)
        if not contents.tensors:
            raise CheckpointError(f"{checkpoint} holds no weights")
        export_contents(contents, folder, dtype=dtype, max_file_bytes=max_file_bytes)
    typer.echo(f"{folder}: {len(contents.tensors)} tensors of {checkpoint}")


class _Difference(NamedTuple):
    name: str
    what: str
    largest: float | None  # absolute difference of two elements; None where they cannot be compared


def diff_command(first: Checkpoint, second: Checkpoint, as_json: Json = False) -> None:
    """Compare two checkpoints: names, shapes, dtypes, and the largest difference of each tensor. Exit code 1 if any.

    \b
    Examples:
      zerofold checkpoint diff runs/one runs/other
      zerofold checkpoint diff runs/last hub/model --json
    """
    with _one_line_errors():
        ours = {each.name: each.stored for each in tensors_of(open_checkpoint(first))}
        theirs = {each.name: each.stored for each in tensors_of(open_checkpoint(second))}
        only_first = [name for name in ours if name not in theirs]
        only_second = [name for name in theirs if name not in ours]
        compared = [_compare(name, ours[name], theirs[name]) for name in ours if name in theirs]
    differing = [each for each in compared if each is not None]
    same = not (only_first or only_second or differing)
    if as_json:
        rows = [{**each._asdict(), "largest": _plain_number(each.largest)} for each in differing]
        said = {"only_first": only_first, "only_second": only_second, "differing": rows}
        typer.echo(json.dumps({**said, "compared": len(compared), "same": same}))
    else:
        for name in only_first:
            typer.echo(f"only in {first}: {name}")
        for name in only_second:
            typer.echo(f"only in {second}: {name}")
        for each in differing:
            typer.echo(f"{each.name}: {each.what}")
        typer.echo(f"{len(compared)} tensors compared, {len(differing)} differ" if not same else _same(len(compared)))
    if not same:
        raise typer.Exit(1)


def _same(count: int) -> str:
    return f"the same: {count} tensors, every bit"


def _compare(name: str, one: Stored, other: Stored) -> _Difference | None:
    if tuple(one.shape) != tuple(other.shape):
        return _Difference(name, f"shape {tuple(one.shape)} and {tuple(other.shape)}", None)
    largest, equal = 0.0, True
    for start, stop in _ranges(one):
        a, b = one.read(start, stop), other.read(start, stop)
        if a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            continue
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        x, y = a.to(wide), b.to(wide)
        alike = (x == y) | (x.isnan() & y.isnan())  # two infinities have no difference that could be computed
        gap = (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(alike, 0.0)
        largest = max(largest, gap.max().item())
        equal = equal and (one.dtype is not other.dtype)
    what = [] if one.dtype is other.dtype else [f"{one.dtype} and {other.dtype}"]
    if largest or not equal:
        what.append(f"largest difference {largest:.3g}")
    return _Difference(name, ", ".join(what), largest) if what else None


def _is_readable(stored: Stored, finite: bool) -> bool:
    for start, stop in _ranges(stored):
        values = stored.read(start, stop)
        if finite and (values.is_floating_point() or values.is_complex()):
            wide = values.float() if values.element_size() == 1 else values  # 8-bit floats know few operations
            if not bool(torch.isfinite(wide).all()):
                return False
    return True


def _ranges(stored: Stored) -> Iterator[tuple[int, int]]:
    for start in range(0, numel(stored), _READ_AT_ONCE):
        yield start, min(start + _READ_AT_ONCE, numel(stored))


def _plain_number(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return "inf" if value == math.inf else value


def _readable(value: Any) -> Any:
    """Plain data as JSON has it; what JSON does not know is shown in words."""
    return json.loads(json.dumps(value, default=str, skipkeys=True))


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (CheckpointError, ValueError) as error:
        _fail(str(error), _BAD_INPUT)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
