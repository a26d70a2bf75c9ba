"""Code that generates under stage 3 takes DeepSpeed's hooks off the model first, and puts them on again after.

Here that is not needed: units that are gathered stay gathered, and the hooks find it so. Such code finds no hook to
take off, and nothing to put on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


class DeepSpeedZeRoOffload:
    """What is found as `engine.optimizer.parameter_offload` where parameters are cut.

    >>> found = DeepSpeedZeRoOffload()
    >>> [hook.remove() for hook in found.forward_hooks + found.backward_hooks]
    []
    >>> found._register_deepspeed_module(found.module)
    """

    def __init__(self) -> None:
        self.module = _NoParameters()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Nothing was taken off."""


class _NoParameters(nn.Module):
    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())
