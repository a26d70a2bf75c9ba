"""Loaders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from zerofold.compat.initialize import Loader as DeepSpeedDataLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]


class RepeatingLoader:
    """Begins again when a loader ends.

    >>> steps = iter(RepeatingLoader([1, 2]))
    >>> [next(steps) for _ in range(5)]
    [1, 2, 1, 2, 1]
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
