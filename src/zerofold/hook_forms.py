"""What the hooks of `hooks` are made of: unseen by torch.compile, and no part of any copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn, TypeVar

import torch

from zerofold.refusals import COPYING, PICKLING

T = TypeVar("T")


def untraced(hook: Callable[..., T]) -> Callable[..., T]:
    """torch.compile leaves the hook and all it calls alone: a graph may not hold what gathers and frees memory."""
    return torch.compiler.disable(hook, reason="zerofold's hooks run between graphs")


class InnerHook:
    """A hook that says so when somebody copies or pickles the module it is on.

    A copy would come with the hooks and the pieces of the original, and train neither.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(COPYING)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(PICKLING)


@cache
def unit_hook() -> type[InnerHook]:
    """The same, out of the sight of torch.compile. Made when a model is there: the compiler takes long to load."""

    class UnitHook(InnerHook):
        __call__ = untraced(InnerHook.__call__)

    return UnitHook
