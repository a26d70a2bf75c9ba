"""One rank's file: a .safetensors file, written and checked in chunks by a few threads.

    | header | tensor | tensor | tensor ...            the file, as any reader of safetensors sees it
    | chunk 0     | chunk 1     | chunk 2 ...          each with its SHA-256 in the manifest

A chunk is what a thread hashes and writes at once; neither holds Python's lock. On load a rank checks the chunks that
it needs, and no others.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy
import torch
from torch import Tensor

from zerofold.checkpoint.contents import CheckpointError

CHUNK_BYTES = 16 * 2**20
_ALIGNMENT = 128
_FEW_PARTS = 64  # up to here a chunk is written from where its parts are, else it is put together first

# fmt: off
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}
# fmt: on
DTYPES = {name: dtype for dtype, name in NAMES.items()}

T = TypeVar("T")
Progress = Callable[[int], None]
"""Told about every number of bytes that has been done."""


class DamagedError(CheckpointError):
    """A file that is not what was written."""


@dataclass(frozen=True)
class Part:
    """A contiguous flat tensor at its place in a file."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    offset: int  # in the file


@dataclass(frozen=True)
class FileLayout:
    """Where everything lies in a file to be written."""

    header: bytes
    parts: list[Part]
    nbytes: int

    @property
    def chunks(self) -> int:
        return -(-self.nbytes // CHUNK_BYTES)


def lay_out(tensors: Iterable[tuple[str, Tensor, tuple[int, ...]]]) -> FileLayout:
    """Names, flat tensors and the shapes they are shown with, end to end as safetensors wants them.

    >>> layout = lay_out([("a", torch.zeros(6), (2, 3))])
    >>> layout.parts[0].offset == len(layout.header), layout.nbytes - len(layout.header)
    (True, 24)
    """
    given = [each for each in tensors if each[1].numel()]
    # The widest first, so that every tensor is aligned to its own size and nothing lies between them.
    given.sort(key=lambda each: -each[1].element_size())
    described: dict[str, Any] = {}
    end = 0
    for name, tensor, shape in given:
        if tensor.dtype not in NAMES:
            raise TypeError(f"'{name}' has dtype {tensor.dtype}, which safetensors files do not have")
        if name in described:
            raise CheckpointError(f"two tensors would be stored under one name, '{name}': rename a parameter")
        offsets = [end, end + tensor.nbytes]
        described[name] = {"dtype": NAMES[tensor.dtype], "shape": list(shape), "data_offsets": offsets}
        end += tensor.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    starts = [len(header) + described[name]["data_offsets"][0] for name, _, _ in given]
    parts = [Part(name, tensor, shape, start) for (name, tensor, shape), start in zip(given, starts, strict=True)]
    return FileLayout(header, parts, len(header) + end)


class Chunks(Protocol):
    """The bytes of a file to be."""

    def chunk(self, number: int) -> list[Any]:
        """One chunk as buffers that follow each other; they may be used again for the thread's next one."""
        ...


class Image:
    """The bytes of a file to be, chunk by chunk, from wherever its tensors are now."""

    def __init__(self, layout: FileLayout) -> None:
        self._layout = layout
        self._starts = [part.offset for part in layout.parts]
        self._room = threading.local()  # of each thread, used again for every chunk: fresh memory costs page faults

    def within(self, start: int, stop: int) -> list[tuple[int, Tensor]]:
        """The tensors' bytes in a range of the file: where each begins in the file, and a flat view of bytes."""
        found = []
        for part in self._layout.parts[max(0, bisect_right(self._starts, start) - 1) :]:
            if part.offset >= stop:
                break
            low, high = max(start, part.offset), min(stop, part.offset + part.tensor.nbytes)
            if low < high:
                flat = part.tensor.view(torch.uint8)
                found.append((low, flat[low - part.offset : high - part.offset]))
        return found

    def chunk(self, number: int) -> list[Any]:
        start, stop = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, self._layout.nbytes)
        head = [self._layout.header[start:stop]] if start < len(self._layout.header) else []
        parts = self.within(start, stop)
        if len(parts) + len(head) > _FEW_PARTS or any(part.device.type != "cpu" for _, part in parts):
            return [*head, *self._together(parts)]
        # A storage that was once given to `Tensor.numpy` counts as somebody else's ever after, and cannot be parked.
        return [*head, *(numpy.from_dlpack(part) for _, part in parts)]

    def _together(self, parts: list[tuple[int, Tensor]]) -> list[Any]:
        if not parts:
            return []
        if not hasattr(self._room, "buffer"):
            is_device = any(part.device.type != "cpu" for _, part in parts)
            self._room.buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=is_device)
        first, (last, tail) = parts[0][0], parts[-1]
        whole = self._room.buffer[: last + tail.numel() - first]
        for start, part in parts:
            whole[start - first : start - first + part.numel()] = part
        return [whole.numpy()]


