"""What a user asks for with offload=, read and checked."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, overload

from zerofold.placement import Row, Tier

AUTO: Literal["auto"] = "auto"

TierWish = Tier | Literal["auto"]
OffloadChoice = str | float | Mapping[str, Any] | None
"""What offload= takes."""

_STATES = ("optimizer", "gradients", "parameters")
_UNITS = {"b": 1} | {f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgt")}
_UNITS |= {f"{p}ib": 1024 ** (i + 1) for i, p in enumerate("kmgt")}


@dataclass(frozen=True, kw_only=True)
class Offload:
    """A wish for each state, and the bounds of each memory; limits and reserve are bytes of this rank."""

    optimizer: TierWish | float = Tier.DEVICE
    """A float is the part of the units whose optimizer states go to the host."""
    gradients: TierWish = AUTO
    """AUTO: with the optimizer, on the device or the host."""
    parameters: TierWish = Tier.DEVICE
    path: str | None = None
    device_limit: int | None = None
    host_limit: int | None = None
    disk_limit: int | None = None
    reserve: int | None = None
    """Device memory kept for activations; None: the plan chooses it."""
    sums: bool = False
    """Gradients of several micro-batches add up, though accumulate= does not say so."""
    checksums: bool = False
    threads: int | None = None
    device_share: float | None = None
    """Part of the host's update that is streamed through the device; None: measured."""

    @property
    def leaves_optimizer_on_device(self) -> bool:
        return self.optimizer is Tier.DEVICE or self.optimizer == 0.0


@overload
def read_offload(value: str | float | Mapping[str, Any]) -> Offload: ...
@overload
def read_offload(value: OffloadChoice) -> Offload | None: ...
def read_offload(value: OffloadChoice) -> Offload | None:
    """The wish behind offload=: None, a word or a fraction for the optimizer, or a dict.

    >>> read_offload("host").optimizer, read_offload({"optimizer": 0.5, "device_limit": "40GiB"}).device_limit
    (<Tier.HOST: 'host'>, 42949672960)
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError(f"offload={value!r} is a {type(value).__name__}; give 'auto', 'host', 'nvme' or a dict")
        value = {"optimizer": value}
    for key in value:
        if key not in _READERS:
            raise ValueError(f"offload[{key!r}] does not exist; {_suggestion(str(key), list(_READERS))}")
    if not any(state in value for state in _STATES):
        raise ValueError(
            f"offload={dict(value)!r} names no state; add 'optimizer': 'host', 'nvme', 'auto' or a fraction"
        )
    wish: dict[str, Any] = {key: _READERS[key](f"offload[{key!r}]", given) for key, given in value.items()}
    if wish.get("optimizer") == AUTO:
        wish.setdefault("parameters", AUTO)
    found = Offload(**wish)
    on_disk = [state for state in _STATES if getattr(found, state) is Tier.NVME]
    if on_disk and found.path is None:
        raise ValueError(f"offload[{on_disk[0]!r}]='nvme' needs a folder; add 'path': a folder on the disk to use")
    return found


def check_row(offload: Offload, row: Row, *, trains: bool = True) -> None:
    """Refuses what the row cannot do; `trains`: some parameter is trained.

    >>> from zerofold.placement import row
    >>> check_row(read_offload({"optimizer": "host", "parameters": "host"}), row(2))
    Traceback (most recent call last):
    ...
    ValueError: offload['parameters']='host' needs parameters that are cut, and stage '2' keeps them whole on every \
rank; use stage=3, or leave them on the device
    """
    where = offload.parameters
    if where in (AUTO, Tier.DEVICE):
        return
    assert isinstance(where, Tier)
    if not row.parameters.is_cut:
        raise ValueError(
            f"offload['parameters']={where.value!r} needs parameters that are cut, and stage {row.name!r} keeps them "
            f"whole on every rank; use stage=3, or leave them on the device"
        )
    if trains and where is Tier.NVME and offload.optimizer is not Tier.NVME:
        raise ValueError(
            "offload['parameters']='nvme' needs the optimizer's states there too, which are six times as large; add "
            "'optimizer': 'nvme', or keep parameters on the host"
        )
    if trains and offload.leaves_optimizer_on_device:
        raise ValueError(
            f"offload['parameters']={where.value!r} frees nothing while the optimizer's states, from which parameters "
            f"are made, stay on the device; add 'optimizer': 'host' or 'nvme'"
        )


def _suggestion(given: str, names: list[str]) -> str:
    near = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(map(repr, names))}"


def _tier(name: str, value: object) -> TierWish:
    choices = [*(tier.value for tier in Tier), AUTO]
    if value == AUTO:
        return AUTO
    if isinstance(value, Tier):
        return value
    if value not in choices:
        raise ValueError(f"{name}={value!r} does not exist; {_suggestion(str(value), choices)}")
    return Tier(value)


def _tier_or_fraction(name: str, value: object) -> TierWish | float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return _tier(name, value)
    return _fraction(name, value)


def _fraction(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r} is no fraction; give a number from 0 to 1")
    return float(value)


def parse_bytes(name: str, value: object) -> int:
    """
    >>> parse_bytes("offload['reserve']", "1.5 GiB"), parse_bytes("offload['reserve']", "500MB")
    (1610612736, 500000000)
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{name}={value!r} is no size; give bytes as a whole number, or text as '40GiB' or '500MB'")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _limit(name: str, value: object) -> int:
    found = parse_bytes(name, value)
    if found == 0:
        raise ValueError(f"{name}={value!r} allows nothing; give more than 0, or leave it out for no limit")
    return found


def _path(name: str, value: object) -> str:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError(f"{name}={value!r} is no folder; give the path of one on the disk to use")
    return str(os.fspath(value))


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is neither True nor False")
    return value


def _threads(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is no number of threads; give 1 or more, or leave it out")
    return value


_READERS: dict[str, Callable[[str, object], object]] = {
    "optimizer": _tier_or_fraction,
    "gradients": _tier,
    "parameters": _tier,
    "path": _path,
    "device_limit": _limit,
    "host_limit": _limit,
    "disk_limit": _limit,
    "reserve": parse_bytes,
    "sums": _flag,
    "checksums": _flag,
    "threads": _threads,
    "device_share": _fraction,
}
