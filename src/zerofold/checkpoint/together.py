"""What goes wrong with a checkpoint on one rank is raised on all of them, in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zerofold.checkpoint.contents import CheckpointError
from zerofold.checkpoint.files import DamagedError
from zerofold.comm import Comm

T = TypeVar("T")


def together(control: Comm, make: Callable[[], T]) -> T:
    """The result of `make`, or the same error on every rank when it fails on any."""
    made: list[T] = []
    error: Exception | None = None
    try:
        made.append(make())
    except Exception as caught:
        error = caught
    kinds = control.all_gather_objects(None if error is None else (isinstance(error, DamagedError), message_of(error)))
    failed = [(rank, *kind) for rank, kind in enumerate(kinds) if kind is not None]
    if error is not None and not isinstance(error, (CheckpointError, OSError)):
        raise error
    if failed:
        _, is_damaged, message = failed[0]
        raise (DamagedError if is_damaged else CheckpointError)(message) from error
    return made[0]


def message_of(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
