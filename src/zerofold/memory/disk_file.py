"""The file behind the NVMe tier: made whole at the start, locked while it is used, removed at the end.

    zerofold-rank0-pid4711-3f9c….states        0           4096                            4096 + nbytes
                                               [ header    | extents …                                ]
    zerofold-rank0-pid4711-3f9c….states.json   the manifest: who made it and what lies where, for people

The file is a working area and never a checkpoint: no run reads a file of another. The lock goes with the process,
so a file that carries our header and that nobody holds is what a killed process left behind.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import re
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = 4096  # what O_DIRECT asks of addresses, offsets and sizes, on every disk in use
MAGIC = "zerofold states in use"
_NAME = re.compile(r"zerofold-rank\d+-pid\d+-([0-9a-f]{16})\.states")


class DiskError(OSError):
    """A disk that is full, missing, failing, or that gives back other bytes than were written."""

    def __str__(self) -> str:
        return str(self.strerror)


def whole_pages(nbytes: int) -> int:
    """
    >>> whole_pages(1), whole_pages(4096)
    (4096, 4096)
    """
    return -(-nbytes // PAGE) * PAGE


class WorkFile:
    """One preallocated file of `nbytes` and a header, locked for as long as it is open."""

    def __init__(self, folder: str | os.PathLike[str], nbytes: int, rank: int) -> None:
        self.folder = Path(folder)
        self.size = PAGE + whole_pages(nbytes)
        self.maps: list[mmap.mmap] = []
        """The whole file, last; before it what was the whole before the file grew, for the tensors made then."""
        self.tag = secrets.token_hex(8)
        self.path = self.folder / f"zerofold-rank{rank}-pid{os.getpid()}-{self.tag}.states"
        self.manifest = self.path.with_name(self.path.name + ".json")
        self._about = {
            "format": MAGIC,
            "tag": self.tag,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "rank": rank,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "bytes": self.size,
        }
        _make_folder(self.folder)
        try:
            others = remove_leftovers(self.folder)
            self._check_room(patience=1.0 if others else 0.0)  # another rank may be removing leftovers just now
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except DiskError:
            raise
        except OSError as error:
            raise self._refusal("no file can be made in it", error) from error
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX)  # before the header: a file with a header and no lock has no owner
            os.pwrite(self.fd, _header(self._about), 0)  # before the room: that may take long, and be killed
            os.posix_fallocate(self.fd, 0, self.size)
            self.write_manifest([])
            self.is_direct = self._go_direct()
            self.maps.append(mmap.mmap(self.fd, self.size))
        except BaseException as error:
            self.remove()
            if isinstance(error, OSError) and not isinstance(error, DiskError):
                raise self._refusal(f"{self.size:,} bytes could not be reserved", error) from error
            raise

    def write_manifest(self, layout: Iterable[dict[str, Any]]) -> None:
        """Replaced as a whole, so that nobody ever sees half of it."""
        half = self.manifest.with_name(self.manifest.name + ".new")
        try:
            half.write_text(json.dumps({**self._about, "extents": list(layout)}, indent=1))
            os.replace(half, self.manifest)
        except OSError as error:
            raise self._refusal(f"its manifest {self.manifest.name} cannot be written", error) from error

    def remove(self) -> None:
        for path in (self.path, self.manifest, self.manifest.with_name(self.manifest.name + ".new")):
            path.unlink(missing_ok=True)
        self.maps = []  # gone from memory with the last tensor of them, and only then is the room free
        os.close(self.fd)

    def grow(self, nbytes: int) -> None:
        """Room for so many bytes more, at the end; requests may be under way."""
        more = whole_pages(nbytes)
        if not self.is_whole():
            raise DiskError(errno.EIO, f"{self.path} has no longer its {self.size:,} bytes, somebody changed it")
        try:
            os.posix_fallocate(self.fd, self.size, more)
            self.maps.append(mmap.mmap(self.fd, self.size + more))
        except OSError as error:
            os.ftruncate(self.fd, self.size)
            raise self._refusal(f"{more:,} bytes more could not be reserved", error) from error
        self.size += more

    def is_whole(self) -> bool:
        """False if somebody cut the file: a later write would lengthen it again, with zeros where states were."""
        return os.fstat(self.fd).st_size >= self.size

    def _check_room(self, patience: float) -> None:
        until = time.monotonic() + patience
        while (free := shutil.disk_usage(self.folder).free) < self.size:
            if time.monotonic() < until:
                time.sleep(0.1)
                continue
            raise DiskError(
                errno.ENOSPC,
                f"the offload folder {self.folder} has too little room: {self.size:,} bytes needed for this rank, "
                f"{free:,} free; make room, name another disk, or keep more on the host",
            )

    def _refusal(self, what: str, error: OSError) -> DiskError:
        try:
            free = f"{shutil.disk_usage(self.folder).free:,} free"
        except OSError:  # the folder was removed, or its disk is gone
            free = "and the folder is gone"
        return DiskError(
            error.errno or errno.EIO,
            f"the offload folder {self.folder}: {what} ({error.strerror or error}); {self.size:,} bytes needed, "
            f"{free}; name a folder on a disk with room where this user (uid {os.geteuid()}) may write",
        )

    def _go_direct(self) -> bool:
        """Past the page cache where the file system can; a few accept the flag and refuse the transfer."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self.fd, [mmap.mmap(-1, PAGE)], 0)
            return True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
        warnings.warn(
            f"the file system of {self.folder} has no O_DIRECT: states pass through the page cache, which is slower "
            "and takes host memory; a folder on a local disk (ext4, xfs) would not",
            stacklevel=4,
        )
        return False


def remove_leftovers(folder: Path) -> bool:
    """Removes what killed processes of this machine left in `folder`, and says so; touches nothing else.

    Returns whether somebody else has a file open there.
    """
    others = False
    for path in sorted(folder.iterdir()):
        named = _NAME.fullmatch(path.name)
        if named is None:
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # another user's, or gone meanwhile
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_leftover(path, fd, named.group(1))
        except OSError:
            others = True
        finally:
            os.close(fd)
    return others


def _remove_leftover(path: Path, fd: int, tag: str) -> None:
    about = _read_header(fd)
    if about.get("tag") != tag:
        return
    size, whose = os.fstat(fd).st_size, f"process {about.get('pid')} on {about.get('host')}"
    if about.get("host") != socket.gethostname():  # a lock need not reach over a shared folder
        warnings.warn(f"{path} ({size:,} bytes) is of {whose}; if that has ended, remove it by hand", stacklevel=5)
        return
    path.unlink()
    for ending in (".json", ".json.new"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    warnings.warn(f"removed {path} ({size:,} bytes), left behind by {whose}, which ended early", stacklevel=5)


def _header(about: dict[str, Any]) -> bytes:
    return json.dumps(about).encode().ljust(PAGE, b"\n")


def _read_header(fd: int) -> dict[str, Any]:
    """What a file says of itself; nothing if it is not one of ours."""
    try:
        about = json.loads(os.pread(fd, PAGE, 0))
    except ValueError:
        return {}
    return about if isinstance(about, dict) and about.get("format") == MAGIC else {}


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise DiskError(error.errno, f"the offload folder {folder} is a file; name a folder on a local disk") from error
    except OSError as error:
        raise DiskError(
            error.errno or errno.EIO,
            f"the offload folder {folder} does not exist and cannot be made ({error.strerror}); "
            f"make it, or name a folder where this user (uid {os.geteuid()}) may write",
        ) from error
