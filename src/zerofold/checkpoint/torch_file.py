"""Files of `torch.save`: a zip whose records are not compressed, so a tensor is a stretch of the file."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

from zerofold.checkpoint.contents import CheckpointError
from zerofold.checkpoint.ondisk import Record, Region
from zerofold.checkpoint.unpickle import unpickle

LOCAL_HEADER = struct.Struct("<4s5H3L2H")


def load_torch(source: Path | Region) -> Any:
    """What was saved, with a `TensorOnDisk` for every tensor and an `Inert` for every object."""
    region = source if isinstance(source, Region) else Region.whole(source)
    try:
        archive = _Archive(region)
    except CheckpointError:
        raise
    # zipfile answers damage with errors of many types, and all of them mean the same here.
    except Exception as error:
        raise CheckpointError(
            f"{region.path} is no file of torch.save, or damaged ({error}); use another copy of the checkpoint, and "
            "if it was saved with _use_new_zipfile_serialization=False, save it again without"
        ) from error
    return unpickle(archive.text("data.pkl"), str(region.path), lambda key: archive.record(f"data/{key}"))


def load_pickle(path: Path) -> Any:
    return unpickle(Region.whole(path).bytes(), str(path))


class _Window(io.RawIOBase):
    """A region as a file, for zipfile to read the directory of."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._place = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._region.length}[whence]
        if place < 0:
            raise OSError("a place before the file")
        self._place = place
        return place

    def read(self, size: int = -1) -> bytes:
        left = max(self._region.length - self._place, 0)
        size = left if size < 0 else min(size, left)
        data = self._region.part(self._place, size).bytes() if size else b""
        self._place += size
        return data


class _Archive:
    """The records of a zip. Their names, sizes and places are taken from its directory and checked one by one."""

    def __init__(self, region: Region) -> None:
        self._region = region
        with zipfile.ZipFile(_Window(region)) as file:
            entries = file.infolist()
        self._root = entries[0].filename.split("/")[0] if entries else ""
        self._entries = {entry.filename: entry for entry in entries}
        if len(self._entries) != len(entries):
            raise CheckpointError(f"{region.path} is damaged: it has two records of one name")
        if f"{self._root}/byteorder" in self._entries and self.text("byteorder") != b"little":
            raise CheckpointError(f"{region.path} was written on a big-endian machine, which is not read here")

    def record(self, name: str) -> Record:
        entry = self._entries.get(f"{self._root}/{name}")
        path = self._region.path
        if entry is None:
            raise CheckpointError(f"{path} is damaged: it has no record {name}; use another copy of the checkpoint")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
            raise CheckpointError(
                f"{path} holds record {name} compressed or encrypted, which torch.save does not do: save it again"
            )
        header = self._region.part(entry.header_offset, LOCAL_HEADER.size).bytes()
        magic, *_, name_length, extra_length = LOCAL_HEADER.unpack(header)
        if magic != b"PK\x03\x04":
            raise CheckpointError(f"{path} is damaged: record {name} is not where the directory says")
        begin = entry.header_offset + LOCAL_HEADER.size + name_length + extra_length
        stored_name = self._region.part(entry.header_offset + LOCAL_HEADER.size, name_length).bytes()
        if stored_name != entry.filename.encode():
            raise CheckpointError(f"{path} is damaged: another record stands where {name} should be")
        return Record(self._region.part(begin, entry.file_size), entry.CRC)

    def text(self, name: str) -> bytes:
        record = self.record(name)
        data = record.region.bytes()
        if record.checksum and zlib.crc32(data) != record.checksum:
            raise CheckpointError(
                f"{self._region.path} is damaged: the checksum of {name} does not fit; use another copy"
            )
        return data
