"""One .safetensors file: read lazily in ranges, or written as a stream; a malformed one is an error, never a crash.

    | 8 bytes: length of the header | header, JSON | tensor | tensor | … |
                                                   ^ offsets in the header count from here

The format is small, and reading ranges of it without mapping or copying whole tensors is all that is needed, so this
stands in for the safetensors package. What that package refuses (overlaps, holes, bytes left over) is refused here.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerofold.checkpoint.contents import CheckpointError

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the same as the format's own reader
_MAX_DIMENSIONS = 64  # torch's
_MAX_NUMEL = 2**62
_CALL_BYTES = 2**30  # the kernel moves at most 2 GiB in one call


def bytes_of(tensor: Tensor) -> memoryview:
    """The same memory, of a uint8 tensor. An empty array would give a view of another kind."""
    array: Any = tensor.numpy()
    return memoryview(array) if tensor.numel() else memoryview(bytearray())


class _OpenFile:
    """A descriptor that lives as long as a tensor of the file is wanted, so that a file replaced meanwhile is not mixed
    with its successor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            self.size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error

    def __del__(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)

    def read(self, start: int, nbytes: int) -> Tensor:
        """Bytes in memory of their own. Callers have checked the range against the file's size."""
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        view = bytes_of(buffer)
        done = 0
        while done < nbytes:
            try:
                got = os.preadv(self._descriptor, [view[done : done + _CALL_BYTES]], start + done)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read at byte {start + done}: {error.strerror}") from error
            if got == 0:
                raise CheckpointError(
                    f"{self.path} ends at byte {start + done}: it was cut off while it was being read"
                )
            done += got
        return buffer


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file. Reading takes the range that is asked for and nothing else."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: _OpenFile
    offset: int  # in the file

    def read(self, start: int, stop: int) -> Tensor:
        if not 0 <= start <= stop <= math.prod(self.shape):
            raise ValueError(f"'{self.name}' {self.shape} has no elements {start} to {stop}")
        size = self.dtype.itemsize
        found = self.file.read(self.offset + start * size, (stop - start) * size)
        if self.dtype is torch.bool and found.numel() and int(found.max()) > 1:
            raise CheckpointError(f"{self.file.path}: '{self.name}' is said to be bool and holds other bytes than 0, 1")
        return found.view(self.dtype)


class SafetensorsFile(NamedTuple):
    """What a header says, checked against the file."""

    tensors: dict[str, FileTensor]
    metadata: dict[str, str]


def read_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile:
    """Reads and checks the header; tensors are read when they are asked for.

    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "one.safetensors"
    >>> with SafetensorsWriter(path, [Planned("w", (2, 3), torch.float32)]) as out:
    ...     out.write(torch.arange(6.0))
    >>> read_safetensors(path).tensors["w"].read(2, 4)
    tensor([2., 3.])
    """
    file = _OpenFile(Path(path))
    header, data = _header(file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _malformed(file, "__metadata__ is not an object of strings")
    tensors = {name: _tensor(file, name, entry, data) for name, entry in header.items()}
    end = data
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, math.prod(t.shape))):
        if tensor.offset != end:
            what = "overlaps the tensor before it" if tensor.offset < end else "leaves a hole before it"
            raise _malformed(file, f"'{tensor.name}' {what}")
        end += math.prod(tensor.shape) * tensor.dtype.itemsize
    if end != file.size:
        raise _malformed(file, f"its tensors end at byte {end}, the file at {file.size}")
    return SafetensorsFile(tensors, metadata)


def _header(file: _OpenFile) -> tuple[dict[str, Any], int]:
    """The parsed header, and where the data begins."""
    if file.size < 8:
        raise _malformed(file, f"it has {file.size} bytes, too few for a header")
    (length,) = struct.unpack("<Q", bytes(file.read(0, 8).numpy()))
    if length > min(file.size - 8, _MAX_HEADER_BYTES):
        raise _malformed(file, f"its header is said to have {length} bytes, the file has {file.size}")
    try:
        header = json.loads(bytes(file.read(8, length).numpy()).decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _malformed(file, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _malformed(file, "its header is not a JSON object")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _tensor(file: _OpenFile, name: str, entry: Any, data: int) -> FileTensor:
    if not isinstance(entry, dict):
        raise _malformed(file, f"'{name}' is no object with dtype, shape and data_offsets")
    code, shape, offsets = entry.get("dtype"), _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise _malformed(file, f"'{name}' has dtype {code!r}, which is not known here")
    if shape is None or len(shape) > _MAX_DIMENSIONS or math.prod(max(n, 1) for n in shape) > _MAX_NUMEL:
        raise _malformed(file, f"'{name}' has shape {_short(entry.get('shape'))}, which is none")
    if offsets is None or len(offsets) != 2:
        raise _malformed(file, f"'{name}' has data_offsets {_short(entry.get('data_offsets'))}, not two numbers")
    start, stop = offsets
    if not start <= stop <= file.size - data:
        raise _malformed(file, f"'{name}' lies at bytes {start} to {stop} of {file.size - data} that are there")
    needed = math.prod(shape) * dtype.itemsize
    if stop - start != needed:
        raise _malformed(file, f"'{name}' has {stop - start} bytes, but {code} {shape} takes {needed}")
    return FileTensor(name, tuple(shape), dtype, file, data + start)


def _counts(value: Any) -> list[int] | None:
    is_list = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
    return value if is_list else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _malformed(file: _OpenFile, problem: str) -> CheckpointError:
    return CheckpointError(f"{file.path} is no intact safetensors file: {problem}")


class Planned(NamedTuple):
    """A tensor that is going to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """Writes one file front to back: the header first, then each tensor in pieces, in the order that was planned.

    Until `close` it has another name; what raises inside `with` leaves nothing behind. Tensors must be planned with
    larger elements first, so that each lies where its dtype can be read in place.
    """

    def __init__(
        self, path: str | os.PathLike[str], tensors: Sequence[Planned], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path, self._part = Path(path), Path(f"{os.fspath(path)}.part")
        self._left = sum(tensor.nbytes for tensor in tensors)
        header = _encode(tensors, metadata or {})
        self._file = self._part.open("wb", buffering=0)
        self._write(memoryview(header))

    def write(self, flat: Tensor) -> None:
        """The next elements, from any device."""
        data = flat.detach().reshape(-1).cpu().contiguous().view(torch.uint8)
        self._left -= data.numel()
        assert self._left >= 0, f"{self.path}: more was written than planned"
        self._write(bytes_of(data))

    def _write(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += self._file.write(data[done : done + _CALL_BYTES])

    def close(self) -> None:
        assert self._left == 0, f"{self.path}: {self._left} planned bytes were not written"
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self.path)

    def abandon(self) -> None:
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._part.unlink(missing_ok=True)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.abandon()
            return
        try:
            self.close()
        except BaseException:
            self.abandon()
            raise


def _encode(tensors: Sequence[Planned], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for tensor in tensors:
        code = _CODES.get(tensor.dtype)
        if code is None:
            raise CheckpointError(f"'{tensor.name}' is {tensor.dtype}, which a safetensors file cannot hold")
        entries[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begins at a multiple of 8
    return struct.pack("<Q", len(text)) + text
