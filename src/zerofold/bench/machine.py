"""What the bench commands share: options checked against this machine, and the machine in words."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from typing import Any

import psutil
import torch

from zerofold.bench.fleet import Setting

STAGES = (0, 1, 2, 3)


def select_engines(names: str, known: Iterable[str], *, always: str) -> list[str]:
    """The engines asked for, in the table's order, with the one among them that every ratio needs."""
    known = list(known)
    wanted = [name.strip() for name in names.split(",") if name.strip()] or known
    for name in wanted:
        if name not in known:
            raise ValueError(f"there is no engine {name!r}; the engines are {', '.join(known)}")
    return [name for name in known if name in wanted or name == always]


def parse_stages(text: str) -> list[int]:
    """ "2,3" as numbers."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in map(str, STAGES):
            raise ValueError(f"there is no stage {name!r}; choose from {', '.join(map(str, STAGES))}")
    if not names:
        raise ValueError("--stages names no stage")
    return [int(name) for name in names]


def choose_device(name: str) -> str:
    """ "cpu" or "cuda"."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, not {name!r}")
    gpus = torch.cuda.device_count()
    if name == "cuda" and not gpus:
        raise ValueError("--device cuda, but this machine has no GPU that torch can use; use --device cpu")
    if name == "auto":
        return "cuda" if gpus else "cpu"
    return name


def choose_world(nproc: int | None, device: str, *, on_cpu: int) -> int:
    gpus = torch.cuda.device_count()
    world = nproc if nproc is not None else (gpus if device == "cuda" else on_cpu)
    if device == "cuda" and world > gpus:
        raise ValueError(f"--nproc {world}, but there are {gpus} GPUs and a rank needs its own")
    return world


def describe_machine(setting: Setting) -> dict[str, Any]:
    return {
        **describe_software(setting.device),
        "backend": setting.backend,
        "world": setting.world,
        "malloc": setting.malloc,
    }


def describe_software(device: str) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
