"""What this process may take of its machine: host memory and cores, whoever sets the limit.

    available = the least of    MemAvailable                                  the machine
                                limit − usage + inactive page cache           each cgroup from ours up to the root
                                RLIMIT_AS − VmSize                            this process

A container's limit is not in /proc/meminfo, and going past it ends the process without a message.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


class HostMemory(NamedTuple):
    total: int
    """Bytes that this process could have if it were alone."""
    available: int
    """Bytes that it may still take now."""


class _Names(NamedTuple):
    """The files of one version of cgroups."""

    limit: str
    usage: str
    reclaimable: str
    """A key of memory.stat: page cache that the kernel drops before it refuses memory."""


_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Names("memory.max", "memory.current", "inactive_file")


def host_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> HostMemory:
    """The host memory of this process: all it may have, and what it may still take. In bytes.

    >>> memory = host_memory()
    >>> 0 <= memory.available <= memory.total
    True
    """
    machine = _fields(proc / "meminfo")
    if "MemAvailable" in machine:
        bounds = [HostMemory(machine["MemTotal"], machine["MemAvailable"])]
    else:  # not Linux
        seen = psutil.virtual_memory()
        bounds = [HostMemory(seen.total, seen.available)]
    for folder in _cgroups("memory", proc, cgroup):
        bounds += [bound for names in (_VERSION_1, _VERSION_2) if (bound := _limit_of(folder, names)) is not None]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        bounds.append(HostMemory(address_space, address_space - _fields(proc / "self" / "status").get("VmSize", 0)))
    total = min(bound.total for bound in bounds)
    return HostMemory(total, max(0, min(total, *(bound.available for bound in bounds))))


def peak_resident(proc: Path = PROC) -> int:
    """The most memory that this process ever had in use, in bytes.

    Linux carries ru_maxrss over from the parent through fork and exec; VmHWM belongs to this process image alone.

    >>> peak_resident() > 2**20
    True
    """
    peak = _fields(proc / "self" / "status").get("VmHWM")
    if peak is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def usable_cores(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """How many threads can run at once: the cores of the affinity mask, or less where a quota grants less time.

    >>> 1 <= usable_cores() <= os.cpu_count()
    True
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_quota_of(folder) for folder in _cgroups("cpu", proc, cgroup)]
    return max(1, min(cores, *(math.ceil(quota) for quota in quotas if quota is not None), cores))


def _cgroups(controller: str, proc: Path, cgroup: Path) -> Iterator[Path]:
    """The folders of this process's cgroups, of both versions, from its own up to the root.

    A container often sees a path that is valid outside of it; then its own folder is what it sees as the root.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        roots = [cgroup / controllers, cgroup / controller] if controllers else [cgroup, cgroup / "unified"]
        below = [part for part in path.split("/") if part not in ("", "..")]
        for root in dict.fromkeys(roots):
            for depth in range(len(below), -1, -1):
                yield root.joinpath(*below[:depth])


def _limit_of(folder: Path, names: _Names) -> HostMemory | None:
    limit, usage = _text(folder / names.limit).strip(), _text(folder / names.usage).strip()
    if not limit.isdigit() or not usage.isdigit():  # no such file, or "max"
        return None
    stat = dict(line.split()[:2] for line in _text(folder / "memory.stat").splitlines())
    return HostMemory(int(limit), int(limit) - int(usage) + int(stat.get(names.reclaimable, 0)))


def _quota_of(folder: Path) -> float | None:
    """Cores' worth of time; None where there is no quota."""
    version_1 = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    quota, period = (_text(folder / "cpu.max").split() or version_1)[:2]
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None  # "max" or -1: none


def _fields(file: Path) -> dict[str, int]:
    """The lines `Name:   123 kB` of a file of /proc, in bytes."""
    lines = (line.split() for line in _text(file).splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}


def _text(file: Path) -> str:
    """Empty where there is no such file, which each caller takes as "no limit here"."""
    try:
        return file.read_text()
    except OSError:
        return ""
