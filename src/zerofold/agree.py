"""What one rank finds wrong is raised on all of them; what must be the same everywhere is compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from zerofold.comm import Comm
from zerofold.entry import Entry

T = TypeVar("T")


def agree(control: Comm, make: Callable[[], T], *, unit: str = "set-up") -> T:
    """The result of `make`, or an error on every rank when it fails on any. `unit`: where a rank that waits is."""
    try:
        made = make()
    except Exception as error:
        control.raise_together(error, unit=unit)
        raise
    control.raise_together(None, unit=unit)
    return made


def fingerprint(assigned: dict[str, list[Entry]], *settings: str) -> list[str]:
    """A line for each setting and parameter, equal on all ranks that hold the same model with the same settings."""
    lines = list(settings)
    for unit, entries in assigned.items():
        for entry in entries:
            p = entry.parameter
            kind = f"{tuple(p.shape)} {p.dtype} {entry.dtypes} {'trainable' if p.requires_grad else 'frozen'}"
            origin = "" if entry.source is None else ", from a file"
            lines.append(f"{entry.name} {kind} in unit '{unit}', owner {entry.owner}{origin}")
    return lines


def check_same_on_all_ranks(control: Comm, lines: list[str]) -> None:
    """Raises on every rank when models or settings differ, naming the first difference and the ranks."""
    digests = control.all_gather_objects(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everyone = control.all_gather_objects(lines)
    odd = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    pairs = zip([*everyone[0], "nothing more"], [*everyone[odd], "nothing more"], strict=False)
    first, second = next((a, b) for a, b in pairs if a != b)
    raise ValueError(
        f"ranks 0 and {odd} hold different models: rank 0 has '{first}' where rank {odd} has '{second}'; build the "
        "same model with the same arguments on every rank"
    )