def write(path: Path, layout: FileLayout, image: Chunks, progress: Progress, *, threads: int) -> list[str]:
    """Writes the file and brings it to the disk; the digests of its chunks."""
    with reported(path), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
        descriptor = file.fileno()

        def put(number: int) -> str:
            buffers, at, digest = image.chunk(number), number * CHUNK_BYTES, hashlib.sha256()
            for buffer in buffers:
                digest.update(buffer)
                at = _write_all(descriptor, memoryview(buffer), at)
            progress(at - number * CHUNK_BYTES)
            return digest.hexdigest()

        digests = in_parallel(put, range(layout.chunks), threads)
        os.fsync(descriptor)
    return digests


def in_parallel(function: Callable[[int], T], numbers: Iterable[int], threads: int) -> list[T]:
    """[function(n) for n in numbers] by a few threads. The first error is raised, and what has not begun is left.

    concurrent.futures takes no work while a process ends, which is when the last checkpoint is often written.
    """
    todo = list(numbers)
    done: dict[int, T] = {}
    errors: list[BaseException] = []
    rest = iter(range(len(todo)))
    lock = threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                place = next(rest, None)
            if place is None:
                return
            try:
                done[place] = function(todo[place])
            except BaseException as error:
                errors.append(error)

    helpers = [threading.Thread(target=work) for _ in range(min(threads, len(todo)) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return [done[place] for place in range(len(todo))]


def _write_all(descriptor: int, buffer: memoryview, at: int) -> int:
    buffer = buffer.cast("B")
    while buffer:
        done = os.pwrite(descriptor, buffer, at)
        buffer, at = buffer[done:], at + done
    return at


@dataclass(frozen=True)
class WrittenFile:
    """What the manifest knows of a file."""

    path: Path
    nbytes: int
    digests: Sequence[str]
    checked: set[int] = field(default_factory=set, compare=False)  # chunks that were found to be what was written

    def chunks(self, start: int, stop: int) -> range:
        """The chunks that hold a range of bytes."""
        return range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES))

    def check_size(self) -> None:
        try:
            nbytes = self.path.stat().st_size
        except FileNotFoundError:
            raise DamagedError(f"{self.path} is missing: a rank's part of the checkpoint is not there") from None
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        if nbytes != self.nbytes:
            what = "cut off" if nbytes < self.nbytes else "too long"
            raise DamagedError(f"{self.path} is {what}: it has {nbytes} bytes, {self.nbytes} were written")

    def check(self, numbers: Iterable[int], *, threads: int, progress: Progress | None = None) -> None:
        """Compares chunks with their digests."""
        self.check_size()
        with reported(self.path), self.path.open("rb", buffering=0) as file:

            def check_one(number: int) -> None:
                start = number * CHUNK_BYTES
                data = _read_all(file.fileno(), start, min(CHUNK_BYTES, self.nbytes - start))
                if hashlib.sha256(data).hexdigest() != self.digests[number]:
                    raise DamagedError(
                        f"{self.path} is damaged: bytes {start} to {start + len(data)} are not what was written"
                    )
                self.checked.add(number)
                if progress is not None:
                    progress(len(data))

            in_parallel(check_one, numbers, threads)

    def forget_cache(self) -> None:
        """What is read next comes from the disk, where the system allows to ask for that."""
        if hasattr(os, "posix_fadvise"):
            with self.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, start: int, nbytes: int) -> bytearray:
        """Some bytes, out of chunks that are checked when they are first read from."""
        unchecked = [number for number in self.chunks(start, start + nbytes) if number not in self.checked]
        if unchecked:
            self.check(unchecked, threads=1)
        with reported(self.path), self.path.open("rb", buffering=0) as file:
            data = _read_all(file.fileno(), start, nbytes)
        if len(data) != nbytes:
            raise DamagedError(f"{self.path} is cut off: {nbytes} bytes from {start} on are not there")
        return data


def _read_all(descriptor: int, start: int, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    view, done = memoryview(data), 0
    while done < nbytes:
        count = os.preadv(descriptor, [view[done:]], start + done)
        if not count:
            view.release()
            return data[:done]
        done += count
    view.release()
    return data


@contextmanager
def reported(path: Path) -> Any:
    """What the system refuses becomes a message with the path and the way out."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(_explain(path, error)) from error


def _explain(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "quota is used up" if error.errno == errno.EDQUOT else "disk is full"
        advice = "Earlier checkpoints are as they were; free some space, or keep fewer"
        return f"{path} cannot be written: the {what}. {advice}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason = "the file system is read-only" if error.errno == errno.EROFS else "permission denied"
        return f"{path}: {reason}; use a folder in which this user may write"
    return f"{path}: {error.strerror or error}"


def threads_here() -> int:
    """Threads for one rank, which shares this machine with the others on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(8, cores // max(1, ranks)))
